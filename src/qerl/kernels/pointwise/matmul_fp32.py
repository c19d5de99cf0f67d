"""Products of 16-bit matrices with an fp32 result.

    c_MN = a_MK @ b_KN        two matrices, or [B, M, K] @ [B, K, N]; summed and returned in fp32

On a CUDA device this is one call. On a CPU torch rounds the product of 16-bit matrices to 16 bits, and the
product of fp32 copies takes 2 to 4 times as long as two rounded products (bf16, AVX-512). So we compute the
rounded product, then its rounding error, from the same operands:

    high = round(a @ b)        low = round(a @ b - high)        a @ b = high + low to 2 ** -17 of |a @ b|

4,096 columns at a time keep both in the cache: logits of 128 rows (V 49,152, D 576, 2 cores) then take 20 ms,
against 39 ms for all columns at once and 44 ms from fp32 copies.

`add_product` adds the unrounded product to an fp32 sum, such as the residual stream, or stores it.

`frozen_linear` is x @ W^T of a weight that is not trained, differentiable in x.

`summed` adds up the products a^T @ b of CHUNK_ROWS rows each, from the last rows to the first. An adapter's
gradient therefore has the same bits if a layer is differentiated chunk by chunk in that order
(learner/chunked_mlp.py).
"""

from collections.abc import Callable

import torch
from torch import Tensor

CASES = ((5, 64, 33), (128, 576, 192), (1, 8, 100), (2, 16, 4_097))  # M, K, N
_COLUMNS = 4096
CHUNK_ROWS = 16_384


def reference(a: Tensor, b: Tensor) -> Tensor:
    return a.double() @ b.double()


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b in fp32, of two matrices or two batches of them; without a gradient."""
    assert a.dtype == b.dtype and a.dim() == b.dim() and a.dim() in (2, 3)
    multiply, multiply_add = (torch.mm, torch.addmm) if a.dim() == 2 else (torch.bmm, torch.baddbmm)
    if a.dtype == torch.float32:
        return multiply(a, b)
    if a.is_cuda:
        return multiply(a, b, out_dtype=torch.float32)
    c = torch.empty(*a.shape[:-1], b.shape[-1], dtype=torch.float32, device=a.device)
    for start in range(0, b.shape[-1], _COLUMNS):
        some = b[..., start : start + _COLUMNS]
        high = multiply(a, some)
        low = multiply_add(high, a, some, beta=-1)
        c[..., start : start + _COLUMNS].copy_(high).add_(low)
    return c


def add_product(c_MN: Tensor, a_MK: Tensor, b_KN: Tensor, alpha: float = 1.0, *, beta: int = 1) -> Tensor:
    """Put beta * c + alpha * a @ b into c, which is fp32, without a gradient. beta 0: c may be unset."""
    assert c_MN.dtype == torch.float32 and a_MK.dtype == b_KN.dtype
    if a_MK.dtype == torch.float32:
        return torch.addmm(c_MN, a_MK, b_KN, beta=beta, alpha=alpha, out=c_MN)
    if a_MK.is_cuda:
        return torch.addmm(c_MN, a_MK, b_KN, out_dtype=torch.float32, beta=beta, alpha=alpha, out=c_MN)
    ab_MN = product(a_MK, b_KN)
    return c_MN.add_(ab_MN, alpha=alpha) if beta else torch.mul(ab_MN, alpha, out=c_MN)


def scaled_product(a_MK: Tensor, b_KN: Tensor, alpha: float = 1.0) -> Tensor:
    """Return alpha * a @ b of two matrices in fp32: on a CUDA device one launch."""
    if alpha == 1:
        return product(a_MK, b_KN)
    c_MN = torch.empty(len(a_MK), b_KN.shape[1], dtype=torch.float32, device=a_MK.device)
    return add_product(c_MN, a_MK, b_KN, alpha, beta=0)


def frozen_linear(x_TK: Tensor, weight_NK: Tensor) -> Tensor:
    """Return x @ weight^T in fp32; differentiable in x, by a product of operands in the weight's dtype."""
    return _FrozenLinear.apply(x_TK, weight_NK)


class _FrozenLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TK, weight_NK):
        ctx.save_for_backward(weight_NK)
        return product(x_TK, weight_NK.T)

    @staticmethod
    def backward(ctx, dy_TN):  # type: ignore[override]
        (weight_NK,) = ctx.saved_tensors
        return dy_TN.to(weight_NK.dtype) @ weight_NK, None


def row_chunks(num_rows: int) -> list[slice]:
    """Return slices of CHUNK_ROWS rows; the last one may be smaller."""
    return [slice(start, min(start + CHUNK_ROWS, num_rows)) for start in range(0, num_rows, CHUNK_ROWS)]


def summed(
    a_TM: Tensor,
    b_TN: Tensor,
    alpha: float = 1.0,
    *,
    multiply: Callable[[Tensor, Tensor, float], Tensor] = scaled_product,
) -> Tensor:
    """Return alpha * a^T @ b in fp32, as the sum over chunks of rows. multiply: returns alpha * the product
    as a new fp32 tensor."""
    *before, last = row_chunks(len(a_TM)) or [slice(0)]
    total_MN = multiply(a_TM[last].T, b_TN[last], alpha)
    for some in reversed(before):
        total_MN.add_(multiply(a_TM[some].T, b_TN[some], alpha))
    return total_MN
