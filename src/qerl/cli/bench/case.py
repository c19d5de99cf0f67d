"""What benchmarks measure: the products of a decode step that a shape makes, cases of options, decoders."""

import dataclasses
from functools import partial
from typing import Any, TypeVar

import torch

from qerl.cli.bench.measure import attempt
from qerl.models.architecture import Architecture
from qerl.models.decoder import Decoder
from qerl.models.random_weights import random_decoder

C = TypeVar("C")
FORMATS = {
    "qerl-nvfp4": "nvfp4",
    "qerl-bf16": "bf16",
    "qerl-fp8-flow": "fp8-flow",
    "flash-fp8": "bf16",
    "flash-int8": "bf16",
}
"""Of the learner's linears, and of the sampler's but for SAMPLERS."""
SAMPLERS = {"flash-fp8": "fp8-flow", "flash-int8": "int8"}


def case_of(kind: type[C], options: Any, **own: Any) -> C:
    """The case with these fields, and with the options' for those of the same name that are not given."""
    names: list[str] = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    return kind(**{name: own[name] if name in own else getattr(options, name) for name in names})


def random_policy(
    architecture: Architecture, provider: str, rank: int, device: torch.device, head: str = "bf16"
) -> tuple[Decoder | None, str]:
    """(a decoder with random weights, ""), or (None, what it lacked)."""
    make = partial(random_decoder, architecture, format=FORMATS[provider], rank=rank, device=device, seed=0)
    return attempt(partial(make, head=head), device)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Gemm:
    """Linears of a layer that share their input.

    Gemm(name="qkv", in_width=3584, out_widths=(3584, 512, 512))
    """

    name: str
    in_width: int
    out_widths: tuple[int, ...]

    @property
    def out_width(self) -> int:
        return sum(self.out_widths)

    @property
    def num_weights(self) -> int:
        return self.in_width * self.out_width

    def num_adapter_weights(self, rank: int) -> int:
        """A and B of each of its linears."""
        return rank * sum(self.in_width + width for width in self.out_widths)


def gemms(a: Architecture) -> tuple[Gemm, Gemm, Gemm, Gemm]:
    """q|k|v, o, gate|up, down."""
    queries, keys = a.num_heads * a.head_size, a.num_kv_heads * a.head_size
    return (
        Gemm(name="qkv", in_width=a.width, out_widths=(queries, keys, keys)),
        Gemm(name="o", in_width=queries, out_widths=(a.width,)),
        Gemm(name="gate_up", in_width=a.width, out_widths=(a.ff_width, a.ff_width)),
        Gemm(name="down", in_width=a.ff_width, out_widths=(a.width,)),
    )
