"""Read the entries that the configs of all mixtures of experts have; name those that are not supported."""

from qerl.errors import UserError
from qerl.models.architecture import StoredLinear
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


def read_experts(config: ConfigReader, *, num_experts: int, num_chosen: int) -> tuple[int, int]:
    """Return (experts, experts of each token). The arguments are the family's, if the config gives none."""
    name = "num_local_experts" if config.get("num_experts") is None else "num_experts"
    found = config.count(name, num_experts, at_most=_MAX_EXPERTS)
    chosen = config.count("num_experts_per_tok", num_chosen)
    if chosen > found:
        raise UserError(f"num_experts_per_tok must be at most {name} ({found}), got {chosen}")
    return found, chosen
