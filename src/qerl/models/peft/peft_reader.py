"""Read the folder of a PEFT LoRA adapter that training can continue from.

Which linears have an adapter is read from its tensors, so that every form of target_modules, exclude_modules
and layers_to_transform is taken as it was trained.
"""

import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from qerl.config import AdapterConfig
from qerl.errors import UserError, did_you_mean_folder, naming
from qerl.models.checkpoint.model_folder import read_json
from qerl.models.checkpoint.safetensors_file import load_whole, stored_names
from qerl.models.peft.peft_experts import experts_of_settings
from qerl.models.peft.peft_fields import NO_EFFECT, check_fields
from qerl.models.peft.peft_modules import wholes_of_tensors
from qerl.models.peft.peft_names import PEFT_PREFIX
from qerl.models.peft.peft_selection import (
    Module,
    alpha_factor,
    named_module,
    pattern_value,
    select,
    used_patterns,
)

ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
_DESCRIBES = NO_EFFECT | {"inference_mode", "revision", "eva_config"}
_SAME_BASE = (True, False, "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights; others, such as pissa, change the model's weights."""
_FUSED = {  # of all families: the family of an adapter on the command line is not known
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "input_linear": ("gate_proj", "up_proj"),
    "output_linear": ("down_proj",),
}


def read_adapter(path: str, config: AdapterConfig) -> dict[str, Tensor]:
    """Return the masters by PEFT's names, for `load_adapter`, which checks names and shapes. Raise UserError
    if the adapter does not match the config."""
    folder, stored = Path(path).expanduser(), adapter_config(path)
    for key, option in (("r", "rank"), ("lora_alpha", "alpha")):
        value, expected = getattr(stored, option), getattr(config, option)
        if value != expected:
            raise UserError(f"{folder}: {key} is {value!r}, adapter.{option} is {expected!r}")
    for field in ("rank_pattern", "alpha_pattern", "use_rslora"):
        value, expected = getattr(stored, field), getattr(config, field)
        if value != expected:
            raise UserError(f"{folder}: {field} is {value!r}, adapter.{field} is {expected!r}")
    if stored.train_norms != config.train_norms:
        has = "has" if stored.train_norms else "has no"
        raise UserError(f"{folder}: {has} trained norms, adapter.train_norms is {config.train_norms}")
    tables, expected = list(stored.modules_to_save), sorted(config.modules_to_save)
    if tables != expected:
        raise UserError(f"{folder}: modules_to_save has {tables}, adapter.modules_to_save is {expected}")
    targets, expected = list(stored.target_modules), sorted(set(config.target_modules))
    if targets != expected:
        raise UserError(f"{folder}: targets {targets}, adapter.target_modules are {expected}")
    rank, needed = (None if c.experts == "none" else c.expert_rank for c in (stored, config))
    if rank != needed:
        needs = f"adapter.experts {config.experts} needs {needed}"
        raise UserError(f"{folder}: the adapters of experts have rank {rank}, {needs}")
    try:
        return load_whole(folder / ADAPTER)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder / ADAPTER}: cannot be read: {error}") from error


def adapter_config(path: str) -> AdapterConfig:
    """Return an AdapterConfig that continues from this folder: its rank, alpha, dropout and linears."""
    folder = Path(path).expanduser()
    settings = _read_settings(folder)
    names = tensor_names(folder / ADAPTER)
    modules = linears_of(names)
    with naming(folder):
        check_fields(settings, no_effect=_DESCRIBES, init=_SAME_BASE)
        _check_types(settings)
        targets, is_everywhere = _targets(settings, modules)
        numbers = _numbers(settings, modules)
        alpha = numbers["alpha"]
        experts = experts_of_settings(settings)
        wholes = wholes_of_tensors(settings, [name for name in names if ".lora_" not in name])
        of_experts = settings["lora_alpha"] * alpha_factor(settings, settings["r"])
        if experts and alpha != of_experts:
            raise UserError(f"alpha_pattern gives linears {alpha:g}, target_parameters have {of_experts:g}")
    layers = {m.layer for m in modules if m.layer is not None}
    parts = tuple(sorted({part for each in targets for part in _FUSED.get(each, (each,))}))
    is_partial = len({m.part for m in modules}) * len(layers) > len(set(modules))
    if is_partial and not is_everywhere and not _selects_layers(settings):  # linears differ by layer
        names = {f"{m.names[0].rpartition('.')[0]}.{part}" for m in modules for part in _parts(m)}
        parts, is_everywhere = tuple(sorted(names)), True
    return AdapterConfig(
        **numbers,
        dropout=float(settings.get("lora_dropout") or 0.0),
        target_modules=parts,
        layers_to_transform=None if is_everywhere else tuple(sorted(layers)),
        init_from=path,
        **experts,
        **wholes,
    )


