"""Reads a PEFT adapter's folder, where it is a LoRA that this package's own adapter can go on from."""

from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from qerl.config import AdapterConfig
from qerl.errors import UserError
from qerl.models.safetensors_file import read_json

ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "use_dora": (False, None),
    "use_rslora": (False, None),
    "bias": ("none", None),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": ([], None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "target_parameters": ([], None),
    "trainable_token_indices": ([], None),
    # others, such as pissa, may take a part out of the model's weights
    "init_lora_weights": (True, False, "gaussian", None),
}
"""What a key of adapter_config.json may say; where it is missing, PEFT's default is the first."""


def read_adapter(path: str, config: AdapterConfig) -> dict[str, Tensor]:
    """The masters by PEFT's names, as `load_adapter` takes them. UserError where they are none of an adapter
    of this config; names and shapes are for `load_adapter` to check, which knows the model."""
    folder = Path(path).expanduser()
    if config.kind != "lora":
        raise UserError(f"adapter.init_from is {path}, which needs adapter.kind lora; it is {config.kind}")
    said = _said(folder)
    for key, option, value in (("r", "rank", config.rank), ("lora_alpha", "alpha", config.alpha)):
        if said.get(key) != value:
            raise UserError(f"{folder}: {key} is {said.get(key)!r}, adapter.{option} is {value!r}")
    named = said.get("target_modules")
    if isinstance(named, list) and (targets := sorted(set(map(_last, named)))) != sorted(
        set(config.target_modules)
    ):
        raise UserError(
            f"{folder}: targets {targets}, adapter.target_modules are {sorted(set(config.target_modules))}"
        )
    try:
        return load_file(folder / ADAPTER)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder / ADAPTER}: cannot be read: {error}") from error


def adapter_config(path: str) -> AdapterConfig:
    """What a run needs to go on from this folder: its rank, alpha and targets."""
    folder = Path(path).expanduser()
    said = _said(folder)
    rank, alpha, named = said.get("r"), said.get("lora_alpha"), said.get("target_modules")
    if not isinstance(rank, int) or not isinstance(alpha, int | float) or not abs(alpha) < 1e9:
        raise UserError(f"{folder}: r and lora_alpha must be numbers, got {rank!r} and {alpha!r}")
    if not isinstance(named, list) or not named:
        raise UserError(
            f"{folder}: target_modules must be a list of names, got {named!r}; see adapter.target_modules"
        )
    return AdapterConfig(
        rank=rank, alpha=float(alpha), target_modules=tuple(sorted(set(map(_last, named)))), init_from=path
    )


def _said(folder: Path) -> dict[str, Any]:
    """Its adapter_config.json, that of a plain LoRA."""
    if not (folder / ADAPTER_CONFIG).is_file():
        raise UserError(f"{folder}: is no PEFT adapter's folder, it has no {ADAPTER_CONFIG}")
    if not (folder / ADAPTER).is_file():
        raise UserError(f"{folder}: has no {ADAPTER} (pickled adapters are never loaded)")
    said = read_json(folder / ADAPTER_CONFIG)
    for key, allowed in _PLAIN.items():
        if said.get(key, allowed[0]) not in allowed:
            raise UserError(f"{folder}: {key} is {said[key]!r}; what is read is plain LoRA, {allowed[0]!r}")
    return said


def _last(name: Any) -> str:
    """model.layers.0.self_attn.q_proj -> q_proj: PEFT takes whole names too."""
    return str(name).rpartition(".")[2]
