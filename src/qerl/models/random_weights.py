"""Build a decoder of a real shape with random weights, made on the device in their format.

    W ~ std 1 / sqrt(K)     E2M1 codes uniform, E4M3 scales from 128 to 448, the rest in the global scale
    embedding, head, bias ~ N(0, 0.02^2),     norms 1,     A_RK uniform in +-1 / sqrt(K),  B_NR ~ N(0, 0.02^2)
    BF16 W of queries over m^2, if rotations multiply queries and keys by m (YaRN): scores have a std of 1

For measuring speed and memory without a checkpoint: shapes, formats and passes are a real model's, the text
is noise. There is no copy in full precision, except of a head that is about to be packed, and layers are
packed into tiles one by one where the decode kernels run (packed_linear.py), so a 72B shape fits in NVFP4 on
one GPU of 80 GB. SHAPES are from the instruction models' config.json.
"""

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from qerl.aqn.noised_norm import NoisedRMSNorm
from qerl.errors import UserError, did_you_mean, require
from qerl.formats import BF16, FP8, INT8, MXFP4, NF4, NVFP4, FP8Flow, PackedWeight
from qerl.kernels.delta_net.gated_delta_net import DeltaShape
from qerl.models.architecture import Architecture, LayerKind, Mixture, Rope
from qerl.models.decoder import Attention, Decoder, Layer
from qerl.models.delta_net import GatedDeltaNet
from qerl.models.device import keeps_tiles
from qerl.models.layer_spec import check_dense
from qerl.models.linear import QuantLinear
from qerl.models.lm_head import check_head
from qerl.models.mixture import ExpertLinear
from qerl.models.norm import RMSNorm
from qerl.models.rope import magnitude
from qerl.models.tiled_experts import ExpertRows, stacked

_STD = 0.02
_CODE_MEAN_SQUARE = 68.5 / 8  # of 0, 1/2, 1, 3/2, 2, 3, 4, 6
_SCALE_BYTES = (0x70, 0x7F)  # E4M3 codes of 128 to 448; the end is exclusive: it is NaN
_LORA_ALPHA = 32


def _shape(
    family: str,
    num_layers: int,
    width: int,
    num_heads: int,
    num_kv_heads: int,
    ff_width: int,
    *,
    vocab_size: int,
    theta: float = 1e6,
    head_size: int | None = None,
    norm_eps: float = 1e-6,
    max_positions: int = 32_768,
    llama3_factor: float | None = None,
    **parts: Any,
) -> Architecture:
    rope = Rope(kind="default", theta=theta, original_positions=max_positions)
    if llama3_factor is not None:
        rope = Rope(kind="llama3", theta=theta, factor=llama3_factor, original_positions=8192)
    fields: dict[str, Any] = {
        "head_size": head_size or width // num_heads,
        "rope": rope,
        "qkv_bias": family == "Qwen2ForCausalLM",
        "output_bias": False,
        "mlp_bias": False,
        "qk_norm": family.startswith("Qwen3"),
        "tied_head": False,
    }
    return Architecture(
        family=family,
        num_layers=num_layers,
        width=width,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        ff_width=ff_width,
        vocab_size=vocab_size,
        norm_eps=norm_eps,
        max_positions=max_positions,
        **fields | parts,
    )


