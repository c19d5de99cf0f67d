"""Load a decoder from a checkpoint, tensor by tensor; each linear is quantized as it is read.

    peak memory = the quantized model + one tensor of the checkpoint      tests/models/test_loader.py

Names, shapes and the config are checked against each other before the first tensor is read. Tensors are read
by name, so their order in the files does not matter. Where the decode kernels run, weights go into tiles:
linears layer by layer (packed_linear.py), experts one by one (tiled_experts.py).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from qerl.errors import naming
from qerl.formats import BF16, FORMATS, PackedWeight
from qerl.models.checkpoint.encoding import SelectScales, default_scales, encode_group, encode_weight
from qerl.models.checkpoint.source import Checkpoint, fitting_weight, layout_of, stored_weight
from qerl.models.checkpoint.state_dict import (
    HEAD,
    architecture_of,
    check_tensors,
    linear_groups,
    read_float,
    tensor_shapes,
    unquantized_linears,
)
from qerl.models.decoder import Decoder, Layer
from qerl.models.device import keeps_tiles
from qerl.models.expert_loading import load_experts
from qerl.models.layer_spec import check_dense
from qerl.models.lm_head import check_head
from qerl.tracking.progress import ignore
from qerl.types import Report


def build_decoder(
    checkpoint: Checkpoint,
    *,
    format: str,
    compute: torch.dtype,
    device: torch.device,
    resident: bool,
    head: str = "bf16",
    scales: SelectScales = default_scales,
    report: Report = ignore,
) -> Decoder:
    """Return a decoder: linears in `format`, the head in `head` (bf16 means `compute`), the rest in
    `compute`.

    Of a checkpoint that is quantized, codes that fit `format` are taken as they are, others are decoded and
    quantized again, and linears in full precision stay in BF16 (layouts/layout.py). A packed head is used
    unchanged if it is NVFP4 and `head` is, else unpacked first. report: gets the number of loaded layers.
    """
    architecture = architecture_of(checkpoint)
    if format == "fp8-flow":
        check_dense(architecture, "model.format fp8-flow")
    shapes = tensor_shapes(architecture)
    check_tensors(checkpoint, shapes)
    with naming(checkpoint.path):
        check_head(head, architecture.vocab_size, architecture.width)
    decoder = Decoder(architecture, compute=compute, device=device)
    packed_head = fitting_weight(checkpoint, HEAD.removesuffix(".weight"), head) if head == "nvfp4" else None
    for name, buffer in decoder.named_buffers():
        hf_name = name if name == HEAD else f"model.{name}"
        if hf_name in shapes and not (name == HEAD and packed_head):
            buffer.copy_(read_float(checkpoint, hf_name))
    # Before the linears, as the head's full weight needs memory.
    decoder.lm_head.pack(head, packed_head)
    tiled = not resident and keeps_tiles(compute, device)
    groups, plain = iter(linear_groups(architecture)), unquantized_linears(architecture)

    def encode(weight_NK: Tensor) -> PackedWeight:
        return encode_weight(weight_NK.to(device), FORMATS[format], scales)

    for index, layer in enumerate(decoder.layers):
        assert isinstance(layer, Layer)
        for linears in layer.linear_groups:
            names = next(groups)
            by_name = dict(zip(names, linears, strict=True))
            group_format = "bf16" if plain.issuperset(names) else format
            for name, weight in _weights(checkpoint, names, group_format, device, scales):
                by_name[name].load_weight(weight)
        for experts, rows in zip(layer.experts, layer.expert_rows, strict=True):
            load_experts(experts, checkpoint, architecture, index, format, encode, rows if tiled else None)
        if tiled:
            layer.tile()
        report(index + 1, architecture.num_layers, "layers")
    if resident:
        decoder.make_resident()
    if device.type == "cuda":
        torch.cuda.empty_cache()  # blocks that held only what was read and packed
    return decoder


def _weights(
    checkpoint: Checkpoint, group: tuple[str, ...], format: str, device: torch.device, scales: SelectScales
) -> Iterator[tuple[str, PackedWeight]]:
    """Yield the linears of a group with their weights, in no order."""
    if layout_of(checkpoint) is None:
        yield from encode_group(checkpoint, group, FORMATS[format], device, scales)
        return
    again: list[str] = []
    for linear in group:
        if stored_weight(checkpoint, linear) is None:
            yield from encode_group(checkpoint, (linear,), BF16, device)
        elif (packed := fitting_weight(checkpoint, linear, format)) is not None:
            yield linear, packed.to(device)
        else:
            again.append(linear)
    if again:
        yield from encode_group(checkpoint, tuple(again), FORMATS[format], device, scales)
