"""Predict the GPU memory of a training step before a model is loaded: its parts, its peak, and what fits."""

from qerl.learner.plan.memory import (
    MemoryPart,
    can_cache_operands,
    learning_bytes,
    memory_parts,
    operand_cache_bytes,
    peak_bytes,
    read_architecture,
    resolve_checkpointing,
    usable_bytes,
)
from qerl.learner.plan.report import LargestSettings, format_plan, largest_settings, options_that_fit

__all__ = [
    "LargestSettings",
    "MemoryPart",
    "can_cache_operands",
    "format_plan",
    "largest_settings",
    "learning_bytes",
    "memory_parts",
    "operand_cache_bytes",
    "options_that_fit",
    "peak_bytes",
    "read_architecture",
    "resolve_checkpointing",
    "usable_bytes",
]
