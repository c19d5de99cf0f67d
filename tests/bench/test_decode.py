"""The rollout benchmark on a tiny decoder."""

import dataclasses

import pytest
import torch

from bench.shapes import TINY
from qerl.bench import decode
from qerl.engine import Stats
from qerl.models.random_weights import random_decoder


def case(**changes):
    given = {
        "shape": "tiny",
        "batch": 4,
        "provider": "qerl-nvfp4",
        "lora_rank": 8,
        "noise_sigma": 0.0,
        "group_size": 2,
        "kv": "bf16",
        "head": "bf16",
        "kernels": "auto",
        "prompt_tokens": 5,
        "max_tokens": 6,
    }
    return decode.DecodeCase(**(given | changes))


@pytest.mark.parametrize(("sigma", "head"), [(0.0, "bf16"), (0.01, "bf16"), (0.0, "nvfp4")])
def test_a_case_is_measured(sigma, head):
    decoder = random_decoder(
        dataclasses.replace(TINY, vocab_size=128),
        format="nvfp4",
        rank=8,
        device=torch.device("cpu"),
        seed=0,
        compute=torch.float32,
        head=head,
    )
    figures = decode.measure_case(case(noise_sigma=sigma, head=head), decoder, 0.0, runs=3)
    assert figures["runs"] == 3
    assert min(figures[name] for name in ("tok_per_s", "step_ms", "start_s")) > 0


def test_prompts_differ_and_are_the_same_each_time():
    first, again = (decode.random_prompts(3, 16, 97) for _ in range(2))
    assert [p.tokens_T for p in first] == [p.tokens_T for p in again]
    assert len({tuple(p.tokens_T) for p in first}) == 3
    assert all(len(p.tokens_T) == 16 and min(p.tokens_T) >= 0 and max(p.tokens_T) < 97 for p in first)


def test_a_step_is_what_is_left_after_prefill():
    assert decode.step_ms(Stats(generate_s=2.5, prefill_s=0.5, decode_forwards=1000)) == pytest.approx(2.0)


@pytest.mark.parametrize(("head", "tok_per_s"), [("nvfp4", 8016), ("bf16", 6825)])
def test_a_row_has_its_share_of_the_limit_and_the_head_that_it_counts(head, tok_per_s):
    from bench.test_record import ORIGIN

    lengths = {"group_size": 1, "prompt_tokens": 256, "max_tokens": 1024}
    measured = case(shape="qwen2.5-7b", batch=8, lora_rank=32, head=head, **lengths)
    row = decode.make_row(measured, {"tok_per_s": tok_per_s / 4}, ORIGIN)
    assert row["bench"] == "decode" and row["floor_fraction"] == pytest.approx(0.25, abs=1e-4)
    assert row["floor_ms"] == pytest.approx(1e3 * 8 / tok_per_s, abs=1e-4)
    assert row["head"] == row["floor_head"] == head
    other = dataclasses.replace(ORIGIN, gpu="another")
    assert decode.make_row(measured, {"tok_per_s": 1.0}, other)["floor_ms"] is None


def test_the_options_head_is_the_rows():
    from qerl.bench.options import BenchDecodeOptions

    cases = decode._cases(BenchDecodeOptions(head="fp8", batches=(8, 16)), "qerl-nvfp4", 32)
    assert [c.head for c in cases] == ["fp8", "fp8"]
