"""Kernels that no GPU has run yet. They give their references' values on a CPU and compile for every card,
but nothing uses them unless QERL_UNTRIED=1 is set: what they would run, PyTorch operations run.

A part leaves this file when its tests marked gpu have passed on a GPU (CONTRIBUTING.md).
"""

from qerl.kernels.untried import VARIABLE, are_used
from qerl.models.architecture import Architecture


def untried_obstacle(a: Architecture) -> str | None:
    """Return why the decode kernels are not used for such a decoder yet; None if they are."""
    part = None if are_used() else _untried_part(a)
    return part and f"no GPU has run their {part} yet ({VARIABLE}=1 uses them)"


def _untried_part(a: Architecture) -> str | None:
    parts = {
        "Gated DeltaNet": a.delta is not None,
        "gated attention": a.attention_gate,
        "interleaved rotation": a.rope_is_interleaved,
    }
    return next((part for part, is_there in parts.items() if is_there), None)