_llama = partial(_shape, "LlamaForCausalLM", norm_eps=1e-5)
_smollm2 = partial(_llama, vocab_size=49_152, max_positions=8192, tied_head=True)
_llama3 = partial(_llama, vocab_size=128_256, theta=5e5, max_positions=131_072)
_mistral = partial(_shape, "MistralForCausalLM", head_size=128, norm_eps=1e-5)
_qwen2 = partial(_shape, "Qwen2ForCausalLM", vocab_size=152_064)
_small_qwen2 = partial(_qwen2, vocab_size=151_936, tied_head=True)
_qwen3_sizes = {"vocab_size": 151_936, "head_size": 128, "max_positions": 40_960}
_qwen3 = partial(_shape, "Qwen3ForCausalLM", **_qwen3_sizes)
SHAPES = {  # layers, width, heads, key/value heads, width of the MLP
    "smollm2-135m": _smollm2(30, 576, 9, 3, 1536, theta=1e5),
    "smollm2-360m": _smollm2(32, 960, 15, 5, 2560, theta=1e5),
    "smollm2-1.7b": _smollm2(24, 2048, 32, 32, 8192, theta=1.3e5),
    "qwen2.5-0.5b": _small_qwen2(24, 896, 14, 2, 4864),
    "qwen2.5-1.5b": _small_qwen2(28, 1536, 12, 2, 8960),
    "qwen2.5-3b": _small_qwen2(36, 2048, 16, 2, 11_008),
    "qwen2.5-7b": _qwen2(28, 3584, 28, 4, 18_944),
    "qwen2.5-14b": _qwen2(48, 5120, 40, 8, 13_824),
    "qwen2.5-32b": _qwen2(64, 5120, 40, 8, 27_648),
    "qwen2.5-72b": _qwen2(80, 8192, 64, 8, 29_568),
    "qwen3-0.6b": _qwen3(28, 1024, 16, 8, 3072, tied_head=True),
    "qwen3-1.7b": _qwen3(28, 2048, 16, 8, 6144, tied_head=True),
    "qwen3-4b": _qwen3(36, 2560, 32, 8, 9728, tied_head=True),
    "qwen3-8b": _qwen3(36, 4096, 32, 8, 12_288),
    "qwen3-14b": _qwen3(40, 5120, 40, 8, 17_408),
    "qwen3-32b": _qwen3(64, 5120, 64, 8, 25_600),
    "llama-3.1-8b": _llama3(32, 4096, 32, 8, 14_336, llama3_factor=8.0),
    "llama-3.2-1b": _llama3(16, 2048, 32, 8, 8192, llama3_factor=32.0, tied_head=True),
    "llama-3.2-3b": _llama3(28, 3072, 24, 8, 8192, llama3_factor=32.0, tied_head=True),
    "llama-3.3-70b": _llama3(80, 8192, 64, 8, 28_672, llama3_factor=8.0),
    "mistral-7b-v0.3": _mistral(32, 4096, 32, 8, 14_336, vocab_size=32_768),
    "mistral-small-24b": _mistral(40, 5120, 32, 8, 32_768, vocab_size=131_072, theta=1e8),
}


