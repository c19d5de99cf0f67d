"""Write 4-bit checkpoints in the layout of compressed-tensors, or as gpt-oss is published.

write_quantized    quantizes a float checkpoint, tensor by tensor
write_packed       writes a decoder whose linears are in NVFP4 or MXFP4, but for those that stay in BF16
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from qerl.errors import UserError
from qerl.formats import FORMATS
from qerl.models.architecture import Architecture
from qerl.models.checkpoint.encoding import SelectScales, default_scales, encode_group, encode_weight
from qerl.models.checkpoint.expert_names import expert_names
from qerl.models.checkpoint.layouts import without_quantization
from qerl.models.checkpoint.layouts.compressed_tensors import WRITTEN, WrittenLayout
from qerl.models.checkpoint.source import Checkpoint, ModelSource, layout_of, locate
from qerl.models.checkpoint.state_dict import (
    HEAD,
    architecture_of,
    check_tensors,
    linear_groups,
    read_float,
    tensor_shapes,
    unquantized_linears,
)
from qerl.models.checkpoint.stored_names import (
    is_shifted_norm,
    language_config,
    stored_linears,
    stored_tensors,
)
from qerl.models.decoder import Decoder
from qerl.models.expert_writing import as_written, blocks_config, expert_tensors, stack_tensors
from qerl.models.hf_writer import (
    atomic_folder,
    check_output_folder,
    write_json,
    write_shards,
    write_tokenizer,
)
from qerl.models.peft.adapter import merged_weight


def write_quantized(
    path: str,
    out_folder: str | Path,
    *,
    format: str = "nvfp4",
    scales: SelectScales = default_scales,
    fold: Callable[[Checkpoint], Checkpoint] | None = None,
    bf16_linears: Collection[str] = (),
    shard_bytes: int = 5_000_000_000,
) -> None:
    """Quantize a checkpoint into a new folder, which appears only when it is complete.

    `fold` may replace the checkpoint by an equivalent one that is easier to quantize (awq.py).
    bf16_linears: those that stay in BF16, whole groups (kept_linears.py).
    """
    out = Path(out_folder)
    if format not in WRITTEN:
        raise UserError(f"{format} cannot be written to a checkpoint; supported: {' and '.join(WRITTEN)}")
    check_output_folder(out)
    source = locate(path)
    checkpoint = source.open()
    if layout_of(checkpoint) is not None:
        raise UserError(f"{path}: is quantized already")
    architecture = architecture_of(checkpoint)
    written = as_written(architecture, format)
    check_tensors(checkpoint, tensor_shapes(architecture))
    folded = checkpoint if fold is None else fold(checkpoint)
    with atomic_folder(out) as folder:
        tensors = _quantized_tensors(folded, architecture, written, WRITTEN[format], scales, bf16_linears)
        write_shards(folder, stored_tensors(architecture, tensors), shard_bytes)
        _write_config(folder, language_config(checkpoint.config), written, WRITTEN[format], bf16_linears)
        write_tokenizer(folder, source)


def _quantized_tensors(
    checkpoint: Checkpoint,
    architecture: Architecture,
    written: Architecture,
    layout: WrittenLayout,
    scales: SelectScales,
    bf16_linears: Collection[str],
) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of the new checkpoint. `written` is its architecture."""
    shapes, plain = tensor_shapes(architecture), unquantized_linears(written) | set(bf16_linears)
    groups = [group for group in linear_groups(architecture) if group[0] not in plain]
    weights = {f"{linear}.weight" for group in groups for linear in group} | expert_names(architecture)
    # A GGUF decodes to float32, its config says bfloat16; a norm as 1 + weight would lose the weight's bits.
    is_gguf = checkpoint.path.suffix == ".gguf"
    for name in shapes:
        if name not in weights:
            tensor = read_float(checkpoint, name)
            is_kept = name.removesuffix(".weight") in bf16_linears
            yield name, tensor.bfloat16() if is_kept or (is_gguf and tensor.dim() > 1) else tensor
    kind = FORMATS[layout.format]
    for group in groups:
        for linear, weight in encode_group(checkpoint, group, kind, torch.device("cpu"), scales):
            tensors = weight.tensors()
            yield from ((f"{linear}.{suffix}", tensors[field]) for field, suffix in layout.suffixes.items())
    encode = partial(encode_weight, kind=kind, scales=scales)
    yield from expert_tensors(checkpoint, architecture, layout.format, layout.suffixes, encode)


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
        tensors = _packed_tensors(decoder, written, WRITTEN[format])
        write_shards(folder, stored_tensors(decoder.architecture, tensors, torch.bfloat16))
        config = with_dtype(language_config(source.open().config), torch.bfloat16)
        bf16_linears = [f"model.{name}" for name in written.bf16_linears]
        _write_config(folder, config, written, WRITTEN[format], bf16_linears)
        write_tokenizer(folder, source)
        for name, note in notes.items():
            write_json(folder / name, note)


def _packed_tensors(
    decoder: Decoder, written: Architecture, layout: WrittenLayout
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


def _write_config(
    folder: Path,
    config: dict[str, Any],
    written: Architecture,
    layout: WrittenLayout,
    bf16_linears: Collection[str] = (),
) -> None:
    """Write config.json with a quantization_config, which leaves out the head, routers and kept linears."""
    config = without_quantization(config)
    if written.mixture is not None and written.mixture.stored == "blocks":
        config = blocks_config(config)
    else:
        ignored = [HEAD.removesuffix(".weight")] + ["re:.*mlp[.]gate$"] * (written.mixture is not None)
        ignored += stored_linears(written, bf16_linears)
        config |= {"quantization_config": layout.config(ignored)}
    write_json(folder / "config.json", config)


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
    others = {key: value for key, value in hf_config.items() if key != "dtype"}
    return others | {"torch_dtype": str(dtype).removeprefix("torch.")}
