"""How much memory a step takes on a GPU, before anything is loaded: part by part, and what fits."""

from qerl.learner.plan.fit import Largest, largest, plan, remedies
from qerl.learner.plan.step import (
    MemoryPart,
    architecture,
    held,
    holds_operands,
    learning_bytes,
    parts,
    resolve_checkpointing,
    total,
    usable_bytes,
)

__all__ = [
    "Largest",
    "MemoryPart",
    "architecture",
    "held",
    "holds_operands",
    "largest",
    "learning_bytes",
    "parts",
    "plan",
    "remedies",
    "resolve_checkpointing",
    "total",
    "usable_bytes",
]
