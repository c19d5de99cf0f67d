"""Rounds weights to NVFP4 codes so that their product with the inputs stays, not each weight.

    E = Q - W      error = tr(E H E^T) = sum over rows x of the calibration |x E^T|^2,      H_KK = X^T X

A delta far below a quantization step is lost where each weight goes to its nearest code. Here the columns
are rounded one by one, in the order of H's diagonal, and each one's error is taken up by the columns still to
come (GPTQ, arXiv 2210.17323); then every column is tried again while the others stay (coordinate descent),
which can only lower the error. The scales are given: a weight that lies on their grid stays where it is.

Everything is held transposed, [K, N], so that a column of the weight is a row in memory.
"""

import torch
from torch import Tensor

from qerl.formats import e2m1

_CHUNK = 128
"""Columns between two products over all that follow: the rest of the work stays in the cache."""


def damped(h_KK: Tensor, damping: float) -> Tensor:
    """H in float64 with this share of its mean diagonal added to the diagonal: what a change costs in the
    directions that the calibration never took."""
    h_KK = h_KK.double()
    floor = (damping * h_KK.diagonal().mean()).clamp(min=torch.finfo(torch.float32).tiny)
    return h_KK + floor * torch.eye(len(h_KK), dtype=h_KK.dtype, device=h_KK.device)


def rounded(weight_NK: Tensor, steps_NK: Tensor, h_KK: Tensor, *, sweeps: int) -> Tensor:
    """In units of the steps, float32 [N, K]: values of E2M1. steps_NK: what a code of 1 stands for, above 0;
    h_KK: positive definite, float64."""
    order_K = h_KK.diagonal().argsort(descending=True)
    w_KN, step_KN = (x.float().T[order_K].contiguous() for x in (weight_NK, steps_NK))
    h_KK = h_KK[order_K][:, order_K]
    q_KN = _fed_forward(w_KN, step_KN, h_KK)
    for _ in range(sweeps):
        _descend(q_KN, w_KN, step_KN, h_KK.float())
    return (q_KN / step_KN)[order_K.argsort()].T.contiguous()


def nearest(value: Tensor, step: Tensor) -> Tensor:
    """The nearest value of the grid: e2m1's rounding, undecoded."""
    units = value / step
    a = units.abs().clamp_(max=e2m1.MAX)
    fine, middle, coarse = (a * 2).round_().mul_(0.5), a.round(), (a * 0.5).round_().mul_(2)
    return torch.where(a < 2, fine, torch.where(a < 4, middle, coarse)).copysign_(units).mul_(step)


def _fed_forward(w_KN: Tensor, step_KN: Tensor, h_KK: Tensor) -> Tensor:
    """GPTQ: each column's error is spread over the later ones as H says."""
    inverse_KK = torch.cholesky_inverse(torch.linalg.cholesky(h_KK))
    upper_KK = torch.linalg.cholesky(inverse_KK, upper=True).float()
    w_KN, q_KN = w_KN.clone(), torch.empty_like(w_KN)
    for start in range(0, len(w_KN), _CHUNK):
        some, rest = slice(start, start + _CHUNK), slice(start + _CHUNK, None)
        w_CN, u_CC = w_KN[some], upper_KK[some, some]
        error_CN = torch.empty_like(w_CN)
        for c in range(len(w_CN)):
            q_KN[start + c] = nearest(w_CN[c], step_KN[start + c])
            error_CN[c] = (w_CN[c] - q_KN[start + c]) / u_CC[c, c]
            w_CN[c + 1 :].addr_(u_CC[c, c + 1 :], error_CN[c], alpha=-1)
        w_KN[rest].addmm_(upper_KK[some, rest].T, error_CN, alpha=-1)
    return q_KN


def _descend(q_KN: Tensor, w_KN: Tensor, step_KN: Tensor, h_KK: Tensor) -> None:
    """One sweep over q, in place: each column in turn takes its best values while all others stay."""
    slope_KN = h_KK @ (q_KN - w_KN)
    for start in range(0, len(q_KN), _CHUNK):
        some = slice(start, start + _CHUNK)
        q_CN, slope_CN, h_CC = q_KN[some], slope_KN[some], h_KK[some, some]
        before_CN = q_CN.clone()
        for c in range(len(q_CN)):
            best_N = nearest(q_CN[c] - slope_CN[c] / h_CC[c, c], step_KN[start + c])
            slope_CN.addr_(h_CC[c], best_N - q_CN[c])
            q_CN[c] = best_N
        change_CN = q_CN - before_CN
        for others in (slice(None, start), slice(start + _CHUNK, None)):
            slope_KN[others].addmm_(h_KK[others, some], change_CN)
