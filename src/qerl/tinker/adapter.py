"""Adapters of training clients, and the one place in the decoder that each of them takes in turn.

The decoder has a single adapter of the largest rank R, whose tensors kernels and recorded graphs point to.
One of rank r fills its first r rows and columns; the rest is zero, adds nothing and has no gradient. Its
scaling is alpha / r where the decoder multiplies by alpha / R: B is loaded times R / r, so is its gradient.
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from qerl.algo.seeds import mix
from qerl.config import AdapterConfig
from qerl.config.options import SHARED_ADAPTERS
from qerl.engine.local_engine import LocalEngine
from qerl.errors import UserError, require
from qerl.learner.optimizer import FusedAdamW, load_state, state_of, step_if
from qerl.models.adapter_bank import AdapterBank
from qerl.models.decoder import Decoder
from qerl.models.peft.adapter import adapter_tensors

ALPHA = 32.0
"""LoRA's alpha of all adapters."""
_MLP = ("gate_proj", "up_proj", "down_proj")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AdapterSpec:
    """The settings with which a client creates a model."""

    rank: int
    seed: int
    train_mlp: bool = True
    train_attn: bool = True

    def config(self, decoder: Decoder) -> AdapterConfig:
        """Return the adapter's config: all linears of MLPs, or all others, or both."""
        names = dict.fromkeys(name.rpartition(".")[2] for name, _ in decoder.linears())
        targets = [name for name in names if (self.train_mlp if name in _MLP else self.train_attn)]
        require(len(targets) > 0, "lora_config: set train_mlp or train_attn; the unembedding has no adapter")
        return AdapterConfig(rank=self.rank, alpha=ALPHA, target_modules=tuple(targets))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AdamSettings:
    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0
    """0: gradients are not clipped."""

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            require(
                math.isfinite(value) and value >= 0, f"{field.name} must be a number from 0 on, got {value}"
            )
        require(self.eps > 0, f"eps must be positive, got {self.eps}")
        require(max(self.beta1, self.beta2) < 1, "beta1 and beta2 must be below 1")


class TrainedAdapter:
    """Masters, gradients and moments of one training client."""

    def __init__(self, decoder: Decoder, spec: AdapterSpec):
        self.spec, self.config = spec, spec.config(decoder)
        self.version = 0
        """Number of updates and loads, so that no two states have the same."""
        self.parameters: dict[str, nn.Parameter] = {}
        for index, (name, linear) in enumerate(decoder.linears()):
            if linear.lora_A is None or name.rpartition(".")[2] not in self.config.target_modules:
                continue
            generator = torch.Generator().manual_seed(mix(spec.seed, index))
            a_RK = torch.rand(spec.rank, linear.in_width, generator=generator)
            bound = 1 / math.sqrt(linear.in_width)
            values = a_RK * (2 * bound) - bound, torch.zeros(linear.out_width, spec.rank)
            for side, value in zip("AB", values, strict=True):
                full_name = _master_name(decoder, name, side)
                self.parameters[full_name] = nn.Parameter(value.to(decoder.device))
        self._optimizer = FusedAdamW(list(self.parameters.values()), **_settings(AdamSettings()))

    def snapshot(self) -> dict[str, Tensor]:
        """Return copies of the masters in host memory."""
        return {name: p.detach().to("cpu", copy=True) for name, p in self.parameters.items()}

    def moments(self) -> dict[str, Tensor]:
        return {name: t.cpu() for name, t in state_of(self._optimizer, self.parameters).items()}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor], moments: Mapping[str, Tensor] | None) -> None:
        """Take these masters, and the moments or none; gradients are dropped. Raise UserError for other names
        or shapes."""
        for name, parameter in self.parameters.items():
            if name not in tensors or tensors[name].shape != parameter.shape:
                raise UserError("the checkpoint is of an adapter of another rank or of other linears")
        for name, parameter in self.parameters.items():
            parameter.copy_(tensors[name])
        load_state(self._optimizer, self.parameters, moments or {})
        self._optimizer.zero_grad()
        self.version += 1

    def move(self, device: torch.device) -> None:
        """Move everything to the device, such as the host's memory while other adapters are in use."""
        for parameter in self.parameters.values():
            grad, parameter.grad = parameter.grad, None
            parameter.data = parameter.data.to(device)
            parameter.grad = None if grad is None else grad.to(device)
            state = self._optimizer.state.get(parameter, {})
            state |= {name: value.to(device) for name, value in state.items()}

    def add_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        for name, gradient in gradients.items():
            parameter = self.parameters[name]
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    def update(self, settings: AdamSettings) -> float:
        """Take a step with the sum of the gradients since the last one, and forget them. Return their norm
        before clipping. Raise UserError, without an update, if it is not finite."""
        parameters = list(self.parameters.values())
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if settings.grad_clip_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(parameters, settings.grad_clip_norm, norm)
        self._optimizer.param_groups[0] |= _settings(settings)
        step_if(self._optimizer, norm.isfinite())
        self._optimizer.zero_grad()
        require(
            bool(norm.isfinite()),
            f"the gradient's norm is {norm.item()}: no update was made, and it is dropped",
        )
        self.version += 1
        return norm.item()


