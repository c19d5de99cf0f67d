"""head_sample.py in Triton for BF16 and FP8 heads, on GPUs without Hopper's product instructions.

    score_Mv = y_Mv - log E(key, position, v)     y_MV = logits_MV / temperature     E, logits: head_sample.py
    per 64 v: best score, its v, its y, log sum exp y

It has the same API and the same generator, hence samples the same tokens unless two scores differ by
rounding. A row's numbers depend on that row alone: every tile multiplies 64 v by 16 to 128 rows, over k from
0 on, in the same steps whatever the number of rows (tests/kernels/test_head_sample.py).
head_finish.cu combines the partial results and advances the state.
"""
# pyright: reportMissingImports=false, reportIndexIssue=false, reportFunctionMemberAccess=false

import functools
import threading

import torch
import triton
import triton.language as tl

from qerl.formats import BF16, FP8
from qerl.formats.fp8 import BLOCK
from qerl.kernels.head_sample import CHUNK, LOGITS, SCORES, HeadSample
from qerl.kernels.nvrtc import is_dry_run

_BLOCKS_M = (16, 32, 64, 128)
_LOCK = threading.Lock()  # Triton compiles in one thread at a time: weights may still be read in another


@triton.jit
def _exponential(bits):
    """E = -log(1 - u); a small u uses a series, because 1 - u would lose its last bits."""
    is_small = bits < (1 << 28)
    a = (
        tl.where(is_small, bits, bits ^ 0xFFFFFFFF).to(tl.float32) * 2.3283064365386963e-10
        + 1.1641532182693481e-10
    )
    series = 0.5 + a * (0.3333333333 + a * (0.25 + a * (0.2 + a * 0.1666666667)))
    return tl.where(is_small, a + a * a * series, -tl.log(a))


