"""Find the fastest tiles of each NVFP4 product and write the kernels' table: `python -m benchmarks tile`.

Each candidate is timed alone, in a CUDA graph of launches with distinct weights,
as a decode step launches it: with adapter, bias, residual and SwiGLU, and with u where the engine passes
it. One choice serves up to 32 tokens, so its times at 8 and at 32 tokens count equally. In this GPU's entry
of the table a measured choice replaces the one of the same (N, K, most_tokens); all others stay.
"""

import dataclasses
import json
import math
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.linear import check_supported
from qerl.bench.measure import cuda_device
from qerl.bench.options import check_ranks
from qerl.bench.product import Product, timed_batches
from qerl.bench.record import ROOT, read_origin
from qerl.config.check import check_positive
from qerl.kernels.runtime import nvrtc
from qerl.kernels.runtime.compile_ahead import compile_ahead
from qerl.kernels.tiles import nvfp4_decode
from qerl.kernels.tiles.nvfp4_tile import MAX_TOKENS, Choice, Tile
from qerl.models.layer_spec import LinearGroupSpec, layer_spec
from qerl.models.random_weights import shape

TABLE = Path("src", "qerl", "kernels", "tiles", "nvfp4_tile.json")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TileOptions:
    shapes: tuple[str, ...] = ("qwen2.5-7b", "qwen2.5-32b")
    """Models whose linears are measured."""

    batches: tuple[Literal[32, 48, 64, 96, 128, 192, 256], ...] = (32, 48, 64, 96, 128, 192, 256)
    """Maximum tokens that each choice of tiles serves."""

    lora_rank: int = 32
    """LoRA rank; 0 is no adapter."""

    runs: int = 9
    """Replays of the CUDA graph; the median is kept."""

    out: Path | None = None
    """File to write; default: src/qerl/kernels/tiles/nvfp4_tile.json."""

    allow_dirty: bool = False
    """Measure a checkout with uncommitted changes."""

    def __post_init__(self):
        check_positive(self, "runs")
        check_ranks((self.lora_rank,))


def candidates(N: int, K: int, most_tokens: int) -> list[Choice]:
    """Return the choices to measure: narrower tiles have more CTAs and longer stages."""
    two = [(tiles, 1, k, 2) for tiles in (1, 2) for k in (512, 256)]
    # one warpgroup and many tiles of tokens: more CTAs for the products of small models
    narrow = [(tiles, 1, k, ctas) for tiles in (1, 2, 3, 4, 8) for k in (512, 256, 128) for ctas in (1, 2)]
    if most_tokens <= 32:
        forms = [*two[:2], (1, 1, 512, 1), (1, 2, 512, 1), (1, 2, 256, 1)]
    elif most_tokens <= 64:
        one = [(tiles, groups, k, 1) for tiles in (1, 2) for groups in (1, 2, 3) for k in (256, 128)]
        forms = [*two[2:], *one, *narrow[:-6]]
    elif most_tokens <= 128:
        one = [(tiles, groups, k, 1) for tiles in (1, 2) for groups in (2, 3) for k in (256, 128)]
        forms = [*one, *narrow]
    else:
        forms = [(tiles, groups, k, 1) for tiles in (1, 2, 3, 4) for groups in (2, 3) for k in (256, 128, 64)]
        forms += narrow[6:]
    names = ("token_tiles", "warpgroups", "k_block", "ctas_per_sm")
    each = [
        Choice(N=N, K=K, most_tokens=most_tokens, us=0.0, **dict(zip(names, form, strict=True)))
        for form in forms
    ]
    tiles = {choice.tile(most_tokens, K): choice for choice in reversed(each)}
    return [
        choice
        for tile, choice in tiles.items()
        if tile is not None and tile.padded_tokens(most_tokens) <= MAX_TOKENS and _fits(tile)
    ]


def _fits(tile: Tile) -> bool:
    """True if the sums fit a warp's registers: three warpgroups have 152 to 160 a thread."""
    return tile.warpgroups < 3 or tile.tokens <= 96


