"""The whole step's benchmark on a tiny decoder."""

import dataclasses

import pytest

from bench.rows import CPU, rows_of
from bench.shapes import TINY
from qerl.bench import step
from qerl.bench.options import BenchStepOptions
from qerl.errors import UserError
from qerl.models.random_weights import random_decoder

OPTIONS = BenchStepOptions(
    shape="tiny",
    batches=(4, 6),
    group_size=2,
    prompt_tokens=5,
    max_tokens=6,
    lora_rank=16,
    steps=2,
    recompute="layer",
    cap_gb=1.0,
)


def test_each_case_is_a_row(tmp_path):
    rows = rows_of(tmp_path, lambda rows: step.measure_cases("step", OPTIONS, TINY, CPU, rows))
    shown = [(r["bench"], r["provider"], r["batch"], r["cap_gb"]) for r in rows]
    assert shown == [("step", f"qerl-{f}", batch, 1.0) for f in ("nvfp4", "bf16") for batch in (4, 6)]
    assert all("error" not in r and r["step_s"] >= r["rollout_s"] > 0 and r["learn_s"] > 0 for r in rows)
    assert all(r["used_micro_tokens"] == 8192 and len(r["peaks_gb"]) == 3 for r in rows)


def test_the_mode_that_fits_and_its_plan_are_in_the_row(tmp_path):
    mode = {}
    for cap_gb in (1.0, 0.003):
        options = dataclasses.replace(OPTIONS, batches=(4,), recompute="auto", cap_gb=cap_gb)
        row, _ = rows_of(
            tmp_path / str(cap_gb), lambda rows, o=options: step.measure_cases("memory", o, TINY, CPU, rows)
        )
        mode[cap_gb] = row["recompute"]
        assert row["plan_gb"] <= round(cap_gb, 2) and row["plan_error"] == -1  # a CPU's peaks are 0
        assert row["compile_s"] == row["num_compiled"] == 0
    assert mode == {1.0: "none", 0.003: "offload"}


def test_it_learns_from_its_samples(tmp_path):
    decoder = random_decoder(TINY, format="nvfp4", rank=16, device=CPU, seed=0)
    before = [p.detach().clone() for p in decoder.parameters()]
    (case, *_) = step.cases("step", dataclasses.replace(OPTIONS, steps=1), "qerl-nvfp4")
    step.measure_case(case, decoder, 1)
    assert all((a != b).any() for a, b in zip(before, decoder.parameters(), strict=True))


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_settings_reach_engine_and_learner(kv):
    options = dataclasses.replace(OPTIONS, kv=kv, kv_gb=0.5, micro_tokens=77, optimizer="adamw_8bit")
    config = step.run_config(next(step.cases("memory", options, "qerl-bf16")))
    assert (config.engine.kv_cache_dtype, config.engine.kv_cache_gb) == (
        "fp8" if kv == "fp8" else "auto",
        0.5,
    )
    learn = config.learn
    assert (learn.gradient_checkpointing, learn.max_tokens_per_microbatch, learn.optim) == (
        "layer",
        77,
        "adamw_8bit",
    )
    assert (config.num_prompts, config.num_generations, config.sample.max_tokens) == (2, 2, 6)


def test_too_little_memory_for_the_cache_is_a_row_and_the_next_case_goes_on(tmp_path):
    options = dataclasses.replace(OPTIONS, providers=("qerl-bf16",), kv_gb=1e-6)
    rows = rows_of(tmp_path, lambda rows: step.measure_cases("memory", options, TINY, CPU, rows))
    assert len(rows) == 2 and all(r["error"].startswith("UserError: prompt 0 needs") for r in rows)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"group_size": 1}, "group_size must be at least 2"),
        ({"batches": (8, 9)}, "multiples of group_size 8, got 9"),
        ({"cap_gb": 0.0}, "cap_gb must be positive"),
        ({"lora_rank": 0}, "lora_rank must be positive, got 0"),
    ],
)
def test_a_mistake_is_named(change, message):
    with pytest.raises(UserError, match=message):
        BenchStepOptions(**change)
