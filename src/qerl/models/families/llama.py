"""Llama 2 and 3 and the models that share its class: SmolLM2, and many more."""

from qerl.models.architecture import Architecture
from qerl.models.families.dense import attention_biases, dense
from qerl.models.families.reader import ConfigReader


def llama(config: ConfigReader) -> Architecture:
    return dense(config, "LlamaForCausalLM", mlp_bias=config.flag("mlp_bias"), **attention_biases(config))
