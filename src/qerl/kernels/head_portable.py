"""head_sample.py in Triton for BF16 and FP8 heads, on GPUs without Hopper's product instructions.

    score_Mv = y_Mv - log E(key, position, v)     y_MV = logits_MV / temperature     E: head_sample.py
    per 64 v: best score, its v, its y, log sum exp y

It has the same API and the same generator, hence samples the same tokens unless two scores differ by
rounding. A row's numbers depend on that row alone: every tile multiplies 64 v by 16 rows, over k from 0 on.
torch's kernels combine the partial results and advance the state, without waiting for the device.
"""
# pyright: reportMissingImports=false, reportIndexIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from qerl.formats import BF16, FP8
from qerl.formats.fp8 import BLOCK
from qerl.kernels.decode_state import DecodeState
from qerl.kernels.head_sample import CHUNK, check_head

_LAST_V = 2**31 - 1


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


@triton.jit(do_not_specialize=["is_given"])
def _chunk(
    hidden,  # bfloat16 [M, D]
    weight,  # bfloat16 [V, D], or E4M3 codes as uint8
    scales,  # float32 [ceil(V / 128), D / 128] of codes
    keys,  # int64 [M]
    positions,  # int32 [M]
    temperature,  # float32 [1]
    scores,  # float32 [M, ceil(V / 64)], as are the next two, and int32
    ys,
    totals,
    tokens,
    logits,  # float32 [M, V]
    M,
    V,
    D: tl.constexpr,
    is_given,  # 1: a row's key is the token to score
    IS_FP8: tl.constexpr,
    DRAWS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OPERAND: tl.constexpr,
):
    tile = tl.program_id(0)
    v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_v, is_m, k = (v < V)[:, None], (m < M)[None, :], tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_V, BLOCK_M), dtype=tl.float32)
    for k0 in range(0, D, BLOCK_K):
        w = tl.load(weight + v.to(tl.int64)[:, None] * D + (k0 + k)[None, :], mask=is_v, other=0)
        x = tl.load(hidden + m[None, :] * D + (k0 + k)[:, None], mask=is_m, other=0.0).to(OPERAND)
        if IS_FP8:
            word = w.to(tl.uint32)
            code = (((word & 0x80) << 24) | ((word & 0x7F) << 20)).to(tl.float32, bitcast=True)
            scale = tl.load(scales + (tile * BLOCK_V // 128) * (D // 128) + k0 // 128)
            acc += tl.dot((code * 1.329227995784916e36).to(OPERAND), x) * scale
        else:
            acc = tl.dot(w.to(OPERAND), x, acc)
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
        at = m * tl.num_programs(0) + tile
        tl.store(scores + at, best, mask=m < M)
        tl.store(ys + at, tl.sum(tl.where(v[:, None] == token[None, :], y, 0.0), 0), mask=m < M)
        tl.store(totals + at, most + tl.log(total), mask=m < M)
        tl.store(tokens + at, token, mask=m < M)
    else:
        tl.store(logits + m.to(tl.int64)[None, :] * V + v[:, None], acc, mask=is_v & is_m)


class PortableHeadSample:
    """The same methods as `HeadSample`."""

    def __init__(self, head: BF16 | FP8, max_rows: int, device: torch.device):
        check_head(head)
        self._v, self._d = head.shape
        is_fp8 = isinstance(head, FP8)
        self._weight = head.codes.view(torch.uint8) if is_fp8 else head.weight
        self._scales = head.scales if is_fp8 else None
        self._operand = tl.float32 if device.type == "cpu" else tl.bfloat16  # on a CPU Triton interprets
        tiles = -(-self._v // CHUNK)
        self._floats = torch.empty(3, max_rows, tiles, device=device)
        self._tokens = torch.empty(max_rows, tiles, dtype=torch.int32, device=device)

    def logits(self, hidden_MD: Tensor) -> Tensor:
        logits_MV = torch.empty(len(hidden_MD), self._v, device=hidden_MD.device)
        self._multiply(hidden_MD, None, None, None, logits_MV, 0)
        return logits_MV

    def score(self, hidden_MD: Tensor, targets_M: Tensor, temperature: Tensor) -> Tensor:
        _, logprobs_M = self._chosen(hidden_MD, targets_M, targets_M.int(), temperature, is_given=1)
        return logprobs_M

    def draw(
        self, hidden_MD: Tensor, keys_M: Tensor, positions_M: Tensor, temperature: Tensor
    ) -> tuple[Tensor, Tensor]:
        return self._chosen(hidden_MD, keys_M, positions_M, temperature, is_given=0)

    def _chosen(
        self, hidden_MD: Tensor, keys_M: Tensor, positions_M: Tensor, temperature: Tensor, *, is_given: int
    ) -> tuple[Tensor, Tensor]:
        m = len(hidden_MD)
        assert m <= len(self._tokens) and keys_M.dtype == torch.int64 and positions_M.dtype == torch.int32
        assert keys_M.is_contiguous() and positions_M.is_contiguous() and temperature.shape == (1,)
        scores, ys, totals = self._multiply(hidden_MD, keys_M, positions_M, temperature, None, is_given)
        tokens = self._tokens.view(-1)[: scores.numel()].view(scores.shape)
        best_M1 = scores.amax(1, keepdim=True)
        tokens_M = tokens.masked_fill(scores != best_M1, _LAST_V).amin(1)
        tokens_M = torch.where(tokens_M < self._v, tokens_M, 0)
        chosen_M = (tokens_M // CHUNK).long()[:, None]
        logprobs_M = ys.gather(1, chosen_M)[:, 0] - totals.logsumexp(1)
        return tokens_M, logprobs_M

    def step(self, hidden_MD: Tensor, state: DecodeState, stop_tokens: Tensor, temperature: Tensor) -> None:
        m = len(hidden_MD)
        tokens_M, logprobs_M = self.draw(hidden_MD, state.keys_B[:m], state.positions_B[:m], temperature)
        state.advance(tokens_M, logprobs_M, stop_tokens)

    def _multiply(self, hidden_MD, keys, positions, temperature, logits_MV, is_given: int) -> Tensor:
        m, tiles = len(hidden_MD), self._tokens.shape[1]
        assert hidden_MD.shape == (m, self._d) and hidden_MD.is_contiguous()
        partials = self._floats.view(3, -1)[:, : m * tiles].view(3, m, tiles)
        _chunk[(tiles, -(-m // 16))](
            hidden_MD,
            self._weight,
            self._scales,
            keys,
            positions,
            temperature,
            *partials,
            self._tokens,
            logits_MV,
            m,
            self._v,
            self._d,
            is_given,
            IS_FP8=self._scales is not None,
            DRAWS=logits_MV is None,
            BLOCK_V=CHUNK,
            BLOCK_M=16,
            BLOCK_K=BLOCK if self._d % BLOCK == 0 else 64,
            OPERAND=self._operand,
        )
        return partials
