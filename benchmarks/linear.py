"""Time the linears of a decode step beside other libraries: `python -m benchmarks linear`.

The four products of every layer run in one CUDA graph.
"""

import dataclasses
import importlib.util
from typing import Any, Literal

import torch

from benchmarks.provider import PROVIDERS, LayerLinears, Provider
from qerl.bench.measure import cuda_device
from qerl.bench.options import BenchOptions, check_ranks
from qerl.bench.record import Origin, row_writer
from qerl.bench.roofline import ADAPTER_BYTES, LIMITS, Limit, adapter_weights
from qerl.bench.timing import Times, graph_times
from qerl.config.check import check_positive
from qerl.cost.weights import linear_weights
from qerl.errors import RunError, UserError
from qerl.kernels.tiles.nvfp4_decode import MAX_TOKENS
from qerl.models.architecture import Architecture
from qerl.models.device import has_tile_kernels
from qerl.models.random_weights import shape

_MAX_ERROR = 0.01
"""Maximum relative RMS error against float64; rounding y to bfloat16 alone gives 0.0017."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LinearOptions(BenchOptions):
    batches: tuple[int, ...] = (8, 16, 32, 64, 128, 256)
    """Tokens per decode step, one case per value."""

    providers: tuple[Literal["qerl-nvfp4", "cublas-bf16", "humming", "bitsandbytes-nf4"], ...] = (
        "qerl-nvfp4",
        "cublas-bf16",
    )
    """Libraries to compare; humming and bitsandbytes-nf4 need their own packages."""

    lora_ranks: tuple[int, ...] = (0, 32)
    """LoRA rank; 0 is no adapter."""

    runs: int = 21
    """Replays of the CUDA graph; the row holds their median."""

    def __post_init__(self):
        check_positive(self, "batches", "runs")
        check_ranks(self.lora_ranks)


def bench_linear(options: LinearOptions) -> None:
    """Write a row for each provider, rank and batch."""
    architecture = shape(options.shape)
    device = cuda_device()
    for name in options.providers:
        check_installed(name, PROVIDERS[name])
    if "qerl-nvfp4" in options.providers:
        check_supported(device, options.batches)
    rows = row_writer(options)
    for name in options.providers:
        products = PROVIDERS[name].make(architecture, device)
        for batch in options.batches:
            check_products(name, products, batch)
            for rank in options.lora_ranks:
                times = graph_times(products.work(batch, rank), options.runs)
                rows.add(_row(options.shape, architecture, name, batch, rank, times, rows.origin))
        del products
        torch.cuda.empty_cache()


def check_installed(name: str, provider: Provider) -> None:
    try:
        is_there = provider.module is None or importlib.util.find_spec(provider.module) is not None
    except ModuleNotFoundError:  # the parent of a dotted name is missing
        is_there = False
    if not is_there:
        raise UserError(f"provider {name} needs {provider.package}: install it, or pass other --providers")


def check_supported(device: torch.device, batches: tuple[int, ...]) -> None:
    if not has_tile_kernels(device):
        raise UserError("provider qerl-nvfp4 needs a Hopper GPU: pass other --providers")
    if max(batches, default=0) > MAX_TOKENS:
        raise UserError(f"provider qerl-nvfp4 supports batches up to {MAX_TOKENS}, got {max(batches)}")


def check_products(name: str, products: LayerLinears, batch: int) -> None:
    x_MK, y_MN, weight_NK = products.one(batch)
    truth_MN = x_MK.double() @ weight_NK.double().T
    error = ((y_MN.double() - truth_MN).square().mean() / truth_MN.square().mean()).sqrt().item()
    if not error <= _MAX_ERROR:
        raise RunError(f"{name} has a relative error of {error:.2g} at batch {batch}, above {_MAX_ERROR}")


def _row(
    shape_name: str,
    architecture: Architecture,
    name: str,
    batch: int,
    rank: int,
    times: Times,
    origin: Origin,
) -> dict[str, Any]:
    limit, fraction = LIMITS.get(origin.gpu), None
    if limit is not None:
        num_bytes = PROVIDERS[name].bytes_per_weight
        least_ms = linear_floor_ms(limit, architecture, bytes_per_weight=num_bytes, rank=rank, batch=batch)
        fraction = round(least_ms / times.ms, 4)
    key = {"bench": "linear", "shape": shape_name, "batch": batch, "provider": name, "lora_rank": rank}
    figures = {k: round(v, 5) for k, v in dataclasses.asdict(times).items()}
    return key | figures | {"floor_fraction": fraction}


def linear_floor_ms(
    limit: Limit, a: Architecture, *, bytes_per_weight: float, rank: int, batch: int
) -> float:
    """Return the least time of the four products of all layers."""
    weights, adapter = sum(linear_weights(a)), adapter_weights(a, rank)
    num_bytes = weights * bytes_per_weight + adapter * ADAPTER_BYTES
    return limit.least_ms(num_bytes, 2 * batch * (weights + adapter))
