"""Make benchmark cases from options, and decoders with random weights."""

import dataclasses
from functools import partial
from typing import Any, TypeVar

import torch

from qerl.bench.measure import attempt
from qerl.config import RunConfig
from qerl.learner.plan import memory as plan
from qerl.models.architecture import Architecture
from qerl.models.decoder import Decoder
from qerl.models.random_weights import random_decoder

C = TypeVar("C")
FORMATS = {
    "qerl-nvfp4": "nvfp4",
    "qerl-mxfp4": "mxfp4",
    "qerl-nf4": "nf4",
    "qerl-fp8": "fp8",
    "qerl-int8": "int8",
    "qerl-bf16": "bf16",
    "qerl-fp8-flow": "fp8-flow",
    "flash-fp8": "bf16",
    "flash-int8": "bf16",
}
"""Format of the linears by provider; the sampler of a provider in SAMPLERS has a copy in another format."""
SAMPLERS = {"flash-fp8": "fp8-flow", "flash-int8": "int8"}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SamplingCase:
    """The settings that rows of all benchmarks of sampling have."""

    shape: str
    provider: str
    lora_rank: int
    group_size: int
    prompt_tokens: int
    max_tokens: int
    kv: str
    head: str
    kernels: str
    """As engine.kernels; the row has what the engine chose."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DecodeCase(SamplingCase):
    """Settings of a row of `qerl bench decode`."""

    batch: int
    noise_sigma: float


def make_case(kind: type[C], options: Any, /, **fields: Any) -> C:
    """Return a case, or another dataclass, with these fields; all others come from the options."""
    names: list[str] = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    return kind(**{name: fields[name] if name in fields else getattr(options, name) for name in names})


def try_random_decoder(
    architecture: Architecture,
    provider: str,
    rank: int,
    device: torch.device,
    head: str = "bf16",
    expert_rank: int = 0,
) -> tuple[Decoder | None, str]:
    """Return (decoder, ""), or (None, error) if it does not fit."""
    make = partial(random_decoder, architecture, format=FORMATS[provider], rank=rank, device=device, seed=0)
    return attempt(partial(make, head=head, expert_rank=expert_rank), device)


def would_hold_operands(decoder: Decoder, config: RunConfig, prompt_tokens: int) -> bool:
    """True if a training run would hold the unpacked operands of all layers through an update."""
    if decoder.device.type == "cpu":
        return False
    usable_bytes = plan.usable_bytes(decoder.device)
    return plan.can_cache_operands(decoder.architecture, config, prompt_tokens, usable_bytes)
