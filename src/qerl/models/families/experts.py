"""Read the entries that the configs of all mixtures of experts have; name those that are not supported."""

from typing import Any

from qerl.errors import UserError
from qerl.models.architecture import Mixture, StoredLinear
from qerl.models.families.reader import ConfigReader

ROUTER_OF_GATE = (StoredLinear(name="mlp.gate", holds=("mlp.router",)),)
_MAX_EXPERTS = 256
"""An expert's id is stored as one byte."""
NOT_SUPPORTED = {
    "DbrxForCausalLM": "clipped projections and another layout of experts",
    "DeepseekV2ForCausalLM": "multi-head latent attention, shared experts and groups of experts",
    "DeepseekV3ForCausalLM": "multi-head latent attention, shared experts and groups of experts",
    "Ernie4_5_MoeForCausalLM": "shared experts and a bias in expert selection",
    "FlexOlmoForCausalLM": "norms in another order",
    "Glm4MoeForCausalLM": "shared experts, groups of experts and a bias in expert selection",
    "GraniteMoeSharedForCausalLM": "a shared expert",
    "JambaForCausalLM": "Mamba layers",
    "Llama4ForCausalLM": "sigmoid routing, a shared expert and chunked attention",
    "Llama4ForConditionalGeneration": "sigmoid routing, a shared expert and chunked attention",
    "MixtralForCausalLM": "experts named w1, w2 and w3",
    "PhimoeForCausalLM": "a sparse mixer",
    "Qwen2MoeForCausalLM": "a shared expert with a gate",
    "Qwen3_5MoeForCausalLM": "a shared expert with a gate",
    "Qwen3_5MoeForConditionalGeneration": "a shared expert with a gate",
}
"""Classes with a mixture of experts, and what they have that is not computed here."""


def read_mixture(config: ConfigReader, *, num_experts: int, num_chosen: int, **parts: Any) -> Mixture:
    """Return the mixture, with these parts. num_experts, num_chosen: the family's defaults."""
    name = "num_local_experts" if config.get("num_experts") is None else "num_experts"
    num_experts = config.count(name, num_experts, at_most=_MAX_EXPERTS)
    num_chosen = config.count("num_experts_per_tok", num_chosen)
    if num_chosen > num_experts:
        raise UserError(f"num_experts_per_tok must be at most {name} ({num_experts}), got {num_chosen}")
    if "width" not in parts:
        parts["width"] = config.count("intermediate_size")
    return Mixture(num_experts=num_experts, num_chosen=num_chosen, **parts)
