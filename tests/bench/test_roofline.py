"""The limits worked by hand, and against what was worked out apart from this code."""

import pytest

from benchmarks.linear import linear_floor_ms
from qerl.bench.case import DecodeCase
from qerl.bench.roofline import LIMITS, Limit, step_floor_ms
from qerl.cost.weights import experts_read
from qerl.models.layer_spec import layer_spec
from qerl.models.random_weights import SHAPES

H200, A = LIMITS["NVIDIA H200"], SHAPES["qwen2.5-7b"]


def step_ms(batch, *, shape="qwen2.5-7b", format="nvfp4", **more):
    usual = {
        "lora_rank": 32,
        "group_size": 1,
        "kv": "bf16",
        "head": "bf16",
        "kernels": "auto",
        "noise_sigma": 0.0,
    }
    usual |= {"prompt_tokens": 256, "max_tokens": 1024}
    case = DecodeCase(shape=shape, batch=batch, provider=f"qerl-{format}", **(usual | more))
    return step_floor_ms(H200, SHAPES[shape], case)


def test_the_products_of_a_layer_of_the_7b_shape():
    shown = [(g.in_width, g.out_width, len(g.out_widths)) for g in layer_spec(A).groups]
    assert shown == [(3584, 4608, 3), (3584, 3584, 1), (3584, 37888, 2), (18944, 3584, 1)]
    assert sum(g.num_weights for g in layer_spec(A).groups) == 233_046_016
    assert sum(g.num_adapter_weights(32) for g in layer_spec(A).groups) == 90_112 * 32


@pytest.mark.parametrize(
    ("batch", "tok_per_s"), [(8, 8016), (32, 25956), (64, 41397), (128, 55237), (256, 55237)]
)
def test_the_nvfp4_limit_of_the_7b_shape(batch, tok_per_s):
    assert batch / step_ms(batch, head="nvfp4") * 1e3 == pytest.approx(tok_per_s, abs=1)


@pytest.mark.parametrize(
    ("batch", "tok_per_s"), [(8, 2457), (32, 9165), (64, 16822), (128, 28888), (256, 45042)]
)
def test_the_bf16_limit_of_the_7b_shape(batch, tok_per_s):
    assert batch / step_ms(batch, format="bf16") * 1e3 == pytest.approx(tok_per_s, abs=1)


@pytest.mark.parametrize(("batch", "tok_per_s"), [(8, 1788), (32, 5767), (64, 9168)])
def test_the_nvfp4_limit_of_the_32b_shape(batch, tok_per_s):
    assert batch / step_ms(batch, shape="qwen2.5-32b", head="nvfp4") * 1e3 == pytest.approx(tok_per_s, abs=1)


@pytest.mark.parametrize(
    ("batch", "ms"), [(8, 0.82), (16, 0.82), (32, 0.82), (64, 1.06), (128, 2.11), (4096, 67.66)]
)
def test_the_limit_of_the_linears(batch, ms):
    assert linear_floor_ms(H200, A, bytes_per_weight=0.5625, rank=0, batch=batch) == pytest.approx(
        ms, abs=0.005
    )


def test_a_limit_is_the_slower_of_memory_and_products():
    limit = Limit(bytes_per_s=1e9, flop_per_s=2e9)
    assert limit.least_ms(5e6, 2e6) == 5 and limit.least_ms(5e6, 20e6) == 10


def test_a_shared_prompt_is_read_once():
    kv_token_ms = 57_344 / 4.5e12 * 1e3
    assert step_ms(8) - step_ms(8, group_size=4) == pytest.approx(6 * 256 * kv_token_ms)


def test_a_head_counts_in_its_own_format_whatever_the_linears_have():
    byte_ms = 152_064 * 3584 / 4.5e12 * 1e3
    for format in ("nvfp4", "bf16"):
        bf16 = step_ms(8, format=format)
        for head, num_bytes in (("nvfp4", 0.5625), ("fp8", 1 + 4 / 128**2)):
            assert bf16 - step_ms(8, format=format, head=head) == pytest.approx((2 - num_bytes) * byte_ms)


def test_fp8_halves_what_the_cache_costs():
    cache_ms = 8 * 768 * 57_344 / 4.5e12 * 1e3
    assert step_ms(8) - step_ms(8, kv="fp8") == pytest.approx(cache_ms / 2)


def test_a_hybrid_reads_and_writes_its_states():
    """24 layers of 2 MiB of state in fp32 and 3 inputs of the convolution; 8 layers have a cache."""
    mlp, out, head = 3 * 4096 * 12_288, 4096 * 4096, 248_320 * 4096
    delta, attention = 4096 * (8192 + 4096 + 64) + out + mlp, 4096 * (8192 + 2 * 1024) + out + mlp
    weights = 24 * delta + 8 * attention
    state, token = 24 * (32 * 128 * 128 * 4 + 3 * 8192 * 2), 8 * 2 * 4 * 256 * 2
    for batch in (8, 64):
        read = 0.5625 * weights + 2 * head + batch * (2 * state + (256 + 512) * token)
        found = step_ms(batch, shape="qwen3.5-9b", lora_rank=0)
        assert found == pytest.approx(1e3 * read / 4.5e12, rel=1e-9)


def test_a_step_reads_the_experts_that_its_rows_choose():
    """gpt-oss-20b: 4 of 32 experts, each of 24 layers with 3 x 2880 x 2880 weights; the rest in BF16."""
    a = SHAPES["gpt-oss-20b"]
    assert experts_read(SHAPES["qwen2.5-7b"], 8) == 0
    assert [experts_read(a, batch) for batch in (1, 2)] == [pytest.approx(4), pytest.approx(7.5)]
    experts = 24 * 3 * 2880 * 2880 * experts_read(a, 8) * 17 / 32
    attention = 24 * 2 * (2880 * (4096 + 2 * 512) + 4096 * 2880)
    router = 24 * 2 * 32 * 2880
    head, cache = 201_088 * 2880 * 2, 8 * 768 * 24 * 2 * 8 * 64 * 2
    least_ms = 1e3 * (experts + attention + router + head + cache) / 4.5e12
    assert step_ms(8, shape="gpt-oss-20b", format="mxfp4", lora_rank=0) == pytest.approx(least_ms)
