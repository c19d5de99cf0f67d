"""Read a checkpoint's tensors in the order and form in which transformers' model has them, one at a time.

Names and forms are those of transformers' own loading (its conversion_mapping.py): renamed keys, experts that
the checkpoint stores one by one and the model as one tensor. A tensor is read when its parameter is filled:
the largest parameter of the model is all that is in memory besides what the caller keeps.
"""

import copy
import functools
import re
from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from qerl.errors import UserError
from qerl.models.checkpoint.source import Checkpoint
from qerl.models.checkpoint.state_dict import read_float

_COMPUTED = re.compile(r"rotary_emb\.inv_freq$")  # of old checkpoints; transformers computes it


class StreamedWeights:
    """A checkpoint's tensors by the names of the model's parameters and buffers."""

    def __init__(self, model: PreTrainedModel, folder: Checkpoint):
        """model: on the meta device."""
        self._model, self._folder = model, folder
        self.unused: list[str] = []
        """Tensors of the checkpoint that the model has no place for."""
        self.names: dict[str, Tensor] = model.state_dict()
        """The model's tensors, on the meta device."""
        self._sources = self._plan()

    def skip(self, names: set[str]) -> None:
        """Leave out these tensors of the model."""
        self._sources = {name: source for name, source in self._sources.items() if name not in names}

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of every parameter and buffer that the checkpoint has."""
        for name, source in self._sources.items():
            converted = source.convert(name, model=self._model, config=self._model.config)
            for target, tensors in converted.items():
                yield target, tensors[0] if isinstance(tensors, list) else tensors

    def _plan(self) -> dict[str, WeightRenaming | WeightConverter]:
        """Return what makes each tensor of the model; the tensors are read when it converts."""
        model, rules = self._model, get_model_conversion_mapping(self._model)
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
        places, prefix = self.names, model.base_model_prefix
        ignored = [re.compile(each) for each in model._keys_to_ignore_on_load_unexpected or ()]
        sources: dict[str, WeightRenaming | WeightConverter] = {}
        for key in sorted(self._folder.shapes, key=dot_natural_key):
            name, pattern = rename_source_key(key, renamings, converters, prefix, places)
            if name not in places and key in places:
                name, pattern = key, None
            if name not in places:
                if not any(each.search(name) for each in (*ignored, _COMPUTED)):
                    self.unused.append(key)
                continue
            rule = WeightRenaming(key, name) if pattern is None else copy.deepcopy(by_pattern[pattern])
            source = sources.setdefault(name, rule)
            read = functools.partial(self._read, key, places[name].is_floating_point())
            source.add_tensor(name, key, key if pattern is None else pattern, read)  # type: ignore[arg-type]
        return sources

    def _read(self, key: str, is_float: bool) -> Tensor:
        return read_float(self._folder, key) if is_float else self._folder.read(key)


def fill(model: PreTrainedModel, name: str, tensor: Tensor, device: torch.device, dtype: torch.dtype) -> None:
    """Put a tensor into the place of a parameter or buffer that is on the meta device; a float gets this
    dtype."""
    parent, _, last = name.rpartition(".")
    module = model.get_submodule(parent)
    place = getattr(module, last)
    if tensor.shape != place.shape:
        raise UserError(f"{name} is {list(tensor.shape)}, must be {list(place.shape)}")
    tensor = tensor.to(device, dtype if tensor.is_floating_point() else tensor.dtype)
    if last in module._parameters:
        module._parameters[last] = torch.nn.Parameter(tensor, requires_grad=False)
    else:
        module._buffers[last] = tensor


@torch.no_grad()
def compute_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Compute the buffers that no checkpoint has, such as rotary frequencies, by the model's own
    initialization; its parameters, which are on the meta device, stay there."""
    for parameter in model.parameters():
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]
    for name, buffer in list(model.named_buffers()):
        module, last = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
        if last in module._non_persistent_buffers_set:
            module._buffers[last] = torch.zeros_like(buffer, device=device)
        else:
            buffer._is_hf_initialized = True  # type: ignore[attr-defined]
    model.initialize_weights()
