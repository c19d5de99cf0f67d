"""Round weights to NVFP4 codes so that the linear's outputs change least, not each weight.

    E = Q - W      error = tr(E H E^T) = sum over rows x of the calibration |x E^T|^2,      H_KK = X^T X

A delta far below a quantization step is lost if each weight goes to its nearest code. Here the columns are
rounded one by one, in the order of H's diagonal, and each column's error is compensated by the remaining
columns (GPTQ, arXiv 2210.17323). Then every column is rounded again while the others stay (coordinate
descent), which can only lower the error. The scales are given: a weight that lies on their grid does not
change.

Both are `round_columns` with feedback of their own. H = U D U^T with a unit upper triangular U and a diagonal
D gives error = sum over k of D_k |E_k + sum over j < k of E_j U_jk|^2, whose terms GPTQ minimizes one by one
(QuIP, arXiv 2307.13304, theorem 6: without the inverse of H); a sweep minimizes over one column at a time.

    GPTQ    f_jk = -U_jk          sweep    f_jk = -H_jk / H_kk

Where the layers before changed x from the float model's z, the target of Q x may be W (x + d), d = a (z - x).
Then the rounded matrix is W + W D^T X H^-1, which H's damping draws to W (`shifted_target`).
"""

import torch
from torch import Tensor

from qerl.kernels.linear.round_columns import round_columns
from qerl.kernels.pointwise.matmul_fp32 import product

_GRAM_ROWS, _DAMPINGS = 1024, 6


def gram(x_TK: Tensor) -> Tensor:
    """Return X^T X in float64 [K, K], the sum of products of 1,024 rows in float32: inputs with a few huge
    columns, as those of Qwen2.5's down projections, lose their definiteness in sums of 32,768 rows."""
    return _products(x_TK, x_TK)


def _products(y_TN: Tensor, x_TK: Tensor) -> Tensor:
    """Return Y^T X in float64 [N, K]. A GPU multiplies 16-bit rows as they are."""
    sum_NK = torch.zeros(y_TN.shape[1], x_TK.shape[1], dtype=torch.float64, device=x_TK.device)
    if not (x_TK.is_cuda and y_TN.dtype == x_TK.dtype):
        y_TN, x_TK = y_TN.float(), x_TK.float()
    for y_sN, x_sK in zip(y_TN.split(_GRAM_ROWS), x_TK.split(_GRAM_ROWS), strict=True):
        sum_NK += product(y_sN.T, x_sK)
    return sum_NK


def shifted_target(weight_NK: Tensor, change_TK: Tensor, x_TK: Tensor, h_KK: Tensor) -> Tensor:
    """Return the matrix whose rounding minimizes |Q x - W (x + change)|^2, float32 [N, K]. h_KK: x's, damped,
    in float64."""
    N, K = weight_NK.shape
    if 2 * N < K:  # fewer operations than with change^T x
        shift_NK = _products(change_TK @ weight_NK.T.to(change_TK.dtype), x_TK)
    else:
        shift_NK = weight_NK.double() @ _products(change_TK, x_TK)
    return (weight_NK + torch.cholesky_solve(shift_NK.T, _cholesky(h_KK)).T).float()


def add_damping(h_KK: Tensor, damping: float) -> Tensor:
    """Return H in float64 with this share of its mean diagonal added to the diagonal: the cost of changes in
    directions that the calibration did not cover."""
    h_KK = h_KK.to(torch.float64, copy=True)
    floor = (damping * h_KK.diagonal().mean()).clamp(min=torch.finfo(torch.float32).tiny)
    h_KK.diagonal().add_(floor)
    return h_KK


def round_to_grid(weight_NK: Tensor, steps_NK: Tensor, h_KK: Tensor, *, sweeps: int) -> Tensor:
    """Return E2M1 values in units of the steps, float32 [N, K]. steps_NK is the value of a code of 1, above
    0; h_KK is positive definite, float64."""
    order_K = h_KK.diagonal().argsort(descending=True, stable=True)
    w_NK, step_NK = (x.float()[:, order_K].contiguous() for x in (weight_NK, steps_NK))
    h_KK = h_KK[order_K][:, order_K]
    q_NK = round_columns(w_NK.clone(), w_NK, step_NK, _gptq_feedback(h_KK))
    feedback_KK = (h_KK / -h_KK.diagonal()).float().contiguous()
    for _ in range(sweeps):
        best_NK = torch.addmm(q_NK, q_NK - w_NK, feedback_KK)
        q_NK = round_columns(best_NK, q_NK, step_NK, feedback_KK)
    return (q_NK / step_NK)[:, order_K.argsort()]


def _gptq_feedback(h_KK: Tensor) -> Tensor:
    """Return -U of H = U D U^T: the Cholesky factor of H in reverse order, its columns over its diagonal."""
    upper_KK = _cholesky(h_KK.flip(0, 1)).flip(0, 1)
    return (upper_KK / -upper_KK.diagonal()).float().contiguous()


def _cholesky(h_KK: Tensor) -> Tensor:
    """Return the lower factor. An H that rounding has made indefinite gets ten times the damping, up to its
    own mean diagonal."""
    lower_KK, failed = torch.linalg.cholesky_ex(h_KK)
    for exponent in range(1 - _DAMPINGS, 1):
        if not failed:
            break
        h_KK = add_damping(h_KK, 10.0**exponent)
        lower_KK, failed = torch.linalg.cholesky_ex(h_KK)
    return lower_KK
