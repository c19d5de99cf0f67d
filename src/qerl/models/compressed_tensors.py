"""Write 4-bit checkpoints in the compressed-tensors layout, which transformers and vLLM load.

    NVFP4 codes          {linear}.weight_packed        uint8 [N, K / 2]            nvfp4-pack-quantized
          scales         {linear}.weight_scale         float8_e4m3fn [N, K / 16]
          global_scale   {linear}.weight_global_scale  float32 [1]
    MXFP4 codes          {linear}.weight_packed        uint8 [N, K / 2]            mxfp4-pack-quantized
          scales         {linear}.weight_scale         uint8 [N, K / 32]

layouts/compressed_tensors.py reads the same codes. NVFP4 linears that read the same input (q, k, v; gate,
up) share one global scale: vLLM fuses them and keeps only the largest of their scales, which would distort
the others. Quantizing at load time shares scales too, so it gives bit for bit the linears that are written.
"""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qerl.errors import UserError
from qerl.formats import FORMATS, NVFP4, PackedWeight
from qerl.models.architecture import Architecture
from qerl.models.checkpoint.expert_names import expert_names
from qerl.models.checkpoint.layouts import QUANTIZATION_KEYS
from qerl.models.checkpoint.layouts.notice import layout_notices
from qerl.models.checkpoint.model_folder import unused_files
from qerl.models.checkpoint.source import Checkpoint, layout_of, locate
from qerl.models.checkpoint.state_dict import (
    HEAD,
    architecture_of,
    check_tensors,
    linear_groups,
    read_float,
    tensor_shapes,
    unquantized_linears,
)
from qerl.models.checkpoint.stored_names import NamedCheckpoint, language_config, stored_tensors
from qerl.models.expert_writing import as_written, blocks_config, expert_tensors
from qerl.models.hf_writer import (
    atomic_folder,
    check_output_folder,
    write_json,
    write_shards,
    write_tokenizer,
)


@dataclasses.dataclass(frozen=True, slots=True)
class CheckpointLayout:
    """Layout of the tensors of one format in a checkpoint."""

    format: str
    checkpoint_format: str
    """`format` in quantization_config."""
    block_weights: int
    strategy: str
    scale_dtype: torch.dtype
    suffixes: dict[str, str]
    """Suffix of each tensor's name, by the field of our format."""


SelectScales = Callable[[PackedWeight, Tensor], PackedWeight]
"""Function (default encoding, weight) -> encoding with the chosen block scales."""

_FIELDS = {"codes": "weight_packed", "scales": "weight_scale"}
LAYOUTS = {
    "nvfp4": CheckpointLayout(
        "nvfp4",
        "nvfp4-pack-quantized",
        16,
        "tensor_group",
        torch.float8_e4m3fn,
        _FIELDS | {"global_scale": "weight_global_scale"},
    ),
    "mxfp4": CheckpointLayout("mxfp4", "mxfp4-pack-quantized", 32, "group", torch.uint8, _FIELDS),
}


def skipped_notices(checkpoint: Checkpoint) -> list[str]:
    """Return a line on tensors that no language model has, such as a vision encoder's, and one on weight
    files beside those that are read."""
    skipped = checkpoint.num_skipped if isinstance(checkpoint, NamedCheckpoint) else 0
    others = unused_files(checkpoint.path) if checkpoint.path.is_dir() else []
    return [
        f"{checkpoint.path}: {skipped} tensors of other modalities and of multi-token prediction"
        " are not loaded"
    ] * bool(skipped) + [f"{checkpoint.path}: not read: {', '.join(others)}"] * bool(others)


def checkpoint_notices(checkpoint: Checkpoint, format: str) -> list[str]:
    """Return lines on what a quantized checkpoint asks for and is not done: activations are not quantized,
    and codes that do not fit `format` are decoded and quantized again."""
    layout = layout_of(checkpoint)
    lines = [] if layout is None else layout_notices(layout, format)
    return [f"{checkpoint.path}: {line}" for line in lines]


def default_scales(packed: PackedWeight, weight_NK: Tensor) -> PackedWeight:
    """Keep the scales of `encode`: each block's largest weight maps to the largest code."""
    return packed


def write_quantized(
    path: str,
    out_folder: str | Path,
    *,
    format: str = "nvfp4",
    scales: SelectScales = default_scales,
    fold: Callable[[Checkpoint], Checkpoint] | None = None,
    shard_bytes: int = 5_000_000_000,
) -> None:
    """Quantize a checkpoint into a new folder, which appears only when it is complete.

    `fold` may replace the checkpoint by an equivalent one that is easier to quantize (awq.py).
    """
    out = Path(out_folder)
    if format not in LAYOUTS:
        raise UserError(f"{format} cannot be written to a checkpoint; supported: {' and '.join(LAYOUTS)}")
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
        tensors = _quantized_tensors(folded, architecture, written, LAYOUTS[format], scales)
        write_shards(folder, stored_tensors(architecture, tensors), shard_bytes)
        config = language_config(checkpoint.config)
        if written.mixture is not None and written.mixture.stored == "blocks":
            write_json(folder / "config.json", blocks_config(without_quantization(config)))
        else:
            write_quantized_config(folder, config, LAYOUTS[format], ignored_modules(architecture))
        write_tokenizer(folder, source)


