"""The published config.json of each model, as far as it concerns the decoder."""

from typing import Any


def _qwen2(
    layers: int, width: int, heads: int, kv: int, ff: int, *, tied: bool, window: int
) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "hidden_act": "silu",
        "hidden_size": width,
        "initializer_range": 0.02,
        "intermediate_size": ff,
        "max_position_embeddings": 32768,
        "max_window_layers": 70 if layers != 28 else 28,
        "model_type": "qwen2",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": window,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936 if tied else 152064,
    }


def _qwen3(layers: int, width: int, heads: int, ff: int, *, tied: bool = False) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": width,
        "intermediate_size": ff,
        "max_position_embeddings": 40960,
        "max_window_layers": layers,
        "model_type": "qwen3",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": 151936,
    }


def _llama3(
    layers: int, width: int, heads: int, ff: int, *, factor: float, tied: bool = False, **more: Any
) -> dict:
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009],
        "hidden_act": "silu",
        "hidden_size": width,
        "intermediate_size": ff,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "vocab_size": 128256,
        **more,
    }


def _mistral(layers: int, width: int, ff: int, vocab: int, **more: Any) -> dict[str, Any]:
    return {
        "architectures": ["MistralForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": width,
        "intermediate_size": ff,
        "max_position_embeddings": 32768,
        "model_type": "mistral",
        "num_attention_heads": 32,
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": vocab,
        **more,
    }


def _smollm2(layers: int, width: int, heads: int, kv: int, ff: int, theta: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": width,
        "intermediate_size": ff,
        "max_position_embeddings": 8192,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": theta,
        "tie_word_embeddings": True,
        "vocab_size": 49152,
    }


CONFIGS = {
    "qwen2.5-0.5b": _qwen2(24, 896, 14, 2, 4864, tied=True, window=32768),
    "qwen2.5-1.5b": _qwen2(28, 1536, 12, 2, 8960, tied=True, window=32768),
    "qwen2.5-3b": _qwen2(36, 2048, 16, 2, 11008, tied=True, window=32768),
    "qwen2.5-7b": _qwen2(28, 3584, 28, 4, 18944, tied=False, window=131072),
    "qwen2.5-14b": _qwen2(48, 5120, 40, 8, 13824, tied=False, window=131072),
    "qwen2.5-32b": _qwen2(64, 5120, 40, 8, 27648, tied=False, window=131072),
    "qwen2.5-72b": _qwen2(80, 8192, 64, 8, 29568, tied=False, window=131072),
    "qwen3-0.6b": _qwen3(28, 1024, 16, 3072, tied=True),
    "qwen3-1.7b": _qwen3(28, 2048, 16, 6144, tied=True),
    "qwen3-4b": _qwen3(36, 2560, 32, 9728, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 32, 12288),
    "qwen3-14b": _qwen3(40, 5120, 40, 17408),
    "qwen3-32b": _qwen3(64, 5120, 64, 25600),
    "llama-3.1-8b": _llama3(32, 4096, 32, 14336, factor=8.0),
    "llama-3.2-1b": _llama3(16, 2048, 32, 8192, factor=32.0, tied=True, head_dim=64),
    "llama-3.2-3b": _llama3(28, 3072, 24, 8192, factor=32.0, tied=True, head_dim=128),
    "llama-3.3-70b": _llama3(80, 8192, 64, 28672, factor=8.0),
    "mistral-7b-v0.3": _mistral(32, 4096, 14336, 32768),
    "mistral-nemo-12b": _mistral(40, 5120, 14336, 131072, head_dim=128, max_position_embeddings=128000),
    "mistral-small-24b": _mistral(40, 5120, 32768, 131072, head_dim=128, rope_theta=100000000.0),
    "smollm2-135m": _smollm2(30, 576, 9, 3, 1536, 100000),
    "smollm2-360m": _smollm2(32, 960, 15, 5, 2560, 100000),
    "smollm2-1.7b": _smollm2(24, 2048, 32, 32, 8192, 130000),
}
"""The -Instruct models of these names; of Mistral Nemo the base."""
