"""Round the columns of a weight to E2M1 values, one after the other; each passes its change on to later ones.

    q_nk = s_nk * e2m1(t_nk / s_nk)      t_nj += (q_nk - b_nk) * f_kj  for all j > k          k = 0 .. K - 1

With t = b = W this is GPTQ (arXiv 2210.17323), with b the codes so far a sweep of coordinate descent: the
feedback f decides (models/quantize/rounding.py). Rows are independent. Columns go in chunks of 128: within
one by a kernel on a GPU, a launch a chunk, where PyTorch needs a dozen launches a column; to later chunks by
a product. The kernel's rounded values are PyTorch's, bit for bit
(tests/kernels/linear/test_round_columns.py).
fp32; letters: N outputs, K inputs, C columns of a chunk.
"""

import struct

import torch
from torch import Tensor

from qerl.formats import e2m1
from qerl.kernels.runtime import row_kernel
from qerl.kernels.runtime.nvrtc import addresses

CASES = ((1, 16), (3, 160), (37, 128), (70, 304))  # N, K
_CHUNK = 128  # columns, of which a lane of a warp has 4
_ROWS, _THREADS = 2, 128  # ROWS: rows of a warp


def reference(target_NK: Tensor, base_NK: Tensor, step_NK: Tensor, feedback_KK: Tensor) -> Tensor:
    """The definition in float64, column by column."""
    target_NK, base_NK, step_NK = target_NK.double(), base_NK.double(), step_NK.double()
    values = torch.tensor(sorted(set(e2m1.VALUES)), dtype=torch.float64, device=target_NK.device)
    rounded_NK = torch.empty_like(target_NK)
    for k in range(target_NK.shape[1]):
        grid_NV = values * step_NK[:, k : k + 1]
        nearest_N = (target_NK[:, k : k + 1] - grid_NV).abs().argmin(1)
        rounded_NK[:, k] = grid_NV.gather(1, nearest_N[:, None])[:, 0]
        change_N = rounded_NK[:, k] - base_NK[:, k]
        target_NK[:, k + 1 :] += change_N[:, None] * feedback_KK[k, k + 1 :].double()
    return rounded_NK


def round_columns(target_NK: Tensor, base_NK: Tensor, step_NK: Tensor, feedback_KK: Tensor) -> Tensor:
    """Return the rounded values. target_NK is overwritten; steps are above 0; of the feedback what lies above
    the diagonal counts."""
    N, K = target_NK.shape
    assert base_NK.shape == step_NK.shape == (N, K) and feedback_KK.shape == (K, K)
    tensors = target_NK, base_NK, step_NK, feedback_KK
    assert all(x.dtype == torch.float32 and x.is_contiguous() for x in tensors)
    rounded_NK = torch.empty_like(target_NK)
    round_chunk = _by_kernel if row_kernel.on_gpu(target_NK) and K % 4 == 0 else _by_torch
    for start in range(0, K, _CHUNK):
        chunk, rest = slice(start, start + _CHUNK), slice(start + _CHUNK, None)
        target_NC, base_NC, step_NC = target_NK[:, chunk], base_NK[:, chunk], step_NK[:, chunk]
        own_CC = feedback_KK[chunk, chunk]
        change_NC = round_chunk(target_NC, base_NC, step_NC, rounded_NK[:, chunk], own_CC)
        target_NK[:, rest].addmm_(change_NC, feedback_KK[chunk, rest])
    return rounded_NK


def nearest(value: Tensor, step: Tensor) -> Tensor:
    """Round to the nearest grid value."""
    units = value / step
    return e2m1.nearest(units.abs()).copysign_(units).mul_(step)


def _by_torch(
    target_NC: Tensor, base_NC: Tensor, step_NC: Tensor, rounded_NC: Tensor, feedback_CC: Tensor
) -> Tensor:
    """Fill rounded_NC and return the change. Inside, a column is a row in memory, in a CPU's cache."""
    target_CN, base_CN, step_CN = (x.T.contiguous() for x in (target_NC, base_NC, step_NC))
    change_CN, rounded_CN = torch.empty_like(target_CN), torch.empty_like(target_CN)
    for c in range(len(target_CN)):
        torch.sub(rounded_CN[c].copy_(nearest(target_CN[c], step_CN[c])), base_CN[c], out=change_CN[c])
        # Two operations: `addr_` may add without rounding the product, which the kernel rounds.
        target_CN[c + 1 :] += feedback_CC[c, c + 1 :, None] * change_CN[c]
    rounded_NC.copy_(rounded_CN.T)
    return change_CN.T.contiguous()


def _by_kernel(
    target_NC: Tensor, base_NC: Tensor, step_NC: Tensor, rounded_NC: Tensor, feedback_CC: Tensor
) -> Tensor:
    N, C = target_NC.shape
    change_NC = target_NC.new_empty(N, C)
    pointers = addresses(target_NC, base_NC, step_NC, feedback_CC, rounded_NC, change_NC)
    operands = struct.pack("6Q3i4x", *pointers, N, C, target_NC.stride(0))
    kernel = row_kernel.kernel(
        "round_columns.cu", "round_columns", target_NC.device, ROWS=_ROWS, THREADS=_THREADS
    )
    rows = _ROWS * _THREADS // 32
    kernel.launch(grid=-(-N // rows), block_threads=_THREADS, parameters=(operands,))
    return change_NC