def _gpt_oss(num_layers: int, num_experts: int) -> Architecture:
    """Experts in MXFP4 blocks, all else in BF16, as published."""
    mixture = Mixture(
        num_experts=num_experts,
        num_chosen=4,
        width=2880,
        softmax_over="chosen",
        stored="blocks",
        has_bias=True,
        swiglu_alpha=1.702,
        is_interleaved=True,
    )
    window = LayerKind(window=128, mlp="experts"), LayerKind(mlp="experts")
    yarn = Rope(kind="yarn", theta=150_000.0, factor=32.0, original_positions=4096, is_truncated=False)
    parts = {"qkv_bias": True, "output_bias": True, "attention_sinks": True, "mixture": mixture}
    parts |= {"rope": yarn, "layer_kinds": window * (num_layers // 2)}
    sizes = {"head_size": 64, "vocab_size": 201_088, "max_positions": 131_072}
    return _shape("GptOssForCausalLM", num_layers, 2880, 64, 8, 2880, norm_eps=1e-5, **sizes, **parts)


def _qwen3_moe(
    num_layers: int, width: int, num_heads: int, num_kv_heads: int, expert_width: int
) -> Architecture:
    mixture = Mixture(
        num_experts=128, num_chosen=8, width=expert_width, softmax_over="chosen", stored="separate"
    )
    parts = {"layer_kinds": (LayerKind(mlp="experts"),) * num_layers, "mixture": mixture, **_qwen3_sizes}
    return _shape("Qwen3MoeForCausalLM", num_layers, width, num_heads, num_kv_heads, 3 * width, **parts)


def _qwen3_5(
    num_layers: int, width: int, num_heads: int, num_kv_heads: int, ff_width: int, num_value_heads: int
) -> Architecture:
    """Every fourth layer has gated attention, the others Gated DeltaNet."""
    delta = DeltaShape(
        num_key_heads=16, num_value_heads=num_value_heads, key_size=128, value_size=128, num_taps=4
    )
    return _shape(
        "Qwen3_5ForCausalLM",
        *(num_layers, width, num_heads, num_kv_heads, ff_width),
        theta=1e7,
        head_size=256,
        vocab_size=248_320,
        max_positions=262_144,
        rotary_size=64,
        attention_gate=True,
        norm_offset=1.0,
        layer_kinds=((LayerKind(mixer="delta"),) * 3 + (LayerKind(),)) * (num_layers // 4),
        delta=delta,
    )


SHAPES |= {
    "qwen3.5-9b": _qwen3_5(32, 4096, 16, 4, 12_288, 32),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "qwen3-30b-a3b": _qwen3_moe(48, 2048, 32, 4, 768),
}
_PUBLISHERS = {"openai", "huggingfacetb", "meta-llama", "mistralai", "qwen", "unsloth"}
_VARIANT = re.compile(r"-(instruct|base|it|hf|\d{4})(?=-|$)")


def shape_of_hub_id(name: str) -> str | None:
    """Return the shape that a hub id of its publisher has: Qwen/Qwen2.5-7B-Instruct -> qwen2.5-7b."""
    owner, slash, model = name.lower().partition("/")
    if not slash or owner not in _PUBLISHERS:
        return None
    shape_name = _VARIANT.sub("", model.removeprefix("meta-"))
    return shape_name if shape_name in SHAPES else None


def shape(name: str) -> Architecture:
    hint = did_you_mean(name, SHAPES) or f"; known: {', '.join(SHAPES)}"
    require(name in SHAPES, f"unknown shape {name}{hint}")
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
    expert_rank: int = 0,
) -> Decoder:
    """Build a decoder whose adapter has this rank and a non-zero B; rank None adds no adapter, nor does an
    expert_rank of 0 to the experts."""
    if format not in _WEIGHTS:
        raise UserError(f"random weights are supported in {', '.join(_WEIGHTS)}, not in {format}")
    if format == "fp8-flow":
        check_dense(architecture, "fp8-flow")
    check_head(head, architecture.vocab_size, architecture.width)
    rng = torch.Generator(device).manual_seed(seed)
    decoder = Decoder(architecture, compute=compute, device=device)
    is_tiled = keeps_tiles(compute, device)
    for module in decoder.modules():
        if isinstance(module, RMSNorm | NoisedRMSNorm):
            module.weight.fill_(1)
    decoder.embed_tokens.weight.normal_(0, _STD, generator=rng)
    if not architecture.tied_head:
        decoder.lm_head.operand().normal_(0, _STD, generator=rng)
    decoder.lm_head.pack(head)
    for layer in decoder.layers:
        assert isinstance(layer, Layer)
        _fill_layer(layer, format, rank, is_tiled, magnitude(architecture.rope), rng)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # blocks that held only what was packed, before adapters split them
    for _, experts in decoder.expert_linears() if expert_rank else ():
        x = experts.spec
        bound, shape = 1 / math.sqrt(x.in_width), (x.num_experts, expert_rank, x.in_width)
        a_ERK = torch.empty(shape, device=rng.device).uniform_(-bound, bound, generator=rng)
        b_ENR = torch.empty(x.num_experts, x.out_width, expert_rank, device=rng.device)
        experts.add_adapter(a_ERK, b_ENR.normal_(0, _STD, generator=rng), _LORA_ALPHA / expert_rank)
    return decoder


def random_nvfp4(n: int, k: int, rng: torch.Generator) -> NVFP4:
    """Return weights [N, K] of standard deviation 1 / sqrt(K)."""
    device = rng.device
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=device, generator=rng)
    scales = torch.randint(*_SCALE_BYTES, (n, k // 16), dtype=torch.uint8, device=device, generator=rng)
    every_scale = torch.arange(*_SCALE_BYTES, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    spread = math.sqrt(_CODE_MEAN_SQUARE * every_scale.square().mean().item() * k)
    return NVFP4(codes, scales.view(torch.float8_e4m3fn), torch.full((1,), spread, device=device))


def random_mxfp4(n: int, k: int, rng: torch.Generator) -> MXFP4:
    """Return uniform codes and two powers of two, in shares that give a standard deviation of 1 / sqrt(K)."""
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=rng.device, generator=rng)
    mean_square = 1 / (_CODE_MEAN_SQUARE * k)
    exponent = math.floor(math.log2(mean_square) / 2)
    # The share of blocks with twice the scale, whose squares are four times.
    share = (mean_square / 4.0**exponent - 1) / 3
    is_upper = torch.rand(n, k // 32, device=rng.device, generator=rng) < share
    return MXFP4(codes, is_upper.to(torch.uint8) + (exponent + 127))


def random_bf16(n: int, k: int, rng: torch.Generator) -> BF16:
    return BF16(_normal((n, k), 1 / math.sqrt(k), torch.bfloat16, rng))


_WEIGHTS: dict[str, Callable[[int, int, torch.Generator], PackedWeight]] = {
    "nvfp4": random_nvfp4,
    "mxfp4": random_mxfp4,
    "bf16": random_bf16,
    "nf4": lambda n, k, rng: NF4.encode(random_bf16(n, k, rng).weight),
    "fp8": lambda n, k, rng: FP8.encode(random_bf16(n, k, rng).weight),
    "int8": lambda n, k, rng: INT8.encode(random_bf16(n, k, rng).weight),
    "fp8-flow": lambda n, k, rng: FP8Flow.encode(random_bf16(n, k, rng).weight),
}


def _fill_layer(
    layer: Layer, format: str, rank: int | None, is_tiled: bool, turn: float, rng: torch.Generator
) -> None:
    """Fill all but the norms and the experts' adapters. turn: factor of rotated queries and keys."""
    for group, linears in zip(layer.spec.groups, layer.linear_groups, strict=True):
        for linear in linears:
            group_format = format if group.is_quantized else "bf16"
            _fill(linear, group_format, None if group.name == "router" else rank, rng)
    for experts, rows in zip(layer.experts, layer.expert_rows, strict=True):
        _fill_experts(experts, format, rows if is_tiled else None, rng)
    _fill_mixer(layer.mixer, rng)
    if isinstance(layer.mixer, Attention) and isinstance(weight := layer.mixer.q_proj.weight, BF16):
        weight.weight.div_(turn**2)
    if is_tiled:
        layer.tile()


def _fill(linear: QuantLinear, format: str, rank: int | None, rng: torch.Generator) -> None:
    n, k = linear.out_width, linear.in_width
    linear.load_weight(_WEIGHTS[format](n, k, rng))
    if linear.bias is not None:
        linear.bias.normal_(0, _STD, generator=rng)
    if rank is not None:
        bound = 1 / math.sqrt(k)
        a_RK = torch.empty(rank, k, device=rng.device).uniform_(-bound, bound, generator=rng)
        linear.add_adapter(a_RK, _normal((n, rank), _STD, torch.float32, rng), _LORA_ALPHA / rank)


def _fill_mixer(mixer: Attention | GatedDeltaNet, rng: torch.Generator) -> None:
    """Fill all but linears and norms. Decays are exp(-A softplus(a + 1)), A uniform from 0 to 16, as models
    with Gated DeltaNet begin."""
    if isinstance(mixer, Attention):
        if mixer.sinks is not None:
            mixer.sinks.normal_(0, 1, generator=rng)
        return
    bound = mixer.shape.num_taps**-0.5
    mixer.conv1d.weight.uniform_(-bound, bound, generator=rng)
    mixer.A_log.uniform_(0, 16, generator=rng).log_()
    mixer.dt_bias.fill_(1)


def _fill_experts(experts: ExpertLinear, format: str, rows: ExpertRows | None, rng: torch.Generator) -> None:
    """Make the stack expert by expert, in tiles if their rows are given."""
    x, make = experts.spec, _WEIGHTS[format]
    experts.load_weight(stacked(x.num_experts, lambda _: make(x.out_width, x.in_width, rng), rows))
    if experts.bias is not None:
        experts.bias.normal_(0, _STD, generator=rng)


def _normal(shape: tuple[int, int], std: float, dtype: torch.dtype, rng: torch.Generator) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=rng.device).normal_(0, std, generator=rng)
