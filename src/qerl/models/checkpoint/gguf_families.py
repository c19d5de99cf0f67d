"""Translate llama.cpp's architectures to Hugging Face's: names of tensors, order of rows, config.

    general.architecture   class                   what the file has in another way
    llama, mistral3        Llama, Mistral 3        rows of q and k in rotary pairs (0, H/2, 1, H/2 + 1, ...)
    granite, smollm3       Granite, SmolLM3        the same
    qwen2, qwen3, olmo2    Qwen2, Qwen3, Olmo2/3   nothing
    gemma2, gemma3         Gemma2, Gemma3          norms as 1 + weight, as the decoder has them
    gemma4                 Gemma4                  key_length of global layers, key_length_swa of the others
    phi3, glm4             Phi3, Glm4              q | k | v, gate | up as one tensor
    qwen35                 Qwen3_5                 norms as 1 + weight, -exp(A_log), order of value heads

Rope scaling of Llama 3 is in no key: rope_freqs holds the divisor of each frequency, from which
`_divided_rope` finds the settings; Gemma 4 divides what it does not turn by 1e30. Source: llama.cpp's
converters (conversion/*.py) and load_arch_hparams (src/models/*.cpp).
"""

import dataclasses
import importlib.metadata
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qerl.errors import UserError
from qerl.models.architecture import Rope
from qerl.models.rope import inverse_frequencies

_MAX_NUMBER, _NOT_TURNED = 1e12, 1e29
_NOT_READ = {
    "expert_count": "a mixture of experts is",
    "embedding_length_per_layer_input": "per-layer embeddings (as in Gemma 4 E2B and E4B) are",
    "attention.shared_kv_layers": "layers that share keys and values are",
}
TOP_LEVEL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_PHI3_NAMES = _LAYER_NAMES | {"ffn_up": "mlp.gate_up_proj"}
_POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA_NAMES = _LAYER_NAMES | _POST_NORMS | {"ffn_norm": "pre_feedforward_layernorm"}
_GEMMA4_NAMES = _GEMMA_NAMES | {"layer_output_scale": "layer_scalar"}
_GLM4_NAMES = _LAYER_NAMES | {
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
    "ffn_up": "mlp.gate_up_proj",
}
_QWEN35_NAMES = _LAYER_NAMES | {"post_attention_norm": "post_attention_layernorm"}


