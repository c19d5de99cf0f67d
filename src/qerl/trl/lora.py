"""Translate a peft.LoraConfig to AdapterConfig."""

import dataclasses
import math
from typing import Any

from qerl.config import AdapterConfig
from qerl.errors import require

_FIXED = {
    "bias": "none",
    "use_dora": False,
    "modules_to_save": None,
    "exclude_modules": None,
    "layers_to_transform": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "init_lora_weights": True,
}
_PEFT_TARGETS = ("q_proj", "v_proj")
"""PEFT's for Llama, Qwen, Mistral and their kind, where target_modules is None."""


def adapter_config(peft_config: Any, base: AdapterConfig) -> AdapterConfig:
    """Options that are not supported must be at PEFT's default. rsLoRA's alpha / sqrt(r) is alpha' / r."""
    if peft_config is None:
        return base
    for name, default in _FIXED.items():
        value = getattr(peft_config, name, default) or default
        require(value == default, f"peft_config.{name} must be {default!r}, got {value!r}")
    targets: Any = peft_config.target_modules
    if targets == "all-linear":
        targets = AdapterConfig().target_modules
    require(
        targets is None or not isinstance(targets, str),
        f'peft_config.target_modules must be "all-linear" or a list of names, got the pattern {targets!r}',
    )
    names = {str(name).rpartition(".")[2] for name in targets or _PEFT_TARGETS}
    factor = math.sqrt(peft_config.r) if getattr(peft_config, "use_rslora", False) else 1.0
    return dataclasses.replace(
        base,
        rank=peft_config.r,
        alpha=peft_config.lora_alpha * factor,
        dropout=float(peft_config.lora_dropout),
        target_modules=tuple(sorted(names)),
    )
