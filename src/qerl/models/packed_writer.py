"""Write a decoder whose linears are in NVFP4 or MXFP4 as a compressed-tensors checkpoint, or as gpt-oss is
published."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from qerl.formats import FORMATS
from qerl.models.architecture import Architecture
from qerl.models.checkpoint.expert_names import expert_names
from qerl.models.checkpoint.source import ModelSource
from qerl.models.checkpoint.state_dict import HEAD, tensor_shapes, unquantized_linears
from qerl.models.checkpoint.stored_names import is_shifted_norm, language_config, stored_tensors
from qerl.models.compressed_tensors import (
    LAYOUTS,
    CheckpointLayout,
    ignored_modules,
    without_quantization,
    write_quantized_config,
)
from qerl.models.decoder import Decoder
from qerl.models.expert_writing import as_written, blocks_config, stack_tensors
from qerl.models.hf_writer import atomic_folder, write_json, write_shards, write_tokenizer
from qerl.models.peft.adapter import merged_weight


def write_packed(
    decoder: Decoder,
    source: ModelSource,
    out: Path,
    *,
    format: str = "nvfp4",
    notes: Mapping[str, dict[str, Any]] = MappingProxyType({}),
) -> None:
    """Write the folder, with config and tokenizer of the source, and the notes, JSON by file name."""
    written = as_written(decoder.architecture, format)
    with atomic_folder(out) as folder:
        tensors = _packed_tensors(decoder, written, LAYOUTS[format])
        write_shards(folder, stored_tensors(decoder.architecture, tensors, torch.bfloat16))
        config = with_dtype(language_config(source.open().config), torch.bfloat16)
        if written.mixture is not None and written.mixture.stored == "blocks":
            write_json(folder / "config.json", blocks_config(without_quantization(config)))
        else:
            write_quantized_config(folder, config, LAYOUTS[format], ignored_modules(written))
        write_tokenizer(folder, source)
        for name, note in notes.items():
            write_json(folder / name, note)


def _packed_tensors(
    decoder: Decoder, written: Architecture, layout: CheckpointLayout
) -> Iterator[tuple[str, Tensor]]:
    yield from other_tensors(decoder, torch.bfloat16)
    plain = unquantized_linears(written)
    for name, linear in decoder.linears():
        if f"model.{name}" in plain:
            yield f"model.{name}.weight", merged_weight(linear).bfloat16().cpu()
            continue
        assert isinstance(linear.weight, FORMATS[layout.format])
        tensors = linear.weight.tensors()
        for field, suffix in layout.suffixes.items():
            yield f"model.{name}.{suffix}", tensors[field].to("cpu", copy=True)
    for name, experts in decoder.expert_linears():
        at, x, stack = f"model.{name.removesuffix(experts.spec.name)}", experts.spec, experts.weight
        assert stack is not None
        weights = (stack[e].to("cpu") for e in range(x.num_experts))
        yield from stack_tensors(written, at, x, weights, layout.suffixes)
        if experts.bias is not None:
            yield f"{at}{x.name}_bias", experts.bias.to("cpu", torch.bfloat16, copy=True)


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
