"""head_sample.py for BF16 and FP8 heads on any GPU since Ampere: head_portable.cu, by mma.sync.

It has the same API and the same generator, hence samples the same tokens unless two scores differ by
rounding. A row's numbers depend on that row alone, whatever the tile
(tests/kernels/head/test_head_portable.py). head_finish.cu combines the partial results and advances the
state.
"""

import dataclasses
import struct
from collections.abc import Callable

import torch

from qerl.formats import BF16, FP8
from qerl.kernels.head.head_sample import CHUNK, HeadSample, is_by_row
from qerl.kernels.runtime.architectures import CudaArchitecture, architecture_of
from qerl.kernels.runtime.nvrtc import addresses, compiled

_MAX_STAGES = 8


@dataclasses.dataclass(frozen=True, slots=True)
class PortableHeadTile:
    """PortableHeadTile(0, 128, row_warps=2, token_warps=2, k_block=64, stages=3, ctas_per_sm=2): BF16, 128
    rows of the head x 128 tokens x 64 k; each warp has 64 rows."""

    format: int
    tokens: int
    row_warps: int
    token_warps: int
    k_block: int
    stages: int
    ctas_per_sm: int

    @property
    def threads(self) -> int:
        return 32 * self.row_warps * self.token_warps

    @property
    def sums(self) -> int:
        """Fp32 sums of a thread; FP8's scale those of 128 k before they are added to the others."""
        return 2 * self.tokens // self.token_warps * (1 + self.format)

    @property
    def shared_bytes(self) -> int:
        return self.stages * self.k_block * (2 * self.tokens + CHUNK * self.row_warps * (2 - self.format))

    @property
    def defines(self) -> dict[str, int]:
        return {
            "FORMAT": self.format,
            "MT": self.tokens,
            "WR": self.row_warps,
            "WM": self.token_warps,
            "KB": self.k_block,
            "STAGES": self.stages,
            "CTAS": self.ctas_per_sm,
        }

    def filling(self, card: CudaArchitecture) -> "PortableHeadTile | None":
        """Return the tile with as many stages as the card has room for; None if that is one."""
        free = min(card.shared_bytes, card.sm_shared_bytes // self.ctas_per_sm - 1024)
        stages = min(free // dataclasses.replace(self, stages=1).shared_bytes, _MAX_STAGES)
        tile = dataclasses.replace(self, stages=stages)
        registers = min(self.sums + 100, 255)  # an estimate; the launch bounds hold the compiler to it
        fits = card.resident_ctas(tile.threads, registers, tile.shared_bytes) >= self.ctas_per_sm
        return tile if stages >= 2 and fits else None


_FORMS = {  # tokens: row_warps, token_warps, k_block, ctas_per_sm, the first that fits
    0: {
        8: ((2, 1, 128, 2), (2, 1, 128, 1)),
        16: ((2, 1, 128, 2), (2, 1, 128, 1)),
        32: ((2, 1, 64, 2), (2, 1, 64, 1)),
        64: ((2, 2, 64, 2), (2, 1, 64, 1)),
        96: ((4, 2, 64, 1), (2, 2, 64, 1)),
        128: ((2, 4, 64, 1), (2, 2, 64, 1)),
        192: ((2, 4, 64, 1),),
        256: ((2, 4, 64, 1),),
    },
    1: {
        8: ((2, 1, 128, 3), (2, 1, 128, 2)),
        16: ((2, 1, 128, 3), (2, 1, 128, 2)),
        32: ((2, 1, 128, 2), (2, 1, 128, 1)),
        64: ((2, 2, 128, 2), (2, 2, 128, 1)),
        128: ((2, 4, 128, 1), (2, 2, 128, 1)),
    },
}


def choose_head_tile(M: int, head_format: int, D: int, card: CudaArchitecture) -> PortableHeadTile:
    """Return the tile for M tokens; of more than the most, several are taken in turn."""
    forms = _FORMS[head_format]
    wanted = next((tokens for tokens in forms if tokens >= M), max(forms))
    for tokens in sorted((t for t in forms if t <= wanted), reverse=True):
        for row_warps, token_warps, k_block, ctas in forms[tokens]:
            k = k_block if D % k_block == 0 else 64
            tile = PortableHeadTile(head_format, tokens, row_warps, token_warps, k, 1, ctas).filling(card)
            if tile is not None:
                return tile
    raise AssertionError(f"no tile of {M} tokens fits {card}")


class PortableHeadSample(HeadSample):
    """HeadSample with the product by head_portable.cu; head_finish.cu is the same."""

    def __init__(
        self,
        head: BF16 | FP8,
        max_rows: int,
        device: torch.device,
        *,
        scale: float = 1.0,
        softcap: float | None = None,
        choose: Callable[[int, int, int, CudaArchitecture], PortableHeadTile] = choose_head_tile,
    ):
        """choose: return the tile for (M, format, D, card)."""
        super().__init__(head, max_rows, device, scale=scale, softcap=softcap)
        self._card, self._choose_tile = architecture_of(device), choose

    def _multiply(self, hidden_MD, keys, positions, temperature, logits_MV, *, output: int) -> None:
        hidden_MD = self._checked(hidden_MD, keys, positions, temperature, logits_MV)
        m, head = len(hidden_MD), self.head
        tile = self._choose_tile(m, self._format, self._d, self._card)
        if isinstance(head, FP8):
            weight, scales, hidden_MD = head.codes, head.scales, self._in_code_order(hidden_MD)
        else:
            assert isinstance(head, BF16)
            weight, scales = head.weight, None
        pointers = (keys, positions, temperature, scales, self._partials, logits_MV)
        operands = struct.pack("6Q4i", *addresses(*pointers), m, self._v, self._d, 0)
        if self._options:
            operands += struct.pack("2f", self._scale, self._softcap or 0.0)
        self._kernel(tile, output, is_by_row(temperature)).launch(
            grid=min(self._num_sms * tile.ctas_per_sm, -(-self._v // CHUNK)),
            block_threads=tile.threads,
            parameters=(operands + struct.pack("2Q", *addresses(weight, hidden_MD)),),
        )

    def _compile(self, tile, output: int, by_row: int):
        defines = {**tile.defines, **self._options, "WIDTH": self._d, "OUTPUT": output, "BY_ROW": by_row}
        return compiled(
            "head_portable.cu", "head_portable", self._device, defines, shared_bytes=tile.shared_bytes
        )
