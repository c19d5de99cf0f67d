"""Round weights to NVFP4 codes so that the linear's outputs change least, not each weight.

    E = Q - W      error = tr(E H E^T) = sum over rows x of the calibration |x E^T|^2,      H_KK = X^T X

A delta far below a quantization step is lost if each weight goes to its nearest code. Here the columns are
rounded one by one, in the order of H's diagonal, and each column's error is compensated by the remaining
columns (GPTQ, arXiv 2210.17323). Then every column is rounded again while the others stay (coordinate
descent), which can only lower the error. The scales are given: a weight that lies on their grid does not
change.

All matrices are transposed, [K, N], so that a column of the weight is a row in memory.
"""

import torch
from torch import Tensor

from qerl.formats import e2m1

_CHUNK = 128
"""Columns per product over the remaining columns; work within a chunk stays in the CPU's cache."""


def add_damping(h_KK: Tensor, damping: float) -> Tensor:
    """Return H in float64 with this share of its mean diagonal added to the diagonal: the cost of changes in
    directions that the calibration did not cover."""
    h_KK = h_KK.double()
    floor = (damping * h_KK.diagonal().mean()).clamp(min=torch.finfo(torch.float32).tiny)
    return h_KK + floor * torch.eye(len(h_KK), dtype=h_KK.dtype, device=h_KK.device)


def round_to_grid(weight_NK: Tensor, steps_NK: Tensor, h_KK: Tensor, *, sweeps: int) -> Tensor:
    """Return E2M1 values in units of the steps, float32 [N, K]. steps_NK is the value of a code of 1, above
    0; h_KK is positive definite, float64."""
    order_K = h_KK.diagonal().argsort(descending=True)
    w_KN, step_KN = (x.float().T[order_K].contiguous() for x in (weight_NK, steps_NK))
    h_KK = h_KK[order_K][:, order_K]
    q_KN = _gptq(w_KN, step_KN, h_KK)
    for _ in range(sweeps):
        _coordinate_descent(q_KN, w_KN, step_KN, h_KK.float())
    return (q_KN / step_KN)[order_K.argsort()].T.contiguous()


def nearest(value: Tensor, step: Tensor) -> Tensor:
    """Round to the nearest grid value, as e2m1 does, without encoding."""
    units = value / step
    a = units.abs().clamp_(max=e2m1.MAX)
    fine, middle, coarse = (a * 2).round_().mul_(0.5), a.round(), (a * 0.5).round_().mul_(2)
    return torch.where(a < 2, fine, torch.where(a < 4, middle, coarse)).copysign_(units).mul_(step)


def _gptq(w_KN: Tensor, step_KN: Tensor, h_KK: Tensor) -> Tensor:
    """GPTQ: distribute each column's error over the later columns by the inverse of H."""
    inverse_KK = torch.cholesky_inverse(torch.linalg.cholesky(h_KK))
    upper_KK = torch.linalg.cholesky(inverse_KK, upper=True).float()
    w_KN, q_KN = w_KN.clone(), torch.empty_like(w_KN)
    for start in range(0, len(w_KN), _CHUNK):
        chunk, rest = slice(start, start + _CHUNK), slice(start + _CHUNK, None)
        w_CN, u_CC = w_KN[chunk], upper_KK[chunk, chunk]
        error_CN = torch.empty_like(w_CN)
        for c in range(len(w_CN)):
            q_KN[start + c] = nearest(w_CN[c], step_KN[start + c])
            error_CN[c] = (w_CN[c] - q_KN[start + c]) / u_CC[c, c]
            w_CN[c + 1 :].addr_(u_CC[c, c + 1 :], error_CN[c], alpha=-1)
        w_KN[rest].addmm_(upper_KK[chunk, rest].T, error_CN, alpha=-1)
    return q_KN


def _coordinate_descent(q_KN: Tensor, w_KN: Tensor, step_KN: Tensor, h_KK: Tensor) -> None:
    """Sweep over q once, in place: set each column in turn to its best values while all others stay."""
    slope_KN = h_KK @ (q_KN - w_KN)
    for start in range(0, len(q_KN), _CHUNK):
        chunk = slice(start, start + _CHUNK)
        q_CN, slope_CN, h_CC = q_KN[chunk], slope_KN[chunk], h_KK[chunk, chunk]
        before_CN = q_CN.clone()
        for c in range(len(q_CN)):
            best_N = nearest(q_CN[c] - slope_CN[c] / h_CC[c, c], step_KN[start + c])
            slope_CN.addr_(h_CC[c], best_N - q_CN[c])
            q_CN[c] = best_N
        change_CN = q_CN - before_CN
        for others in (slice(None, start), slice(start + _CHUNK, None)):
            slope_KN[others].addmm_(h_KK[others, chunk], change_CN)
