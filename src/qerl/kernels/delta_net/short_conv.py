"""y = silu(a causal convolution over the last W tokens, channel by channel), over packed sequences.

    y_tc = silu(sum_w weight_cw x_{t - W + 1 + w, c})          w = 0 .. W - 1

The inputs before a sequence's first token are its state: W - 1 rows, oldest first, zeros at the very start.
The state after it is its last W - 1 inputs. fp32 inside, y in x's dtype. The weight is frozen. On a GPU one
launch for W = 4 in bf16, which reads x and writes y once. Letters: T tokens, C channels, W taps, S sequences.
"""

import struct
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from qerl.kernels.delta_net.gated_delta import SequenceLayout
from qerl.kernels.pointwise.recomputed import recomputed
from qerl.kernels.runtime import row_kernel
from qerl.kernels.runtime.nvrtc import addresses

CASES = ((3, 4, (1,)), (8, 4, (5, 1, 2, 3)), (16, 2, (7, 0, 1)), (5, 1, (4, 2)))  # C, W, lengths
_KERNEL_TAPS, _ROWS, _THREADS = 4, 16, 128  # ROWS: rows of a thread


def reference(
    x_TC: Tensor, weight_CW: Tensor, lengths: Sequence[int], state_SWC: Tensor
) -> tuple[Tensor, Tensor]:
    """The definition in float64; differentiable. state_SWC has W - 1 rows a sequence."""
    outputs, states, start, W = [], [], 0, weight_CW.shape[1]
    for length, before in zip(lengths, state_SWC.double(), strict=True):
        rows = torch.cat((before, x_TC[start : start + length].double()))
        for t in range(length):
            outputs.append(F.silu((rows[t : t + W] * weight_CW.double().T).sum(0)))
        states.append(rows[length:])
        start += length
    return torch.stack(outputs), torch.stack(states)


def short_conv(
    x_TC: Tensor, weight_CW: Tensor, layout: SequenceLayout, state_SWC: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (y_TC, the states after the sequences in x's dtype); differentiable in x and the state."""
    C, W, S = x_TC.shape[1], weight_CW.shape[1], len(layout.lengths)
    assert weight_CW.shape[0] == C and state_SWC.shape == (S, W - 1, C), (state_SWC.shape, x_TC.shape)
    if _has_kernel(x_TC, weight_CW, state_SWC):
        y_TC, after_SWC = recomputed(
            lambda x, state: _by_kernel(x, weight_CW, layout.ends, state),
            lambda x, state: _by_torch(x, weight_CW, layout, state),
            *(x_TC, state_SWC),
        )
        return y_TC, after_SWC
    return _by_torch(x_TC, weight_CW, layout, state_SWC)


def _by_torch(
    x_TC: Tensor, weight_CW: Tensor, layout: SequenceLayout, state_SWC: Tensor
) -> tuple[Tensor, Tensor]:
    (T, _), W, S = x_TC.shape, weight_CW.shape[1], len(layout.lengths)
    inputs_TC = torch.cat((state_SWC.to(x_TC.dtype).flatten(0, 1), x_TC))
    # every sequence's state, then its rows: [T + S (W - 1), C]
    before_S = torch.arange(S, device=x_TC.device) * (W - 1)
    places_T = torch.arange(W - 1, T + W - 1, device=x_TC.device)
    places_T = places_T + before_S.repeat_interleave(layout.ends.diff(), output_size=T)
    offsets_W = torch.arange(W - 1, device=x_TC.device)
    places_SW = (layout.ends[:-1] + before_S)[:, None] + offsets_W
    rows = torch.empty(len(inputs_TC), dtype=torch.long, device=x_TC.device)
    rows[torch.cat((places_SW.flatten(), places_T))] = torch.arange(len(inputs_TC), device=x_TC.device)
    joined_TC = inputs_TC[rows]
    last_SW = (layout.ends[1:] + before_S)[:, None] + offsets_W
    return _taps(joined_TC, weight_CW)[places_T - (W - 1)].to(x_TC.dtype), joined_TC[last_SW]


def _has_kernel(x_TC: Tensor, weight_CW: Tensor, state_SWC: Tensor) -> bool:
    is_ready = len(x_TC) > 0 and weight_CW.shape[1] == _KERNEL_TAPS
    return is_ready and row_kernel.are_vectors(x_TC, state_SWC) and weight_CW.is_contiguous()


def _by_kernel(x_TC: Tensor, weight_CW: Tensor, ends: Tensor, state_SWC: Tensor) -> tuple[Tensor, Tensor]:
    (T, C), S, W = x_TC.shape, len(state_SWC), _KERNEL_TAPS
    assert weight_CW.dtype == torch.float32 and weight_CW.data_ptr() % 16 == 0
    assert ends.dtype == torch.int64 and ends.shape == (S + 1,)
    state_SWC = state_SWC.contiguous()
    y_TC, after_SWC = x_TC.new_empty(T, C), torch.empty_like(state_SWC)
    pointers = addresses(x_TC, weight_CW, ends, state_SWC, y_TC, after_SWC)
    operands = struct.pack("6Q4i", *pointers, x_TC.stride(0), T, S, C)
    kernel = row_kernel.kernel("short_conv.cu", "short_conv", x_TC.device, ROWS=_ROWS, THREADS=_THREADS)
    units = (-(-T // _ROWS) + S * (W - 1)) * (C // 8)
    kernel.launch(grid=-(-units // _THREADS), block_threads=_THREADS, parameters=(operands,))
    return y_TC, after_SWC


def short_conv_step(x_BC: Tensor, weight_CW: Tensor, state_BWC: Tensor) -> tuple[Tensor, Tensor]:
    """Return (y_BC, the states) after one token of each of B sequences."""
    rows_BWC = torch.cat((state_BWC.to(x_BC.dtype), x_BC[:, None]), 1)
    y_BC = F.silu((rows_BWC * weight_CW.float().T).sum(1))
    return y_BC.to(x_BC.dtype), rows_BWC[:, 1:]


def _taps(x_TC: Tensor, weight_CW: Tensor) -> Tensor:
    """Return y of the rows from the W-th on, fp32, as if x were one sequence."""
    W = weight_CW.shape[1]
    num_rows = len(x_TC) - (W - 1)
    sums_TC = x_TC[:num_rows] * weight_CW[:, 0].float()
    for w in range(1, W):
        sums_TC = torch.addcmul(sums_TC, x_TC[w : w + num_rows], weight_CW[:, w].float())
    return F.silu(sums_TC)
