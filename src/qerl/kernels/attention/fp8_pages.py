"""Keys and values in E4M3, one scale for each token and head: round them, write them to the cache.

    scale = absmax / 448, or 1 of a head of zeros      codes = x / scale, rounded to nearest even

T tokens, K heads of H. On a GPU one launch (fp8_pages.cu) writes both if they are aligned bfloat16 and H is
64, 128 or 256; otherwise PyTorch's operations do.
"""

import struct

import torch
from torch import Tensor

from qerl.kernels.runtime import row_kernel
from qerl.kernels.runtime.nvrtc import addresses

_E4M3_LARGEST = 448.0


def to_fp8(x_TKH: Tensor) -> tuple[Tensor, Tensor]:
    """Return (codes float8_e4m3fn, scales_TK fp32), rounded to nearest even. A head of zeros has scale 1."""
    wide = x_TKH.float()
    absmax_TK = wide.abs().amax(-1)
    largest_TK = torch.full_like(
        absmax_TK, _E4M3_LARGEST
    )  # for a Python number CUDA would multiply by its inverse
    scales_TK = torch.where(absmax_TK > 0, absmax_TK / largest_TK, 1.0)
    scaled = (wide / scales_TK[..., None]).clamp(-_E4M3_LARGEST, _E4M3_LARGEST)
    return scaled.to(torch.float8_e4m3fn), scales_TK


def from_fp8(codes_TKH: Tensor, scales_TK: Tensor) -> Tensor:
    """Return codes * scales in fp32."""
    return codes_TKH.float() * scales_TK[..., None]


def write(
    x_2TKH: tuple[Tensor, Tensor],
    slots_T: Tensor,
    pages: tuple[Tensor, Tensor],
    scales: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """Write keys and values to slots of pages [X, page_tokens, K, H], scales fp32 [X, K, page_tokens], and
    return them as the cache has them, in their own dtype. slot = page * page_tokens + offset."""
    (T, K, H), page_tokens = x_2TKH[0].shape, pages[0].shape[1]
    if T and _has_kernel(x_2TKH):
        slots_T = slots_T.long().contiguous()
        stored = tuple(torch.empty(T, K, H, dtype=x.dtype, device=x.device) for x in x_2TKH)
        kernel = row_kernel.kernel(
            "fp8_pages.cu", "write_fp8", slots_T.device, H=H, PAGE=page_tokens, KV_HEADS=K
        )
        assert all(each.is_contiguous() for each in (*pages, *scales))
        pointers = addresses(*x_2TKH, slots_T, *pages, *scales, *stored)
        operands = struct.pack("9Q3i4x", *pointers, T, *(x.stride(0) for x in x_2TKH))
        kernel.launch(grid=-(-2 * T * K // 4), block_threads=128, parameters=(operands,))
        return stored[0], stored[1]
    stored = []
    for x_TKH, page, scale in zip(x_2TKH, pages, scales, strict=True):
        codes_TKH, scales_TK = to_fp8(x_TKH)
        scale[slots_T // page_tokens, :, slots_T % page_tokens] = scales_TK
        stored.append(from_fp8(codes_TKH, scales_TK).to(x_TKH.dtype))
        # as bytes, because index_copy_ does not take FP8
        page.view(torch.uint8).flatten(0, 1).index_copy_(0, slots_T, codes_TKH.view(torch.uint8))
    return stored[0], stored[1]


def _has_kernel(x_2TKH: tuple[Tensor, Tensor]) -> bool:
    are_rows = row_kernel.are_vectors(*x_2TKH) and all(x.stride(1) == x.shape[2] for x in x_2TKH)
    return are_rows and x_2TKH[0].shape[2] in (64, 128, 256)
