"""Families of decoders: each file describes those whose config.json and tensors are alike.

`from_hf_config` finds the family by transformers' class name, which config.json has under `architectures`. A
multimodal class is loaded as its language part.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from qerl.errors import UserError
from qerl.models.architecture import Architecture
from qerl.models.families.experts import NOT_SUPPORTED
from qerl.models.families.gemma import gemma2, gemma3
from qerl.models.families.gemma4 import gemma4
from qerl.models.families.glm4 import glm4
from qerl.models.families.gpt_oss import gpt_oss
from qerl.models.families.granite import granite, granite4, granite_moe
from qerl.models.families.llama import llama
from qerl.models.families.mistral import ministral, ministral3, mistral
from qerl.models.families.olmo import olmo2, olmo3, olmoe
from qerl.models.families.phi3 import phi3
from qerl.models.families.qwen import qwen2, qwen3
from qerl.models.families.qwen_hybrid import qwen3_5, qwen3_next
from qerl.models.families.qwen_moe import qwen3_moe
from qerl.models.families.reader import ConfigReader, NotDescribedError, short_text
from qerl.models.families.smollm3 import smollm3

FAMILIES: dict[str, Callable[[ConfigReader], Architecture]] = {
    "LlamaForCausalLM": llama,
    "MistralForCausalLM": mistral,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
    "Gemma2ForCausalLM": gemma2,
    "Gemma3ForCausalLM": gemma3,
    "Gemma4ForCausalLM": gemma4,
    "Glm4ForCausalLM": glm4,
    "GptOssForCausalLM": gpt_oss,
    "GraniteForCausalLM": granite,
    "GraniteMoeForCausalLM": granite_moe,
    "GraniteMoeHybridForCausalLM": granite4,
    "MinistralForCausalLM": ministral,
    "Ministral3ForCausalLM": ministral3,
    "Olmo2ForCausalLM": olmo2,
    "Olmo3ForCausalLM": olmo3,
    "OlmoeForCausalLM": olmoe,
    "Phi3ForCausalLM": phi3,
    "Qwen3MoeForCausalLM": qwen3_moe,
    "Qwen3NextForCausalLM": qwen3_next,
    "Qwen3_5ForCausalLM": qwen3_5,
    "SmolLM3ForCausalLM": smollm3,
}
MULTIMODAL: dict[str, dict[str, str]] = {
    "Gemma3ForConditionalGeneration": {"gemma3_text": "Gemma3ForCausalLM"},
    "Gemma4ForConditionalGeneration": {"gemma4_text": "Gemma4ForCausalLM"},
    "Mistral3ForConditionalGeneration": {
        "mistral": "MistralForCausalLM",
        "ministral": "MinistralForCausalLM",
        "ministral3": "Ministral3ForCausalLM",
    },
    "Qwen3_5ForConditionalGeneration": {"qwen3_5_text": "Qwen3_5ForCausalLM"},
}
"""For each multimodal class, the class of its language part by the model_type of its text_config."""


def from_hf_config(config: dict[str, Any]) -> Architecture:
    """Parse the contents of config.json; raise UserError if anything in it is wrong or unsupported."""
    family, language, part_of = language_part(config)
    architecture = FAMILIES[family](ConfigReader(language))
    return dataclasses.replace(architecture, part_of=part_of)


def obstacle(config: dict[str, Any]) -> str | None:
    """Return why our decoder cannot run a model whose config is valid; None if it can."""
    try:
        from_hf_config(config)
    except UserError as error:  # a wrong config is an error of our decoder's loader
        return str(error) if isinstance(error, NotDescribedError) else None
    return None


def language_part(config: dict[str, Any]) -> tuple[str, dict[str, Any], str | None]:
    """Return the language model's class and config, and the multimodal class that it is part of."""
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"architectures must be a list of names, got {short_text(names)}")
    if len(names) == 1 and names[0] in FAMILIES:
        return names[0], config, None
    if len(names) == 1 and names[0] in MULTIMODAL:
        text = ConfigReader(config).section("text_config")
        family = text.choice("model_type", MULTIMODAL[names[0]], next(iter(MULTIMODAL[names[0]])))
        tied = {"tie_word_embeddings": config.get("tie_word_embeddings")}
        return family, tied | text.entries | {"architectures": [family]}, names[0]
    if len(names) == 1 and names[0] in NOT_SUPPORTED:
        raise NotDescribedError(
            f"architecture {names[0]} is not supported: this mixture of experts has {NOT_SUPPORTED[names[0]]}"
        )
    name = short_text(", ".join(names), str) or "(none named)"
    supported = ", ".join([*FAMILIES, *MULTIMODAL])
    raise NotDescribedError(f"architecture {name} is not supported; supported: {supported}")
