"""AdamW over the fp32 masters, with moments in fp32 or 8 bits; its state as named tensors.

    adamw        torch's, fused:   step, exp_avg, exp_avg_sq                          8 bytes per weight
    adamw_8bit    bitsandbytes':    step, state1, state2, absmax1, absmax2, qmap1, qmap2   2 + 1/32 bytes

bitsandbytes keeps the moments of tensors under 4,096 elements in fp32; it counts steps in a plain int.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from qerl.config import LearnConfig
from qerl.errors import UserError


def new_optimizer(masters: Mapping[str, nn.Parameter], learn: LearnConfig) -> torch.optim.Optimizer:
    parameters = list(masters.values())
    settings: dict[str, Any] = {"lr": learn.learning_rate, "betas": learn.betas}
    settings |= {"eps": learn.adam_epsilon, "weight_decay": learn.weight_decay}
    if learn.optim == "adamw":
        return torch.optim.AdamW(parameters, **settings, fused=True)
    try:
        from bitsandbytes.optim.adamw import AdamW8bit
    except ImportError:
        raise UserError("learn.optim = adamw_8bit needs bitsandbytes: pip install bitsandbytes") from None
    return AdamW8bit(parameters, **settings)


def state_of(optimizer: torch.optim.Optimizer, masters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
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
    optimizer: torch.optim.Optimizer, masters: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]
) -> None:
    """Restore what `state_of` returned; an int64 without dimensions becomes a plain int."""
    optimizer.state.clear()
    for full_name, tensor in tensors.items():
        name, _, moment = full_name.rpartition(".")
        is_int = tensor.dim() == 0 and tensor.dtype == torch.int64
        value = int(tensor) if is_int else tensor.to(masters[name].device, copy=True)
        optimizer.state[masters[name]][moment] = value
