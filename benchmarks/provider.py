"""Libraries that `python -m benchmarks linear` compares: the four products of every layer in their formats.

    qerl-nvfp4        one launch per product; LoRA's B, bias, residual and SwiGLU run in its epilogue
    cublas-bf16       PyTorch's product of bfloat16 matrices
    humming           humming-kernels' NVFP4 layer, with its own choice of tiles
    bitsandbytes-nf4  matmul_4bit on NF4 in blocks of 64

All but the first compute the product alone. Rank R adds u = x A^T to each product, with A stacked over
the linears that share x, and y += u B^T to each linear: one launch before the product and B inside it for
qerl-nvfp4, separate PyTorch products for the others. Layers share values but not memory; timings do not
depend on values.
"""

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from qerl.formats import BF16, NVFP4
from qerl.kernels.tiles import nvfp4_decode
from qerl.kernels.tiles.lora_shrink import LoraShrink
from qerl.models.architecture import Architecture
from qerl.models.layer_spec import LinearGroupSpec, layer_spec
from qerl.models.random_weights import random_bf16, random_nvfp4

Product = Callable[[Tensor, Tensor], Tensor]  # (x_MK, a y_MN that it may write to) -> y_MN
_QKV, _O, _GATE_UP, _DOWN = range(4)


class LayerLinears(Protocol):
    def work(self, batch: int, rank: int) -> Callable[[], None]:
        """Return a function that runs all products of all layers once; rank 0 is no adapter."""
        ...

    def one(self, batch: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return x_MK and y_MN of the o product, and its dequantized weight [N, K]."""
        ...


class QerlNVFP4:
    def __init__(self, architecture: Architecture, device: torch.device):
        self._gemms, self._num_layers, self._device = (
            layer_spec(architecture).groups,
            architecture.num_layers,
            device,
        )
        self._decode = nvfp4_decode.NVFP4Decode(device)
        self._shrink = LoraShrink(device)
        weights = [random_nvfp4(g.out_width, g.in_width, _rng(device)) for g in self._gemms]
        self._o_weight_NK = weights[_O].decode()
        self._factors = [nvfp4_decode.row_factors(w.alpha, w.shape[0]) for w in weights]
        order = nvfp4_decode.swiglu_order(architecture.ff_width, device)
        plain = [(w.codes, w.scales) for w in weights]
        plain[_GATE_UP] = weights[_GATE_UP].codes[order], weights[_GATE_UP].scales[order]
        packed = [nvfp4_decode.pack(codes, scales) for codes, scales in plain]
        self._tiles_LG = [[tiles.clone() for tiles in packed] for _ in range(self._num_layers)]

    def work(self, batch: int, rank: int) -> Callable[[], None]:
        qkv, o = self._gemms[_QKV], self._gemms[_O]
        x_G = _random_inputs(self._gemms, batch, self._device)
        residual_MD = torch.randn(batch, o.out_width, device=self._device)
        bias_N = torch.randn(qkv.out_width, device=self._device)
        a_LG, b_LG = _adapters(self._gemms, self._num_layers, rank, self._device)
        starts = (qkv.out_widths[0], sum(qkv.out_widths[:2]))

        def adapter(layer: int, i: int) -> nvfp4_decode.PackedAdapter | None:
            if rank == 0:
                return None
            a_RK, b_NR, is_qkv = a_LG[layer][i], b_LG[layer][i], i == _QKV
            u_MR = None
            if not nvfp4_decode.pays_to_compute_lora_hidden(
                batch, self._gemms[i].in_width, len(a_RK), i == _GATE_UP
            ):
                u_MR = self._shrink.shrink(x_G[i], a_RK, 1.0)
            return nvfp4_decode.PackedAdapter(a_RK, b_NR, 1.0, starts if is_qkv else (), u_MR)

        def linear(layer: int, i: int, **epilogue: Tensor) -> Tensor:
            tiles, factors_N = self._tiles_LG[layer][i], self._factors[i]
            return self._decode.linear(x_G[i], tiles, factors_N, adapter=adapter(layer, i), **epilogue)

        def run() -> None:
            for layer, tiles_G in enumerate(self._tiles_LG):
                linear(layer, _QKV, bias_N=bias_N)
                linear(layer, _O, residual_MN=residual_MD)
                beside = adapter(layer, _GATE_UP)
                factors_N = self._factors[_GATE_UP]
                self._decode.swiglu(x_G[_GATE_UP], tiles_G[_GATE_UP], factors_N, adapter=beside)
                linear(layer, _DOWN, residual_MN=residual_MD)

        return run

    def one(self, batch: int) -> tuple[Tensor, Tensor, Tensor]:
        x_MK = _random_inputs(self._gemms, batch, self._device)[_O]
        y_MN = self._decode.linear(x_MK, self._tiles_LG[0][_O], self._factors[_O])
        return x_MK, y_MN, self._o_weight_NK


class LibraryLinears:
    """Products of another library, with the adapter in separate PyTorch products."""

    def __init__(
        self,
        architecture: Architecture,
        device: torch.device,
        products_LG: list[list[Product]],
        o_weight_NK: Tensor,
    ):
        self._gemms, self._device = layer_spec(architecture).groups, device
        self._products_LG, self._o_weight_NK = products_LG, o_weight_NK

    def work(self, batch: int, rank: int) -> Callable[[], None]:
        x_G = _random_inputs(self._gemms, batch, self._device)
        y_G = _outputs(self._gemms, batch, self._device)
        a_LG, b_LG = _adapters(self._gemms, len(self._products_LG), rank, self._device)

        def run() -> None:
            for layer, products in enumerate(self._products_LG):
                for i, gemm in enumerate(self._gemms):
                    y_MN = products[i](x_G[i], y_G[i])
                    if rank:
                        add_adapter(y_MN, x_G[i], a_LG[layer][i], b_LG[layer][i], gemm)

        return run

    def one(self, batch: int) -> tuple[Tensor, Tensor, Tensor]:
        x_MK = _random_inputs(self._gemms, batch, self._device)[_O]
        y_MN = self._products_LG[0][_O](x_MK, _outputs(self._gemms, batch, self._device)[_O])
        return x_MK, y_MN, self._o_weight_NK


def add_adapter(y_MN: Tensor, x_MK: Tensor, a_RK: Tensor, b_NR: Tensor, gemm: LinearGroupSpec) -> None:
    """Add (x A^T) B^T to y in place: one product with the stacked A, then one per linear."""
    rows = list(gemm.out_widths)
    parts = (x_MK @ a_RK.T).chunk(len(rows), dim=1)
    for y, u, b in zip(y_MN.split(rows, dim=1), parts, b_NR.split(rows), strict=True):
        y.addmm_(u, b.T)


def cublas_bf16(architecture: Architecture, device: torch.device) -> LibraryLinears:
    weights = [
        random_bf16(g.out_width, g.in_width, _rng(device)).weight for g in layer_spec(architecture).groups
    ]

    def product(weight_NK: Tensor) -> Product:
        return lambda x_MK, y_MN: torch.mm(x_MK, weight_NK.T, out=y_MN)

    products_LG = [[product(w.clone()) for w in weights] for _ in range(architecture.num_layers)]
    return LibraryLinears(architecture, device, products_LG, weights[_O].float())


def humming_nvfp4(architecture: Architecture, device: torch.device) -> LibraryLinears:
    make_layer = importlib.import_module("humming.layer").HummingLayer
    nvfp4 = {"type": "float", "num_bits": 4, "strategy": "tensor_group", "group_size": 16}
    nvfp4 |= {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
    weights = [random_nvfp4(g.out_width, g.in_width, _rng(device)) for g in layer_spec(architecture).groups]

    def product(i: int) -> Product:
        (n, k), weight = weights[i].shape, weights[i]
        layer = make_layer(shape_n=n, shape_k=k, weight_config=dict(nvfp4), torch_dtype=torch.bfloat16).to(
            device
        )
        names = {"weight_packed": weight.codes, "weight_scale": weight.scales}
        layer.load_from_tensors(names | {"weight_global_scale": weight.global_scale})
        layer.transform()
        return lambda x_MK, y_MN: layer(x_MK, outputs=y_MN)

    products_LG = [[product(i) for i in range(len(weights))] for _ in range(architecture.num_layers)]
    return LibraryLinears(architecture, device, products_LG, weights[_O].decode())


def bitsandbytes_nf4(architecture: Architecture, device: torch.device) -> LibraryLinears:
    package = importlib.import_module("bitsandbytes")
    weights = [
        random_bf16(g.out_width, g.in_width, _rng(device)).weight for g in layer_spec(architecture).groups
    ]

    def product(weight_NK: Tensor) -> Product:
        codes, state = package.functional.quantize_4bit(weight_NK, quant_type="nf4")
        return lambda x_MK, y_MN: package.matmul_4bit(x_MK, codes.t(), state)

    products_LG = [[product(w) for w in weights] for _ in range(architecture.num_layers)]
    codes, state = package.functional.quantize_4bit(weights[_O], quant_type="nf4")
    o_weight_NK = package.functional.dequantize_4bit(codes, state)
    return LibraryLinears(architecture, device, products_LG, o_weight_NK.float())


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Provider:
    make: Callable[[Architecture, torch.device], LayerLinears]
    bytes_per_weight: float
    """Including scales."""
    module: str | None = None
    """Module it needs beyond qerl's own dependencies."""
    package: str | None = None
    """Name of the package for pip."""


PROVIDERS = {
    "qerl-nvfp4": Provider(
        make=QerlNVFP4,
        bytes_per_weight=NVFP4.bytes_per_weight,
        module="cuda.bindings",
        package="cuda-bindings",
    ),
    "cublas-bf16": Provider(make=cublas_bf16, bytes_per_weight=BF16.bytes_per_weight),
    "humming": Provider(
        make=humming_nvfp4,
        bytes_per_weight=NVFP4.bytes_per_weight,
        module="humming",
        package="humming-kernels==0.1.19",
    ),
    "bitsandbytes-nf4": Provider(
        make=bitsandbytes_nf4,
        bytes_per_weight=0.5 + 4 / 64,
        module="bitsandbytes",
        package="bitsandbytes==0.50.0",
    ),
}


def _rng(device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(0)


def _random_inputs(gemms_G: tuple[LinearGroupSpec, ...], batch: int, device: torch.device) -> list[Tensor]:
    return [torch.randn(batch, g.in_width, device=device).bfloat16() for g in gemms_G]


def _outputs(gemms_G: tuple[LinearGroupSpec, ...], batch: int, device: torch.device) -> list[Tensor]:
    return [torch.empty(batch, g.out_width, dtype=torch.bfloat16, device=device) for g in gemms_G]


def _adapters(
    gemms_G: tuple[LinearGroupSpec, ...], num_layers: int, rank: int, device: torch.device
) -> tuple[list[list[Any]], list[list[Any]]]:
    """Return A [G R, K] of each product of G linears, and B [N, R], for every layer; None for rank 0."""

    def random(rows: int, columns: int) -> Tensor | None:
        return torch.randn(rows, columns, device=device).mul_(0.02).bfloat16() if rank else None

    layers = range(num_layers)
    a_LG = [[random(len(g.out_widths) * rank, g.in_width) for g in gemms_G] for _ in layers]
    return a_LG, [[random(g.out_width, rank) for g in gemms_G] for _ in layers]