@triton.jit
def _bits(keys, positions, v):
    zero = v * 0 + positions * 0
    quad = (v // 4 + zero).to(tl.uint32)
    words = tl.philox(keys, quad, (positions + zero).to(tl.uint32), zero.to(tl.uint32), zero.to(tl.uint32))
    low = tl.where(v % 2 == 0, words[0], words[1])
    return tl.where(v % 4 < 2, low, tl.where(v % 2 == 0, words[2], words[3]))


@triton.jit
def _capped(z, SOFTCAP: tl.constexpr):
    """SOFTCAP * tanh(z / SOFTCAP), NaN if z is not finite; a small tanh uses a series, because 1 minus a
    number near 1 would lose its last bits."""
    x = z / SOFTCAP
    size = tl.abs(x)
    large = 1 - 2 / (tl.exp(2 * tl.minimum(size, 20.0)) + 1)
    x2 = tl.minimum(x * x, 1.0)
    series = -0.33333326 + x2 * (
        0.13332961 + x2 * (-0.05390003 + x2 * (0.0213066 + x2 * -0.00666816))
    )  # to 1e-9 of tanh(x) below 1/2
    tanh = tl.where(size < 0.5, x + x * x2 * series, tl.where(x < 0, -large, large))
    return tanh * SOFTCAP + z * 0


@triton.jit(do_not_specialize=["is_given"])
def _chunk(
    hidden,  # bfloat16 [M, D]
    weight,  # bfloat16 [V, D], or E4M3 codes as uint8
    scales,  # float32 [ceil(V / 128), D / 128] of codes
    keys,  # int64 [M]
    positions,  # int32 [M]
    temperature,  # float32 [1]
    partials,  # float32 [M, ceil(V / 64), 4]: score, y, v as bits, log sum exp y
    logits,  # float32 [M, V]
    M,
    V,
    D: tl.constexpr,
    is_given,  # 1: a row's key is the token to score
    IS_FP8: tl.constexpr,
    DRAWS: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,  # or None
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tile, num_tiles = tl.program_id(1), tl.num_programs(1)
    v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_v, is_m, k = (v < V)[:, None], (m < M)[None, :], tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_V, BLOCK_M), dtype=tl.float32)
    for k0 in range(0, D, BLOCK_K):
        w = tl.load(weight + v.to(tl.int64)[:, None] * D + (k0 + k)[None, :], mask=is_v, other=0)
        x = tl.load(hidden + m[None, :] * D + (k0 + k)[:, None], mask=is_m, other=0.0)
        if IS_FP8:
            word = w.to(tl.uint32)
            code = (((word & 0x80) << 24) | ((word & 0x7F) << 20)).to(tl.float32, bitcast=True)
            scale = tl.load(scales + (tile * BLOCK_V // 128) * (D // 128) + k0 // 128)
            acc += tl.dot((code * 1.329227995784916e36).to(tl.bfloat16), x) * scale
        else:
            acc = tl.dot(w, x, acc)
    if SCALE != 1:
        acc *= SCALE
    if SOFTCAP is not None:
        acc = _capped(acc, SOFTCAP)
    if DRAWS:
        t = tl.load(temperature)
        y = acc * (1 / tl.where(t > 0, t, 1.0))
        key = tl.load(keys + m, mask=m < M, other=0)[None, :]
        position = tl.load(positions + m, mask=m < M, other=0)[None, :]
        noise = tl.log(_exponential(_bits(key, position, v[:, None])))
        score = tl.where(is_v, y - tl.where(t > 0, noise, 0.0), -float("inf"))
        # One compiled kernel for sampling and scoring: two would differ in rounding.
        score = tl.where(is_given > 0, tl.where(v[:, None] == key, 0.0, -float("inf")), score)
        best = tl.max(score, 0)
        token = tl.min(tl.where((score == best[None, :]) & is_v, v[:, None], 2147483647), 0)
        most = tl.max(tl.where(is_v, y, -float("inf")), 0)
        total = tl.sum(tl.where(is_v, tl.exp(y - most[None, :]) + y * 0, 0.0), 0)
        at = (m * num_tiles + tile) * 4
        tl.store(partials + at, best, mask=m < M)
        tl.store(partials + at + 1, tl.sum(tl.where(v[:, None] == token[None, :], y, 0.0), 0), mask=m < M)
        tl.store(partials + at + 2, token.to(tl.float32, bitcast=True), mask=m < M)
        tl.store(partials + at + 3, most + tl.log(total), mask=m < M)
    else:
        tl.store(logits + m.to(tl.int64)[None, :] * V + v[:, None], acc, mask=is_v & is_m)


class PortableHeadSample(HeadSample):
    """HeadSample with the product in Triton; head_finish.cu is the same."""

    def __init__(
        self,
        head: BF16 | FP8,
        max_rows: int,
        device: torch.device,
        *,
        scale: float = 1.0,
        softcap: float | None = None,
    ):
        super().__init__(head, max_rows, device, scale=scale, softcap=softcap)
        self._scales = head.scales if isinstance(head, FP8) else None
        self._weight = head.codes.view(torch.uint8) if isinstance(head, FP8) else head.weight

    def _multiply(self, hidden_MD, keys, positions, temperature, logits_MV, *, output: int) -> None:
        m, hidden_MD = len(hidden_MD), self._widened(hidden_MD)
        assert hidden_MD.shape == (m, self._d) and hidden_MD.is_contiguous()
        if logits_MV is None:
            assert m <= len(self._partials)
            assert keys.dtype == torch.int64 and keys.shape[0] >= m and keys.is_contiguous()
            assert positions.dtype == torch.int32 and positions.shape[0] >= m and positions.is_contiguous()
            assert temperature.dtype == torch.float32 and temperature.shape == (1,)
        block_m = next((n for n in _BLOCKS_M if n >= m), _BLOCKS_M[-1])
        is_bf16, has_wide_k = self._scales is None, self._d % BLOCK == 0
        grid = (-(-m // block_m), -(-self._v // CHUNK))  # neighbors read the same weights
        # A dry run compiles for Triton's own cache, and launches nothing.
        run = functools.partial(_chunk.warmup, grid=grid) if is_dry_run() else _chunk[grid]
        with _LOCK:
            run(
                hidden_MD,
                self._weight,
                self._scales,
                keys,
                positions,
                temperature,
                self._partials,
                logits_MV,
                m,
                self._v,
                self._d,
                int(output == SCORES),
                IS_FP8=not is_bf16,
                DRAWS=output != LOGITS,
                SCALE=self._scale,
                SOFTCAP=self._softcap,
                BLOCK_V=CHUNK,
                BLOCK_M=block_m,
                BLOCK_K=BLOCK if has_wide_k and not (is_bf16 and block_m > 32) else 64,
            )
