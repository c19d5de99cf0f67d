"""Write a decoder whose linears are in NVFP4 as a compressed-tensors checkpoint."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from qerl.formats import NVFP4
from qerl.models.compressed_tensors import LAYOUTS, ignored_modules, write_quantized_config
from qerl.models.decoder import Decoder
from qerl.models.expert_names import expert_names
from qerl.models.hf_writer import atomic_folder, write_json, write_shards, write_tokenizer
from qerl.models.source import ModelSource
from qerl.models.state_dict import HEAD, tensor_shapes
from qerl.models.stored_names import is_shifted_norm, language_config, stored_tensors


def write_packed(
    decoder: Decoder,
    source: ModelSource,
    out: Path,
    *,
    notes: Mapping[str, dict[str, Any]] = MappingProxyType({}),
) -> None:
    """Write the folder, with config and tokenizer of the source, and the notes, JSON by file name."""
    with atomic_folder(out) as folder:
        tensors = stored_tensors(decoder.architecture, _packed_tensors(decoder), torch.bfloat16)
        write_shards(folder, tensors)
        config = language_config(source.open().config)
        ignored = ignored_modules(decoder.architecture)
        write_quantized_config(folder, with_dtype(config, torch.bfloat16), LAYOUTS["nvfp4"], ignored)
        write_tokenizer(folder, source)
        for name, note in notes.items():
            write_json(folder / name, note)


def _packed_tensors(decoder: Decoder) -> Iterator[tuple[str, Tensor]]:
    yield from other_tensors(decoder, torch.bfloat16)
    for name, linear in decoder.linears():
        assert isinstance(linear.weight, NVFP4)
        tensors = linear.weight.tensors()
        for field, suffix in LAYOUTS["nvfp4"].suffixes.items():
            yield f"model.{name}.{suffix}", tensors[field].to("cpu", copy=True)


def other_tensors(decoder: Decoder, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield a copy of every tensor of the checkpoint that is no linear's weight and no expert's, by the
    decoder's name. Norms whose stored weight is one less are in float32: rounded to bf16 first, they would
    lose 8 bits."""
    weights = {f"model.{name}.weight" for name, _ in decoder.linears()}
    weights |= expert_names(decoder.architecture)
    for name in tensor_shapes(decoder.architecture):
        if name not in weights:
            tensor = decoder.get_buffer(name if name == HEAD else name.removeprefix("model."))
            is_shifted = decoder.architecture.norm_offset and is_shifted_norm(name)
            yield name, tensor.to("cpu", torch.float32 if is_shifted else dtype, copy=True)


def with_dtype(hf_config: dict, dtype: torch.dtype) -> dict:
    """Set torch_dtype, which transformers 4 and 5 both read."""
    kept = {key: value for key, value in hf_config.items() if key != "dtype"}
    return kept | {"torch_dtype": str(dtype).removeprefix("torch.")}
