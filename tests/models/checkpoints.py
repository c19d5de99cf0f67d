"""Tiny random models of each family, saved as transformers saves them, and the same as a GGUF file.

The permutation of q and k is written here as llama.cpp's converter applies it, so the reader has to undo it.
"""

import json
from pathlib import Path

import gguf
import torch
from safetensors.torch import load_file, save_file
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

CONFIGS = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
SHAPE = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # heads wider than the model, so that no shape passes for another
    "max_position_embeddings": 128,
}
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"

_GGML_NAMES = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}


def tiny(family="llama", *, dtype=torch.float32, seed=0, **changes):
    """A model with random weights, norms and biases included."""
    torch.manual_seed(seed)
    config = CONFIGS[family](**(SHAPE | {"tie_word_embeddings": False} | changes), dtype=dtype)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if value.dim() == 1:
                value.copy_(torch.randn(value.shape) * 0.2 + (0 if name.endswith("bias") else 1))
            else:
                value.copy_(torch.randn(value.shape) * value.shape[1] ** -0.5)
    return model


def save_tiny(folder, family="llama", **changes):
    model = tiny(family, **changes)
    model.save_pretrained(folder)
    return model


def store_in_bf16(folder, source, linears):
    """Store these linears of a quantized checkpoint in BF16, with the weights of `source`."""
    tensors, exact = load_file(folder / "model.safetensors"), load_file(source / "model.safetensors")
    for name in linears:
        tensors = {key: x for key, x in tensors.items() if not key.startswith(f"{name}.weight")}
        tensors[f"{name}.weight"] = exact[f"{name}.weight"].bfloat16()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["ignore"] += linears
    (folder / "config.json").write_text(json.dumps(config))


def ggml_name(name):
    parts = name.removeprefix("model.").split(".")
    where = f"blk.{parts[1]}." if parts[0] == "layers" else ""
    return f"{where}{_GGML_NAMES[parts[-2]]}.{parts[-1]}"


def halves_to_pairs(weight, num_heads):
    """As llama.cpp's converter reorders the rows of a llama q or k."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)


def write_gguf(file: Path, model, *, kinds=None, vocabulary=None, changes=None):
    """The model as float32, or in the gguf type that `kinds` gives for a part of the name."""
    config, family = model.config, model.config.model_type
    writer = gguf.GGUFWriter(file, family)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    for key, value in (changes or {}).items():
        writer.add_string(key, value) if isinstance(value, str) else writer.add_uint32(key, value)
    if vocabulary is not None:
        add_vocabulary(writer, **vocabulary)
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(
            name.split(".")[-2]
        )
        if heads and family == "llama":
            value = halves_to_pairs(value, heads)
        kind = next((k for part, k in (kinds or {}).items() if part in name), gguf.GGMLQuantizationType.F32)
        writer.add_tensor(ggml_name(name), gguf.quantize(value.float().numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_vocabulary(writer, *, pre="smollm", tokens=None, kinds=None, merges=("h e", "he l"), eos=1):
    tokens = tokens or byte_tokens()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds or [3, 3] + [1] * (len(tokens) - 2))
    writer.add_token_merges(list(merges))
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(eos)
    writer.add_chat_template(TEMPLATE)


def byte_tokens():
    """Two control tokens, every byte, and what the default merges make."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    return ["<|im_start|>", "<|im_end|>", *letters, "he", "hel"]