def _settings(adam: AdamSettings) -> dict[str, Any]:
    betas = {"lr": adam.learning_rate, "betas": (adam.beta1, adam.beta2)}
    return betas | {"eps": adam.eps, "weight_decay": adam.weight_decay}


def _master_name(decoder: Decoder, linear: str, side: str) -> str:
    return f"base_model.model.{decoder.name_prefix}{linear}.lora_{side}.weight"


class AdapterSlot:
    """The decoder's adapter, which holds one client's at a time."""

    def __init__(
        self, decoder: Decoder, engine: LocalEngine, max_rank: int, shared_adapters: int = SHARED_ADAPTERS
    ):
        """shared_adapters: of rows of one decode step."""
        self.decoder, self.max_rank = decoder, max_rank
        self._bank = AdapterBank(decoder.compute, decoder.device, shared_adapters, max_rank)
        self._engine, self._held, self._version = engine, None, 0
        self._masters = adapter_tensors(decoder)
        decoder.reserved_bank = self._bank if self.shares_steps else None

    @torch.no_grad()
    def hold(self, key: object, tensors: Mapping[str, Tensor], rank: int) -> None:
        """Compute with these masters from now on; none are the base model. key: equal for equal ones."""
        if key == self._held:
            return
        for name, master in self._masters.items():
            master.zero_()
            if name in tensors:
                self._part(name, master, rank).copy_(tensors[name]).mul_(self._factor(name, rank))
        self._version += 1
        self._engine.publish(self._version)
        self._held = key

    @property
    def shares_steps(self) -> bool:
        """True if rows of a decode step may have different adapters."""
        is_possible = self.decoder.device.type == "cpu" or self._engine.bank_obstacle(self._bank) is None
        return self._bank.max_adapters > 0 and is_possible

    @contextlib.contextmanager
    def banked(self) -> Iterator[AdapterBank]:
        """Yield the adapters by row of what is sampled inside, in the place of the one that is held."""
        self.decoder.adapter_bank = self._bank
        try:
            yield self._bank
        finally:
            self._bank.clear()
            self.decoder.adapter_bank = None

    def add_to(self, bank: AdapterBank, tensors: Mapping[str, Tensor], rank: int) -> int:
        """Return the number of rows with these masters."""
        adapters: dict[nn.Module, tuple[Tensor, Tensor]] = {}
        for name, linear in self.decoder.linears():
            sides = [_master_name(self.decoder, name, side) for side in "AB"]
            if sides[0] in tensors:
                adapters[linear] = tensors[sides[0]], tensors[sides[1]]
        return bank.add(adapters, ALPHA / rank)

    def take_gradients(self, adapter: TrainedAdapter) -> dict[str, Tensor]:
        """Return the gradients of the adapter that is held, and clear them."""
        rank, result = adapter.spec.rank, {}
        for name, master in self._masters.items():
            if master.grad is not None and name in adapter.parameters:
                result[name] = self._part(name, master.grad, rank) * self._factor(name, rank)
        self.clear_gradients()
        return result

    def clear_gradients(self) -> None:
        for master in self._masters.values():
            master.grad = None

    def _factor(self, name: str, rank: int) -> float:
        return self.max_rank / rank if name.endswith("lora_B.weight") else 1.0

    def _part(self, name: str, tensor: Tensor, rank: int) -> Tensor:
        return tensor[:, :rank] if name.endswith("lora_B.weight") else tensor[:rank]
