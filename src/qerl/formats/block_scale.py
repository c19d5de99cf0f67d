"""Choose the block scales of four-bit float formats by least squared error.

    s_b = the candidate with the least sum over block b of m_k (q(w / s) * s - w)^2

m_k is 1, or the mean square of input k over a text (GPTQ's diagonal of H), if it is known.

    NVFP4   the plain E4M3 scale, the 3 below it and the 5 above: 0.75 to 1.5 times, so that the largest
            weight may be clipped, or become 4 instead of 6 ("four over six", arXiv 2512.02010)
    MXFP4   the plain power of two, a half and a quarter of it; twice it has no value below its largest
            weight that the plain one lacks

The plain scale is a candidate and wins ties, so no block's error exceeds that of plain rounding
(tests/formats/test_block_scale.py). The global scale does not change, so linears can still share it.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from qerl.formats import e2m1
from qerl.formats.mxfp4 import MXFP4
from qerl.formats.nvfp4 import NVFP4
from qerl.formats.packed import PackedWeight, row_chunks

_NVFP4_STEPS = (-1, -2, -3, 1, 2, 3, 4, 5)
_MXFP4_STEPS = (-1, -2)
_E4M3_RANGE = 1, 0x7E
"""The bits of the smallest and the largest positive E4M3 number; bits ascend with the value."""
_E8M0_RANGE = 0, 252


def reference(weight_NK: Tensor, steps_CNB: Tensor, importance_K: Tensor) -> Tensor:
    """Return the least error of each block among C candidates for the value of its code of 1, in float64."""
    values = torch.tensor(e2m1.VALUES, dtype=torch.float64, device=weight_NK.device)
    blocks = weight_NK.double().unflatten(1, (steps_CNB.shape[2], -1))
    m_BW = importance_K.double().view(steps_CNB.shape[2], -1)
    errors_CNB = [
        ((blocks[..., None] - values * step[:, :, None, None]).square().amin(-1) * m_BW).sum(-1)
        for step in steps_CNB.double()
    ]
    return torch.stack(errors_CNB).amin(0)


def least_squares(
    packed: PackedWeight, weight_NK: Tensor, importance_K: Tensor | None = None
) -> PackedWeight:
    """Return weight_NK with searched scales. `packed` is its plain encoding, returned as it is unless it is
    NVFP4 or MXFP4. importance_K: the m above, not negative; None: all 1."""
    m_K = None if importance_K is None else (importance_K / importance_K.max()).float()
    if isinstance(packed, NVFP4):
        return _nvfp4(packed, weight_NK, m_K)
    return _mxfp4(packed, weight_NK, m_K) if isinstance(packed, MXFP4) else packed


def _nvfp4(packed: NVFP4, weight_NK: Tensor, m_K: Tensor | None) -> NVFP4:
    bits_NB = packed.scales.view(torch.uint8)

    def scale(bits: Tensor) -> Tensor:
        return bits.view(torch.float8_e4m3fn).float() / packed.global_scale

    codes, bits = _search(packed.codes, bits_NB, weight_NK, m_K, scale, _NVFP4_STEPS, _E4M3_RANGE)
    return NVFP4(codes, bits.view(torch.float8_e4m3fn), packed.global_scale)


def _mxfp4(packed: MXFP4, weight_NK: Tensor, m_K: Tensor | None) -> MXFP4:
    def scale(bits: Tensor) -> Tensor:
        return bits.view(torch.float8_e8m0fnu).float()

    return MXFP4(*_search(packed.codes, packed.scales, weight_NK, m_K, scale, _MXFP4_STEPS, _E8M0_RANGE))


def _search(
    codes: Tensor,
    bits_NB: Tensor,
    weight_NK: Tensor,
    m_K: Tensor | None,
    scale: Callable[[Tensor], Tensor],
    steps: tuple[int, ...],
    bits_range: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    """Return codes and scale bits: for each block the best of the plain scale and those `steps` away."""
    codes, bits_NB = codes.clone(), bits_NB.clone()
    block_weights = weight_NK.shape[1] // bits_NB.shape[1]
    m_BW = None if m_K is None else m_K.view(-1, block_weights)
    for rows in row_chunks(weight_NK):
        blocks = weight_NK[rows].float().unflatten(1, (-1, block_weights))
        plain = bits_NB[rows].clone()
        unit = scale(plain)  # errors are in this unit: squares of tiny weights would underflow

        best, best_error = plain, _block_errors(blocks, unit, unit, m_BW)
        for step in steps:
            bits = (plain.int() + step).clamp(*bits_range).to(torch.uint8)
            error = _block_errors(blocks, scale(bits), unit, m_BW)
            best = torch.where(error < best_error, bits, best)
            best_error = torch.minimum(error, best_error)
        bits_NB[rows] = best
        codes[rows] = e2m1.encode((blocks / scale(best)[:, :, None]).flatten(1))
    return codes, bits_NB


def _block_errors(blocks: Tensor, step: Tensor, unit: Tensor, m_BW: Tensor | None) -> Tensor:
    """Return each block's sum of m (q(w / s) * s - w)^2 / unit^2."""
    size = (blocks / step[:, :, None]).abs_()
    error = e2m1.nearest(size).sub_(size).square_()
    return (error if m_BW is None else error.mul_(m_BW)).sum(-1).mul_((step / unit).square_())
