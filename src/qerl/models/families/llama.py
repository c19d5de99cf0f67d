"""Llama 2 and 3 and the models that share its class: SmolLM2, and many more."""

from qerl.models.architecture import Architecture
from qerl.models.families.dense import dense
from qerl.models.families.reader import ConfigReader


def llama(config: ConfigReader) -> Architecture:
    is_biased, mlp_bias = config.flag("attention_bias"), config.flag("mlp_bias")
    return dense(config, "LlamaForCausalLM", qkv_bias=is_biased, output_bias=is_biased, mlp_bias=mlp_bias)
