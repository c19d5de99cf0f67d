"""Tiny random models of classes that families/ does not describe, as transformers saves them.

Numbers are those that bf16 has exactly, so that the BF16 format loses nothing.
"""

import warnings
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM

from qerl.models.source import ModelSource
from qerl.models.transformers_loader import load_transformers_model
from qerl.models.transformers_model import TransformersModel

SHAPE = {
    "vocab_size": 272,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ROWS = {
    "GPTNeoX": {},  # LayerNorm; q, k and v in one linear
    "StableLm": {},  # LayerNorm
    "Exaone4": {"sliding_window": 8, "sliding_window_pattern": 2},  # RMSNorm behind attention and MLP
    "Lfm2": {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3},  # convolutions with a state
    "Helium": {"head_dim": 16},
    "Falcon": {},  # a linear class of its own
    "RecurrentGemma": {"num_hidden_layers": 3},  # norms of 1 + w; recurrent states
    "Mixtral": {"num_local_experts": 4},  # experts stored one by one, held as one tensor
    "Gemma4Text": {  # heads that differ by layer, keys shared by layers, embeddings of each layer
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "head_dim": 16,
        "global_head_dim": 32,
        "num_kv_shared_layers": 2,
        "sliding_window": 8,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 272,
    },
    "Llama": {},
}


def oracle(family: str):
    """transformers' model in float32, with norm weights that are not trivial."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = getattr(transformers, f"{family}Config")(**SHAPE | ROWS[family])
        model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.add_(torch.randn(parameter.shape) * 0.1)
        parameter.copy_(parameter.bfloat16())
    return model


def load(folder: Path, *, format: str = "bf16", compute: torch.dtype = torch.float32) -> TransformersModel:
    return load_transformers_model(
        ModelSource(folder), format=format, compute=compute, device=torch.device("cpu"), resident=True
    )
