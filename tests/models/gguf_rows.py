"""Tiny models of each family as llama.cpp's converter writes them: names from the gguf package's own maps,
keys and orders as conversion/*.py has them.
"""

import copy
import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from models.checkpoints import halves_to_pairs
from models.family_rows import FACTORS, LOCAL, ROPES, YARN, oracle
from qerl.models.architecture import Rope
from qerl.models.rope import inverse_frequencies

LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
HYBRID_ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
MINISTRAL3 = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GgufRow:
    family: str
    """Prefix of transformers' classes."""
    arch: str
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)
    keys: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Keys beside those that every file has."""
    is_paired: bool = False
    norm_shift: float = 0.0
    extra: Callable[[Any], dict[str, np.ndarray]] = lambda config: {}


def rope_freqs(config) -> dict[str, np.ndarray]:
    """As LlamaModel.generate_extra_tensors makes it."""
    size, settings = config.head_dim, config.rope_parameters
    plain = inverse_frequencies(Rope(kind="default", theta=settings["rope_theta"]), size)
    divisors = []
    for f in plain.tolist():
        turns = settings["original_max_position_embeddings"] * f / (2 * math.pi)
        kept = min(max((turns - 1) / 3, 0), 1)
        divisors.append(1 / ((1 - kept) / settings["factor"] + kept))
    return {"rope_freqs.weight": np.array(divisors, np.float32)}


def rope_factors(config) -> dict[str, np.ndarray]:
    settings = config.rope_parameters
    lists = {"long": settings["long_factor"], "short": settings["short_factor"]}
    return {f"rope_factors_{name}.weight": np.array(values, np.float32) for name, values in lists.items()}


def unturned(config) -> dict[str, np.ndarray]:
    """As Gemma4Model.generate_extra_tensors makes it: of a global head of 24 half of the pairs turn."""
    return {"rope_freqs.weight": np.array([1.0] * 6 + [1e30] * 6, np.float32)}


GRANITE_KEYS = {
    "attention.scale": 0.1,
    "embedding_scale": 3.0,
    "residual_scale": 0.3,
    "logit_scale": 2.0,
}
GEMMA_WINDOWS = ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
OLMO_TYPES = ["sliding_attention"] * 3 + ["full_attention"]
YARN_KEYS = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
YARN_KEYS |= {"rope.scaling.original_context_length": 16}
ROWS = {
    "llama": GgufRow(family="Llama", arch="llama", is_paired=True),
    "llama-biased": GgufRow(
        family="Llama", arch="llama", is_paired=True, changes={"attention_bias": True, "mlp_bias": True}
    ),
    "llama3": GgufRow(
        family="Llama",
        arch="llama",
        is_paired=True,
        changes={"rope_parameters": LLAMA3, "head_dim": 32},
        extra=rope_freqs,
    ),
    "mistral": GgufRow(family="Mistral", arch="llama", is_paired=True, changes={"sliding_window": None}),
    "mistral3": GgufRow(
        family="Ministral3",
        arch="mistral3",
        is_paired=True,
        changes={"sliding_window": None, "rope_parameters": MINISTRAL3},
        keys=YARN_KEYS | {"rope.scaling.yarn_log_multiplier": 1.0, "attention.temperature_scale": 0.1},
    ),
    "mistral3-small": GgufRow(
        family="Mistral", arch="mistral3", is_paired=True, changes={"sliding_window": None}
    ),
    "qwen2": GgufRow(family="Qwen2", arch="qwen2"),
    "qwen3": GgufRow(family="Qwen3", arch="qwen3"),
    "qwen3-yarn": GgufRow(family="Qwen3", arch="qwen3", changes={"rope_parameters": YARN}, keys=YARN_KEYS),
    "qwen35": GgufRow(
        family="Qwen3_5",
        arch="qwen35",
        changes={
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
            "rope_parameters": HYBRID_ROPE,
        },
        keys={
            "rope.dimension_count": 8,
            "rope.dimension_sections": [2, 1, 1, 0],
            "ssm.conv_kernel": 4,
            "ssm.state_size": 8,
            "ssm.group_count": 2,
            "ssm.time_step_rank": 4,
            "ssm.inner_size": 48,
            "full_attention_interval": 4,
        },
        norm_shift=1.0,
    ),
    "gemma2": GgufRow(
        family="Gemma2",
        arch="gemma2",
        changes={"query_pre_attn_scalar": 16},
        keys={
            "attention.sliding_window": 7,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 6.0,
        },
        norm_shift=1.0,
    ),
    "gemma3": GgufRow(
        family="Gemma3",
        arch="gemma3",
        changes={"query_pre_attn_scalar": 16, "num_hidden_layers": 7, "layer_types": GEMMA_WINDOWS},
        keys={
            "attention.sliding_window": 7,
            "rope.freq_base_swa": 100.0,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 4.0,
        },
        norm_shift=1.0,
    ),
    "gemma3-pattern": GgufRow(
        family="Gemma3",
        arch="gemma3",
        changes={
            "query_pre_attn_scalar": 16,
            "rope_parameters": {"full_attention": LOCAL, "sliding_attention": {**LOCAL, "rope_theta": 1e4}},
            "layer_types": ["full_attention", "sliding_attention"] * 2,
        },
        keys={
            "attention.sliding_window": 7,
            "attention.sliding_window_pattern": [False, True, False, True],
        },
        norm_shift=1.0,
    ),
    "gemma4": GgufRow(
        family="Gemma4",
        arch="gemma4",
        keys={
            "attention.key_length": 24,
            "attention.value_length": 24,
            "attention.key_length_swa": 16,
            "attention.value_length_swa": 16,
            "attention.head_count_kv": [2, 1] * 2,
            "attention.sliding_window": 7,
            "attention.sliding_window_pattern": [True, False] * 2,
            "attention.shared_kv_layers": 0,
            "embedding_length_per_layer_input": 0,
            "final_logit_softcapping": 6.0,
            "rope.dimension_count": 24,
            "rope.dimension_count_swa": 16,
            "rope.freq_base_swa": 100.0,
        },
        extra=unturned,
    ),
    "gemma4-values": GgufRow(  # values of their own, as many heads in all layers
        family="Gemma4",
        arch="gemma4",
        changes={
            "attention_k_eq_v": False,
            "num_global_key_value_heads": None,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
            "num_hidden_layers": 6,
            "tie_word_embeddings": True,
            "rope_parameters": {"full_attention": {**LOCAL, "rope_theta": 1e6}, "sliding_attention": LOCAL},
        },
        keys={
            "attention.key_length": 24,
            "attention.key_length_swa": 16,
            "attention.sliding_window": 7,
            "final_logit_softcapping": 6.0,
            "rope.dimension_count": 24,
            "rope.freq_base_swa": 100.0,
        },
    ),
    "phi3": GgufRow(
        family="Phi3",
        arch="phi3",
        changes={"original_max_position_embeddings": 64},
        keys={
            "attention.sliding_window": 9,
            "rope.scaling.original_context_length": 64,
            "rope.scaling.attn_factor": math.sqrt(1 + math.log(4) / math.log(64)),
        },
        extra=rope_factors,
    ),
    "phi3-partial": GgufRow(
        family="Phi3",
        arch="phi3",
        changes={
            "sliding_window": None,
            "tie_word_embeddings": True,
            "rope_parameters": HYBRID_ROPE,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
        },
        keys={"attention.sliding_window": 0, "rope.dimension_count": 8},
    ),
    "olmo2": GgufRow(family="Olmo2", arch="olmo2"),
    "olmo3": GgufRow(
        family="Olmo3",
        arch="olmo2",
        changes={
            "layer_types": OLMO_TYPES,
            "rope_parameters": {
                "full_attention": {**YARN, "attention_factor": 1.2},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        keys=YARN_KEYS
        | {
            "attention.sliding_window": 7,
            "attention.sliding_window_pattern": [True, True, True, False],
            "rope.scaling.attn_factor": 1.2,
        },
    ),
    "granite": GgufRow(family="Granite", arch="granite", is_paired=True, keys=GRANITE_KEYS),
    "granite4": GgufRow(
        family="GraniteMoeHybrid",
        arch="granite",
        is_paired=True,
        changes={"position_embedding_type": "nope"},
        keys=GRANITE_KEYS
        | {"rope.scaling.finetuned": False, "attention.head_count_kv": [2] * 4, "expert_count": 0},
    ),
    "glm4": GgufRow(
        family="Glm4",
        arch="glm4",
        changes={"rope_parameters": HYBRID_ROPE, "attention_bias": True},
        keys={"rope.dimension_count": 8},
    ),
    "smollm3": GgufRow(
        family="SmolLM3",
        arch="smollm3",
        is_paired=True,
        changes={"no_rope_layer_interval": 4, "use_sliding_window": False, "sliding_window": None},
    ),
}
assert FACTORS["logits_scaling"] == 2.0 and ROPES["full_attention"]["factor"] == 4.0  # as in the keys above


def model_of(row: GgufRow):
    return oracle(row.family, **row.changes)


def write_row(file: Path, row: GgufRow, model, *, kinds=None, as_float=False, vocabulary=None) -> None:
    """Write the model in float32, or in the ggml type that `kinds` gives for a part of a tensor's name.
    as_float: what this type holds, as float32. vocabulary(writer) adds the tokenizer's keys."""
    config, f32 = copy.deepcopy(model.config), gguf.GGMLQuantizationType.F32
    config.allow_global_per_layer_attribute_access = True  # Gemma 4's head_dim is that of windows here
    writer = gguf.GGUFWriter(file, row.arch)
    for key, value in all_keys(row, config).items():
        add(writer, f"{row.arch}.{key}", value)
    if vocabulary is not None:
        vocabulary(writer)
    for name, value in converted(row, model, config).items():
        kind = next((k for part, k in (kinds or {}).items() if part in name), f32)
        raw = gguf.quantize(value, kind)
        if as_float:
            writer.add_tensor(name, gguf.dequantize(raw, kind))
        else:
            writer.add_tensor(name, raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def all_keys(row: GgufRow, config) -> dict[str, Any]:
    ropes = config.rope_parameters
    ff_width = getattr(config, "shared_intermediate_size", config.intermediate_size)
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {
        "vocab_size": config.vocab_size,
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": ff_width,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_size,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": ropes.get("full_attention", ropes)["rope_theta"],
        "rope.dimension_count": head_size,
    } | row.keys


def add(writer, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_uint32(key, value)


def converted(row: GgufRow, model, config) -> dict[str, np.ndarray]:
    """Return the tensors with ggml's names, as the converter orders and changes them."""
    arch = next(each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == row.arch)
    ggml_names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    found = {}
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        value = value.float()
        short = name.split(".")[-2]
        if row.is_paired and short in heads:
            value = halves_to_pairs(value, heads[short])
        if name.endswith("layer_scalar"):
            name += ".weight"  # as Gemma4Model.filter_tensors names it
        if name.endswith("norm.weight") and "linear_attn" not in name:
            value = value + row.norm_shift
        if "linear_attn" in name:
            name, value = delta(name, value, config)
        if "shared_mlp.input_linear" in name:
            for part, rows in zip(("gate_proj", "up_proj"), value.chunk(2), strict=True):
                whole = name.replace("shared_mlp.input_linear", f"mlp.{part}")
                found[ggml_names.get_name(whole, (".weight",))] = rows.numpy()
            continue
        name = name.replace("shared_mlp.output_linear", "mlp.down_proj")
        ggml_name = ggml_names.get_name(name, (".weight", ".bias"))
        assert ggml_name is not None, name
        found[ggml_name] = value.contiguous().numpy()
    return found | row.extra(config)


def delta(name: str, value: torch.Tensor, config) -> tuple[str, torch.Tensor]:
    """As _LinearAttentionVReorderBase and Qwen3NextModel change it."""
    num_keys, num_values = config.linear_num_key_heads, config.linear_num_value_heads
    size, start = config.linear_value_head_dim, 2 * num_keys * config.linear_key_head_dim

    def tiled(x, head_size, dim=0):
        shape = (*x.shape[:dim], num_keys, num_values // num_keys, head_size, *x.shape[dim + 1 :])
        return x.reshape(shape).swapaxes(dim, dim + 1).reshape(x.shape)

    if "in_proj_qkv." in name or "conv1d" in name:
        value = value.squeeze() if "conv1d" in name else value
        value = torch.cat((value[:start], tiled(value[start:], size)))
    elif "in_proj_z." in name:
        value = tiled(value, size)
    elif "out_proj" in name:
        value = tiled(value, size, 1)
    elif "norm" not in name:
        value = tiled(value, 1)
    if name.endswith("A_log"):
        value = -value.exp()
    return name.replace(".dt_bias", ".dt_proj.bias"), value
