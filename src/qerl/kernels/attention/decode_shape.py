"""Choose chunks of positions, CTAs and stages of a launch of decode_attention.py, and what is compiled in."""

import dataclasses
from collections.abc import Sequence

import torch

from qerl.kernels.attention.attention_options import AttentionOptions

CHUNK = 128
"""Positions of a chunk of few rows."""
LONG_CHUNKS = (192, 256, 320, 384, 448, 512)
"""Those of more rows; `Shape.best_chunk` chooses one, if there are enough units of the largest."""

_CTA_BYTES = 1024  # shared memory that the system reserves per CTA
_TILE_BYTES = 8192  # of the keys of a tile, which has at most 32 positions
_FEW_ROWS, _SHORT_CHUNK = 32, 256  # the chunk of more rows that have few units
_MANY_FP8_HEADS = 256  # rows x K/V heads of few rows above which 8 one-warp CTAs beat 6 (H200)


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """Shape(chunk=128, ctas_per_sm=6, has_few_rows=True): each CTA is one warp."""

    chunk: int
    ctas_per_sm: int
    has_few_rows: bool
    """At most 32: many CTAs add up the chunks of a row, not one. A row's bits are the same."""
    is_variable: bool = False
    """DecodeState.chunk_1 has the positions of a chunk, at most `chunk`."""

    @property
    def min_chunk(self) -> int:
        return LONG_CHUNKS[0] if self.is_variable else self.chunk

    def best_chunk(self, lengths_B: Sequence[int], num_kv_heads: int, num_sms: int) -> int:
        """Return the positions of a chunk for rows of these lengths, that of the least cost in positions: the
        chunks of the busiest CTA, 160 for each unit of a CTA, 36 for each chunk of the longest row (fitted to
        launches on an H200, dev/log/attention.md)."""
        ctas = self.ctas_per_sm * num_sms

        def cost(chunk: int) -> float:
            units = num_kv_heads * sum(-(-length // chunk) for length in lengths_B)
            return -(-units // ctas) * chunk + 160 * units / ctas + 36 * -(-max(lengths_B) // chunk)

        return min(reversed(LONG_CHUNKS), key=cost)


def choose_shape(
    B: int, num_kv_heads: int, max_positions: int, is_fp8: bool, num_sms: int, chunk: int | None = None
) -> Shape:
    """Use fewer CTAs with more tiles in flight if there are few units. chunk=None: chosen."""
    has_few_rows = B <= _FEW_ROWS
    is_variable = chunk is None and not has_few_rows
    chunk = chunk or (CHUNK if has_few_rows else LONG_CHUNKS[-1])
    if B * num_kv_heads * -(-max_positions // chunk) <= 3 * num_sms:
        return Shape(_SHORT_CHUNK if is_variable else chunk, 3, has_few_rows)
    is_bound_by_issue = is_fp8 and (not has_few_rows or B * num_kv_heads > _MANY_FP8_HEADS)
    return Shape(chunk, 8 if is_bound_by_issue else 6, has_few_rows, is_variable)


@dataclasses.dataclass(frozen=True, slots=True)
class Variant:
    """Constants that are compiled in: elements that are rotated, and the options in use."""

    rotary: int
    window: bool
    softcap: bool
    sinks: bool

    @property
    def has_options(self) -> bool:
        return self.window or self.softcap or self.sinks

    @classmethod
    def of(cls, rotary: int, options: AttentionOptions) -> "Variant":
        flags = (each is not None for each in (options.window, options.softcap, options.sinks_N))
        return cls(rotary, *flags)


def choose_stages(
    head_size: int, kv_dtype: torch.dtype, ctas_per_sm: int, max_rows: int, multiprocessor_bytes: int
) -> tuple[int, int]:
    """Return (stages, bytes of shared memory of a CTA): as many as there is room for, at least 2."""
    row_bytes = head_size * kv_dtype.itemsize
    tile = min(_TILE_BYTES // row_bytes, 32)
    stage_bytes = 2 * tile * (row_bytes + (0 if kv_dtype == torch.bfloat16 else 4))
    available = multiprocessor_bytes // ctas_per_sm - _CTA_BYTES - 4 * max_rows
    stages = max(min(available // stage_bytes, CHUNK // tile), 2)
    return stages, stages * stage_bytes + 4 * max_rows


def max_chunks(num_positions: int, chunk: int, window: int | None) -> int:
    """Return the maximum chunks of a row of up to num_positions positions; of a window, if it has fewer."""
    all_chunks = -(-num_positions // chunk)
    return all_chunks if window is None else min(all_chunks, (window + chunk - 2) // chunk + 1)
