"""OLMo 2 and 3: norms after attention and MLP, none before, and norms over all queries and all keys; OLMo 3
has windows, with an unscaled rope of their own. OLMoE: experts, norms before attention and experts."""

from typing import Any

from qerl.models.architecture import PRE_NORMS, Architecture, NormNames
from qerl.models.families.dense import all_kinds, attention_biases, dense, read_layer_kinds
from qerl.models.families.experts import ROUTER_OF_GATE, read_mixture
from qerl.models.families.reader import ConfigReader
from qerl.models.families.rope_settings import read_rope, rope_section

_NORMS = NormNames(
    before_attention=None,
    after_attention="post_attention_layernorm",
    before_mlp=None,
    after_mlp="post_feedforward_layernorm",
)


def olmo2(config: ConfigReader) -> Architecture:
    return _olmo(config.filled(max_position_embeddings=2048), "Olmo2ForCausalLM")


def olmo3(config: ConfigReader) -> Architecture:
    config = config.filled(max_position_embeddings=2048, sliding_window=4096)
    local = ConfigReader(config.entries | {"rope_theta": None})  # it is that of full attention alone
    return _olmo(
        config,
        "Olmo3ForCausalLM",
        layer_kinds=read_layer_kinds(config, lambda index: (index + 1) % 4 != 0, has_local_rope=True),
        rope=read_rope(config, rope_section(config, "full_attention"), theta=5e5),
        local_rope=read_rope(local, rope_section(config, "sliding_attention"), theta=5e5),
    )


def olmoe(config: ConfigReader) -> Architecture:
    config = config.filled(max_position_embeddings=4096).having(clip_qkv=None)
    softmax_over = "chosen" if config.flag("norm_topk_prob") else "all"
    return _olmo(
        config,
        "OlmoeForCausalLM",
        norms=PRE_NORMS,
        layer_kinds=all_kinds(config, mlp="experts"),
        mixture=read_mixture(
            config, num_experts=64, num_chosen=8, softmax_over=softmax_over, stored="separate"
        ),
        stored_linears=ROUTER_OF_GATE,
    )


def _olmo(config: ConfigReader, family: str, **parts: Any) -> Architecture:
    parts = {"norms": _NORMS, "qk_norm": True, "qk_norm_over": "projection"} | parts
    return dense(config, family, eps=1e-5, **attention_biases(config), **parts)
