"""Fold AWQ's factors into the norm before a group of linears, while GPTQ quantizes it.

    W x = (W diag(s)) (diag(1 / s) x)        error of s = tr(E H_s E^T)
    E = Q(W diag(s)) - W diag(s)             H_s = diag(1 / s) X^T X diag(1 / s)

s is that of awq.py, from the inputs of the layers below in 4 bits; among its exponents the one whose rounding
to the nearest codes errs least, then GPTQ chooses the codes of W diag(s). The norm's weight over s is rounded
to bfloat16, in which it is stored, and s recomputed from it: before its linears are quantized the model
computes the same. Norms that are stored less 1 would lose that: they are left alone.
"""

import torch
from torch import Tensor

from qerl.formats import MXFP4, NVFP4
from qerl.models.checkpoint.encoding import SelectScales
from qerl.models.quantize.awq import channel_scales, exact_in_bf16
from qerl.models.quantize.rounding import gram

_EXPONENTS = (0.0, 0.15, 0.3, 0.45)


def fold_into_norm(
    norm_K: Tensor,
    weight_NK: Tensor,
    x_TK: Tensor,
    kind: type[NVFP4] | type[MXFP4],
    select_scales: SelectScales,
) -> Tensor:
    """Return s, fp32 [K], and divide the norm's weight by it."""
    mean_K, h_KK = x_TK.abs().float().mean(0), gram(x_TK).float()
    candidates = [channel_scales(mean_K, exponent) for exponent in _EXPONENTS]
    errors = [_error(weight_NK * s_K, h_KK / (s_K[:, None] * s_K), kind, select_scales) for s_K in candidates]
    best_K = candidates[int(torch.stack(errors).argmin())]
    s_K = exact_in_bf16(norm_K, best_K)
    norm_K.copy_((norm_K / s_K).bfloat16())
    return s_K


def _error(
    weight_NK: Tensor, h_KK: Tensor, kind: type[NVFP4] | type[MXFP4], select_scales: SelectScales
) -> Tensor:
    """Return tr(E H E^T) of rounding to the nearest codes."""
    packed = select_scales(kind.encode(weight_NK), weight_NK, h_KK.diagonal())
    error_NK = packed.decode().float() - weight_NK
    return ((error_NK @ h_KK) * error_NK).sum()
