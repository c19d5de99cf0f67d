"""Qwen 3 with a mixture of experts in some or all layers (Qwen3MoeForCausalLM): no shared expert."""

from qerl.errors import UserError
from qerl.models.architecture import Architecture, LayerKind
from qerl.models.families.dense import attention_biases, dense, read_num_layers
from qerl.models.families.experts import ROUTER_OF_GATE, read_mixture
from qerl.models.families.qwen import max_positions
from qerl.models.families.reader import ConfigReader, short_text

_DENSE, _EXPERTS = LayerKind(), LayerKind(mlp="experts")


def qwen3_moe(config: ConfigReader) -> Architecture:
    config = config.filled(num_key_value_heads=4, max_position_embeddings=32_768)
    kinds = _layer_kinds(config)
    mixture = read_mixture(
        config,
        num_experts=128,
        num_chosen=8,
        width=config.count("moe_intermediate_size", 768),
        softmax_over="chosen" if config.flag("norm_topk_prob") else "all",
        stored="separate",
    )
    return dense(
        config,
        "Qwen3MoeForCausalLM",
        qk_norm=True,
        max_positions=max_positions(config),
        layer_kinds=kinds,
        mixture=mixture if _EXPERTS in kinds else None,
        stored_linears=ROUTER_OF_GATE,
        **attention_biases(config),
    )


def _layer_kinds(config: ConfigReader) -> tuple[LayerKind, ...]:
    """Return a mixture in every `decoder_sparse_step`-th layer, but none in `mlp_only_layers`."""
    num_layers, every = read_num_layers(config), config.count("decoder_sparse_step", 1)
    without = config.get("mlp_only_layers") or []
    if not isinstance(without, list):
        raise UserError(f"mlp_only_layers must be a list in the model's config, got {short_text(without)}")
    return tuple(
        _DENSE if index in without or (index + 1) % every else _EXPERTS for index in range(num_layers)
    )
