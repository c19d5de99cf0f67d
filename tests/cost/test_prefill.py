import pytest

from qerl.config import EngineConfig
from qerl.cost.prefill import batched_tokens, min_prefill_tokens
from qerl.models.random_weights import shape


@pytest.mark.parametrize(
    ("name", "tokens", "least"),
    [
        ("qwen2.5-0.5b", 32_768, 16_384),
        ("qwen2.5-1.5b", 32_768, 16_384),
        ("qwen2.5-3b", 16_384, 8192),
        ("qwen2.5-7b", 4096, 2048),
        ("qwen2.5-32b", 4096, 2048),
        ("qwen3-30b-a3b", 16_384, 2048),
    ],
)
def test_passes_over_small_layers_have_more_tokens_on_a_gpu(name, tokens, least):
    a, config = shape(name), EngineConfig()
    assert batched_tokens(config, a, 150e9) == tokens
    assert min_prefill_tokens(config, a, 150e9) == least
    assert batched_tokens(config, a) == (16_384 if a.mixture else 4096)


@pytest.mark.parametrize(("gb", "tokens"), [(8, 4096), (24, 8192), (48, 16_384), (80, 32_768)])
def test_passes_take_a_small_share_of_the_memory(gb, tokens):
    assert batched_tokens(EngineConfig(), shape("qwen2.5-0.5b"), gb * 1e9) == tokens


def test_the_setting_decides():
    a, config = shape("qwen2.5-0.5b"), EngineConfig(max_num_batched_tokens=512)
    assert batched_tokens(config, a, 150e9) == 512
    assert min_prefill_tokens(config, a, 150e9) == 256
