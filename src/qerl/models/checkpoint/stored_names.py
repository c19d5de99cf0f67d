"""Map the names of a checkpoint's tensors, where its names are not the decoder's.

    the decoder                                    the checkpoint
    model.layers.{i}.self_attn.{q,k,v}_proj        ....self_attn.qkv_proj, rows of q, k and v (StoredLinear)
    model.layers.{i}.mlp.{gate,up}_proj            ....mlp.gate_up_proj, rows of gate and up
    a norm's weight                                weight - Architecture.norm_offset
    model.*, lm_head.weight                        of a multimodal class: model.language_model.* and
                                                   lm_head.weight, or language_model.{model.*,lm_head.weight}

`NamedCheckpoint` shows a checkpoint under the decoder's names, without the tensors of other modalities and of
multi-token prediction (mtp.*).
`stored_tensors` gives tensors the checkpoint's names again. What is written of a multimodal checkpoint is its
language model alone, with the names and the config of that class.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qerl.errors import UserError
from qerl.formats import PackedWeight
from qerl.models.architecture import Architecture
from qerl.models.checkpoint.layouts.folder import QuantizedFolder
from qerl.models.checkpoint.layouts.layout import Layout, StoredWeight
from qerl.models.checkpoint.safetensors_file import SafetensorsFolder
from qerl.models.families import from_hf_config, language_part
from qerl.models.layer_spec import kinds_of_linears

_LANGUAGE_PREFIXES = (  # of the decoder and of the head, as transformers 5 and 4 name them
    (("model.language_model.", "model."), ("lm_head.", "lm_head.")),
    (("language_model.model.", "model."), ("language_model.lm_head.", "lm_head.")),
)
_MULTI_TOKEN = "mtp."  # layers that predict several tokens at once
_Folder = SafetensorsFolder | QuantizedFolder
_BY_ROW = "weight", "bias", "weight_packed", "weight_scale"
"""Parts of a stored linear that have a row, or an element, for each output; its linears share the others."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    """Rows of a stored tensor; None: all of it."""

    name: str
    rows: slice | None = None
    offset: float = 0.0


class NamedCheckpoint:
    """A Checkpoint with the decoder's names."""

    def __init__(self, folder: _Folder, architecture: Architecture):
        self.path: Path = folder.path
        self.config: dict[str, Any] = folder.config
        self.layout: Layout | None = folder.layout if isinstance(folder, QuantizedFolder) else None
        self._folder = folder
        self.num_skipped = 0
        """Number of tensors of other modalities, and of layers that predict several tokens at once."""
        self._places: dict[str, _Place] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        prefixes = _language_prefixes(folder, architecture)
        for name in folder.shapes:
            if (ours := _renamed(name, prefixes)) is None:
                self.num_skipped += 1
            else:
                self._add(name, ours, architecture)

    def _add(self, stored: str, ours: str, architecture: Architecture) -> None:
        shape = self._folder.shapes[stored]
        for name, rows in _parts(ours, shape, architecture):
            offset = architecture.norm_offset if is_shifted_norm(name) else 0.0
            self._places[name] = _Place(stored, rows, offset)
            self.shapes[name] = shape if rows is None else (rows.stop - rows.start, *shape[1:])

    def read(self, name: str) -> Tensor:
        place = self._places[name]
        if place.rows is not None:
            return self._folder.read_rows(place.name, place.rows)
        tensor = self._folder.read(place.name)
        return tensor.float() + place.offset if place.offset else tensor

    def read_rows(self, name: str, rows: slice) -> Tensor:
        place = self._places[name]
        start = 0 if place.rows is None else place.rows.start
        some = self._folder.read_rows(place.name, slice(start + rows.start, start + rows.stop))
        return some.float() + place.offset if place.offset else some

    def packed(self, module: str) -> PackedWeight | None:
        """Return a linear's weight with the stored codes; None if they fit none of our formats."""
        place = self._places.get(f"{module}.weight")
        if place is None or not isinstance(self._folder, QuantizedFolder):
            return None
        return self._folder.packed(place.name.removesuffix(".weight"), place.rows)

    def stored(self, module: str) -> StoredWeight | None:
        """Return how a linear's weight is quantized in the checkpoint; None: it is not."""
        place = self._places.get(f"{module}.weight")
        if place is None or self.layout is None:
            return None
        return self.layout.weights.get(place.name.removesuffix(".weight"))


