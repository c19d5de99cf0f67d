"""Granite 3 (GraniteForCausalLM; GraniteMoeForCausalLM, with experts) and the dense models of Granite 4
(GraniteMoeHybridForCausalLM without experts and state-space layers): Llama with factors of embedding,
attention, residuals and logits."""

from typing import Any

from qerl.models.architecture import Architecture, StoredLinear
from qerl.models.families.dense import all_kinds, attention_biases, dense, read_num_layers
from qerl.models.families.experts import read_mixture
from qerl.models.families.reader import ConfigReader, NotDescribedError, short_text

_STORED = (
    StoredLinear(name="shared_mlp.input_linear", holds=("mlp.gate_proj", "mlp.up_proj")),
    StoredLinear(name="shared_mlp.output_linear", holds=("mlp.down_proj",)),
)
_DENSE = "our decoder runs the dense models of Granite 4; model.backend transformers runs the others"
_STORED_EXPERTS = (
    StoredLinear(name="block_sparse_moe.router.layer", holds=("mlp.router",)),
    StoredLinear(name="block_sparse_moe.input_linear", holds=("mlp.experts.gate_up_proj",)),
    StoredLinear(name="block_sparse_moe.output_linear", holds=("mlp.experts.down_proj",)),
)


def granite(config: ConfigReader) -> Architecture:
    config = config.filled(max_position_embeddings=2048)
    return _granite(config, "GraniteForCausalLM", mlp_bias=config.flag("mlp_bias"))


def granite_moe(config: ConfigReader) -> Architecture:
    config = config.filled(max_position_embeddings=2048)
    return _granite(
        config,
        "GraniteMoeForCausalLM",
        layer_kinds=all_kinds(config, mlp="experts"),
        mixture=read_mixture(config, num_experts=8, num_chosen=2, softmax_over="chosen", stored="stacked"),
        stored_linears=_STORED_EXPERTS,
    )


def granite4(config: ConfigReader) -> Architecture:
    config = config.filled(max_position_embeddings=2048, shared_intermediate_size=1024)
    if config.get("num_local_experts") != 0:
        raise NotDescribedError(
            f"num_local_experts must be 0, got {short_text(config.get('num_local_experts'))}: {_DENSE}"
        )
    name = "layers_block_type" if config.get("layer_types") is None else "layer_types"
    for each in config.listed(name, read_num_layers(config)):
        if each not in ("attention", "full_attention"):
            raise NotDescribedError(f"{name} must be attention, got {short_text(each)}: {_DENSE}")
    has_rope = config.get("position_embedding_type") == "rope"
    return _granite(
        config,
        "GraniteMoeHybridForCausalLM",
        ff_width=config.count("shared_intermediate_size"),
        layer_kinds=() if has_rope else all_kinds(config, rope="none"),
        stored_linears=_STORED,
    )


def _granite(config: ConfigReader, family: str, **parts: Any) -> Architecture:
    return dense(
        config,
        family,
        embedding_scale=config.number("embedding_multiplier", 1.0),
        attention_scale=config.number("attention_multiplier", 1.0),
        residual_scale=config.number("residual_multiplier", 1.0),
        logit_scale=1 / config.number("logits_scaling", 1.0),
        **attention_biases(config),
        **parts,
    )
