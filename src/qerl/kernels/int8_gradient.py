"""The gradient of a product's input as a product of 8-bit integers, for the backward pass on Hopper.

    dx_TK = plus_TK + dy_TN @ (f_N * W_NK)            f: the factors (alphas) that the operand W leaves out

    R = H / 8 for each 64 neighbors of N, with H Hadamard's matrix: dy R (R f W) = dy f W, as R R = 1
    dy_8 = round(127 dy R / p)     p_t = max |dy R| of a row
    W_8  = round(127 R f W / q)    q_k = max |R f W| of a column
    dx   = plus + p_t q_k / 127^2 * sum_n dy_8 W_8

R spreads outliers over 64 numbers. Rounding is then about 0.9 % of each operand (FP8: 2.6 %, with or without
R): the gradient of SmolLM2's adapter has a cosine of 0.9995 to the unrounded one, with FP8 0.995, and that of
the 7B shape 0.9994 (dev/LOG.md). The sum of integers is exact. On a GPU codes are stored as the product's
copies read them (int8_gradient.cu); elsewhere they are plain, and the same numbers are multiplied in float64.
"""

import dataclasses
import functools
import struct
from typing import NamedTuple

import torch
from torch import Tensor

from qerl.kernels import row_kernel
from qerl.kernels.architectures import gpu_of
from qerl.kernels.nvrtc import CudaKernel, KernelVariant, addresses, compiled

CASES = ((5, 192, 64), (130, 576, 1536), (300, 1152, 320), (33, 37_888, 128))  # T, N, K
NEIGHBORS = 64
_FILE, _DEPTH, _ROWS, _COLUMNS, _STAGES = "int8_gradient.cu", 128, 128, 256, 4
_SHARED_BYTES = _STAGES * ((_ROWS + _COLUMNS) * _DEPTH + 16) + 1024
_PRODUCT_THREADS, _COLUMN_THREADS, _MOST_ROW_THREADS = 384, 256, 800


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Rotation:
    """The factors and divisors of a weight, which are the same in all passes."""

    factors_N: Tensor
    """fp32, f."""
    maxima_K: Tensor
    """fp32, q; on a GPU 8 times as large."""

    def codes(self, w_NK: Tensor) -> Tensor:
        """Return W_8, int8, of the operand (bf16 on a GPU): [K, N] on a CPU, on a GPU blocks of it."""
        n, k = w_NK.shape
        assert can_rotate(n, k) and self.factors_N.shape == (n,)
        if not row_kernel.are_vectors(w_NK):
            return _rounded(_rotated_rows(w_NK.T.double() * self.factors_N), self.maxima_K)
        codes = torch.empty(rotated_bytes(n, k), dtype=torch.int8, device=w_NK.device)
        _rotate_columns(w_NK, self.factors_N, codes, self.maxima_K)
        return codes


class RotatedWeight(NamedTuple):
    codes: Tensor
    """W_8."""
    rotation: Rotation


def rotation_of(w_NK: Tensor, factors_N: Tensor) -> Rotation:
    """Return the rotation of a weight's operand (bf16 on a GPU) with its factors (fp32)."""
    assert can_rotate(*w_NK.shape) and factors_N.dtype == torch.float32
    if not row_kernel.are_vectors(w_NK):
        return Rotation(factors_N, _rotated_rows(w_NK.T.double() * factors_N).abs().amax(1).float())
    maxima_K = torch.zeros(w_NK.shape[1], device=w_NK.device)
    _rotate_columns(w_NK, factors_N, None, maxima_K)
    return Rotation(factors_N, maxima_K)


def can_rotate(out_width: int, in_width: int) -> bool:
    """True if [N, K] has whole groups of neighbors and rows that the kernels can read."""
    return out_width % NEIGHBORS == 0 and in_width % 8 == 0


def hadamard(device: torch.device) -> Tensor:
    """Return R, float64 [64, 64]."""
    h = torch.ones(1, 1, dtype=torch.float64, device=device)
    while len(h) < NEIGHBORS:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
    return h / NEIGHBORS**0.5


def reference(dy_TN: Tensor, w_NK: Tensor, factors_N: Tensor, plus_TK: Tensor | None) -> Tensor:
    """Compute the definition without rounding in float64."""
    dx_TK = dy_TN.double() @ (factors_N.double()[:, None] * w_NK.double())
    return dx_TK if plus_TK is None else dx_TK + plus_TK.double()


def input_gradient(dy_TN: Tensor, weight: RotatedWeight, plus_TK: Tensor | None) -> Tensor:
    """Return dx_TK in dy's dtype, in the place of plus if that is given."""
    (codes, rotation), (T, n), k = weight, dy_TN.shape, len(weight.rotation.maxima_K)
    assert n == len(rotation.factors_N) and (plus_TK is None or plus_TK.shape == (T, k))
    if not row_kernel.on_gpu(dy_TN):
        dy_TN64 = _rotated_rows(dy_TN.double())
        maxima_T = dy_TN64.abs().amax(1)
        sums_TK = _rounded(dy_TN64, maxima_T).double() @ codes.double().T
        dx_TK = sums_TK * (maxima_T[:, None] * rotation.maxima_K / 127.0**2)
        return (dx_TK if plus_TK is None else dx_TK + plus_TK).to(dy_TN.dtype)
    dx_TK = torch.empty(T, k, dtype=dy_TN.dtype, device=dy_TN.device) if plus_TK is None else plus_TK
    assert row_kernel.are_vectors(dx_TK)
    if T:
        dy_TN = dy_TN if row_kernel.are_vectors(dy_TN) else dy_TN.contiguous()
        _multiply(*_rotate_rows(dy_TN), weight, plus_TK, dx_TK)
    return dx_TK


