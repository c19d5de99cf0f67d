"""Write a model of transformers in each layout of quantized weights, with the library that owns the layout.

A row is a quantization_config and a function that compresses one weight; `decoded` is what the library
decompresses it to, or the documented formula where there is no library to run here (ModelOpt, fp8).
"""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from qerl.formats import FORMATS, NVFP4


@dataclasses.dataclass(frozen=True)
class Row:
    config: dict
    compress: Callable[[Tensor], dict[str, Tensor]]
    decoded: Callable[[dict[str, Tensor]], Tensor]
    format: str | None = None
    """The format of ours that the codes fit."""
    kind: str = ""


def grid_of(weight_NK: Tensor, args: QuantizationArgs) -> tuple[int, int]:
    """Rows and columns that share a scale."""
    (n, k), strategy = weight_NK.shape, args.strategy
    return {
        "tensor": (n, k),
        "channel": (1, k),
        "group": (1, args.group_size),
        "block": args.block_structure,
    }[strategy]


def ranges(weight_NK: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    n, k = weight_NK.shape
    padded = nn.functional.pad(weight_NK, (0, -k % columns, 0, -n % rows))
    blocks = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    return blocks.amin((1, 3)), blocks.amax((1, 3))


def of_library(format: str, kind: str, ours: str | None = None, **settings) -> Row:
    """A row of compressed-tensors."""
    args = QuantizationArgs(**settings)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = BaseCompressor.get_value_from_registry(format)

    def compress(weight_NK: Tensor) -> dict[str, Tensor]:
        if format in ("nvfp4-pack-quantized", "mxfp4-pack-quantized"):
            packed = FORMATS[format[:5]].encode(weight_NK).tensors()
            names = {"codes": "packed", "scales": "scale", "global_scale": "global_scale"}
            return {f"weight_{names[field]}": tensor for field, tensor in packed.items()}
        scale, zero = calculate_qparams(*ranges(weight_NK, *grid_of(weight_NK, args)), args)
        if args.strategy == "tensor":
            scale, zero = scale.reshape(1), zero.reshape(1)
        state = {"weight": weight_NK, "weight_scale": scale, "weight_zero_point": zero.to(torch.int8)}
        if args.type == "float":
            del state["weight_zero_point"]
        return compressor.compress(state, scheme)

    def decoded(state: dict[str, Tensor]) -> Tensor:
        if ours in ("nvfp4", "mxfp4"):
            return FORMATS[ours](*state.values()).decode()
        return compressor.decompress(state, scheme)["weight"].float()

    group = {"targets": ["Linear"], "weights": args.model_dump(mode="json"), "format": format}
    config = {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    return Row(config, compress, decoded, ours, kind)


def _reordered(weight_NK: Tensor) -> dict[str, Tensor]:
    """int4 in groups of columns that do not follow each other, as actorder leaves them."""
    k = weight_NK.shape[1]
    order = torch.randperm(k, generator=torch.Generator().manual_seed(k))
    state = INT4.compress(weight_NK[:, order].contiguous())
    codes = compressed_codes(state)
    back = order.argsort()
    state["weight_packed"] = pack_to_int32(codes[:, back].contiguous(), 4)
    state["weight_g_idx"] = (torch.arange(k) // 16)[back].int()
    return state


def zero_points(state: dict[str, Tensor]) -> Tensor:
    """[N, 1] of int4 per channel; 0 where there are none."""
    if "weight_zero_point" not in state:
        return torch.zeros(1, 1, dtype=torch.int8)
    shape = torch.Size((int(state["weight_shape"][0]), 1))
    return unpack_from_int32(state["weight_zero_point"], 4, shape, packed_dim=0)


def compressed_codes(state: dict[str, Tensor]) -> Tensor:
    return unpack_from_int32(state["weight_packed"], 4, state["weight_shape"])


def _decode_reordered(state: dict[str, Tensor]) -> Tensor:
    return compressed_codes(state).float() * state["weight_scale"][:, state["weight_g_idx"].long()].float()


def _modelopt_nvfp4(weight_NK: Tensor) -> dict[str, Tensor]:
    packed = NVFP4.encode(weight_NK)
    multiplier = packed.global_scale.reciprocal().squeeze(0)
    return {"weight": packed.codes, "weight_scale": packed.scales, "weight_scale_2": multiplier} | {
        "input_scale": torch.tensor(0.5)
    }


def _decode_modelopt_nvfp4(state: dict[str, Tensor]) -> Tensor:
    one = torch.ones(1)
    return NVFP4(state["weight"], state["weight_scale"], one).decode() * state["weight_scale_2"]


def _awq(weight_NK: Tensor) -> dict[str, Tensor]:
    factors = torch.linspace(0.5, 2.0, weight_NK.shape[1])
    return _modelopt_nvfp4(weight_NK / factors) | {"pre_quant_scale": factors}


def _fp8(weight_NK: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    (n, k), (low, high) = weight_NK.shape, ranges(weight_NK, rows, columns)
    scales = torch.maximum(-low, high) / 448
    return (weight_NK / spread(scales, rows, columns)[:n, :k]).to(torch.float8_e4m3fn), scales


def spread(scales: Tensor, rows: int, columns: int) -> Tensor:
    return scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)


def fp8_blocks(rows: int, columns: int, ours: str | None) -> Row:
    def compress(weight_NK: Tensor) -> dict[str, Tensor]:
        codes, scales = _fp8(weight_NK, rows, columns)
        return {"weight": codes, "weight_scale_inv": scales}

    def decoded(state: dict[str, Tensor]) -> Tensor:
        n, k = state["weight"].shape
        return state["weight"].float() * spread(state["weight_scale_inv"], rows, columns)[:n, :k]

    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [rows, columns]}
    return Row(config, compress, decoded, ours, f"FP8 per {rows} x {columns}")


def _modelopt_fp8(weight_NK: Tensor) -> dict[str, Tensor]:
    codes, scales = _fp8(weight_NK, *weight_NK.shape)
    return {"weight": codes, "weight_scale": scales.reshape(()), "input_scale": torch.tensor(0.5)}


def fp8_of(
    config: dict, rows: int | None, names: tuple[str, ...], kind: str, to=lambda scales: scales
) -> Row:
    """FP8 with one scale (rows None) or one per row, under one of the names that tools give it."""

    def compress(weight_NK: Tensor) -> dict[str, Tensor]:
        codes, scales = _fp8(weight_NK, rows or len(weight_NK), weight_NK.shape[1])
        others = {name: torch.tensor(0.5) for name in names[1:]}
        return {"weight": codes, names[0]: to(scales)} | others

    def decoded(state: dict[str, Tensor]) -> Tensor:
        return state["weight"].float() * state[names[0]].float().reshape(-1, 1)

    return Row(config, compress, decoded, "fp8" if rows is None else None, kind)


def modelopt(algo: str, **settings) -> Row:
    return Row({"quant_method": "modelopt", "quant_algo": algo, "ignore": ["lm_head"]}, **settings)


FLOAT = {"num_bits": 8, "type": "float", "symmetric": True}
INT = {"num_bits": 8, "type": "int", "symmetric": True}
GROUP = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16}
E2M1 = {"num_bits": 4, "type": "float", "symmetric": True}
INT4 = of_library("pack-quantized", "int4 per 16", **GROUP, symmetric=True)
ROWS = {
    "ct-nvfp4": of_library(
        "nvfp4-pack-quantized", "NVFP4", "nvfp4", **E2M1, strategy="tensor_group", group_size=16
    ),
    "ct-mxfp4": of_library("mxfp4-pack-quantized", "MXFP4", "mxfp4", **E2M1, strategy="group", group_size=32),
    "ct-fp8-tensor": of_library("float-quantized", "FP8 per tensor", "fp8", **FLOAT, strategy="tensor"),
    "ct-fp8-channel": of_library("float-quantized", "FP8 per channel", **FLOAT, strategy="channel"),
    "ct-fp8-block": of_library(
        "float-quantized", "FP8 per 128 x 128", "fp8", **FLOAT, strategy="block", block_structure=[128, 128]
    ),
    "ct-mxfp8": of_library(
        "mxfp8-quantized", "FP8 per 32", **FLOAT, strategy="group", group_size=32, scale_dtype=torch.uint8
    ),
    "ct-int8-channel": of_library("int-quantized", "INT8 per channel", "int8", **INT, strategy="channel"),
    "ct-int8-asymmetric": of_library(
        "int-quantized", "INT8 per channel", **INT | {"symmetric": False}, strategy="channel"
    ),
    "ct-int4-group": INT4,
    "ct-int4-asymmetric": of_library("pack-quantized", "int4 per 16", **GROUP, symmetric=False),
    "ct-int4-channel": of_library(
        "pack-quantized", "int4 per channel", "int8", **INT | {"num_bits": 4}, strategy="channel"
    ),
    "ct-int4-channel-asymmetric": of_library(
        "pack-quantized",
        "int4 per channel",
        "int8",
        **INT | {"num_bits": 4, "symmetric": False},
        strategy="channel",
    ),
    "ct-int8-packed": of_library("pack-quantized", "int8 per 16", **GROUP | {"num_bits": 8}, symmetric=False),
    "ct-int4-reordered": Row(INT4.config, _reordered, _decode_reordered, None, "int4 per 16"),
    "modelopt-nvfp4": modelopt(
        "NVFP4", compress=_modelopt_nvfp4, decoded=_decode_modelopt_nvfp4, format="nvfp4", kind="NVFP4"
    ),
    "modelopt-awq": modelopt(
        "NVFP4_AWQ",
        compress=_awq,
        decoded=lambda state: _decode_modelopt_nvfp4(state) * state["pre_quant_scale"],
        kind="NVFP4 with AWQ's factors",
    ),
    "modelopt-fp8": modelopt(
        "FP8",
        compress=_modelopt_fp8,
        decoded=lambda state: state["weight"].float() * state["weight_scale"],
        format="fp8",
        kind="FP8 per tensor",
    ),
    "modelopt-fp8-channel": fp8_of(
        {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
        1,
        ("weight_scale",),
        "FP8 per channel",
        lambda scales: scales[:, 0],
    ),
    "fp8-tensor": fp8_of(
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        None,
        ("weight_scale_inv", "activation_scale"),
        "FP8 per tensor",
        lambda scales: scales.bfloat16().reshape(()),
    ),
    "fbgemm": fp8_of(
        {"quant_method": "fbgemm_fp8"}, 1, ("weight_scale", "input_scale_ub"), "FP8 per channel"
    ),
    "fp8-128": fp8_blocks(128, 128, "fp8"),
    "fp8-32": fp8_blocks(32, 16, None),
}


def linears_of(model) -> list[str]:
    return [
        name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name != "lm_head"
    ]


def write(row: Row, model, source: Path, folder: Path) -> dict[str, Tensor]:
    """Write the folder in the row's layout; return what the library decodes, by the tensors' names."""
    return write_mixed(dict.fromkeys(linears_of(model), row), row.config, source, folder)


def write_mixed(rows: dict[str, Row], config: dict, source: Path, folder: Path) -> dict[str, Tensor]:
    """Write each named module in the layout of its row, the others as they are."""
    folder.mkdir()
    tensors, truth = load_file(source / "model.safetensors"), {}
    for module, row in rows.items():
        state = row.compress(tensors.pop(f"{module}.weight").float())
        truth[f"{module}.weight"] = row.decoded(dict(state))
        tensors |= {f"{module}.{name}": tensor.contiguous() for name, tensor in state.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": config}
    (folder / "config.json").write_text(json.dumps(config))
    return truth