def encode_group(
    checkpoint: Checkpoint,
    group: tuple[str, ...],
    kind: type[PackedWeight],
    device: torch.device,
    scales: SelectScales = default_scales,
) -> Iterator[tuple[str, PackedWeight]]:
    """Yield a group's linears with their encoded weights; one float weight is in memory at a time."""
    weights = (read_float(checkpoint, f"{linear}.weight") for linear in group)
    largest = _shared_largest(weights, kind, len(group))
    for linear in group:
        yield linear, _read_and_encode(checkpoint, f"{linear}.weight", kind, largest, device, scales)


def _read_and_encode(
    checkpoint: Checkpoint,
    name: str,
    kind: type[PackedWeight],
    largest: float | None,
    device: torch.device,
    scales: SelectScales,
) -> PackedWeight:
    weight_NK = read_float(checkpoint, name).to(device)
    try:
        return _encode_one(weight_NK, kind, largest, scales)
    except UserError as error:
        raise UserError(f"{checkpoint.path}: {name}: {error}") from error


def encode_weights(
    weights: list[Tensor], kind: type[PackedWeight], scales: SelectScales = default_scales
) -> list[PackedWeight]:
    """Encode a group's weights that are in memory, as `encode_group` does."""
    largest = _shared_largest(iter(weights), kind, len(weights))
    return [_encode_one(weight_NK, kind, largest, scales) for weight_NK in weights]


def _shared_largest(weights: Iterator[Tensor], kind: type[PackedWeight], num: int) -> float | None:
    """Return the magnitude that sets the group's global scale; None if each linear has its own scale."""
    return max(map(_largest, weights)) if kind is NVFP4 and num > 1 else None


def _encode_one(
    weight_NK: Tensor, kind: type[PackedWeight], largest: float | None, scales: SelectScales
) -> PackedWeight:
    packed = kind.encode(weight_NK) if largest is None else NVFP4.encode(weight_NK, largest)
    return scales(packed, weight_NK)


def _largest(weight_NK: Tensor) -> float:
    """Return the largest magnitude without the copy that abs() makes."""
    return torch.stack(torch.aminmax(weight_NK)).abs().max().item()


def _quantized_tensors(
    checkpoint: Checkpoint,
    architecture: Architecture,
    written: Architecture,
    layout: CheckpointLayout,
    scales: SelectScales,
) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of the new checkpoint. `written` is its architecture."""
    shapes, plain = tensor_shapes(architecture), unquantized_linears(written)
    groups = [group for group in linear_groups(architecture) if group[0] not in plain]
    weights = {f"{linear}.weight" for group in groups for linear in group} | expert_names(architecture)
    # A GGUF decodes to float32, its config says bfloat16; a norm as 1 + weight would lose the weight's bits.
    is_gguf = checkpoint.path.suffix == ".gguf"
    for name in shapes:
        if name not in weights:
            tensor = read_float(checkpoint, name)
            yield name, tensor.bfloat16() if is_gguf and tensor.dim() > 1 else tensor
    for group in groups:
        device = torch.device("cpu")
        for linear, weight in encode_group(checkpoint, group, FORMATS[layout.format], device, scales):
            tensors = weight.tensors()
            yield from ((f"{linear}.{suffix}", tensors[field]) for field, suffix in layout.suffixes.items())

    def encode(weight_NK: Tensor) -> PackedWeight:
        return _encode_one(weight_NK, FORMATS[layout.format], None, scales)

    yield from expert_tensors(checkpoint, architecture, layout.format, layout.suffixes, encode)


def ignored_modules(architecture: Architecture) -> list[str]:
    """Return the modules that `qerl quantize` leaves in full precision, as compressed-tensors names them."""
    return [HEAD.removesuffix(".weight")] + ["re:.*mlp[.]gate$"] * (architecture.mixture is not None)


def write_quantized_config(
    folder: Path, config: dict[str, Any], layout: CheckpointLayout, ignored: list[str]
) -> None:
    """Write config.json with the quantization_config of this layout."""
    weights = {
        "num_bits": 4,
        "type": "float",
        "strategy": layout.strategy,
        "group_size": layout.block_weights,
        "symmetric": True,
        "dynamic": False,
        "scale_dtype": str(layout.scale_dtype),
    }
    group = {"targets": ["Linear"], "weights": weights, "format": layout.checkpoint_format}
    quantization = {
        "quant_method": "compressed-tensors",
        "format": layout.checkpoint_format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group | {"input_activations": None, "output_activations": None}},
        "ignore": ignored,
        "kv_cache_scheme": None,
    }
    write_json(folder / "config.json", without_quantization(config) | {"quantization_config": quantization})


def without_quantization(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config without its quantization entries."""
    return {key: value for key, value in config.items() if key not in QUANTIZATION_KEYS}
