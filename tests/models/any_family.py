"""Tiny random models of classes that families/ does not describe, as transformers saves them.

Numbers are those that bf16 has exactly, so that the BF16 format loses nothing.
"""

import copy
import warnings
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from qerl.models.checkpoint.source import ModelSource
from qerl.models.transformers_backend.transformers_loader import load_transformers_model
from qerl.models.transformers_backend.transformers_model import TransformersModel

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
ROPE = {"rope_type": "default", "rope_theta": 1e4}
DELTA = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "head_dim": 16,
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
    "Jamba": {  # Mamba layers, whose code reads dt_proj's weight
        "num_experts": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
    },
    "MiniMax": {  # a cache of a class of its own
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "head_dim": 16,
    },
    "Qwen3Next": DELTA,  # a mixture of a family whose dense models are described
    "Llama": {},
}
IMAGES = {  # settings of the language part
    "Qwen2_5_VL": {"rope_parameters": {**ROPE, "mrope_section": [4, 2, 2]}},
    "Qwen3_5Moe": {**DELTA, "rope_parameters": {**ROPE, "mrope_section": [2, 1, 1]}},
    "PaliGemma": {"model_type": "gemma", "head_dim": 16},
}
TOWER = {"hidden_size": 32, "intermediate_size": 48, "depth": 1, "num_heads": 2, "out_hidden_size": 64}
TOWER |= {"patch_size": 4, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
TOWER |= {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "projection_dim": 64}


def oracle(family: str):
    """transformers' model in float32, with norm weights that are not trivial."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kind, auto = getattr(transformers, f"{family}Config"), AutoModelForCausalLM
        if family in IMAGES:
            auto, tower = AutoModelForImageTextToText, TOWER
            config = kind(text_config=SHAPE | IMAGES[family], vision_config=tower, image_token_id=5)
        else:
            config = kind(**copy.deepcopy(SHAPE | ROWS[family]))  # transformers changes what it is given
        model = auto.from_config(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.add_(torch.randn(parameter.shape) * 0.1)
        parameter.copy_(parameter.bfloat16())
    return model


def load(folder: Path, *, format: str = "bf16", compute: torch.dtype = torch.float32) -> TransformersModel:
    return load_transformers_model(
        ModelSource(folder), format=format, compute=compute, device=torch.device("cpu"), resident=True
    )
