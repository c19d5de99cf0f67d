"""What benchmarks measure: the products of a decode step that a shape makes, cases of options, decoders."""

import dataclasses
from functools import partial
from typing import Any, TypeVar

import torch

from qerl.cli.bench.measure import attempt
from qerl.models.architecture import Architecture
from qerl.models.decoder import Decoder
from qerl.models.layer_spec import LinearGroupSpec, layer_spec
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


Gemm = LinearGroupSpec
"""One product of a decode step: the linears of a layer that read the same input."""


def gemms(a: Architecture) -> tuple[Gemm, Gemm, Gemm, Gemm]:
    """Return the products of a layer: q|k|v, o, gate|up, down."""
    return layer_spec(a).groups
