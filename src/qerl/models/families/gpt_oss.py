"""gpt-oss: experts with biases and a clamped SwiGLU; attention with sinks, in half of the layers windows."""

import dataclasses

from qerl.models.architecture import Architecture
from qerl.models.families.dense import all_kinds, dense, read_layer_kinds
from qerl.models.families.experts import read_mixture
from qerl.models.families.reader import ConfigReader
from qerl.models.families.rope_settings import read_rope

_DEFAULTS = {  # of transformers, whose config.json may leave them out
    "head_dim": 64,
    "num_key_value_heads": 8,
    "sliding_window": 128,
    "max_position_embeddings": 131_072,
}
_YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}


def gpt_oss(config: ConfigReader) -> Architecture:
    config = config.filled(**_DEFAULTS)
    if not (config.get("rope_parameters") or config.get("rope_scaling")):
        config = ConfigReader(config.entries | {"rope_parameters": _YARN})
    is_biased = config.flag("attention_bias", True)
    windows = read_layer_kinds(config, lambda index: index % 2 == 0) or all_kinds(config)
    mixture = read_mixture(
        config,
        num_experts=128,
        num_chosen=4,
        softmax_over="chosen",
        stored="transposed",
        has_bias=True,
        swiglu_alpha=config.number("swiglu_alpha", 1.702),
        swiglu_limit=config.number("swiglu_limit", 7.0),
        is_interleaved=True,
    )
    return dense(
        config,
        "GptOssForCausalLM",
        eps=1e-5,
        rope=read_rope(config, theta=150_000.0),
        qkv_bias=is_biased,
        output_bias=is_biased,
        attention_sinks=True,
        layer_kinds=tuple(dataclasses.replace(kind, mlp="experts") for kind in windows),
        mixture=mixture,
    )