def rotated_gradient_bytes(rows: int, out_width: int) -> int:
    """Return the bytes of dy_8 of so many rows."""
    return _padded(rows, _ROWS) * _padded(out_width, _DEPTH)


def rotated_bytes(out_width: int, in_width: int) -> int:
    """Return the bytes of W_8."""
    return _padded(in_width, _COLUMNS) * _padded(out_width, _DEPTH)


def _padded(n: int, block: int) -> int:
    return -(-n // block) * block


def _rotated_rows(x_TN: Tensor) -> Tensor:
    return (x_TN.unflatten(1, (-1, NEIGHBORS)) @ hadamard(x_TN.device)).flatten(1)


def _rounded(x_TN: Tensor, maxima_T: Tensor) -> Tensor:
    inverse_T = torch.where(maxima_T > 0, 127.0 / maxima_T.double(), 0.0)
    return (x_TN * inverse_T[:, None]).round().clamp(-127, 127).to(torch.int8)


def _rotate_columns(w_NK: Tensor, factors_N: Tensor, codes: Tensor | None, maxima_K: Tensor) -> None:
    """Fill in the codes, or without them the maxima."""
    n, k = w_NK.shape
    kernel = row_kernel.kernel(_FILE, "rotate_columns", w_NK.device, MAXIMA=int(codes is None))
    depth_blocks = _padded(n, _DEPTH) // _DEPTH
    kernel.launch(
        grid=depth_blocks * -(-k // 64),
        block_threads=_COLUMN_THREADS,
        parameters=(w_NK, factors_N, codes, maxima_K, n, k, w_NK.stride(0), depth_blocks),
    )


def _row_threads(n: int) -> tuple[int, int]:
    """Return a CTA's threads, whole warps, and how many times 16 numbers each has."""
    units = _padded(n, _DEPTH) // 16
    vectors = -(-units // _MOST_ROW_THREADS)
    return _padded(-(-units // vectors), 32), vectors


def _rotate_rows(dy_TN: Tensor) -> tuple[Tensor, Tensor]:
    """Return dy_8 and 8 p."""
    T, n = dy_TN.shape
    codes = torch.empty(rotated_gradient_bytes(T, n), dtype=torch.int8, device=dy_TN.device)
    maxima_T = torch.empty(T, device=dy_TN.device)
    threads, vectors = _row_threads(n)
    kernel = row_kernel.kernel(_FILE, "rotate_rows", dy_TN.device, THREADS=threads, VECTORS=vectors)
    parameters = dy_TN, codes, maxima_T, T, n, dy_TN.stride(0), _padded(n, _DEPTH) // _DEPTH
    most = kernel.resident_ctas(threads) * _num_sms(dy_TN.device)
    kernel.launch(grid=min(T, most), block_threads=threads, parameters=parameters)
    return codes, maxima_T


def _multiply(
    codes: Tensor, maxima_T: Tensor, weight: RotatedWeight, plus_TK: Tensor | None, dx_TK: Tensor
) -> None:
    (T, k), device = dx_TK.shape, dx_TK.device
    tensors = addresses(codes, weight.codes, maxima_T, weight.rotation.maxima_K, plus_TK, dx_TK)
    depth_blocks = _padded(len(weight.rotation.factors_N), _DEPTH) // _DEPTH
    tiles = -(-T // _ROWS) * -(-k // _COLUMNS)
    _product_kernel(device).launch(
        grid=min(tiles, _num_sms(device)),
        block_threads=_PRODUCT_THREADS,
        parameters=(struct.pack("6Q4i", *tensors, T, k, depth_blocks, dx_TK.stride(0)),),
    )


@functools.cache
def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(gpu_of(device)).multi_processor_count


@functools.cache
def _product_kernel(device: torch.device) -> CudaKernel:
    return compiled(_FILE, "int8_product", device, {"STAGES": _STAGES}, shared_bytes=_SHARED_BYTES)


def variants() -> list[KernelVariant]:
    """Return what is launched for the sizes of CASES."""
    rows = {_row_threads(n) for _, n, _ in CASES}
    found = [
        KernelVariant(_FILE, "rotate_rows", (("THREADS", threads), ("VECTORS", vectors)), threads, 0)
        for threads, vectors in sorted(rows)
    ]
    for maxima in (0, 1):
        found.append(KernelVariant(_FILE, "rotate_columns", (("MAXIMA", maxima),), _COLUMN_THREADS, 0))
    product = (("STAGES", _STAGES),)
    return [*found, KernelVariant(_FILE, "int8_product", product, _PRODUCT_THREADS, _SHARED_BYTES)]