def named(folder: _Folder) -> _Folder | NamedCheckpoint:
    """Return the folder under the decoder's names. A folder whose architecture is not supported stays as it
    is: its loader raises the error."""
    try:
        architecture = from_hf_config(folder.config)
    except UserError:
        return folder
    is_ours = architecture.part_of is None and not architecture.stored_linears
    return folder if is_ours and not architecture.norm_offset else NamedCheckpoint(folder, architecture)


def _language_prefixes(folder: _Folder, architecture: Architecture) -> tuple[tuple[str, str], ...] | None:
    """Return (stored prefix, the decoder's) of the language part; None: every tensor is of it."""
    if architecture.part_of is None:
        return None
    for prefixes in _LANGUAGE_PREFIXES:
        if any(name.startswith(prefixes[0][0]) for name in folder.shapes):
            return prefixes
    raise UserError(f"{folder.path}: has no tensor of a language model: none begins with language_model")


def _renamed(name: str, prefixes: tuple[tuple[str, str], ...] | None) -> str | None:
    """Return the name in the language model; None if the tensor is not part of it."""
    if name.startswith(_MULTI_TOKEN):
        return None
    if prefixes is None:
        return name
    names = (ours + name.removeprefix(stored) for stored, ours in prefixes if name.startswith(stored))
    return next(names, None)


def is_shifted_norm(name: str) -> bool:
    """Return True if norm_offset is added to this norm; that of Gated DeltaNet stores its weight."""
    return name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight")


def _parts(name: str, shape: tuple[int, ...], architecture: Architecture) -> list[tuple[str, slice | None]]:
    """Return the decoder's tensors that a stored one holds, and their rows of it."""
    module, _, suffix = name.rpartition(".")
    for stored in architecture.stored_linears:
        if not module.endswith(f".{stored.name}"):
            continue
        at = module.removesuffix(stored.name)
        names = [f"{at}{part}.{suffix}" for part in stored.holds]
        if len(names) == 1:
            return [(names[0], None)]
        widths = {x.name: x.out_width for x in kinds_of_linears(architecture)}
        ends = [sum(widths[part] for part in stored.holds[: i + 1]) for i in range(len(stored.holds))]
        if suffix not in _BY_ROW or shape[:1] != (ends[-1],):
            return [(each, None) for each in names]  # loading checks their shapes
        return [(each, slice(start, end)) for each, start, end in zip(names, [0, *ends], ends, strict=False)]
    return [(name, None)]


def stored_tensors(
    architecture: Architecture, tensors: Iterable[tuple[str, Tensor]], norm_dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors that have the decoder's names as the checkpoint's class has them. Parts of one stored
    tensor follow each other, tensors of other kinds may be between them."""
    stored_of = {part: stored for stored in architecture.stored_linears for part in stored.holds}
    waiting: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors:
        module, _, suffix = name.rpartition(".")
        at, short = _split(module)
        if short not in stored_of:
            if architecture.norm_offset and is_shifted_norm(name):
                tensor = (tensor.float() - architecture.norm_offset).to(norm_dtype or tensor.dtype)
            yield name, tensor
            continue
        stored = stored_of[short]
        whole = f"{at}{stored.name}.{suffix}"
        parts = waiting.setdefault(whole, {})
        parts[short] = tensor
        if len(parts) == len(stored.holds):
            yield whole, _joined([parts[part] for part in stored.holds], suffix)
            del waiting[whole]
    assert not waiting, f"only a part was written of {list(waiting)}"


def stored_linears(architecture: Architecture, linears: Iterable[str]) -> list[str]:
    """Return the names that the checkpoint's class gives to these linears, sorted."""
    stored_of = {part: stored.name for stored in architecture.stored_linears for part in stored.holds}
    return sorted({at + stored_of.get(short, short) for at, short in map(_split, linears)})


def _joined(parts: list[Tensor], suffix: str) -> Tensor:
    if suffix in _BY_ROW:
        return torch.cat([part.view(torch.uint8) for part in parts]).view(parts[0].dtype)
    assert all(torch.equal(part, parts[0]) for part in parts), f"linears stored as one differ in {suffix}"
    return parts[0]


def _split(module: str) -> tuple[str, str]:
    """model.layers.0.self_attn.q_proj -> ("model.layers.0.", "self_attn.q_proj")"""
    names = module.split(".")
    return ".".join((*names[:3], "")), ".".join(names[3:])


def language_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config of the language model alone, as its class has it."""
    _, language, part_of = language_part(config)
    if part_of is None:
        return config
    dtype = {key: config[key] for key in ("dtype", "torch_dtype") if key in config}
    quantization = {key: value for key, value in config.items() if key == "quantization_config"}
    return {key: value for key, value in (dtype | quantization | language).items() if value is not None}