@dataclasses.dataclass(frozen=True, slots=True)
class GgufKeys:
    """The metadata of a file's architecture: keys("block_count") for llama.block_count."""

    file: Path
    metadata: dict[str, Any]
    family: str
    shapes: dict[str, tuple[int, ...]]
    """Shapes of all tensors, by ggml's names."""
    rope_tensors: dict[str, Tensor]

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"{self.family}.{key}", default)

    def positive(self, key: str, default: int | float | None = None, layer: int | None = None) -> Any:
        """Return a positive number; of a list, one per layer, that of this layer or of all."""
        value = self.get(key, default)
        if isinstance(value, list) and layer is not None and layer < len(value):
            value = value[layer]
        elif isinstance(value, list) and value and all(each == value[0] for each in value):
            value = value[0]
        if not isinstance(value, int | float) or not 0 < value <= _MAX_NUMBER:
            problem = f"must be one positive number, got {value!r:.80}"
            raise UserError(f"{self.file}: {self.family}.{key} {problem}")
        # Stored in float32: 1e-5 would come back as 9.99999975e-06.
        return float(str(np.float32(value))) if isinstance(value, float) else value

    def count(self, key: str, default: int | None = None, layer: int | None = None) -> int:
        """Return a positive integer."""
        value = self.positive(key, default, layer)
        if not isinstance(value, int):
            raise UserError(f"{self.file}: {self.family}.{key} must be one positive integer, got {value!r}")
        return value

    def optional(self, key: str) -> Any:
        """Return a positive number; None if the key is missing or 0."""
        return None if self.get(key) in (None, 0) else self.positive(key)

    @property
    def theta(self) -> dict[str, float]:
        return {"rope_theta": self.positive("rope.freq_base", 10000.0)}

    @property
    def num_layers(self) -> int:
        """Layers without those at the end that predict several tokens at once."""
        num_blocks, num_extra = self.count("block_count"), self.get("nextn_predict_layers", 0)
        if not isinstance(num_extra, int) or not 0 <= num_extra < num_blocks:
            raise UserError(
                f"{self.file}: {self.family}.nextn_predict_layers must be less than {num_blocks} layers,"
                f" got {num_extra!r:.80}"
            )
        if num_blocks > len(self.shapes):  # before anything is listed layer by layer
            raise UserError(f"{self.file}: has {len(self.shapes)} tensors, too few for {num_blocks:,} layers")
        return num_blocks - num_extra

    @property
    def num_heads(self) -> int:
        return self.count("attention.head_count")

    def num_kv_heads(self, layer: int | None = None) -> int:
        return self.count("attention.head_count_kv", self.num_heads, layer)

    @property
    def head_size(self) -> int:
        return self.count("attention.key_length", self.count("embedding_length") // self.num_heads)

    def has(self, ggml_name: str) -> bool:
        return ggml_name in self.shapes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GgufFamily:
    """One architecture."""

    hf_class: str
    model_type: str
    names: dict[str, str] = dataclasses.field(default_factory=lambda: _LAYER_NAMES)
    """Name of each of a layer's modules in the decoder."""
    is_paired: bool = False
    """Rows of q and k are in rotary pairs."""
    has_partial_rope: bool = False
    config: Callable[[GgufKeys], dict[str, Any]] = lambda keys: {}
    """Entries of config.json beside those that all families have."""


def hf_config(keys: GgufKeys) -> dict[str, Any]:
    """Return the entries of config.json that `families.from_hf_config` reads."""
    family, file = FAMILIES[keys.family], keys.file
    if (num_parts := keys.metadata.get("split.count", 0)) not in (0, 1):
        raise UserError(f"{file}: is one of {num_parts} parts; merge them with gguf-split first")
    for key, part in _NOT_READ.items():
        if keys.get(key, 0) != 0:
            raise UserError(f"{file}: {part} not supported in GGUF; use the model's safetensors")
    if not keys.has("token_embd.weight"):
        raise UserError(f"{file}: has no tensor token_embd.weight")
    entries = family.config(keys)
    common = {
        "architectures": [family.hf_class],
        "model_type": family.model_type,
        # Without it transformers says of a Mistral that its tokenizer is wrong; that of llama.cpp is right.
        "transformers_version": importlib.metadata.version("transformers"),
        "num_hidden_layers": keys.num_layers,
        "hidden_size": keys.count("embedding_length"),
        "intermediate_size": keys.count("feed_forward_length"),
        "num_attention_heads": keys.num_heads,
        "num_key_value_heads": entries.get("num_key_value_heads") or keys.num_kv_heads(),
        "head_dim": keys.head_size,
        "vocab_size": keys.shapes["token_embd.weight"][0],
        "max_position_embeddings": keys.count("context_length"),
        "rms_norm_eps": keys.positive("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "rope_parameters": keys.theta | _rope_scaling(keys) | _rotated_part(keys, family),
        "attention_bias": keys.has("blk.0.attn_q.bias") or keys.has("blk.0.attn_qkv.bias"),
        "mlp_bias": keys.has("blk.0.ffn_gate.bias"),
        "tie_word_embeddings": not keys.has("output.weight"),
        "dtype": "bfloat16",
    }
    ids = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    tokens = {name: keys.metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in ids.items()}
    return common | entries | _present(tokens)


def _present(entries: dict[str, Any]) -> dict[str, Any]:
    """Return the entries that have a value."""
    return {name: value for name, value in entries.items() if value is not None}


def _rotated_part(keys: GgufKeys, family: GgufFamily) -> dict[str, float]:
    size = keys.count("rope.dimension_count", keys.head_size)
    if family.has_partial_rope:
        return {"partial_rotary_factor": size / keys.head_size}
    if size != keys.head_size:
        raise UserError(
            f"{keys.file}: {keys.family}.rope.dimension_count must be the head size {keys.head_size};"
            f" partial rotary embedding is not supported in {keys.family}"
        )
    return {}


def _rope_scaling(keys: GgufKeys) -> dict[str, Any]:
    kind = keys.get("rope.scaling.type", "none")
    if "rope_freqs.weight" in keys.rope_tensors:
        return _divided_rope(keys)
    if kind in ("none", "longrope"):  # phi3 says it by its tensors
        return {"rope_type": "default"}
    scaling = {"rope_type": kind, "factor": keys.positive("rope.scaling.factor", 1.0)}
    names = {
        "original_context_length": "original_max_position_embeddings",
        "yarn_beta_fast": "beta_fast",
        "yarn_beta_slow": "beta_slow",
    }
    return scaling | _present({ours: keys.optional(f"rope.scaling.{name}") for name, ours in names.items()})


def _divided_rope(keys: GgufKeys) -> dict[str, Any]:
    """Return the settings that give the divisors of rope_freqs; raise UserError if there are none."""
    divisors = keys.rope_tensors["rope_freqs.weight"]
    if torch.equal(divisors, torch.ones_like(divisors)):
        return {"rope_type": "default"}
    turned = int((divisors == 1).sum())
    if turned and bool((divisors[turned:] >= _NOT_TURNED).all()):
        return {"rope_type": "proportional", "partial_rotary_factor": turned / len(divisors)}
    theta = keys.theta["rope_theta"]
    plain = inverse_frequencies(Rope(kind="default", theta=theta), keys.head_size)
    factor = divisors.max().item()
    for original in (8192, *(1 << bits for bits in range(8, 21))):
        rope = Rope(kind="llama3", theta=theta, factor=factor, original_positions=original)
        expected = plain / inverse_frequencies(rope, keys.head_size)
        if expected.shape == divisors.shape and torch.allclose(expected, divisors, rtol=1e-4):
            settings = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
            return settings | {"factor": factor, "original_max_position_embeddings": original}
    raise UserError(f"{keys.file}: rope_freqs holds divisors that are not Llama 3's; use the safetensors")


def _mistral3(keys: GgufKeys) -> dict[str, Any]:
    growth = keys.optional("attention.temperature_scale")
    if growth is None:
        return {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    scale = keys.optional("rope.scaling.yarn_log_multiplier")
    factors = {"llama_4_scaling_beta": growth, "mscale": scale, "mscale_all_dim": scale}
    return {"rope_parameters": keys.theta | _rope_scaling(keys) | _present(factors)}


def _gemma(keys: GgufKeys, *, num_layers_of_27b: int, every: int) -> dict[str, Any]:
    # llama.cpp tells the 27B models, which scale by the width, from the others by their layers.
    is_27b = keys.num_layers == num_layers_of_27b
    scalar = keys.count("embedding_length") // keys.num_heads if is_27b else keys.head_size
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "final_logit_softcapping": keys.optional("final_logit_softcapping"),
        "tie_word_embeddings": not keys.has("output.weight"),
    } | _windows(keys, lambda index: (index + 1) % every != 0)


def _gemma2(keys: GgufKeys) -> dict[str, Any]:
    caps = {"attn_logit_softcapping": keys.optional("attn_logit_softcapping")}
    return _gemma(keys, num_layers_of_27b=46, every=2) | caps


def _gemma3(keys: GgufKeys) -> dict[str, Any]:
    return _gemma(keys, num_layers_of_27b=62, every=6) | _two_ropes(keys)


def _two_ropes(keys: GgufKeys) -> dict[str, Any]:
    whole = {"rope_theta": keys.positive("rope.freq_base", 1e6)} | _rope_scaling(keys)
    local = {"rope_type": "default", "rope_theta": keys.positive("rope.freq_base_swa", 10000.0)}
    return {"rope_parameters": {"full_attention": whole, "sliding_attention": local}}


def _gemma4(keys: GgufKeys) -> dict[str, Any]:
    windows = _windows(keys, lambda index: (index + 1) % 6 != 0)
    firsts = {kind: index for index, kind in reversed(list(enumerate(windows["layer_types"])))}
    whole, size = firsts.get("full_attention", 0), keys.count("attention.key_length_swa", keys.head_size)
    if keys.count("rope.dimension_count_swa", size) != size:
        raise UserError(f"{keys.file}: gemma4.rope.dimension_count_swa must be key_length_swa, {size}")
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": keys.optional("final_logit_softcapping"),
        "hidden_size_per_layer_input": 0,
        "head_dim": size,
        "global_head_dim": keys.head_size,
        "num_global_key_value_heads": keys.num_kv_heads(whole),
        "num_key_value_heads": keys.num_kv_heads(firsts.get("sliding_attention", 0)),
        "attention_k_eq_v": not keys.has(f"blk.{whole}.attn_v.weight"),
        **_two_ropes(keys),
        **windows,
    }


def _windows(keys: GgufKeys, has_window: Callable[[int], bool]) -> dict[str, Any]:
    """Return the layers with windows: those of the pattern in the file, or else those of the family."""
    window, pattern = keys.optional("attention.sliding_window"), keys.get("attention.sliding_window_pattern")
    if window is None:
        return {"layer_types": ["full_attention"] * keys.num_layers}
    if isinstance(pattern, list):
        windowed = pattern[: keys.num_layers]
    else:
        every = None if pattern in (None, 0) else keys.count("attention.sliding_window_pattern")
        indices = range(keys.num_layers)
        windowed = [has_window(i) if every is None else (i + 1) % every != 0 for i in indices]
    kinds = ["sliding_attention" if each else "full_attention" for each in windowed]
    return {"sliding_window": window, "layer_types": kinds}


def _olmo(keys: GgufKeys) -> dict[str, Any]:
    if keys.optional("attention.sliding_window") is None:
        return {}
    whole = keys.theta | _rope_scaling(keys) | _magnitude(keys)
    ropes = {"full_attention": whole, "sliding_attention": {"rope_type": "default"} | keys.theta}
    olmo3 = {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "rope_parameters": ropes}
    return olmo3 | _windows(keys, lambda index: (index + 1) % 4 != 0)


def _magnitude(keys: GgufKeys) -> dict[str, float]:
    return _present({"attention_factor": keys.optional("rope.scaling.attn_factor")})


def _phi3(keys: GgufKeys) -> dict[str, Any]:
    config: dict[str, Any] = {"sliding_window": keys.optional("attention.sliding_window")}
    factors = {
        f"{length}_factor": keys.rope_tensors[f"rope_factors_{length}.weight"].tolist()
        for length in ("long", "short")
        if f"rope_factors_{length}.weight" in keys.rope_tensors
    }
    if not factors:
        return config
    original = keys.count("rope.scaling.original_context_length", keys.count("context_length"))
    rope = keys.theta | {"rope_type": "longrope", "original_max_position_embeddings": original}
    rope |= _rotated_part(keys, FAMILIES["phi3"]) | factors | _magnitude(keys)
    return config | {"rope_parameters": rope, "original_max_position_embeddings": original}


def _granite(keys: GgufKeys) -> dict[str, Any]:
    names = {
        "attention_multiplier": "attention.scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }
    factors = {name: keys.positive(key, 1.0) for name, key in names.items()}
    if keys.get("attention.scale") is None:
        factors["attention_multiplier"] = 1 / math.sqrt(keys.head_size)
    if keys.get("rope.scaling.finetuned", True):
        return factors
    return factors | {  # of Granite 4, which rotates nothing
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "position_embedding_type": "nope",
        "layer_types": ["full_attention"] * keys.num_layers,
        "num_local_experts": 0,
        "shared_intermediate_size": keys.count("feed_forward_length"),
    }


def _qwen35(keys: GgufKeys) -> dict[str, Any]:
    every, value_heads = keys.count("full_attention_interval", 4), keys.count("ssm.time_step_rank")
    kinds = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(keys.num_layers)]
    return {
        "layer_types": kinds,
        "linear_num_key_heads": keys.count("ssm.group_count"),
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": keys.count("ssm.state_size"),
        "linear_value_head_dim": keys.count("ssm.inner_size") // value_heads,
        "linear_conv_kernel_dim": keys.count("ssm.conv_kernel"),
    }


def _family(name: str, model_type: str, **parts: Any) -> GgufFamily:
    return GgufFamily(hf_class=f"{name}ForCausalLM", model_type=model_type, **parts)


FAMILIES: dict[str, GgufFamily] = {
    "llama": _family("Llama", "llama", is_paired=True),
    "mistral3": _family("Ministral3", "ministral3", is_paired=True, config=_mistral3),
    "qwen2": _family("Qwen2", "qwen2"),
    "qwen3": _family("Qwen3", "qwen3"),
    "qwen35": _family("Qwen3_5", "qwen3_5_text", names=_QWEN35_NAMES, has_partial_rope=True, config=_qwen35),
    "gemma2": _family("Gemma2", "gemma2", names=_GEMMA_NAMES, config=_gemma2),
    "gemma3": _family("Gemma3", "gemma3_text", names=_GEMMA_NAMES, config=_gemma3),
    "gemma4": _family("Gemma4", "gemma4_text", names=_GEMMA4_NAMES, config=_gemma4),
    "phi3": _family("Phi3", "phi3", names=_PHI3_NAMES, has_partial_rope=True, config=_phi3),
    "olmo2": _family("Olmo2", "olmo2", names=_LAYER_NAMES | _POST_NORMS, config=_olmo),
    "granite": _family("Granite", "granite", is_paired=True, config=_granite),
    "glm4": _family("Glm4", "glm4", names=_GLM4_NAMES, has_partial_rope=True),
    "smollm3": _family("SmolLM3", "smollm3", is_paired=True),
}
