"""Adapters of experts as PEFT names and shapes them, with target_parameters.

    the decoder   lora_A [E or 1, R, K]    lora_B [E or 1, N, R]       1: shared by all experts
    PEFT          lora_A [R E, K], viewed (E, R, K)    lora_B [N, R E], viewed (N, R, E)

PEFT has one adapter for each expert, so a shared A or B is written once for each, which is exact, and read
back as shared if all are equal. PEFT wraps a module once for each parameter: gate_up_proj, the first one, is
`experts.base_layer`, down_proj `experts`. The ranks of experts are in rank_pattern, since r is the linears'.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from qerl.errors import UserError
from qerl.models.architecture import Architecture
from qerl.models.peft.peft_selection import pattern_value

_PLACES = {"gate_up_proj": "base_layer.", "down_proj": ""}
_EXPERTS = "mlp.experts."


def expert_parameters(a: Architecture | None) -> list[str]:
    """Return the names of the experts' parameters in transformers, by the last parts."""
    return [f"{_block(a)}.experts.{name}" for name in _PLACES]


def to_peft(a: Architecture | None, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return masters with those of experts as PEFT has them."""
    result = dict(tensors)
    for at, name in _stacks(tensors):
        keys = [f"{at}{_EXPERTS}{name}.lora_{side}.weight" for side in "AB"]
        if not all(key in result for key in keys):
            continue
        a_ERK, b_ENR = (result.pop(key).detach() for key in keys)
        num = max(len(a_ERK), len(b_ENR))
        a_ERK, b_ENR = a_ERK.expand(num, -1, -1), b_ENR.expand(num, -1, -1)
        target = f"{at}{_block(a)}.experts.{_PLACES[name]}lora_"
        result[f"{target}A.weight"] = a_ERK.flatten(0, 1).contiguous()
        result[f"{target}B.weight"] = b_ENR.permute(1, 2, 0).flatten(1).contiguous()
    return result


def from_peft(
    a: Architecture | None, tensors: Mapping[str, Tensor], masters: Iterable[str]
) -> dict[str, Tensor]:
    """Invert to_peft: return A and B of each expert; tensors with the decoder's own names stay as they are.
    masters: the names of all masters of the decoder."""
    result = dict(tensors)
    num = 0 if a is None or a.mixture is None else a.mixture.num_experts
    for at, name in _stacks(masters):
        target = f"{at}{_block(a)}.experts.{_PLACES[name]}lora_"
        keys = [f"{target}{side}.weight" for side in "AB"]
        if not num or not all(key in result for key in keys):
            continue
        a_SK, b_NS = (result.pop(key) for key in keys)
        if a_SK.dim() != 2 or b_NS.dim() != 2 or len(a_SK) % num or b_NS.shape[1] != len(a_SK):
            shapes = f"{tuple(a_SK.shape)} and {tuple(b_NS.shape)}"
            columns = f"one column for each row of lora_A, {num} times the rank"
            raise UserError(f"{keys[1]} must have {columns}, got shapes {shapes}")
        stack = f"{at}{_EXPERTS}{name}.lora_"
        result[f"{stack}A.weight"] = a_SK.unflatten(0, (num, -1))
        result[f"{stack}B.weight"] = b_NS.unflatten(1, (-1, num)).permute(2, 0, 1)
    return result


def shared(name: str, tensor: Tensor, num: int) -> Tensor:
    """Return the tensor; if num is 1, the first of its equal parts. Raise UserError if they differ."""
    if tensor.dim() != 3 or num != 1 or len(tensor) == 1:
        return tensor
    if not torch.equal(tensor, tensor[:1].expand_as(tensor)):
        raise UserError(f"{name} differs from expert to expert: set adapter.experts per_expert")
    return tensor[:1]


def experts_of_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields experts and expert_rank of an AdapterConfig from adapter_config.json. Raise UserError
    if other parameters than all experts' are targeted."""
    targets = settings.get("target_parameters") or []
    if not targets:
        return {}
    if sorted(str(each).rpartition(".experts.")[2] for each in targets) != sorted(_PLACES):
        raise UserError(f"target_parameters must be the experts' {', '.join(_PLACES)}, got {targets!r}")
    patterns, rank = settings.get("rank_pattern") or {}, settings.get("r")
    ranks = {pattern_value(patterns, str(each), rank) for each in targets}
    alphas = [pattern_value(settings.get("alpha_pattern") or {}, str(each), None) for each in targets]
    expert_rank = next(iter(ranks))
    if len(ranks) != 1 or not isinstance(expert_rank, int) or any(each is not None for each in alphas):
        raise UserError(f"the experts' parameters must have one rank, and lora_alpha; got {patterns!r}")
    if settings.get("use_rslora") and expert_rank != rank:
        raise UserError(f"use_rslora needs one rank, got {rank} and {expert_rank} in target_parameters")
    return {"experts": "per_expert", "expert_rank": expert_rank}


def _block(a: Architecture | None) -> str:
    is_granite = a is not None and a.mixture is not None and a.mixture.stored == "stacked"
    return "block_sparse_moe" if is_granite else "mlp"


def _stacks(names: Iterable[str]) -> list[tuple[str, str]]:
    """Return (the layer's name with a dot, gate_up_proj or down_proj) of each stack with an adapter."""
    endings = {part: f"{_EXPERTS}{part}.lora_A.weight" for part in _PLACES}
    stacks = (
        (name.removesuffix(ending), part)
        for name in names
        for part, ending in endings.items()
        if name.endswith(f".{ending}")
    )
    return list(dict.fromkeys(stacks))
