"""Gemma 2, with soft caps; Gemma 3, with norms of queries and keys and a rope of its own for windows. Gemma 3
does not cap scores of attention, whatever its config says.

Norms before and after attention and MLP multiply by 1 + weight; the embedding is scaled by the root of its
width.
"""

import math
from typing import Any

from qerl.errors import UserError
from qerl.models.architecture import Architecture, NormNames
from qerl.models.families.dense import attention_biases, dense, read_layer_kinds
from qerl.models.families.reader import ConfigReader
from qerl.models.families.rope_settings import read_rope, rope_section

NORMS = NormNames(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)
ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "silu": "silu"}
_DEFAULTS = {  # of transformers, whose config.json leaves them out
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}


def gemma2(config: ConfigReader) -> Architecture:
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    config = config.filled(**_DEFAULTS, **caps, max_position_embeddings=8192, vocab_size=256_000)
    kinds = read_layer_kinds(config, lambda index: index % 2 == 0)
    cap = config.optional_number("attn_logit_softcapping")
    return _gemma(config, "Gemma2ForCausalLM", layer_kinds=kinds, attention_softcap=cap)


def gemma3(config: ConfigReader) -> Architecture:
    config = config.filled(**_DEFAULTS, max_position_embeddings=131_072, vocab_size=262_208)
    every = config.count("sliding_window_pattern", 6)
    local_theta = config.number("rope_local_base_freq", 10_000.0)
    local = ConfigReader(config.entries | {"rope_theta": None})
    return _gemma(
        config,
        "Gemma3ForCausalLM",
        layer_kinds=read_layer_kinds(config, lambda index: (index + 1) % every != 0, has_local_rope=True),
        rope=read_rope(config, rope_section(config, "full_attention"), theta=1e6),
        local_rope=read_rope(local, rope_section(config, "sliding_attention"), theta=local_theta),
        qk_norm=True,
    )


def _gemma(config: ConfigReader, family: str, **parts: Any) -> Architecture:
    if config.flag("use_bidirectional_attention"):
        raise UserError("use_bidirectional_attention must be False, got True: it cannot generate text")
    return dense(
        config,
        family,
        activation=config.choice("hidden_activation", ACTIVATIONS, "gelu_pytorch_tanh"),
        norms=NORMS,
        norm_offset=1.0,
        embedding_scale=math.sqrt(config.count("hidden_size")),
        attention_scale=config.number("query_pre_attn_scalar", 256.0) ** -0.5,
        logit_softcap=config.optional_number("final_logit_softcapping"),
        **attention_biases(config),
        **parts,
    )
