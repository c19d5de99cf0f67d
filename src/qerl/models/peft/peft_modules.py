"""Modules that are trained whole, as PEFT describes them: modules_to_save of adapter_config.json.

    adapter.train_norms         input_layernorm, post_attention_layernorm   or as the family calls its norms
    adapter.modules_to_save     embed_tokens, lm_head

PEFT saves every module whose name ends in an entry. In a multimodal model other parts have modules of these
names, so there the entries are full names of the language model's.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from qerl.config import AdapterConfig
from qerl.errors import UserError
from qerl.models.architecture import Architecture

_NORM = re.compile(r"(?:.*\.)?layers\.\d+\.\w*norm")
_TABLES: tuple[Literal["embed_tokens", "lm_head"], ...] = ("embed_tokens", "lm_head")
_SUPPORTED = "only the RMSNorms of every layer, embed_tokens and lm_head can be trained whole"


def modules_to_save(a: Architecture | None, adapter: AdapterConfig) -> list[str] | None:
    """Return the field's value for an adapter of this config; None if nothing is trained whole."""
    if a is None or not adapter.trains_whole:
        return None
    norms = a.norms.names if adapter.train_norms else ()
    if a.part_of is None:
        return [*norms, *adapter.modules_to_save]
    full = [f"language_model.layers.{i}.{name}" for i in range(a.num_layers) for name in norms]
    return full + [x if x == "lm_head" else f"language_model.{x}" for x in adapter.modules_to_save]


def wholes_of_tensors(settings: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return the fields of an AdapterConfig whose file has these tensors of whole modules. Raise UserError
    for others than norms, or than the entries of modules_to_save."""
    entries = settings.get("modules_to_save") or ()
    modules = [name.removesuffix(".weight") for name in names]
    tables = tuple(name for name in _TABLES if any(each.rpartition(".")[2] == name for each in modules))
    norms = [each for each in modules if each.rpartition(".")[2] not in _TABLES]
    if odd := [each for each in norms if not _NORM.fullmatch(each)]:
        raise UserError(f"modules_to_save: the file has {odd[0]}; {_SUPPORTED}")
    if odd := [each for each in entries if not any(name.endswith(each) for name in modules)]:
        raise UserError(f"modules_to_save has {odd[0]!r}, of which the file has no tensor")
    if odd := [name for name in modules if not name.endswith(tuple(entries))]:
        raise UserError(f"modules_to_save is {entries!r}, but the file has {odd[0]}")
    return {"train_norms": bool(norms), "modules_to_save": tables}


def wholes_of_settings(settings: Mapping[str, Any], a: Architecture | None) -> dict[str, Any]:
    """Return the same for a LoraConfig of a model; raise UserError for other modules than all its norms."""
    entries = settings.get("modules_to_save") or ()
    wanted = [each for each in entries if each not in _TABLES]
    norms = () if a is None else a.norms.names
    if odd := [each for each in wanted if each not in norms] or list(entries if a is None else ()):
        raise UserError(f"modules_to_save has {odd[0]!r}; {_SUPPORTED}")
    if missing := [name for name in norms if name not in wanted and wanted]:
        raise UserError(f"modules_to_save lacks {missing[0]}; {_SUPPORTED}")
    tables = tuple(name for name in _TABLES if name in entries)
    if a is not None and a.tied_head and tables:
        raise UserError(f"modules_to_save has {tables[0]!r}, but the head is tied to the embedding")
    return ({"train_norms": True} if wanted else {}) | ({"modules_to_save": tables} if tables else {})
