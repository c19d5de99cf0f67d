"""Make a decoder without memory: one layer of each kind on the meta device, its weights in their layouts.

Its passes launch what the whole decoder's do, so a dry run (kernels/runtime/nvrtc.py) lists the kernels of a
model of which only config.json has been read. It assumes that weights whose shape fits tiles are in tiles;
of an MXFP4 or FP8 weight the loader looks at the values too.
"""

import dataclasses

import torch
from torch import Tensor

from qerl.config import AdapterConfig
from qerl.formats import BF16, FORMATS, FP8, PackedWeight
from qerl.formats.fp8 import BLOCK
from qerl.kernels.tiles.nvfp4_tile import TILE_K, TILE_ROWS
from qerl.kernels.tiles.tile_layout import TileLayout
from qerl.kernels.tiles.tile_unpack import UnpackRows
from qerl.models.architecture import Architecture
from qerl.models.decoder import Decoder, Layer
from qerl.models.delta_net import GatedDeltaNet
from qerl.models.linear import QuantLinear
from qerl.models.lm_head import LMHead, packed_width
from qerl.models.mixture import ExpertLinear
from qerl.models.packed.packed_linear import KINDS, PackedGroup, PackedNVFP4
from qerl.models.peft.adapter import add_adapter
from qerl.models.tiled_experts import ExpertRows, TiledStack

_META = torch.device("meta")
_LAYOUTS = {
    "nvfp4": TileLayout.NVFP4,
    "mxfp4": TileLayout.NVFP4,
    "nf4": TileLayout.NF4,
    "fp8": TileLayout.FP8,
    "int8": TileLayout.INT8,
}
_ROW_SCALES = "mxfp4", "int8"


@torch.no_grad()
def meta_decoder(
    architecture: Architecture, *, format: str, head: str, compute: torch.dtype, adapter: AdapterConfig
) -> Decoder:
    """Return, without memory, what `build_decoder` and `add_adapter` make on a GPU with tile kernels."""
    kinds = tuple(dict.fromkeys(architecture.kinds))
    a = dataclasses.replace(architecture, num_layers=len(kinds), layer_kinds=kinds, bf16_linears=frozenset())
    decoder = Decoder(a, compute=compute, device=_META)
    _fill_head(decoder.lm_head, head)
    for layer in decoder.layers:
        assert isinstance(layer, Layer)
        for group, linears in zip(layer.spec.groups, layer.linear_groups, strict=True):
            group_format = format if group.is_quantized else "bf16"
            if isinstance(layer.mixer, GatedDeltaNet) and group.name == "qkv":
                _fill(layer.mixer.gate_projs, "bf16", UnpackRows.ALL)
                linears = layer.mixer.wide_projs
            _fill(linears, group_format, UnpackRows.GATE_UP if group.name == "gate_up" else UnpackRows.ALL)
        if format in ("nvfp4", "mxfp4"):
            for experts, rows in zip(layer.experts, layer.expert_rows, strict=True):
                _fill_experts(experts, rows)
    add_adapter(decoder, adapter, seed=0)
    return decoder


def _fill(linears: tuple[QuantLinear, ...], format: str, rows: UnpackRows) -> None:
    """Give the linears weights of this format in tiles; where they do not fit, in BF16."""
    shapes, k = [(linear.out_width, linear.in_width) for linear in linears], linears[0].in_width
    multiple = TILE_ROWS // len(linears) if rows is UnpackRows.GATE_UP else TILE_ROWS
    fits = format in _LAYOUTS and k % TILE_K == 0 and all(n % multiple == 0 for n, _ in shapes)
    group = _tiles(tuple(n for n, _ in shapes), k, rows, format) if fits else None
    for index, linear in enumerate(linears):
        weight: PackedWeight = BF16(_empty(*shapes[index], dtype=torch.bfloat16))
        linear.load_weight(weight if group is None else KINDS[FORMATS[format]](group, index))


def _tiles(widths: tuple[int, ...], k: int, rows: UnpackRows, format: str) -> PackedGroup:
    n, layout = sum(widths), _LAYOUTS[format]
    tiles = _empty(n // TILE_ROWS, k // TILE_K, layout.tile_bytes, dtype=torch.uint8)
    scales = tuple(_empty(width if format in _ROW_SCALES else 1) for width in widths)
    return PackedGroup(tiles, _empty(n), scales, widths, rows, layout)


def _fill_experts(experts: ExpertLinear, rows: ExpertRows) -> None:
    num, n, k = experts.spec.num_experts, experts.spec.out_width, experts.spec.in_width
    if n % TILE_ROWS == k % TILE_K == 0:
        shape = num, n // TILE_ROWS, k // TILE_K, TileLayout.NVFP4.tile_bytes
        stack = TiledStack(_empty(*shape, dtype=torch.uint8), _empty(num, n), _empty(num, 1), rows)
        experts.load_weight(stack)


def _fill_head(head: LMHead, format: str) -> None:
    v, d = head.shape[0], packed_width(head.shape[1])
    if format == "nvfp4":
        head.packed = PackedNVFP4(_tiles((v,), d, UnpackRows.ALL, format), 0)
    elif format == "fp8":
        codes = _empty(v, d, dtype=torch.float8_e4m3fn)
        head.packed = FP8(codes, _empty(-(-v // BLOCK), -(-d // BLOCK)))
    if head.packed is not None:
        head.weight = None


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=_META)
