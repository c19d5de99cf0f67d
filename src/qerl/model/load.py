"""Fills a decoder from a checkpoint, tensor by tensor: each linear is quantized when it arrives.

    peak memory = the quantized model + one tensor of the checkpoint      tests/model/test_load.py

Names, shapes and the config are checked against each other before the first tensor is read. Tensors are asked
for by name, so the order in which the files hold them does not matter. Where the decode kernels run, weights
that multiply the same input go into tiles (tiled.py) as soon as all of them are there.
"""

from collections.abc import Iterator

import torch

from qerl.errors import UserError
from qerl.formats import BF16, FORMATS, PackedWeight
from qerl.kernels.nvfp4_unpack import Rows
from qerl.model.decoder import Decoder
from qerl.model.device import has_tile_kernels
from qerl.model.names import HEAD, architecture_of, check_tensors, linear_groups, read_float
from qerl.model.quantized import Layout, encoded, packed_layout, packed_shapes, read_packed
from qerl.model.source import Checkpoint, locate
from qerl.model.tiled import tile_linears


def load_decoder(
    path: str, *, format: str, compute: torch.dtype, device: torch.device, resident: bool
) -> Decoder:
    """Linears in `format`, the rest in `compute`; a packed checkpoint must be in that format already."""
    checkpoint = locate(path).open()
    layout = packed_layout(checkpoint)
    if layout is not None and layout.format != format:
        raise UserError(f"{path}: holds {layout.format}, which is taken as it is; model.format says {format}")
    architecture = architecture_of(checkpoint)
    shapes = packed_shapes(checkpoint, architecture, layout)
    check_tensors(checkpoint, shapes)
    decoder = Decoder(architecture, compute=compute, device=device)
    tiled = not resident and compute == torch.bfloat16 and has_tile_kernels(device)
    linears = {f"model.{name}": linear for name, linear in decoder.linears()}
    for group in linear_groups(architecture):
        for name, weight in _weights(checkpoint, layout, group, format, device):
            linears[name].load_weight(weight)
        if tiled:
            together = [linears[name] for name in group]
            tile_linears(together, Rows.GATE_UP if group[0].endswith("gate_proj") else Rows.ALL)
    for name, buffer in decoder.named_buffers():
        hf_name = name if name == HEAD else f"model.{name}"
        if hf_name in shapes:
            buffer.copy_(read_float(checkpoint, hf_name))
    if layout is not None and f"{HEAD}_packed" in shapes:
        decoder.lm_head.weight.copy_(read_packed(checkpoint, layout, HEAD.removesuffix(".weight")).decode())
    if resident:
        decoder.make_resident()
    return decoder


def _weights(
    checkpoint: Checkpoint, layout: Layout | None, group: tuple[str, ...], format: str, device: torch.device
) -> Iterator[tuple[str, PackedWeight]]:
    if layout is None:
        yield from encoded(checkpoint, group, FORMATS[format], device)
        return
    for linear in group:
        if f"{linear}.weight_packed" in checkpoint.shapes:
            yield linear, read_packed(checkpoint, layout, linear).to(device)
        else:  # what a packed checkpoint leaves unpacked was meant to stay precise
            yield from encoded(checkpoint, (linear,), BF16, device)
