"""Attention of sequences in a row on a GPU in 16 bits: FlashAttention 2 as torch has it.

    o_n = softmax([scale * q_n @ k^T, sink_n]) @ v      over the keys a query may see; k, v of head n * K // N

The last query of a sequence sees its last key, the one before it all but the last, each at most its window.
FlashAttention knows no sinks. With its own sum of exponents, exp(lse), the sink's share is known:

    lse' = log(exp(lse) + exp(sink))        o' = exp(lse - lse') * o

Its backward pass takes o' and lse' in the place of o and lse and then has the gradients: p = exp(s - lse')
are the weights with the sink, and ds = p * (do @ v^T - do . o'). Soft caps are not computed here.
"""

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qerl.kernels.attention.attention_options import PLAIN, AttentionOptions
from qerl.kernels.runtime.gpu_memory import sent

_MAX_HEAD = 256


@dataclasses.dataclass(frozen=True, slots=True)
class SequenceEnds:
    """Ends of the queries and keys of sequences in a row; the last query of each sees its last key."""

    queries: Tensor
    """int32: 0, then the end of each sequence's queries."""
    keys: Tensor
    max_queries: int
    max_keys: int

    @classmethod
    def of(cls, num_queries: list[int], num_keys: list[int], device: torch.device | str) -> "SequenceEnds":
        queries, keys = (
            sent(F.pad(torch.tensor(num).cumsum(0), (1, 0)).int(), device) for num in (num_queries, num_keys)
        )
        return cls(queries, keys, max(num_queries), max(num_keys))


def is_for_flash(head_size: int, options: AttentionOptions) -> bool:
    """True if FlashAttention computes such attention, on a GPU in 16 bits."""
    return options.softcap is None and head_size % 8 == 0 and head_size <= _MAX_HEAD


def flash_attention(
    q_TNH: Tensor, k_RKH: Tensor, v_RKH: Tensor, ends: SequenceEnds, options: AttentionOptions = PLAIN
) -> Tensor:
    """Return o_TNH of sequences with these ends; it has no gradient."""
    with torch.no_grad():
        return attend(q_TNH, k_RKH, v_RKH, ends, options)[0]


def attend(
    q_TNH: Tensor, k_RKH: Tensor, v_RKH: Tensor, ends: SequenceEnds, options: AttentionOptions
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return o_TNH, lse_NT (the logarithm of its weights' sum, fp32), and two states that the backward pass
    asks for."""
    assert options.softcap is None
    places, named = _arguments(ends, options)
    o_TNH, lse_NT, *states = _forward(q_TNH, k_RKH, v_RKH, *places, False, **named)
    assert lse_NT.shape == (q_TNH.shape[1], len(q_TNH))
    if options.sinks_N is not None:
        total_NT = torch.logaddexp(lse_NT, options.sinks_N[:, None])
        o_TNH = (o_TNH * (lse_NT - total_NT).exp_().T[..., None]).to(q_TNH.dtype)
        lse_NT = total_NT
    return o_TNH, lse_NT, states[0], states[1]


def gradients(
    do_TNH: Tensor,
    q_TNH: Tensor,
    k_RKH: Tensor,
    v_RKH: Tensor,
    attended: tuple[Tensor, Tensor, Tensor, Tensor],
    ends: SequenceEnds,
    options: AttentionOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq_TNH, dk_RKH, dv_RKH) from what `attend` returned, for its sequences or parts of them."""
    o_TNH, lse_NT, *states = attended
    places, named = _arguments(ends, options)
    return _backward(do_TNH, q_TNH, k_RKH, v_RKH, o_TNH, lse_NT, *places, *states, **named)


def _arguments(ends: SequenceEnds, options: AttentionOptions) -> tuple[tuple, dict[str, Any]]:
    """Return (ends, longest sequences, dropout, is_causal) and the options as both kernels take them."""
    # With one query a sequence the kernel turns heads into queries, and the order of lse with them.
    sizes = ends.queries, ends.keys, max(ends.max_queries, 2), ends.max_keys
    window = options.window
    named = {"scale": options.scale, "window_size_left": -1 if window is None else window - 1}
    return (*sizes, 0.0, window is None), named | {"window_size_right": 0}


def _forward(*arguments: Any, **named: Any) -> tuple[Tensor, ...]:
    """Return (o_TNH, lse_NT fp32, state of the dropout, unused, unused)."""
    return torch.ops.aten._flash_attention_forward(*arguments, **named)


def _backward(*arguments: Any, **named: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.ops.aten._flash_attention_backward(*arguments, **named)
