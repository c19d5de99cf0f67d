"""A decoder of a real shape with random weights, made on the device in the format they are held in.

    W ~ std 1 / sqrt(K)     E2M1 codes drawn evenly, E4M3 scales from 128 to 448, the rest in the global scale
    embedding, head, bias ~ N(0, 0.02^2),     norms 1,     A_RK uniform in +-1 / sqrt(K),  B_NR ~ N(0, 0.02^2)

For speed and memory where no checkpoint is at hand: shapes, formats and passes are a real model's, what it
says is noise. There is never a copy in full precision, but of a head that is about to be packed; layer after
layer goes into tiles where the decode kernels run (tiled.py), so a 72B shape is made in NVFP4 on one GPU of
80 GB.
SHAPES are those of the instruction models' config.json.
"""

import math

import torch
from torch import Tensor

from qerl.errors import UserError
from qerl.formats import BF16, NVFP4, PackedWeight
from qerl.model.architecture import Architecture, Rope
from qerl.model.decoder import Decoder, Layer
from qerl.model.device import has_tile_kernels
from qerl.model.head import check_head
from qerl.model.linear import QuantLinear
from qerl.model.norm import NoisedRMSNorm, RMSNorm

_STD = 0.02
_CODE_MEAN_SQUARE = 68.5 / 8  # of 0, 1/2, 1, 3/2, 2, 3, 4, 6
_SCALE_BYTES = (0x70, 0x7F)  # E4M3's numbers from 128 to 448; the last is not taken, it is NaN
_LORA_ALPHA = 32


def _qwen(
    num_layers: int,
    width: int,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    ff_width: int,
    *,
    tied_head: bool = False,
) -> Architecture:
    return Architecture(
        family="Qwen2ForCausalLM",
        num_layers=num_layers,
        width=width,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        ff_width=ff_width,
        vocab_size=151_936 if tied_head else 152_064,
        norm_eps=1e-6,
        rope=Rope(kind="default", theta=1e6, original_positions=32_768),
        max_positions=32_768,
        qkv_bias=True,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        tied_head=tied_head,
    )


SHAPES = {
    "smollm2-135m": Architecture(
        family="LlamaForCausalLM",
        num_layers=30,
        width=576,
        num_heads=9,
        num_kv_heads=3,
        head_size=64,
        ff_width=1536,
        vocab_size=49_152,
        norm_eps=1e-5,
        rope=Rope(kind="default", theta=1e5, original_positions=8192),
        max_positions=8192,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        tied_head=True,
    ),
    "qwen2.5-0.5b": _qwen(24, 896, 14, 2, 64, 4864, tied_head=True),
    "qwen2.5-1.5b": _qwen(28, 1536, 12, 2, 128, 8960, tied_head=True),
    "qwen2.5-3b": _qwen(36, 2048, 16, 2, 128, 11_008, tied_head=True),
    "qwen2.5-7b": _qwen(28, 3584, 28, 4, 128, 18_944),
    "qwen2.5-14b": _qwen(48, 5120, 40, 8, 128, 13_824),
    "qwen2.5-32b": _qwen(64, 5120, 40, 8, 128, 27_648),
    "qwen2.5-72b": _qwen(80, 8192, 64, 8, 128, 29_568),
}


def shape(name: str) -> Architecture:
    if name not in SHAPES:
        raise UserError(f"no shape {name}; there are {', '.join(SHAPES)}")
    return SHAPES[name]


@torch.no_grad()
def random_decoder(
    architecture: Architecture,
    *,
    format: str,
    rank: int | None,
    device: torch.device,
    seed: int,
    compute: torch.dtype = torch.bfloat16,
    head: str = "bf16",
) -> Decoder:
    """Linears in nvfp4 or bf16, with an adapter of this rank whose B is not zero; None makes none."""
    if format not in _WEIGHTS:
        raise UserError(f"random weights are made in {' or '.join(_WEIGHTS)}, not in {format}")
    check_head(head, architecture.vocab_size, architecture.width)
    rng = torch.Generator(device).manual_seed(seed)
    decoder = Decoder(architecture, compute=compute, device=device)
    is_tiled = compute == torch.bfloat16 and has_tile_kernels(device)
    for module in decoder.modules():
        if isinstance(module, RMSNorm | NoisedRMSNorm):
            module.weight.fill_(1)
    decoder.embed_tokens.weight.normal_(0, _STD, generator=rng)
    if not architecture.tied_head:
        decoder.lm_head.operand().normal_(0, _STD, generator=rng)
    decoder.lm_head.pack(head)
    for layer in decoder.layers:
        assert isinstance(layer, Layer)
        for linear in layer.modules():
            if isinstance(linear, QuantLinear):
                _fill(linear, format, rank, rng)
        if is_tiled:
            layer.tile()
    return decoder


def random_nvfp4(n: int, k: int, rng: torch.Generator) -> NVFP4:
    """Weights [N, K] of standard deviation 1 / sqrt(K)."""
    device = rng.device
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=device, generator=rng)
    scales = torch.randint(*_SCALE_BYTES, (n, k // 16), dtype=torch.uint8, device=device, generator=rng)
    every_scale = torch.arange(*_SCALE_BYTES, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    spread = math.sqrt(_CODE_MEAN_SQUARE * every_scale.square().mean().item() * k)
    return NVFP4(codes, scales.view(torch.float8_e4m3fn), torch.full((1,), spread, device=device))


def random_bf16(n: int, k: int, rng: torch.Generator) -> BF16:
    return BF16(_normal((n, k), 1 / math.sqrt(k), torch.bfloat16, rng))


_WEIGHTS = {"nvfp4": random_nvfp4, "bf16": random_bf16}


def _fill(linear: QuantLinear, format: str, rank: int | None, rng: torch.Generator) -> None:
    n, k = linear.out_width, linear.in_width
    weight: PackedWeight = _WEIGHTS[format](n, k, rng)
    linear.load_weight(weight)
    if linear.bias is not None:
        linear.bias.normal_(0, _STD, generator=rng)
    if rank is not None:
        bound = 1 / math.sqrt(k)
        a_RK = torch.empty(rank, k, device=rng.device).uniform_(-bound, bound, generator=rng)
        linear.add_adapter(a_RK, _normal((n, rank), _STD, torch.float32, rng), _LORA_ALPHA / rank)


def _normal(shape: tuple[int, int], std: float, dtype: torch.dtype, rng: torch.Generator) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=rng.device).normal_(0, std, generator=rng)
