"""A row for each family: a tiny random model of it, in transformers and in ours, with the same weights.

Matrices hold numbers that bf16 has exactly, so the BF16 format loses nothing and float32 results must agree.
"""

import copy
import functools
import warnings
from pathlib import Path

import torch
import transformers
from torch import Tensor
from torch.overrides import TorchFunctionMode

from models.tiny import packed
from qerl.config import AdapterConfig
from qerl.kernels.head.logprob import Softcap, chunked_logprob
from qerl.models.architecture import Architecture
from qerl.models.checkpoint.source import locate
from qerl.models.decoder import Decoder, RunLayer, run_layer
from qerl.models.delta_net import recur_over
from qerl.models.loader import build_decoder
from qerl.models.peft.adapter import adapter_tensors, add_adapter, publish
from qerl.types import Tree

SHAPE = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
WIDE = {"head_dim": 16}  # heads wider than the model, so that no shape passes for another
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 7}
FACTORS = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.1,
    "residual_multiplier": 0.3,
    "logits_scaling": 2.0,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.2, 1.5, 2.0],
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 64,
}
LOCAL = {"rope_type": "default", "rope_theta": 100.0}
ROPES = {"full_attention": {**LOCAL, "rope_type": "linear", "factor": 4.0}, "sliding_attention": LOCAL}
CAPS = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 6.0}
DELTA = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}
QUARTER = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2}
ROWS = {
    "Llama": WIDE,
    "Mistral": WIDE,
    "Qwen2": WIDE,
    "Qwen3": WIDE,
    "Gemma2": {**WIDE, **WINDOWS, **CAPS, "query_pre_attn_scalar": 24},
    "Gemma3": {**WIDE, **WINDOWS, "query_pre_attn_scalar": 24, "rope_parameters": ROPES},
    "Gemma4": {
        **WIDE,
        **WINDOWS,
        "global_head_dim": 24,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": 6.0,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": 100.0,
                "partial_rotary_factor": 0.5,
            },
            "sliding_attention": LOCAL,
        },
    },
    "Glm4": WIDE,
    "GptOss": {
        **WIDE,
        **WINDOWS,
        **EXPERTS,
        "rope_parameters": {**YARN, "truncate": False},
        "swiglu_limit": 0.7,
    },
    "Granite": FACTORS,
    "GraniteMoe": {**FACTORS, "num_local_experts": 5, "num_experts_per_tok": 2},
    "GraniteMoeHybrid": {
        **FACTORS,
        "num_local_experts": 0,
        "shared_intermediate_size": 80,
        "layer_types": ["full_attention"] * 4,
        "position_embedding_type": "rope",
        "mamba_n_heads": 2,
    },
    "Ministral": {**WIDE, **WINDOWS},
    "Ministral3": {
        **WIDE,
        "sliding_window": 9,
        "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
    },
    "Olmo2": {},
    "Olmoe": EXPERTS,
    "Olmo3": {**WINDOWS, "rope_parameters": ROPES},
    "Phi3": {"sliding_window": 9, "rope_parameters": LONGROPE},
    "Qwen3_5": {**WIDE, **DELTA, **QUARTER},
    "Qwen3Moe": {
        **WIDE,
        **EXPERTS,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "mlp_only_layers": [2],
    },
    "Qwen3Next": {**WIDE, **DELTA, **QUARTER, "num_experts": 0, "decoder_sparse_step": 1},
    "SmolLM3": {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 7},
}


def config_class(family: str):
    return getattr(
        transformers, f"{family}{'Text' if family in ('Gemma3', 'Gemma4', 'Qwen3_5') else ''}Config"
    )


def oracle(family: str, *, seed: int = 0, **changes):
    """transformers' model, eager attention, float32, with biases and norm weights that are not trivial."""
    settings = copy.deepcopy(SHAPE | ROWS[family] | changes)  # transformers changes what it is given
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = config_class(family)(**settings, attn_implementation="eager", experts_implementation="eager")
        model = getattr(transformers, f"{family}ForCausalLM")(config).eval().requires_grad_(False)
    return randomize(model, seed)


def multimodal(family: str, **changes):
    """A class with a vision tower whose language part is of this family."""
    gemma = {name: (name, f"{name}Text") for name in ("Gemma3", "Gemma4")}
    whole, text = (gemma | {"Ministral3": ("Mistral3", "Ministral3")})[family]
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14, "head_dim": 8} if family == "Ministral3" else {}
    vision |= {"image_size": 28, "patch_size": 14, "vision_use_head": False} if family == "Gemma3" else {}
    vision |= {"num_key_value_heads": 2, "head_dim": 8} if family == "Gemma4" else {}
    towers = {"Gemma3": "SiglipVision", "Gemma4": "Gemma4Vision", "Ministral3": "PixtralVision"}
    kind = towers[family]
    settings = copy.deepcopy(SHAPE | ROWS[family] | changes)  # transformers changes what it is given
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = getattr(transformers, f"{whole}Config")(
            text_config=getattr(transformers, f"{text}Config")(**settings).to_dict(),
            vision_config=getattr(transformers, f"{kind}Config")(**vision).to_dict(),
            image_token_index=3,
            tie_word_embeddings=settings.get("tie_word_embeddings", family in gemma),
            attn_implementation="eager",
        )
        model = getattr(transformers, f"{whole}ForConditionalGeneration")(config).eval()
    return randomize(model.requires_grad_(False))