def bench_tile(options: TileOptions) -> None:
    """Print the candidates of each product and write the table."""
    each = {(g.out_width, g.in_width): g for name in options.shapes for g in layer_spec(shape(name)).groups}
    device = cuda_device()
    check_supported(device, options.batches)
    origin = read_origin(allow_dirty=options.allow_dirty)
    best = []
    for size, gemm in each.items():
        product = _Tiles(gemm, options.lora_rank, device)
        for most_tokens in options.batches:
            choices = candidates(*size, most_tokens)
            product.compile(choices)
            timed = [product.timed(choice, options.runs) for choice in choices]
            timed.sort(key=lambda choice: choice.us)
            print(*timed, sep="\n", flush=True)
            best.append(timed[0])
        del product
        torch.cuda.empty_cache()
    file = options.out or ROOT / TABLE
    facts = {"gpu": origin.gpu, "commit": origin.commit, "torch": origin.torch, "driver": origin.driver}
    facts |= {"date": datetime.now(UTC).date().isoformat()}
    file.write_text(merged((ROOT / TABLE).read_text(), facts, best))


def merged(old: str, facts: dict[str, str], best: list[Choice]) -> str:
    """Return the table with these choices put into this GPU's entry."""
    entries = {entry["gpu"]: entry for entry in json.loads(old)}
    present = entries.get(facts["gpu"], {"choices": []})["choices"]
    choices = {_size(choice): choice for choice in present}
    choices |= {_size(choice): choice for choice in map(dataclasses.asdict, best)}
    entries[facts["gpu"]] = facts | {"choices": list(choices.values())}
    return "[" + ",\n".join(_written(entry) for entry in entries.values()) + "]\n"


def _size(choice: dict[str, Any]) -> tuple[int, int, int]:
    return choice["N"], choice["K"], choice["most_tokens"]


def _written(entry: dict[str, Any]) -> str:
    """Format an entry with one line per choice."""
    head = json.dumps({key: value for key, value in entry.items() if key != "choices"})[:-1]
    lines = ",\n".join("  " + json.dumps(choice) for choice in entry["choices"])
    return f'{head}, "choices": [\n{lines}\n]}}'


class _Tiles:
    """The kernels with a tile that is set before each launch."""

    def __init__(self, gemm: LinearGroupSpec, rank: int, device: torch.device):
        self._gemm, self._rank, self._device = gemm, rank, device
        self._product = Product(gemm, rank, device)
        self._tile: Tile | None = None
        self._kernels = nvfp4_decode.NVFP4Decode(device, lambda M, N, K: self._chosen())

    def compile(self, choices: list[Choice]) -> None:
        """Compile the kernels of all choices in parallel."""
        with nvrtc.dry_run() as variants:
            for choice in choices:
                for M, gives_hidden in self._cases(choice):
                    self._product.work(self._kernels, M, gives_hidden=gives_hidden)()
        compile_ahead(variants, self._device)

    def timed(self, choice: Choice, runs: int) -> Choice:
        """Return the choice with its time per launch in us; small ones average two batches."""
        each_us = [
            self._product.launch_us(self._kernels, M, runs, gives_hidden=gives_hidden)
            for M, gives_hidden in self._cases(choice)
        ]
        return dataclasses.replace(choice, us=round(math.prod(each_us) ** (1 / len(each_us)), 2))

    def _cases(self, choice: Choice) -> Iterator[tuple[int, bool]]:
        """Yield each batch of the choice while its tile is set, and whether launches are given u."""
        gemm, rows = self._gemm, self._rank * len(self._gemm.out_widths)
        for M in timed_batches(choice.most_tokens):
            self._tile = choice.tile(M, gemm.in_width)
            yield (
                M,
                not nvfp4_decode.pays_to_compute_lora_hidden(M, gemm.in_width, rows, gemm.name == "gate_up"),
            )

    def _chosen(self) -> Tile:
        assert self._tile is not None
        return self._tile
