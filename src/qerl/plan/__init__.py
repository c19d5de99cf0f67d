"""How much memory a step takes on a GPU, before anything is loaded: part by part, and what fits."""

from qerl.plan.fit import Largest, largest, plan, remedies
from qerl.plan.step import (
    CONTEXT_BYTES,
    Part,
    architecture,
    held,
    holds_operands,
    learning_bytes,
    parts,
    settled,
    total,
)

__all__ = [
    "CONTEXT_BYTES",
    "Largest",
    "Part",
    "architecture",
    "held",
    "holds_operands",
    "largest",
    "learning_bytes",
    "parts",
    "plan",
    "remedies",
    "settled",
    "total",
]
