"""Choose a packed product's tile by (M, N, K) and GPU, from a table measured by `python -m benchmarks tile`.

    nvfp4_tile.json   for each GPU: commit and date of the last measurement (choices of sizes that it did not
                      measure are older); for each (N, K) and upper bound of M the fastest Choice

A product uses the choice of the nearest (N, K), by |log N / N'| + |log K / K'|, with the smallest
`most_tokens` that is at least M. A GPU that is not in the table uses the first GPU's choices. A k_block that
does not divide K is replaced by the next smaller one that does. Up to 32 tokens there is one choice per (N,
K), so that the split of K, and with it a row's bits, are the same at any M.
"""

import dataclasses
import functools
import json
import math
from importlib import resources

MAX_TOKENS = 256
TILE_BYTES, TILE_ROWS, TILE_K = 2304, 64, 64
TOKEN_BOUNDS = (32, 48, 64, 96, 128, 192, 256)
"""The token bounds of the choices for one (N, K)."""
TOKEN_TILES = (*range(8, 129, 8), *range(144, 257, 16))
"""Tokens of a tile."""

_SHARED_BYTES = 227 * 1024  # of a multiprocessor; each CTA also takes 1 KB of its own
_K_BLOCKS = (512, 256, 192, 128, 64)
_SLICE_K = 256  # k per partial sum of the adapter's u, if a stage has that many
_MAX_STAGES = 16


@dataclasses.dataclass(frozen=True, slots=True)
class Tile:
    """Tile(tokens=8, warpgroups=1, k_block=512, stages=4, ctas_per_sm=2): 64 rows x 8 tokens x 512 k."""

    tokens: int
    warpgroups: int
    k_block: int
    stages: int
    ctas_per_sm: int

    @property
    def rows(self) -> int:
        return TILE_ROWS * self.warpgroups

    @property
    def is_wide(self) -> bool:
        """True if multiplying warps take over registers of the last warpgroup (WIDE in nvfp4_shrink.cuh)."""
        return self.tokens > 128 or self.warpgroups > 2

    @property
    def stage_bytes(self) -> int:
        used = self.tokens * self.k_block * 2 + self.warpgroups * self.k_block // TILE_K * TILE_BYTES
        return -(-used // 1024) * 1024

    @property
    def shared_bytes(self) -> int:
        return self.stages * (self.stage_bytes + 16) + 16 + 1024

    def threads(self, has_adapter_warp: bool) -> int:
        """Return the threads of a CTA: the multiplying warps, one copying warp, and one for u if
        has_adapter_warp. A wide tile has a whole warpgroup instead of these one or two warps."""
        return 32 * (4 * self.warpgroups + (4 if self.is_wide else 1 + int(has_adapter_warp)))

    def with_room_for(self, u_bytes: int) -> "Tile | None":
        """Return the tile with as many of its stages as fit beside u_bytes of shared memory, or None if fewer
        than two fit."""
        room = _SHARED_BYTES // self.ctas_per_sm - 2048 - u_bytes
        stages = min(room // (self.stage_bytes + 16), self.stages)
        return dataclasses.replace(self, stages=stages) if stages > 1 else None

    @property
    def slice_k(self) -> int:
        """k per partial sum of u."""
        return min(self.k_block, _SLICE_K)

    def padded_tokens(self, M: int) -> int:
        return -(-M // self.tokens) * self.tokens

    def units(self, M: int, N: int, K: int) -> int:
        return -(-N // self.rows) * -(-M // self.tokens) * (K // self.k_block)

    def grid(self, M: int, N: int, K: int, num_sms: int) -> int:
        """Return the number of CTAs: at most what runs at once, and each has work: others wait for it."""
        return min(self.units(M, N, K), num_sms * self.ctas_per_sm)

    def splits_sums(self, M: int, N: int, K: int, num_sms: int) -> bool:
        """True if the CTAs that share a tile also share adding up and finishing it."""
        tiles = -(-N // self.rows) * -(-M // self.tokens)
        return N * K > 2**25 and self.tokens >= 48 and self.grid(M, N, K, num_sms) >= 4 * tiles

    def workspace_words(self, num_sms: int) -> int:
        return 2 * num_sms * self.ctas_per_sm * self.rows * self.tokens


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The fastest tile up to most_tokens: token_tiles=2, warpgroups=1, k_block=512, ctas_per_sm=2, 9.3 us."""

    N: int
    K: int
    most_tokens: int
    token_tiles: int
    """Number of tiles for M tokens; each weight is decoded this many times."""
    warpgroups: int
    k_block: int
    ctas_per_sm: int
    us: float
    """Measured time of a launch."""

    def tile(self, M: int, K: int) -> Tile | None:
        """Return the tile with as many stages as fit, or None if not even two do."""
        tokens = next(width for width in TOKEN_TILES if width * self.token_tiles >= M)
        k_block = next(k for k in _K_BLOCKS if k <= self.k_block and K % k == 0)
        stage_bytes = Tile(tokens, self.warpgroups, k_block, 1, self.ctas_per_sm).stage_bytes + 16
        stages = min((_SHARED_BYTES // self.ctas_per_sm - 2048) // stage_bytes, _MAX_STAGES)
        return Tile(tokens, self.warpgroups, k_block, stages, self.ctas_per_sm) if stages > 1 else None


@functools.lru_cache(maxsize=4096)
def choose_tile(M: int, N: int, K: int, gpu: str = "") -> Tile:
    assert 1 <= M <= MAX_TOKENS and N % TILE_ROWS == 0 and K % TILE_K == 0
    bound = next(bound for bound in TOKEN_BOUNDS if bound >= M)
    choices = [choice for choice in table(gpu) if choice.most_tokens == bound]
    nearest = min(choices, key=lambda c: abs(math.log(N / c.N)) + abs(math.log(K / c.K)))
    tile = nearest.tile(M, K)
    assert tile is not None, nearest
    return tile


@functools.cache
def table(gpu: str) -> tuple[Choice, ...]:
    by_gpu = read()
    return by_gpu.get(gpu, next(iter(by_gpu.values())))


def read() -> dict[str, tuple[Choice, ...]]:
    text = resources.files("qerl.kernels.tiles").joinpath("nvfp4_tile.json").read_text()
    return {entry["gpu"]: tuple(Choice(**each) for each in entry["choices"]) for entry in json.loads(text)}
