"""y = Q(x) @ W^T with W in FP8 and x quantized to FP8, plus a LoRA adapter's product.

    y  = Q(x) @ W^T + scaling * (x @ a^T) @ b^T + bias        Q: 128 neighbors of a row share a scale
    dx = Q(dy) @ W + scaling * (dy @ b) @ a                   straight through Q; a, b as in lora_linear.py

Q and W are those of formats/fp8_flow.py; T tokens, K inputs, N outputs. The adapter reads x unquantized. On
a Hopper GPU the products are cuBLAS's with block scales (1 x 128 by 128 x 128), and Q is one kernel with the
same bits as torch's. Elsewhere Q(x) and W are multiplied in fp32: the same numbers in another order of
summation.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from qerl.formats.fp8 import BLOCK
from qerl.formats.fp8_flow import FP8Flow, rounded_rows
from qerl.kernels.linear.lora_linear import Adapter
from qerl.kernels.runtime import row_kernel

CASES = ((1, 128, 256), (5, 576, 192), (37, 384, 640), (130, 1536, 576))  # T, K, N
_ROWS = 16  # each group's scales start at a multiple of this


def reference(
    x_TK: Tensor,
    weight_NK: Tensor,
    a_RK: Tensor | None = None,
    b_NR: Tensor | None = None,
    scaling: float = 0.0,
) -> Tensor:
    """The definition in float64, with a straight-through gradient for Q; differentiable in x, a and b."""
    x_TK = x_TK.double()
    y_TN = (x_TK + (rounded_rows(x_TK).double() - x_TK).detach()) @ weight_NK.double().T
    if y_TN.requires_grad:
        y_TN.register_hook(lambda dy_TN: rounded_rows(dy_TN).double())
    if a_RK is not None and b_NR is not None:
        y_TN = y_TN + scaling * (x_TK @ a_RK.double().T) @ b_NR.double().T
    return y_TN


def fp8_product(x_TK: Tensor, weight: FP8Flow, resident_NK: Tensor | None = None) -> Tensor:
    """Return Q(x) @ W^T in x's dtype. resident_NK: W in fp32, if it is kept in memory."""
    if _has_kernels(x_TK, weight):
        return _scaled(x_TK, weight.codes, weight.scales)
    w_NK = weight.operand(torch.float32) if resident_NK is None else resident_NK
    return (rounded_rows(x_TK) @ w_NK.T).to(x_TK.dtype)


def fp8_linear(
    x_TK: Tensor,
    weight: FP8Flow,
    resident_NK: Tensor | None,
    adapter: Adapter | None,
    bias_N: Tensor | None,
    *,
    needs_output: bool = True,
) -> Tensor:
    """Return y_TN, differentiable in x and the masters, or zeros if not needs_output."""
    assert x_TK.dim() == 2
    return _FP8Linear.apply(x_TK, weight, resident_NK, bias_N, needs_output, *(adapter or (None,) * 5))


class _FP8Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x_TK, weight, resident_NK, bias_N, needs_output, a_RK, b_NR, a_work_RK, b_work_NR, scaling
    ):
        u_TR = None if a_work_RK is None else x_TK @ a_work_RK.T
        ctx.weight, ctx.scaling = weight, scaling
        ctx.save_for_backward(
            x_TK if a_work_RK is not None else None, u_TR, a_work_RK, b_work_NR, resident_NK
        )
        if not needs_output:
            return x_TK.new_zeros(len(x_TK), weight.shape[0])
        y_TN = fp8_product(x_TK, weight, resident_NK)
        if u_TR is not None:
            y_TN = y_TN.addmm_(u_TR, b_work_NR.T, alpha=scaling)
        return y_TN if bias_N is None else y_TN.add_(bias_N)

    @staticmethod
    def backward(ctx, dy_TN):  # type: ignore[override]
        x_TK, u_TR, a_work_RK, b_work_NR, resident_NK = ctx.saved_tensors
        dx_TK = da_RK = db_NR = None
        if ctx.needs_input_grad[0]:
            dx_TK = _input_gradient(dy_TN, ctx.weight, resident_NK)
        if u_TR is not None:
            du_TR = dy_TN @ b_work_NR
            da_RK = (du_TR.T @ x_TK).float().mul_(ctx.scaling)
            db_NR = (dy_TN.T @ u_TR).float().mul_(ctx.scaling)
            if dx_TK is not None:
                dx_TK.addmm_(du_TR, a_work_RK, alpha=ctx.scaling)
        return dx_TK, None, None, None, None, da_RK, db_NR, None, None, None


def _input_gradient(dy_TN: Tensor, weight: FP8Flow, resident_NK: Tensor | None) -> Tensor:
    if _has_kernels(dy_TN, weight):
        codes_KN = weight.codes.view(torch.uint8).T.contiguous().view(torch.float8_e4m3fn)
        return _scaled(dy_TN, codes_KN, weight.scales.T)
    w_NK = weight.operand(torch.float32) if resident_NK is None else resident_NK
    return (rounded_rows(dy_TN) @ w_NK).to(dy_TN.dtype)


def _has_kernels(x_TK: Tensor, weight: FP8Flow) -> bool:
    """True on Hopper, where cuBLAS has block scales, if N and K are multiples of 16."""
    n, k = weight.shape
    return (
        x_TK.is_cuda
        and x_TK.dtype == torch.bfloat16
        and torch.cuda.get_device_capability(x_TK.device) == (9, 0)
        and n % 16 == k % 16 == 0
    )


def quantized(x_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Return (codes [T', K], scales [T', ceil(K / 128)] with contiguous columns).

    T' is T rounded up to 16; rows from T on are undefined.
    """
    x_TK = x_TK if row_kernel.are_vectors(x_TK) else x_TK.contiguous()
    (T, K), rows = x_TK.shape, -(-x_TK.shape[0] // _ROWS) * _ROWS
    groups = -(-K // BLOCK)
    codes = torch.empty(rows, K, dtype=torch.float8_e4m3fn, device=x_TK.device)
    scales = torch.empty(groups, rows, device=x_TK.device)
    if T:
        kernel = row_kernel.kernel("fp8_linear.cu", "quantize_rows", x_TK.device)
        parameters = (x_TK, codes, scales, T, K, x_TK.stride(0), rows)
        kernel.launch(grid=-(-T * groups // 8), block_threads=256, parameters=parameters)
    return codes, scales.T


def _scaled(x_TK: Tensor, codes_NK: Tensor, scales: Tensor) -> Tensor:
    codes_TK, scales_TB = quantized(x_TK)
    y_TN = F.scaled_mm(
        codes_TK,
        codes_NK.T,
        scales_TB,
        F.ScalingType.BlockWise1x128,
        _padded(scales).T,
        F.ScalingType.BlockWise128x128,
        output_dtype=x_TK.dtype,
    )
    return y_TN[: len(x_TK)]


def _padded(scales: Tensor) -> Tensor:
    """Pad rows of [N / 128, K / 128] to a multiple of 4, as cuBLAS expects."""
    return F.pad(scales, (0, -scales.shape[1] % 4)).contiguous()
