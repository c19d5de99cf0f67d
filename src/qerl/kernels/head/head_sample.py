"""Sample each row's next token from the LM head's logits without writing them, and advance the rows.

    logits_MV = x_MD @ head_VD^T                        bf16 operands, fp32 sums
    logits_MV = scale * logits_MV                       of models that have a factor
    logits_MV = softcap * tanh(logits_MV / softcap)     of models that have a cap
    token_M = argmax_v (logits_Mv / temperature - log E(key, position, v))       E = -log(1 - u), u in (0, 1)
    logprob_M = log_softmax(logits_MV / temperature)[token]

The temperature is one for all rows, [1], or each row's own, [M]: a row has the same bits either way.
u = (bits + 1/2) / 2^32, where bits is word v % 4 of Philox 4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel
random numbers: as easy as 1, 2, 3; SC 2011) of the counter (v // 4, position, 0, 0) under the key: a sample
depends on (key, position, v) only. Temperature 0 takes the first of the largest logits, with the logprob of
temperature 1. A row with a product or a logit that is not finite gets logprob NaN and ends.

    BF16    weight bfloat16 [V, D]                    the embedding's own storage, if they are tied
    FP8     codes float8_e4m3fn [V, D], scales float32 [ceil(V / 128), D / 128]    formats/fp8.py
    NVFP4   tiles uint8 [V / 64, D / 64, 2304], factors_V float32              nvfp4_decode.py

Two launches: the product, which writes 16 bytes per 64 of the vocabulary (the best score, its v, its logit,
the log of the sum of exponentials), and their reduction in a fixed order. A row's numbers do not depend on
M, the other rows or the tile chosen for M (tests/kernels/head/test_head_sample.py). V is a multiple of 16, D
of
64 (FP8 and NVFP4: of 128). Hidden states of fewer elements are padded with zeros, for heads whose rows end
with zeros (models/lm_head.py). Hopper only; head_portable.py is for other GPUs.
"""

import dataclasses
import struct

import torch
from torch import Tensor
from torch.nn import functional as F

from qerl.formats import BF16, FP8
from qerl.kernels.attention.decode_state import DecodeState
from qerl.kernels.runtime.architectures import num_sms
from qerl.kernels.runtime.nvrtc import addresses, cached_method, compiled, tensor_map
from qerl.kernels.tiles.nvfp4_tile import TILE_BYTES

