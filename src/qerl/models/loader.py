"""Load a decoder from a checkpoint, tensor by tensor; each linear is quantized as it is read.

    peak memory = the quantized model + one tensor of the checkpoint      tests/models/test_loader.py

Names, shapes and the config are checked against each other before the first tensor is read. Tensors are read
by name, so their order in the files does not matter. Where the decode kernels run, weights
go into tiles (packed_linear.py) layer by layer.
"""

from collections.abc import Iterator

import torch

from qerl.errors import UserError
from qerl.formats import BF16, FORMATS, PackedWeight
from qerl.models.architecture import Architecture
from qerl.models.compressed_tensors import (
    CheckpointLayout,
    SelectScales,
    default_scales,
    detect_layout,
    encode_group,
    packed_shapes,
    read_packed,
)
from qerl.models.decoder import Decoder, Layer
from qerl.models.device import has_tile_kernels
from qerl.models.lm_head import LMHead, check_head
from qerl.models.source import Checkpoint
from qerl.models.state_dict import HEAD, architecture_of, check_tensors, linear_groups, read_float


def build_decoder(
    checkpoint: Checkpoint,
    *,
    format: str,
    compute: torch.dtype,
    device: torch.device,
    resident: bool,
    head: str = "bf16",
    scales: SelectScales = default_scales,
) -> Decoder:
    """Return a decoder: linears in `format`, the head in `head` (bf16 means `compute`), the rest in
    `compute`.

    A packed checkpoint must be in `format` already. Its packed head is used unchanged
    if its format is `head`, and unpacked first if not.
    """
    path, layout = str(checkpoint.path), detect_layout(checkpoint)
    if layout is not None and layout.format != format:
        raise UserError(
            f"{path}: is in {layout.format}, but model.format is {format}; set --model.format {layout.format}"
        )
    architecture = architecture_of(checkpoint)
    shapes = packed_shapes(checkpoint, architecture, layout)
    check_tensors(checkpoint, shapes)
    _check_head(path, head, architecture)
    decoder = Decoder(architecture, compute=compute, device=device)
    for name, buffer in decoder.named_buffers():
        hf_name = name if name == HEAD else f"model.{name}"
        if hf_name in shapes:
            buffer.copy_(read_float(checkpoint, hf_name))
    _load_head(decoder.lm_head, checkpoint, layout if f"{HEAD}_packed" in shapes else None, head)
    tiled = not resident and compute == torch.bfloat16 and has_tile_kernels(device)
    groups = iter(linear_groups(architecture))
    for layer in decoder.layers:
        assert isinstance(layer, Layer)
        for linears in layer.linear_groups:
            weights = _weights(checkpoint, layout, next(groups), format, device, scales)
            for linear, (_, weight) in zip(linears, weights, strict=True):
                linear.load_weight(weight)
        if tiled:
            layer.tile()
    if resident:
        decoder.make_resident()
    return decoder


def _check_head(path: str, format: str, architecture: Architecture) -> None:
    try:
        check_head(format, architecture.vocab_size, architecture.width)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def _load_head(head: LMHead, checkpoint: Checkpoint, layout: CheckpointLayout | None, format: str) -> None:
    """Load the head before the linears, as its full weight needs memory; `layout` is that of a packed
    head."""
    if layout is not None:
        assert head.weight is not None
        packed = read_packed(checkpoint, layout, HEAD.removesuffix(".weight"))
        if layout.format == format:
            head.load_packed(packed.to(head.weight.device))
            return
        head.weight.copy_(packed.decode())
    head.pack(format)


def _weights(
    checkpoint: Checkpoint,
    layout: CheckpointLayout | None,
    group: tuple[str, ...],
    format: str,
    device: torch.device,
    scales: SelectScales,
) -> Iterator[tuple[str, PackedWeight]]:
    if layout is None:
        yield from encode_group(checkpoint, group, FORMATS[format], device, scales)
        return
    for linear in group:
        if f"{linear}.weight_packed" in checkpoint.shapes:
            yield linear, read_packed(checkpoint, layout, linear).to(device)
        else:  # a packed checkpoint leaves linears unpacked on purpose
            yield from encode_group(checkpoint, (linear,), BF16, device)