def _read_settings(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise UserError(
            f"{folder}: no such folder; give the folder of an adapter or a run" + did_you_mean_folder(folder)
        )
    if not (folder / ADAPTER_CONFIG).is_file():
        raise UserError(f"{folder}: is not a PEFT adapter: {ADAPTER_CONFIG} is missing")
    if not (folder / ADAPTER).is_file():
        raise UserError(f"{folder}: has no {ADAPTER} (pickled adapters are never loaded)")
    return read_json(folder / ADAPTER_CONFIG)


def tensor_names(file: Path) -> list[str]:
    """Return the names of the file's tensors in transformers' model."""
    return [name.removeprefix(PEFT_PREFIX) for name in stored_names(file)]


def linears_of(names: Iterable[str]) -> list[Module]:
    """Return the linears that have an A."""
    ending = ".lora_A.weight"
    modules = [name.removesuffix(ending) for name in names if name.endswith(ending)]
    return [named_module(name) for name in modules if ".experts" not in name]


def _check_types(settings: dict[str, Any]) -> None:
    def is_number(value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e9

    rank, alpha, dropout = settings.get("r"), settings.get("lora_alpha"), settings.get("lora_dropout") or 0.0
    if not is_number(rank) or not isinstance(rank, int) or not is_number(alpha):
        raise UserError(f"r and lora_alpha must be numbers, got {rank!r} and {alpha!r}")
    if not is_number(dropout):
        raise UserError(f"lora_dropout must be a number, got {dropout!r}")
    for field in ("rank_pattern", "alpha_pattern"):
        patterns = settings.get(field) or {}
        if not isinstance(patterns, dict) or not all(map(is_number, patterns.values())):
            raise UserError(f"{field} must be an object of numbers, got {patterns!r}")
        if odd := [key for key in patterns if not re.fullmatch(r"[\w.^$\\-]+", key)]:
            raise UserError(f"{field} must name linears, got the pattern {odd[0]!r}")  # may take forever
    lists = "target_parameters", "modules_to_save"
    for field in ("target_modules", "exclude_modules", "layers_pattern", *lists):
        value = settings.get(field) or []
        is_list = isinstance(value, list) and all(isinstance(each, str) for each in value)
        if not is_list and not (isinstance(value, str) and field not in lists):
            raise UserError(f"{field} must be a list of names, got {value!r}")
    if odd := [each for each in _listed(settings.get("layers_pattern")) if not re.fullmatch(r"[\w.]*", each)]:
        raise UserError(f"layers_pattern must name a list of layers, got the pattern {odd[0]!r}")
    layers = settings.get("layers_to_transform")
    if not isinstance(layers, list | int | None) or any(type(n) is not int for n in _listed(layers)):
        raise UserError(f"layers_to_transform must be a list of numbers of layers, got {layers!r}")


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _targets(settings: dict[str, Any], modules: list[Module]) -> tuple[set[str], bool]:
    """Return the linears with an adapter, by the last part of their names, with those of target_modules that
    have no tensor; and True if the fields say nothing of layers. Raise UserError if target_modules is a list
    that does not select a tensor's linear."""
    targets, opening = settings.get("target_modules"), r".*\.language_model\..*\.("
    if isinstance(targets, str) and targets.startswith(opening) and targets.endswith(")"):
        targets = targets.removeprefix(opening).removesuffix(")").split("|")  # as peft_names.py writes it
    if not modules:
        raise UserError(f"{ADAPTER} has no adapter of a linear; target_modules are {targets!r}")
    parts, excluded = {m.part for m in modules}, settings.get("exclude_modules")
    if not isinstance(targets, list) or isinstance(excluded, str):
        return parts, False  # a pattern of a stranger may take forever
    selected = set(select({**settings, "target_modules": targets}, modules, ()).modules)
    if odd := [m.names[0] for m in modules if m not in selected]:
        raise UserError(f"target_modules {targets} are not those of the tensors, which have {odd[0]} too")
    layers = any(re.search(r"\d+\.", each) for each in targets) or _listed(
        settings.get("layers_to_transform")
    )
    listed = set() if excluded else {each.rpartition(".")[2] for each in targets}
    return parts | listed, not (layers or excluded)


def _selects_layers(settings: dict[str, Any]) -> bool:
    """True if the linears are all of some names in some layers, of which a hybrid's layers have different
    ones."""
    targets, layers = settings.get("target_modules"), settings.get("layers_to_transform")
    has_names = isinstance(targets, list) and not any("." in each for each in targets)
    return has_names and bool(_listed(layers)) and not settings.get("exclude_modules")


def _parts(module: Module) -> tuple[str, ...]:
    return _FUSED.get(module.part, (module.part,))


def _numbers(settings: dict[str, Any], modules: list[Module]) -> dict[str, Any]:
    """Return rank and alpha of an AdapterConfig, and their patterns if linears differ. Those stored as one
    may have a multiple of both (peft_names.py); raise UserError for other differences of theirs."""
    ranks, alphas = settings.get("rank_pattern") or {}, settings.get("alpha_pattern") or {}
    usual, is_stable = (settings["r"], settings["lora_alpha"]), bool(settings.get("use_rslora"))

    def numbers(module: Module) -> tuple[Any, Any]:
        name = module.names[0]
        return pattern_value(ranks, name, usual[0]), pattern_value(alphas, name, usual[1])

    def is_multiple(module: Module, rank: Any, alpha: Any) -> bool:
        counts, stored = range(1, len(_parts(module)) + 1), numbers(module)
        factors = [(n, math.sqrt(n) if is_stable and n > 1 else n) for n in counts]
        return any(stored[0] == n * rank and math.isclose(stored[1], f * alpha) for n, f in factors)

    alone = next((m for m in modules if len(_parts(m)) == 1), None)
    candidates = [numbers(alone)] if alone is not None else [usual, numbers(modules[0])]
    for rank, alpha in candidates:
        if all(is_multiple(m, rank, alpha) for m in modules):
            return {"rank": rank, "alpha": float(alpha) * alpha_factor(settings, rank)}
    if all(len(_parts(module)) == 1 for module in modules):
        names = [module.names[0] for module in modules]
        return {
            "rank": usual[0],
            "alpha": float(usual[1]),
            "rank_pattern": tuple(used_patterns(ranks, names).items()),
            "alpha_pattern": tuple(
                (key, float(value)) for key, value in used_patterns(alphas, names).items()
            ),
            "use_rslora": is_stable,
        }
    odd = next(m for m in modules if not is_multiple(m, *candidates[0]))
    got = " and ".join(map(repr, numbers(odd)))
    raise UserError(
        f"rank_pattern and alpha_pattern must give the other ranks of linears stored as one, got {got} for"
        f" {odd.names[0]}"
    )