CASES = ((1, 1008, 192), (7, 4096, 896), (8, 2064, 3584), (64, 1040, 576), (65, 640, 1024), (256, 1616, 320))
WIDTH_MULTIPLE = 128  # of D, in FP8 and NVFP4
CHUNK = 64  # of the vocabulary; its best token and sum are one partial result
_SHARED_BYTES = 227 * 1024  # of a multiprocessor; each CTA also takes 1 KB of its own
_TOKENS = (8, 16, 32, *range(48, 225, 16), 256)  # of a tile
_MAX_SPLIT = (128, 64, 0)  # by format
# For each format, (tokens of a tile, maximum k of a stage), in ascending order.
_MAX_K = (((16, 128), (256, 64)), ((32, 256), (128, 128)), ((16, 512), (80, 256), (224, 128), (256, 64)))
_MASK = 2**32 - 1
DRAWS, LOGITS, SCORES = 0, 1, 2  # what the product writes


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the 4 words of Philox 4x32-10, in int64, for a counter of 4 words and a key of 2."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = _product_words(0xD2511F53, c0)
        high1, low1 = _product_words(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def _product_words(factor: int, word: Tensor) -> tuple[Tensor, Tensor]:
    """Return (high, low) words of the product, without an intermediate over 2^63."""
    upper, lower = factor * (word >> 16), factor * (word & 0xFFFF)
    return (upper + (lower >> 16)) >> 16, (((upper & 0xFFFF) << 16) + lower) & _MASK


def random_bits(keys_M: Tensor, positions_M: Tensor, vocab_size: int) -> Tensor:
    """Return int64 [M, V], each below 2^32."""
    quads_V = torch.arange(-(-vocab_size // 4), device=keys_M.device)[None]
    zero = torch.zeros_like(quads_V)
    keys_M1, positions_M1 = keys_M.long()[:, None], positions_M.long()[:, None]
    words = philox((quads_V, positions_M1, zero, zero), (keys_M1 & _MASK, keys_M1 >> 32))
    return torch.stack(torch.broadcast_tensors(*words), dim=-1).flatten(1)[:, :vocab_size]


def gumbels(bits: Tensor) -> Tensor:
    """Return Gumbel noise in float64; precise for large values, which decide the argmax."""
    return -torch.log(-torch.log1p(-(bits.double() + 0.5) * 2.0**-32))


def reference_logits(
    hidden_MD: Tensor, weight_VD: Tensor, scale: float = 1.0, softcap: float | None = None
) -> Tensor:
    """The definition above in float64."""
    logits_MV = scale * (hidden_MD.double() @ weight_VD.double().T)
    return logits_MV if softcap is None else softcap * (logits_MV / softcap).tanh()


def reference(
    hidden_MD: Tensor,
    weight_VD: Tensor,
    keys_M: Tensor,
    positions_M: Tensor,
    temperature: float | Tensor,
    scale: float = 1.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The definition above in float64: (tokens_M, logprobs_M, margin of the best score)."""
    logits_MV = reference_logits(hidden_MD, weight_VD, scale, softcap)
    temperatures_M1 = torch.as_tensor(temperature, device=logits_MV.device).double().view(-1, 1)
    is_greedy_M1 = temperatures_M1 == 0
    scaled_MV = logits_MV / temperatures_M1.masked_fill(is_greedy_M1, 1)
    noise_MV = gumbels(random_bits(keys_M, positions_M, logits_MV.shape[1]))
    scores_MV = scaled_MV + noise_MV.masked_fill(is_greedy_M1, 0)
    best_M2 = scores_MV.topk(2).values
    tokens_M1 = scores_MV.argmax(1, keepdim=True)
    logprobs_M = scaled_MV.log_softmax(1).gather(1, tokens_M1)[:, 0]
    return tokens_M1[:, 0], logprobs_M, best_M2[:, 0] - best_M2[:, 1]


@dataclasses.dataclass(frozen=True, eq=False)
class NVFP4Head:
    """A head with the results of nvfp4_decode's `pack` and `row_factors`."""

    tiles: Tensor
    factors_V: Tensor

    def __post_init__(self):
        assert self.tiles.dtype == torch.uint8 and self.tiles.shape[2] == TILE_BYTES
        assert self.factors_V.shape == self.shape[:1] and self.factors_V.dtype == torch.float32

    @property
    def shape(self) -> tuple[int, int]:
        return 64 * self.tiles.shape[0], 64 * self.tiles.shape[1]


Head = BF16 | FP8 | NVFP4Head
_FORMATS = {BF16: 0, FP8: 1, NVFP4Head: 2}


def check_head(head: Head) -> None:
    """Assert what both samplers need."""
    v, d = head.shape
    assert v % 16 == 0 and d % (64 if isinstance(head, BF16) else WIDTH_MULTIPLE) == 0
    assert all(tensor.is_contiguous() for tensor in vars(head).values())


@dataclasses.dataclass(frozen=True, slots=True)
class HeadTile:
    """HeadTile(0, tokens=64, warpgroups=2, k_block=64, ctas_per_sm=2): BF16, 128 rows x 64 tokens x 64 k."""

    format: int
    tokens: int
    warpgroups: int
    k_block: int
    ctas_per_sm: int
    split: int = 0
    """1: four additional warps reduce."""

    @property
    def reduce_tokens(self) -> int:
        """Tokens that are reduced together."""
        widths = (32, 16, 8) if self.warpgroups < 4 else (16, 8)
        return next(width for width in widths if self.tokens % width == 0)

    @property
    def stage_bytes(self) -> int:
        weights = (self.k_block * 128, self.k_block * 64, self.k_block // 64 * TILE_BYTES)
        used = self.tokens * self.k_block * 2 + self.warpgroups * weights[self.format]
        return -(-used // 1024) * 1024

    @property
    def scratch_bytes(self) -> int:
        stride = (
            self.tokens + 8 if self.split and self.tokens > 32 else 40 if self.reduce_tokens == 32 else 20
        )
        groups = 1 if self.split else self.warpgroups
        return self.warpgroups * 4 * 16 * stride * 4 + groups * 2 * 4 * self.reduce_tokens * 20

    @property
    def stages(self) -> int:
        free = _SHARED_BYTES // self.ctas_per_sm - 1024 * (self.ctas_per_sm > 1) - 1024 - self.scratch_bytes
        return min((free - 16) // (self.stage_bytes + 16), 8)

    @property
    def shared_bytes(self) -> int:
        return self.stages * (self.stage_bytes + 16) + 16 + self.scratch_bytes + 1024

    @property
    def registers(self) -> int:
        """Registers per multiplying thread, or 0: the default holds sums and, of codes, 32 decoded words."""
        needed = self.tokens // 2 * (1 + (self.format == 1)) + 32 * (self.format > 0)
        return 240 if self.warpgroups == 2 and needed > 100 else 0

    @property
    def threads(self) -> int:
        return 32 * (4 * self.warpgroups + (4 if self.registers else 5 if self.split else 1))

    @property
    def defines(self) -> dict[str, int]:
        return {
            "FORMAT": self.format,
            "MT": self.tokens,
            "WG": self.warpgroups,
            "KB": self.k_block,
            "STAGES": self.stages,
            "CTAS": self.ctas_per_sm,
            "REDUCE": self.reduce_tokens,
            "SPLIT": self.split,
            "REGISTERS": self.registers,
        }


def choose_tile(M: int, head_format: int, D: int) -> HeadTile:
    """Choose the fastest tile on an H200 with V = 152064, D = 3584; dev/log/head.md lists the slower ones."""
    max_tokens = 128 if head_format == 1 else 256
    tokens = next(t for t in _TOKENS if t * -(-M // max_tokens) >= M)
    max_k = next(k for up_to, k in _MAX_K[head_format] if up_to >= tokens)
    k_block = next(k for k in (512, 256, 128, 64) if k <= max_k and D % k == 0)
    if tokens <= (16 if head_format == 0 else 32):
        return HeadTile(head_format, tokens, 1, k_block, 2, split=int(head_format > 0))
    warpgroups = 3 if head_format == 2 and tokens <= 128 else 2
    return HeadTile(head_format, tokens, warpgroups, k_block, 1, int(tokens <= _MAX_SPLIT[head_format]))


def is_by_row(temperature: Tensor | None) -> int:
    """Return the kernels' BY_ROW."""
    return int(temperature is not None and len(temperature) > 1)


class HeadSample:
    """The kernels for one head, compiled on first use, and their workspace. Use one object per stream."""

    def __init__(
        self,
        head: Head,
        max_rows: int,
        device: torch.device,
        *,
        scale: float = 1.0,
        softcap: float | None = None,
    ):
        """scale, softcap: of the logits, compiled in; of an NVFP4 head, scale is beside its row factors."""
        check_head(head)
        assert softcap is None or softcap > 0
        self.head, self._device, self._scale, self._softcap = head, device, scale, softcap
        self._format, (self._v, self._d) = _FORMATS[type(head)], head.shape
        self._num_sms = num_sms(device)
        self._partials = torch.empty(max_rows, -(-self._v // CHUNK), 4, device=device)
        self._ordered_MD = torch.empty(max_rows, self._d, dtype=torch.bfloat16, device=device)
        self._arrived = torch.zeros(1, dtype=torch.int32, device=device)
        self._kernel = cached_method(self._compile)
        self._finish_kernel = cached_method(self._compile_finish)

    def logits(self, hidden_MD: Tensor) -> Tensor:
        """Return fp32 [M, V], not divided by a temperature: the same bits as used for sampling."""
        logits_MV = torch.empty(len(hidden_MD), self._v, device=self._device)
        self._multiply(hidden_MD, None, None, None, logits_MV, output=LOGITS)
        return logits_MV

    def score(self, hidden_MD: Tensor, targets_M: Tensor, temperature: Tensor) -> Tensor:
        """Return logprobs_M of targets_M (int64), bit for bit those of sampling them."""
        tokens_M = targets_M.int()
        return self._logprobs(hidden_MD, targets_M, tokens_M, temperature, tokens_M, output=SCORES)

    def draw(
        self, hidden_MD: Tensor, keys_M: Tensor, positions_M: Tensor, temperature: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Sample (tokens_M int32, logprobs_M fp32); temperature is fp32 on the device, [1] or of each row."""
        tokens_M = torch.empty(len(hidden_MD), dtype=torch.int32, device=self._device)
        logprobs_M = self._logprobs(hidden_MD, keys_M, positions_M, temperature, tokens_M, output=DRAWS)
        return tokens_M, logprobs_M

    def _logprobs(self, hidden_MD, keys, positions, temperature, tokens_M, *, output: int) -> Tensor:
        """Return the logprobs of tokens_M, which drawing fills."""
        logprobs_M = torch.empty(len(hidden_MD), device=self._device)
        self._multiply(hidden_MD, keys, positions, temperature, None, output=output)
        pointers = (self._partials, None, None, None, tokens_M, logprobs_M, None, None, None, None)
        self._finish(len(hidden_MD), pointers, (0, 0, 0), step=0)
        return logprobs_M

    def step(self, hidden_MD: Tensor, state: DecodeState, stop_tokens: Tensor, temperature: Tensor) -> None:
        """Sample for the first M rows of the state and advance them; stop_tokens int32, padded with -1."""
        m = len(hidden_MD)
        rows = (state.ends_B, state.positions_B, state.tokens_B)
        rings = (state.drawn_tokens_WB, state.drawn_logprobs_WB)
        for row in rows:
            assert row.dtype == torch.int32 and row.shape[0] >= m and row.is_contiguous()
        for ring, dtype in zip(rings, (torch.int32, torch.float32), strict=True):
            assert ring.dtype == dtype and ring.shape[1] >= m and ring.stride(1) == 1
        assert stop_tokens.dtype == torch.int32 and stop_tokens.is_contiguous()
        assert state.place_1.dtype == torch.int32
        self._multiply(hidden_MD, state.keys_B, state.positions_B, temperature, None, output=DRAWS)
        pointers = (self._partials, stop_tokens, *rows, None, *rings, state.place_1, self._arrived)
        sizes = (stop_tokens.numel(), rings[0].stride(0), rings[1].stride(0))
        self._finish(m, pointers, sizes, step=1)

    def _multiply(self, hidden_MD, keys, positions, temperature, logits_MV, *, output: int) -> None:
        hidden_MD = self._checked(hidden_MD, keys, positions, temperature, logits_MV)
        m = len(hidden_MD)
        tile = choose_tile(m, self._format, self._d)
        weight_map, tiles, factors = bytes(128), None, None
        if isinstance(self.head, BF16):
            weight_map = tensor_map(self.head.weight, 64, tile.k_block)
        elif isinstance(self.head, FP8):
            hidden_MD, factors = self._in_code_order(hidden_MD), self.head.scales
            weight_map = tensor_map(self.head.codes.view(torch.bfloat16), 64, tile.k_block // 2)
        else:
            tiles, factors = self.head.tiles, self.head.factors_V
        pointers = (keys, positions, temperature, factors, self._partials, logits_MV)
        operands = struct.pack("6Q4i", *addresses(*pointers), m, self._v, self._d, 0)
        if self._options:
            operands += struct.pack("2f", self._scale, self._softcap or 0.0)
        self._kernel(tile, output, is_by_row(temperature)).launch(
            grid=min(self._num_sms * tile.ctas_per_sm, -(-self._v // CHUNK)),
            block_threads=tile.threads,
            parameters=(weight_map, tensor_map(hidden_MD, tile.tokens, tile.k_block), tiles, operands),
        )

    def _checked(self, hidden_MD, keys, positions, temperature, logits_MV) -> Tensor:
        """Return the hidden states in the head's width; the others are needed if no logits are."""
        m, hidden_MD = len(hidden_MD), self._widened(hidden_MD)
        assert hidden_MD.shape == (m, self._d) and hidden_MD.dtype == torch.bfloat16
        assert hidden_MD.is_contiguous() and hidden_MD.data_ptr() % 16 == 0
        if logits_MV is None:
            assert m <= len(self._partials)
            assert keys.dtype == torch.int64 and keys.shape[0] >= m and keys.is_contiguous()
            assert positions.dtype == torch.int32 and positions.shape[0] >= m and positions.is_contiguous()
            assert temperature.dtype == torch.float32 and temperature.is_contiguous()
            assert temperature.shape == (1,) or (temperature.dim() == 1 and len(temperature) >= m)
        return hidden_MD

    def _widened(self, hidden_MD: Tensor) -> Tensor:
        """Return the hidden states with a zero for each zero at the end of the head's rows."""
        missing = self._d - hidden_MD.shape[1]
        assert 0 <= missing < WIDTH_MULTIPLE
        return F.pad(hidden_MD, (0, missing)) if missing else hidden_MD

    @property
    def _options(self) -> dict[str, int]:
        """Return the definitions of what the logits have beside the product."""
        has = {"SCALE": self._scale != 1, "SOFTCAP": self._softcap is not None}
        return {name: 1 for name, is_there in has.items() if is_there}

    def _in_code_order(self, hidden_MD: Tensor) -> Tensor:
        """Reorder each 64 k, 16 t + 4 j + 2 pair + parity, to [j, parity, t, pair], as decode4 expects."""
        ordered_MD = self._ordered_MD[: len(hidden_MD)]
        pieces = hidden_MD.view(len(hidden_MD), -1, 4, 4, 2, 2).permute(0, 1, 3, 5, 2, 4)
        ordered_MD.view(pieces.shape).copy_(pieces)
        return ordered_MD

    def _finish(self, m: int, pointers: tuple, sizes: tuple[int, int, int], *, step: int) -> None:
        finish = struct.pack("10Q4i", *addresses(*pointers), -(-self._v // CHUNK), *sizes)
        self._finish_kernel(step).launch(grid=m, block_threads=512, parameters=(finish,))

    def _compile(self, tile: HeadTile, output: int, by_row: int):
        defines = {**tile.defines, **self._options, "OUTPUT": output, "BY_ROW": by_row}
        return compiled(
            "head_sample.cu", "head_sample", self._device, defines, shared_bytes=tile.shared_bytes
        )

    def _compile_finish(self, step: int):
        return compiled("head_finish.cu", "head_finish", self._device, {"STEP": step})
