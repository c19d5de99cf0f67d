"""Mistral: its window, of the first version only, caps the positions, so that it never takes effect."""

from qerl.models.architecture import Architecture
from qerl.models.families.dense import dense
from qerl.models.families.reader import ConfigReader


def mistral(config: ConfigReader) -> Architecture:
    positions = config.count("max_position_embeddings")
    positions = min(positions, config.count("sliding_window", positions))
    return dense(config, "MistralForCausalLM", max_positions=positions)
