"""AdamW over the fp32 masters, with moments in fp32 or 8 bits; its state as named tensors.

    adamw        torch's kernel:   step, exp_avg, exp_avg_sq                          8 bytes per weight
    adamw_8bit    bitsandbytes':    step, state1, state2, absmax1, absmax2, qmap1, qmap2   2 + 1/32 bytes

bitsandbytes keeps the moments of tensors under 4,096 elements in fp32; it counts steps in a plain int.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from qerl.config import LearnConfig
from qerl.errors import UserError


class FusedAdamW:
    """torch.optim.AdamW(fused=True) for fp32 parameters, with the same state and result.

    The methods of torch.optim.Optimizer import torch._dynamo, 2 of the 6 CPU seconds in which a run starts.
    """

    def __init__(self, parameters: list[nn.Parameter] | list[dict[str, Any]], **settings: Any):
        groups = [x for x in parameters if isinstance(x, dict)] or [{"params": parameters}]
        self.param_groups: list[dict[str, Any]] = [settings | group for group in groups]
        self.state: dict[Tensor, dict[str, Any]] = defaultdict(dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        assert set_to_none
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    @torch.no_grad()
    def step(self, is_skipped: Tensor | None = None) -> None:
        """is_skipped: fp32, on the device; 1 leaves the parameters and their state as they are."""
        for group in self.param_groups:
            self._step_group(dict(group), is_skipped)

    def _step_group(self, settings: dict[str, Any], is_skipped: Tensor | None) -> None:
        parameters = [x for x in settings.pop("params") if x.grad is not None]
        for parameter in parameters:
            if parameter not in self.state:
                self.state[parameter] = {
                    "step": torch.zeros((), device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                    "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                }
        states = [self.state[x] for x in parameters]
        gradients = [x.grad for x in parameters if x.grad is not None]
        averages, squares, steps = ([x[name] for x in states] for name in ("exp_avg", "exp_avg_sq", "step"))
        beta1, beta2 = settings.pop("betas")
        settings |= {"beta1": beta1, "beta2": beta2, "amsgrad": False, "maximize": False}
        settings |= {"found_inf": is_skipped, "fused": True}
        adamw(parameters, gradients, averages, squares, [], steps, **settings)


Optimizer = FusedAdamW | torch.optim.Optimizer


def step_if(optimizer: Optimizer, is_finite: Tensor) -> None:
    """Update the parameters, or leave them as they are; with FusedAdamW the host does not wait to know."""
    if isinstance(optimizer, FusedAdamW):
        optimizer.step(is_skipped=is_finite.logical_not().float())
    elif is_finite:
        optimizer.step()


def new_optimizer(masters: Mapping[str, nn.Parameter], learn: LearnConfig) -> Optimizer:
    groups = _groups(masters.values())
    settings: dict[str, Any] = {"lr": learn.learning_rate, "betas": learn.betas}
    settings |= {"eps": learn.adam_epsilon, "weight_decay": learn.weight_decay}
    if learn.optim == "adamw":
        return FusedAdamW(groups, **settings)
    try:
        from bitsandbytes.optim.adamw import AdamW8bit
    except ImportError:
        raise UserError("learn.optim = adamw_8bit needs bitsandbytes: pip install bitsandbytes") from None
    return AdamW8bit(groups, **settings)


def _groups(masters: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
    """Return AdamW's groups: norms (of one dimension) are not decayed, as in transformers' Trainer."""
    matrices, norms = [], []
    for master in masters:
        (matrices if master.dim() > 1 else norms).append(master)
    groups: list[dict[str, Any]] = [{"params": matrices}]
    return [*groups, {"params": norms, "weight_decay": 0.0}] if norms else groups


def state_of(optimizer: Optimizer, masters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Return `<master>.<moment>` for everything the optimizer keeps; empty before the first update."""
    return {
        f"{name}.{moment}": _tensor(moment, value)
        for name, master in masters.items()
        if master in optimizer.state
        for moment, value in optimizer.state[master].items()
    }


def _tensor(moment: str, value: Tensor | int) -> Tensor:
    """Copy shared tensors: bitsandbytes has one qmap for all masters, safetensors stores no tensor twice."""
    if isinstance(value, int):
        return torch.tensor(value)
    return value.clone() if moment.startswith("qmap") else value


def load_state(
    optimizer: Optimizer, masters: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]
) -> None:
    """Restore what `state_of` returned; an int64 without dimensions becomes a plain int."""
    optimizer.state.clear()
    for full_name, tensor in tensors.items():
        name, _, moment = full_name.rpartition(".")
        is_int = tensor.dim() == 0 and tensor.dtype == torch.int64
        value = int(tensor) if is_int else tensor.to(masters[name].device, copy=True)
        optimizer.state[masters[name]][moment] = value
