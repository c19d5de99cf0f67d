"""Translate a peft.LoraConfig to AdapterConfig.

Fields at PEFT's default are dropped; the others are read, named in a warning if they change nothing, or
refused (models/peft/peft_fields.py). The names of the model's linears are those of transformers.
"""

import dataclasses
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from qerl.config import AdapterConfig, ModelConfig
from qerl.errors import UserError, require
from qerl.models.architecture import Architecture
from qerl.models.checkpoint.source import locate
from qerl.models.checkpoint.state_dict import architecture_of
from qerl.models.peft.peft_experts import experts_of_settings
from qerl.models.peft.peft_fields import NO_EFFECT, check_fields
from qerl.models.peft.peft_modules import wholes_of_settings
from qerl.models.peft.peft_selection import (
    Module,
    modules_of,
    named_module,
    parts_and_layers,
    rank_and_alpha,
    select,
)
from qerl.models.transformers_backend.backend import backend_of

_PEFT_TARGETS = ("q_proj", "v_proj")
"""PEFT's for Llama, Qwen, Mistral and their kind, where target_modules is None."""
_logger = logging.getLogger(__name__)


def adapter_config(peft_config: Any, base: AdapterConfig, model: ModelConfig) -> AdapterConfig:
    """Raise UserError, by its name, for a field that cannot be honoured. rsLoRA's alpha / sqrt(r) is
    alpha' / r."""
    if peft_config is None:
        return base
    is_config = dataclasses.is_dataclass(peft_config) and hasattr(peft_config, "lora_alpha")
    require(is_config, f"peft_config must be a peft.LoraConfig, got a {type(peft_config).__name__}")
    changed = _changed(peft_config)
    settings = {name: getattr(peft_config, name) for name in ("r", "lora_alpha", "lora_dropout")} | changed
    with _named():
        check_fields(changed)
        experts = experts_of_settings(settings)
        targets = settings.setdefault("target_modules", None if experts else _PEFT_TARGETS)
        require(bool(targets), "target_modules must name at least one linear, got none")
        modules, others, architecture = _modules(model)
        selected, notices = select(settings, modules, others)
        numbers, unused = rank_and_alpha(settings, selected)
        fields = numbers | parts_and_layers(selected, modules) | experts
        fields |= wholes_of_settings(settings, architecture)
    for notice in notices + unused:
        _logger.warning("peft_config.%s", notice)
    if describing := sorted(changed.keys() & NO_EFFECT):
        _logger.warning("peft_config: no effect here: %s", ", ".join(describing))
    return dataclasses.replace(base, dropout=float(settings["lora_dropout"]), **fields)


def _changed(peft_config: Any) -> dict[str, Any]:
    """Return the fields that are not at PEFT's default."""
    changed = {}
    for field in dataclasses.fields(peft_config):
        make = field.default_factory
        default = field.default if make is dataclasses.MISSING else make()
        if (value := getattr(peft_config, field.name)) != default:
            changed[field.name] = value
    return {name: value for name, value in changed.items() if name != "peft_version"}


def _modules(model: ModelConfig) -> tuple[list[Module], list[str], Architecture | None]:
    """Return the linears that may have an adapter, the names of other modules that PEFT could adapt, and the
    architecture; None if transformers' code runs the model."""
    source = locate(model.path)
    if backend_of(model) == "qerl":
        architecture = architecture_of(source.open())
        return *modules_of(architecture), architecture
    from qerl.models.transformers_backend.transformers_loader import linear_names  # takes seconds to import

    return [named_module(name) for name in linear_names(source)], ["lm_head"], None


@contextmanager
def _named() -> Iterator[None]:
    """Put the argument's name before the field's in an error."""
    try:
        yield
    except UserError as error:
        raise UserError(f"peft_config.{error}") from error
