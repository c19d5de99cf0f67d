"""Read the folder of a PEFT LoRA adapter that training can continue from."""

from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from qerl.config import AdapterConfig
from qerl.errors import UserError, did_you_mean_folder, naming
from qerl.models.checkpoint.model_folder import read_json
from qerl.models.peft.peft_experts import experts_of_settings, without_experts
from qerl.models.peft.peft_names import check_patterns, decoder_targets

ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "use_dora": (False, None),
    "use_rslora": (False, None),
    "bias": ("none", None),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": ([], None),
    "trainable_token_indices": ([], None),
    # others, such as pissa, change the model's weights
    "init_lora_weights": (True, False, "gaussian", None),
}
"""Supported values of adapter_config.json by key; the first is PEFT's default."""


def read_adapter(path: str, config: AdapterConfig) -> dict[str, Tensor]:
    """Return the masters by PEFT's names, for `load_adapter`, which checks names and shapes. Raise UserError
    if the adapter does not match the config."""
    folder = Path(path).expanduser()
    settings = _read_settings(folder)
    for key, option, value in (("r", "rank", config.rank), ("lora_alpha", "alpha", config.alpha)):
        if settings.get(key) != value:
            raise UserError(f"{folder}: {key} is {settings.get(key)!r}, adapter.{option} is {value!r}")
    targets, expected = decoder_targets(settings), sorted(set(config.target_modules))
    if targets is not None and targets != expected:
        raise UserError(f"{folder}: targets {targets}, adapter.target_modules are {expected}")
    _check_experts(folder, settings, config)
    try:
        return load_file(folder / ADAPTER)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder / ADAPTER}: cannot be read: {error}") from error


def _check_experts(folder: Path, settings: dict[str, Any], config: AdapterConfig) -> None:
    rank = experts_of_settings(settings).get("expert_rank")
    needed = None if config.experts == "none" else config.expert_rank
    if rank != needed:
        needs = f"adapter.experts {config.experts} needs {needed}"
        raise UserError(f"{folder}: the adapters of experts have rank {rank}, {needs}")


def adapter_config(path: str) -> AdapterConfig:
    """Return an AdapterConfig that continues from this folder: its rank, alpha and target modules."""
    folder = Path(path).expanduser()
    settings = _read_settings(folder)
    rank, alpha, targets = settings.get("r"), settings.get("lora_alpha"), decoder_targets(settings)
    if not isinstance(rank, int) or not isinstance(alpha, int | float) or not abs(alpha) < 1e9:
        raise UserError(f"{folder}: r and lora_alpha must be numbers, got {rank!r} and {alpha!r}")
    if targets is None:
        named = settings.get("target_modules")
        raise UserError(
            f"{folder}: target_modules must be a list of names, got {named!r}; see adapter.target_modules"
        )
    experts = experts_of_settings(settings)
    names = tuple(targets)
    return AdapterConfig(rank=rank, alpha=float(alpha), target_modules=names, init_from=path, **experts)


def _read_settings(folder: Path) -> dict[str, Any]:
    """Read adapter_config.json; raise UserError if it is not plain LoRA."""
    if not folder.is_dir():
        raise UserError(
            f"{folder}: no such folder; give the folder of an adapter or a run" + did_you_mean_folder(folder)
        )
    if not (folder / ADAPTER_CONFIG).is_file():
        raise UserError(f"{folder}: is not a PEFT adapter: {ADAPTER_CONFIG} is missing")
    if not (folder / ADAPTER).is_file():
        raise UserError(f"{folder}: has no {ADAPTER} (pickled adapters are never loaded)")
    settings = read_json(folder / ADAPTER_CONFIG)
    for key, allowed in _SUPPORTED.items():
        if settings.get(key, allowed[0]) not in allowed:
            reason = f"only plain LoRA is supported, {allowed[0]!r}"
            raise UserError(f"{folder}: {key} is {settings[key]!r}; {reason}")
    with naming(folder):
        experts_of_settings(settings)
        check_patterns(without_experts(settings))
    return settings
