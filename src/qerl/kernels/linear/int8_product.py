"""Products of 8-bit integers for the backward pass on Hopper: dx of a linear, and gate and up once more.

    dx_TK = dy_TN @ (f_N * W_NK) + du_TR @ a_RK                f: the factors (alphas) that the operand omits
    y_TF  = silu(g) * u,  [g | u]_TN = x_TK @ (f_N * W_NK)^T + u_TR @ (f_N * b_NR)^T

    R = H / 8 for each 64 neighbors of what is summed over, H: Hadamard's matrix; dy R (R f W) = dy f W
    dy_8 = round(127 dy R / p)     p_t = max |dy R| of a row
    W_8  = round(127 R f W / q)    q_k = max |R f W| of a column
    dx   = p_t q_k / 127^2 * sum_n dy_8 W_8 + du @ a

R spreads outliers over 64 numbers. Rounding is then about 0.9 % of each operand (FP8: 2.6 %, with or without
R): the gradient of SmolLM2's adapter has a cosine of 0.9995 to the unrounded one, with FP8 0.995, and that of
the 7B shape 0.9994. If layers are recomputed, gate and up are products of integers in the second forward pass
too, which reads them for the gradient alone: 0.9992 (dev/log/learner.md). The sum of integers is exact;
adapters' products are in bfloat16, with fp32 sums.

Elsewhere than on a GPU the same numbers are multiplied in float64.
"""

import functools
import struct

import torch
import torch.nn.functional as F
from torch import Tensor

from qerl.kernels.linear import int8_codes
from qerl.kernels.linear.int8_codes import COLUMNS, DEPTH, ROWS, RotatedWeight, rotated, rounded
from qerl.kernels.pointwise.swiglu import put_swiglu
from qerl.kernels.runtime import row_kernel
from qerl.kernels.runtime.architectures import num_sms
from qerl.kernels.runtime.nvrtc import CudaKernel, addresses, compiled

CASES = ((5, 192, 64), (130, 576, 1536), (300, 1152, 320), (33, 37_888, 128))  # T, N, K
_FILE, _STAGES, _THREADS = "int8_product.cu", 4, 384
_SHARED_BYTES = _STAGES * ((ROWS + COLUMNS) * DEPTH + 16) + 1024


def reference(
    dy_TN: Tensor, w_NK: Tensor, factors_N: Tensor, du_TR: Tensor | None = None, a_RK: Tensor | None = None
) -> Tensor:
    """Compute dx without rounding in float64."""
    dx_TK = dy_TN.double() @ (factors_N.double()[:, None] * w_NK.double())
    return dx_TK if du_TR is None or a_RK is None else dx_TK + du_TR.double() @ a_RK.double()


def input_gradient(
    dy_TN: Tensor, weight: RotatedWeight, du_TR: Tensor | None = None, a_RK: Tensor | None = None
) -> Tensor:
    """Return dx_TK in dy's dtype, of a weight that was rotated along n."""
    (n, k), T = weight.rotation.shape, len(dy_TN)
    assert dy_TN.shape[1] == n and not weight.rotation.along_k
    if not row_kernel.on_gpu(dy_TN):
        dx_TK = _product(dy_TN, weight)
        return (dx_TK if du_TR is None or a_RK is None else dx_TK + du_TR @ a_RK).to(dy_TN.dtype)
    dx_TK = torch.empty(T, k, dtype=dy_TN.dtype, device=dy_TN.device)
    a_lines = None if a_RK is None else int8_codes.adapter_lines(a_RK.T, None, 0)
    if T:
        _launch(dy_TN, du_TR, weight, a_lines, dx_TK, None)
    return dx_TK


def put_gate_up(
    x_TK: Tensor,
    u_TR: Tensor | None,
    b_NR: Tensor | None,
    weight: RotatedWeight,
    y_TF: Tensor,
    gate_TF: Tensor,
) -> None:
    """Fill y, and gate as `swiglu.wide_gradient` takes it. The weight was rotated along k; its factors are in
    its codes, and multiply b here."""
    (n, k), features, factors_N = weight.rotation.shape, y_TF.shape[1], weight.rotation.factors_N
    assert x_TK.shape == (len(y_TF), k) and n == 2 * features and weight.rotation.along_k
    assert gate_TF.shape == y_TF.shape and gate_TF.is_contiguous()
    if not row_kernel.on_gpu(x_TK):
        gate_up_TN = _product(x_TK, weight)
        if u_TR is not None and b_NR is not None:
            gate_up_TN = gate_up_TN + u_TR.double() @ (factors_N[:, None] * b_NR).double().T
        put_swiglu(gate_up_TN.float(), y_TF, gate_TF)
        return
    assert row_kernel.are_vectors(y_TF, gate_TF)
    b_lines = None if b_NR is None else int8_codes.adapter_lines(b_NR, factors_N, features)
    if len(y_TF):
        _launch(x_TK, u_TR, weight, b_lines, y_TF, gate_TF)


def gate_up_reference(x_TK: Tensor, w_NK: Tensor, factors_N: Tensor, u_TR: Tensor, b_NR: Tensor) -> Tensor:
    """Compute silu(gate) * up without rounding in float64."""
    gate_up_TN = (x_TK.double() @ w_NK.double().T + u_TR.double() @ b_NR.double().T) * factors_N.double()
    gate_TF, up_TF = gate_up_TN.chunk(2, 1)
    return F.silu(gate_TF) * up_TF


def _product(x_TS: Tensor, weight: RotatedWeight) -> Tensor:
    """Return the product of integers times its scales, in float64."""
    x_TS = rotated(x_TS)
    maxima_T = x_TS.abs().amax(1)
    sums = rounded(x_TS, maxima_T).double() @ weight.codes.double().T
    return sums * (maxima_T[:, None] * weight.rotation.maxima / 127.0**2)


def _launch(
    x_TS: Tensor,
    u_TR: Tensor | None,
    weight: RotatedWeight,
    lines: Tensor | None,
    y: Tensor,
    gate_TF: Tensor | None,
) -> None:
    assert x_TS.dtype == y.dtype == torch.bfloat16
    x_TS = x_TS if row_kernel.are_vectors(x_TS) else x_TS.contiguous()
    codes, maxima_T, u_lines = int8_codes.rotated_rows(x_TS, None if lines is None else u_TR)
    tensors = codes, weight.codes, u_lines, lines, maxima_T, weight.rotation.maxima, y, gate_TF
    (T, width), depth = y.shape, x_TS.shape[1]
    u_blocks = 0 if u_lines is None or u_TR is None else int8_codes.num_tail_blocks(u_TR.shape[1])
    tiles = -(-T // ROWS) * -(-width // (COLUMNS if gate_TF is None else COLUMNS // 2))
    numbers = T, width, -(-depth // DEPTH), u_blocks, y.stride(0)
    _kernel(x_TS.device, gate_TF is not None).launch(
        grid=min(tiles, num_sms(x_TS.device)),
        block_threads=_THREADS,
        parameters=(struct.pack("8Q5i4x", *addresses(*tensors), *numbers),),
    )


@functools.cache
def _kernel(device: torch.device, is_swiglu: bool) -> CudaKernel:
    defines = {"STAGES": _STAGES, "SWIGLU": int(is_swiglu)}
    return compiled(_FILE, "int8_product", device, defines, shared_bytes=_SHARED_BYTES)