def randomize(model, seed: int = 0):
    rng = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        spread = 0.6 * p.shape[-1] ** -0.5 if p.dim() >= 2 else 0.3
        p.copy_(torch.randn(p.shape, generator=rng) * spread)
        has_offset = "Gemma" in type(model).__name__ and "Gemma4" not in type(model).__name__
        if p.dim() == 1 and "norm" in name and not has_offset:
            p.add_(1.0)
        if "embed_tokens" in name or "lm_head" in name:
            p.mul_(4)
        p.copy_(p.bfloat16())
    for name, buffer in model.named_buffers():
        if "layer_scalar" in name:
            buffer.copy_(1 + torch.randn(1, generator=rng).mul(0.3).bfloat16())
    return model


def save(model, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def load(folder: Path, *, compute: torch.dtype = torch.float32) -> Decoder:
    cpu = torch.device("cpu")
    checkpoint = locate(str(folder)).open()
    return build_decoder(checkpoint, format="bf16", compute=compute, device=cpu, resident=True)


class Pairs:
    """Each family's oracle, its folder and our decoder, made once."""

    def __init__(self, folder: Path):
        self._folder = folder
        self.of = functools.cache(self._made)

    def _made(self, family: str):
        model = oracle(family)
        folder = save(model, self._folder / family)
        return model, folder, load(folder)


def adapted(decoder: Decoder) -> Decoder:
    """Add an adapter to every linear, whose A and B are random."""
    targets = tuple(dict.fromkeys(name.rpartition(".")[2] for name, _ in decoder.linears()))
    add_adapter(decoder, AdapterConfig(rank=4, alpha=8.0, target_modules=targets), seed=3)
    rng = torch.Generator().manual_seed(4)
    for master in adapter_tensors(decoder).values():
        master.data.copy_(torch.randn(master.shape, generator=rng) * 0.1)
    publish(decoder)
    return decoder


def sampled_logprobs(
    decoder: Decoder, tokens_T: Tensor, trees: list[Tree], run_layer: RunLayer = run_layer
) -> Tensor:
    """Return the logprobs of a tree's branches, sample after sample, as the learner computes them."""
    (tree,), head = trees, decoder.lm_head
    positions_T, attend = packed(trees)
    rows, targets, row = [], [], tree.prompt_tokens
    for length in tree.branch_tokens:
        rows += [tree.prompt_tokens - 1, *range(row, row + length - 1)][:length]
        targets += range(row, row + length)
        row += length
    softcap = None if head.softcap is None else Softcap(head.softcap, head.alpha)
    logprob_C, _ = chunked_logprob(
        decoder(tokens_T, positions_T, attend, run_layer, recur=recur_over(trees, decoder.device)),
        head.operand(),
        tokens_T[targets],
        rows_C=torch.tensor(rows),
        temperature=1.0 / (1.0 if softcap else head.alpha),
        chunk_tokens=10,
        softcap=softcap,
    )
    return logprob_C


def oracle_logprobs(
    model, decoder: Decoder, tokens_T: Tensor, prompt_tokens: int, changed: dict[str, Tensor] | None = None
) -> Tensor:
    """Return those of one sample by transformers' model, with W + scaling * B @ A of our masters, and other
    weights as they are given."""
    architecture, linears = decoder.architecture, dict(decoder.linears())
    changes = {
        f"model.{name}.weight": linear.scaling * linear.lora_B @ linear.lora_A
        for name, linear in linears.items()
        if linear.lora_A is not None
    }
    weights = dict(model.named_parameters())
    stored = {name: weights[name] + change for name, change in joined(architecture, changes)}
    stored |= changed or {}
    logits_TV = torch.func.functional_call(model, stored, (tokens_T[None],)).logits[0]
    logprobs_TV = logits_TV.log_softmax(-1)[prompt_tokens - 1 : -1]
    return logprobs_TV.gather(1, tokens_T[prompt_tokens:, None])[:, 0]


class InFloat64(TorchFunctionMode):
    """Let float64 models compute in float64 what transformers computes in float32 whatever they are in."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.float:
            return args[0].double()
        wider = {key: _wider(value) for key, value in (kwargs or {}).items()}
        return func(*map(_wider, args), **wider)


def _wider(value):
    return torch.float64 if value is torch.float32 else value


def joined(architecture: Architecture, tensors: dict[str, Tensor]):
    """Put side by side what the checkpoint stores as one, written apart from stored_names.py."""
    fused = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    wholes = {"Phi3ForCausalLM": ("qkv_proj", "gate_up_proj"), "Glm4ForCausalLM": ("gate_up_proj",)}
    hybrid = {"gate_up_proj": "shared_mlp.input_linear", "down_proj": "shared_mlp.output_linear"}
    found = dict(tensors)
    is_hybrid = architecture.family == "GraniteMoeHybridForCausalLM"
    for whole in ("gate_up_proj",) if is_hybrid else wholes.get(architecture.family, ()):
        for name in [name for name in found if f".{fused[whole][0]}." in name]:
            parts = [found.pop(name.replace(fused[whole][0], part)) for part in fused[whole]]
            found[name.replace(fused[whole][0], whole)] = torch.cat(parts)
    routers = {"Qwen3Moe": "mlp.gate", "Olmoe": "mlp.gate", "GraniteMoe": "block_sparse_moe.router"}
    router = routers.get(architecture.family.removesuffix("ForCausalLM"), "mlp.router")
    for name, tensor in found.items():
        name = name.replace("mlp.router", router)
        short = name.split(".")[-2]
        if is_hybrid and short in hybrid:
            name = name.replace(f"mlp.{short}", hybrid[short])
        yield name, tensor
