"""The benchmark of a step's sampling on a tiny decoder, and the arithmetic of its schedule."""

import dataclasses
import statistics

import pytest
import torch

from bench.shapes import TINY
from bench.test_record import ORIGIN
from qerl.bench import rollout
from qerl.bench.roofline import LIMITS, rows_floor_ms
from qerl.bench.schedule import Lengths, live_rows, rollout_floor_s, starts, tail_s
from qerl.models.random_weights import SHAPES, random_decoder

CASE = rollout.RolloutCase(
    shape="tiny",
    provider="qerl-nvfp4",
    lora_rank=8,
    num_samples=8,
    rows=3,
    group_size=2,
    prompt_tokens=5,
    lengths="log-normal",
    median_tokens=6,
    sigma=0.8,
    max_tokens=20,
    seed=0,
    kv="bf16",
    head="bf16",
    kernels="auto",
)
LENGTHS = Lengths(kind="log-normal", median_tokens=600, sigma=0.8, max_tokens=4096, seed=0)


def test_every_sample_has_its_own_length():
    decoder = random_decoder(
        dataclasses.replace(TINY, vocab_size=128),
        format="nvfp4",
        rank=8,
        device=torch.device("cpu"),
        seed=0,
        compute=torch.float32,
    )
    figures = rollout.measure_case(CASE, decoder, runs=2)  # which raises RunError if one has another length
    assert figures["tokens"] == sum(CASE.lengths_S) and len(set(CASE.lengths_S)) > 3
    assert figures["runs"] == 2 and figures["first_s"] >= figures["first_open_s"] >= 0
    # on a CPU a burst is one step, so the engine runs this very schedule
    assert figures["steps"] == len(live_rows(CASE.lengths_S, CASE.rows, CASE.group_size))
    assert figures["tail_8_s"] >= figures["tail_16_s"] == figures["tail_32_s"] > 0


def test_lengths_are_log_normal_and_the_seeds():
    drawn = LENGTHS.of(4000)
    assert drawn[:100] == LENGTHS.of(100) != dataclasses.replace(LENGTHS, seed=1).of(100)
    assert statistics.median(drawn) == pytest.approx(600, rel=0.05)
    cuts = statistics.quantiles(drawn, n=100)
    assert cuts[83] / cuts[15] == pytest.approx(2.7183**1.6, rel=0.1)  # one standard deviation to both sides
    assert max(drawn) == 4096 and min(drawn) > 0


def test_constant_lengths_are_the_median():
    assert dataclasses.replace(LENGTHS, kind="constant").of(3) == [600, 600, 600]


def test_a_sample_starts_when_a_row_is_free():
    assert starts([4, 2, 6, 3], rows=2) == [0, 0, 1, 3]
    assert starts([4, 2], rows=8) == [0, 0]


def test_rows_caches_and_prompts_of_each_step():
    # of 3, 2, 1 and 4 tokens, whose first ones the prefill samples; two to a prompt
    assert live_rows([3, 2, 1, 4], rows=8, group_size=2) == [(3, 3, 2), (2, 4, 2), (1, 3, 1)]


def test_the_floor_is_the_sum_over_the_steps():
    limit, shape = LIMITS["NVIDIA H200"], SHAPES["qwen2.5-7b"]
    case = dataclasses.replace(CASE, prompt_tokens=256)
    steps = [(3, 3 + 512), (2, 4 + 512), (1, 3 + 256)]
    by_hand_ms = sum(rows_floor_ms(limit, shape, case, *step) for step in steps)
    assert rollout_floor_s(limit, shape, case, [3, 2, 1, 4], rows=8) == pytest.approx(by_hand_ms / 1e3)


def test_the_tail_is_the_time_with_fewer_unfinished():
    finish_s = [1.0, 2.0, 4.0, 8.0]
    assert [tail_s(finish_s, n) for n in (1, 2, 3, 4, 9)] == [0.0, 4.0, 6.0, 7.0, 7.0]


def test_a_row_has_its_share_of_the_floor():
    case = dataclasses.replace(CASE, shape="qwen2.5-7b")
    row = rollout.make_row(case, {"call_s": 2.0}, ORIGIN)
    assert row["bench"] == "rollout" and row["floor_s"] > 0
    assert row["floor_fraction"] == pytest.approx(row["floor_s"] / 2, abs=1e-4)
    packed = rollout.make_row(dataclasses.replace(case, head="nvfp4"), {"call_s": 2.0}, ORIGIN)
    assert packed["floor_s"] < row["floor_s"]
    assert (packed["floor_head"], row["floor_head"]) == ("nvfp4", "bf16")
    other = dataclasses.replace(ORIGIN, gpu="another")
    assert rollout.make_row(case, {"call_s": 2.0}, other)["floor_s"] is None
