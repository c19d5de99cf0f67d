"""Find the fastest tiles of the portable packed product on this GPU: `qerl bench tune`.

Each candidate is timed in a CUDA graph of launches with distinct weights, as a decode step launches it. One
choice serves up to 32 tokens, so its times at 8 and at 32 tokens count equally. The table is written to
$QERL_CACHE/portable_tile.json, where the kernels find it (kernels/tiles/portable_table.py).
"""

import math
import time
from datetime import UTC, datetime

import torch

from qerl.bench.measure import cuda_device
from qerl.bench.options import BenchTuneOptions
from qerl.bench.product import Product, timed_batches
from qerl.bench.record import Origin, read_origin
from qerl.errors import UserError
from qerl.kernels.runtime.architectures import architecture_of
from qerl.kernels.runtime.compile_ahead import compile_ahead
from qerl.kernels.tiles.nvfp4_tile import TOKEN_BOUNDS
from qerl.kernels.tiles.portable_product import PortableProduct
from qerl.kernels.tiles.portable_table import MeasuredChoice, merged, user_file
from qerl.kernels.tiles.portable_tile import PortableChoice, PortableTile, candidates
from qerl.models.device import best_kernels
from qerl.models.layer_spec import LinearGroupSpec, layer_spec
from qerl.models.random_weights import shape

_NOT_HERE = "bench tune needs an NVIDIA GPU from Ampere on"


def bench(options: BenchTuneOptions) -> None:
    """Print the fastest tile of each product and batch, and write the table."""
    start_s = time.perf_counter()
    device = cuda_device()
    if best_kernels(device) == "torch":
        raise UserError(_NOT_HERE)
    groups = {(g.out_width, g.in_width): g for name in options.shapes for g in layer_spec(shape(name)).groups}
    batches = tuple(batch for batch in TOKEN_BOUNDS if batch <= max(options.max_batch, TOKEN_BOUNDS[0]))
    tuner = _Tuner(device, options.lora_rank, options.runs)
    tuner.compile(list(groups.values()), batches)
    choices = [each for group in groups.values() for each in tuner.fastest(group, batches)]
    _write(choices, read_origin(allow_dirty=True))
    print(f"took {time.perf_counter() - start_s:.0f} s")


class _Tuner:
    def __init__(self, device: torch.device, rank: int, runs: int):
        self._device, self._rank, self._runs = device, rank, runs
        self._card = architecture_of(device)
        self._tile: PortableTile
        self._kernels = PortableProduct(device, lambda M, N, K: self._tile)

    def compile(self, groups: list[LinearGroupSpec], batches: tuple[int, ...]) -> None:
        variants = [
            tile.variant(self._rank, int(group.name == "gate_up"))
            for group in groups
            for batch in batches
            for choice in candidates(batch, group.in_width, self._card)
            for M in timed_batches(batch)
            if (tile := choice.tile(M, group.in_width, self._card)) is not None
        ]
        report = compile_ahead(variants, self._device)
        print(f"compiled {report.num_compiled} of {report.num_kernels} kernels in {report.compile_s:.0f} s")

    def fastest(self, group: LinearGroupSpec, batches: tuple[int, ...]) -> list[MeasuredChoice]:
        """Return the fastest choice for each batch, and print it."""
        product, fastest = Product(group, self._rank, self._device), []
        for batch in batches:
            each = [
                MeasuredChoice(
                    N=group.out_width,
                    K=group.in_width,
                    most_tokens=batch,
                    us=self._time_us(product, choice, batch),
                    choice=choice,
                )
                for choice in candidates(batch, group.in_width, self._card)
            ]
            fastest.append(min(each, key=lambda each: each.us))
            size = f"{group.out_width} x {group.in_width}"
            print(f"{group.name} {size}, up to {batch} tokens: {fastest[-1].us} us", flush=True)
        del product
        torch.cuda.empty_cache()
        return fastest

    def _time_us(self, product: Product, choice: PortableChoice, batch: int) -> float:
        """Return the time of a launch; of up to 32 tokens the geometric mean of two batches."""
        each_us = []
        for M in timed_batches(batch):
            tile = choice.tile(M, product.gemm.in_width, self._card)
            assert tile is not None
            self._tile = tile
            each_us.append(product.launch_us(self._kernels, M, self._runs, gives_hidden=True))
        return round(math.prod(each_us) ** (1 / len(each_us)), 2)


def _write(choices: list[MeasuredChoice], origin: Origin) -> None:
    file = user_file()
    old = file.read_text() if file.exists() else None
    facts = {"gpu": origin.gpu, "commit": origin.commit or "", "torch": origin.torch, "driver": origin.driver}
    facts |= {"date": datetime.now(UTC).date().isoformat()}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(merged(old, facts, choices))
    print(f"written to {file}. To let others use it, send this entry to the project in an issue:")
    print(merged(None, facts, choices), end="")
