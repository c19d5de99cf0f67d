"""Kernels that no GPU has run yet. They give their references' values on a CPU and compile for every card,
but nothing uses them unless QERL_UNTRIED=1 is set: what they would run, PyTorch operations run.

A part leaves this file when its tests marked gpu have passed on a GPU (CONTRIBUTING.md).
"""

from qerl.kernels.untried import VARIABLE, are_used
from qerl.models.architecture import PRE_NORMS, Architecture

_TRIED_TILES = ("nvfp4",)
"""Formats whose tiles have been multiplied and unpacked on a GPU."""


def tiles_are_used(format: str) -> bool:
    """True if weights of this format are stored in the decode kernels' tiles where those kernels run."""
    return format in _TRIED_TILES or are_used()


def untried_obstacle(a: Architecture) -> str | None:
    """Return why the decode kernels are not used for such a decoder yet; None if they are."""
    part = None if are_used() else _untried_part(a)
    return part and f"no GPU has run their {part} yet ({VARIABLE}=1 uses them)"


def _untried_part(a: Architecture) -> str | None:
    parts = {
        "mixtures of experts": a.mixture is not None,
        "attention sinks": a.attention_sinks,
        "Gated DeltaNet": a.delta is not None,
        "gated attention": a.attention_gate,
        "sliding windows": any(kind.window is not None for kind in a.kinds),
        "layers with different ropes": any(kind.rope != "main" for kind in a.kinds),
        "norms in other places": a.norms != PRE_NORMS,
        f"activation {a.activation}": a.activation != "silu",
        "norms over all heads": a.qk_norm and a.qk_norm_over != "head",
        "interleaved rotation": a.rope_is_interleaved,
        "partial rotation": a.rotated != a.head_size,
        "scale of attention": a.attention_scale is not None,
        "soft caps": (a.attention_softcap, a.logit_softcap) != (None, None),
        "factors of embedding or residuals": (a.embedding_scale, a.residual_scale) != (1.0, 1.0),
        "queries that grow with the position": a.rope.query_growth > 0,
        "biases in the MLP": a.mlp_bias,
        "heads of 256": a.head_size > 128,
    }
    return next((part for part, is_there in parts.items() if is_there), None)
