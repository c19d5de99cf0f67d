"""How much memory a step takes on a GPU, before anything is loaded: part by part, and what fits."""

from qerl.learner.plan.fit import Largest, largest, plan, remedies
from qerl.learner.plan.step import (
    Part,
    architecture,
    held,
    holds_operands,
    learning_bytes,
    parts,
    settled,
    total,
    usable_bytes,
)

__all__ = [
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
    "usable_bytes",
]
