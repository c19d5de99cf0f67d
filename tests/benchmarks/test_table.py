"""Tables hold the latest row of each case and nothing else."""

from benchmarks.table import coverage, latest, markdown, summary
from qerl.cli.bench.record import RESULTS, ROOT, read_rows

ORIGIN = {
    "commit": "0123456" + "a" * 33,
    "is_dirty": False,
    "gpu": "NVIDIA H200",
    "capability": "9.0",
    "torch": "2.11",
    "triton": "3.6",
    "driver": "580",
    "date": "2026-11-21",
}


def linear(batch, ms, *, provider="qerl-nvfp4", rank=0, fraction=0.5, **more):
    row = {"bench": "linear", "shape": "qwen2.5-7b", "batch": batch, "provider": provider, "lora_rank": rank}
    return row | {"ms": ms, "floor_fraction": fraction} | ORIGIN | more


def decode(batch, tok_per_s, **more):
    row = {"bench": "decode", "shape": "qwen2.5-7b", "batch": batch, "provider": "qerl-nvfp4"}
    row |= {"lora_rank": 32, "noise_sigma": 0.0, "group_size": 1, "kv": "bf16", "head": "bf16"}
    row |= {"prompt_tokens": 256, "max_tokens": 1024, "tok_per_s": tok_per_s, "floor_fraction": 0.6}
    return row | ORIGIN | more


def test_the_linear_table_has_a_line_a_provider_and_a_column_a_batch():
    rows = [linear(64, 2.213), linear(8, 1.394, fraction=0.5884), linear(8, 3.89, provider="cublas-bf16")]
    lines = markdown(rows).splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("| provider"))
    assert lines[at : at + 4] == [
        "| provider | LoRA rank | 8 | 64 |",
        "| --- | --- | --- | --- |",
        "| qerl-nvfp4 | 0 | 1.39 (59%) | 2.21 (50%) |",
        "| cublas-bf16 | 0 | 3.89 (50%) |  |",
    ]
    assert lines[-1] == "Measured at commit 0123456 (2026-11-21, torch 2.11, triton 3.6, driver 580)."


def test_the_decode_table_shows_a_setting_only_where_it_differs():
    text = markdown([decode(8, 3218.4), decode(32, 10646.0)])
    assert "| weights | LoRA rank | 8 | 32 |\n" in text
    assert "| qerl-nvfp4 | 32 | 3,218 (60%) | 10,646 (60%) |" in text
    text = markdown([decode(8, 3218.4), decode(8, 3210.0, noise_sigma=0.01)])
    assert "| weights | LoRA rank | noise | 8 |\n" in text
    assert "| qerl-nvfp4 | 32 | 0.01 | 3,210 (60%) |" in text


def test_the_latest_row_of_a_case_counts():
    rows = [linear(8, 2.0), linear(8, 1.5, rank=32), linear(8, 1.0, commit="b" * 40)]
    assert [row["ms"] for row in latest(rows)] == [1.0, 1.5]
    assert "2.00" not in markdown(rows)


def test_lengths_gpus_and_shapes_are_tables_of_their_own():
    rows = [decode(8, 1), decode(8, 2, max_tokens=64), decode(8, 3, gpu="NVIDIA L40S", capability="8.9")]
    assert markdown(rows).count("| weights |") == 3


def test_gpus_without_rows_are_said_to_be_unmeasured():
    assert coverage([]).startswith("Hopper, Ampere, Ada, Blackwell: not measured. ")
    shown = coverage([linear(8, 1.0)]).replace("\n", " ")
    assert shown.startswith("Hopper: measured (NVIDIA H200). Ampere, Ada, Blackwell: not measured. ")


def test_a_gpu_whose_limits_are_unknown_has_no_share():
    assert "| 1.00 |" in markdown([linear(8, 1.0, fraction=None)])


def test_every_committed_row_is_of_a_clean_commit():
    for row in read_rows(ROOT / RESULTS):
        assert len(row["commit"]) == 40 and row["is_dirty"] is False


def step(bench="step", **more):
    row = {"bench": bench, "shape": "qwen2.5-7b", "provider": "qerl-nvfp4", "batch": 8, "group_size": 8}
    row |= {"prompt_tokens": 256, "max_tokens": 1024, "lora_rank": 32, "recompute": "none", "kv": "bf16"}
    return row | {"micro_tokens": 8192, "optimizer": "adamw", "kv_gb": None, "cap_gb": None} | ORIGIN | more


TAKEN = {"step_s": 3.214, "rollout_s": 2.5, "learn_s": 0.7, "peak_gb": 15.04}


def test_a_step_is_a_line_and_one_that_failed_says_why():
    text = markdown([step(**TAKEN), step(batch=64, error="OutOfMemoryError: CUDA out of memory.")])
    assert "| qwen2.5-7b | qerl-nvfp4 | 8 x 1,024 | none | bf16 |  | 3.21 | 2.50 | 0.70 | 15.0 |" in text
    assert "| qwen2.5-7b | qerl-nvfp4 | 64 x 1,024 | none | bf16 |  |  |  |  | OutOfMemoryError |" in text


def test_memory_is_shown_step_by_step():
    figures = TAKEN | {"peaks_gb": [70.25, 73.5, 73.5], "growth_gb": 0.0}
    text = markdown([step("memory", cap_gb=80, **figures)])
    assert "| 15.0 | 80 | 70.2, 73.5, 73.5 | 0.00 |" in text


def test_a_learner_is_a_line():
    row = {"bench": "learn", "shape": "qwen2.5-7b", "provider": "qerl-nvfp4", "lora_rank": 32}
    row |= {"recompute": "layer", "tokens": 8192, "sequence_tokens": 2048, "micro_tokens": 8192}
    figures = {"tok_per_s": 12403.0, "mfu": 0.666, "peak_gb": 11.14, "used_micro_tokens": 4096}
    text = markdown([row | figures | ORIGIN])
    assert "| qwen2.5-7b | qerl-nvfp4 | layer | 4 x 2,048 | 4,096 | 12,403 | 67% | 11.1 |" in text
    text = markdown([row | {"error": "UserError: too little", "mfu": None} | ORIGIN])
    assert "| layer | 4 x 2,048 | 8,192 |  |  | UserError |" in text


def test_parity_is_a_line():
    row = {"bench": "parity", "shape": "qwen2.5-7b", "provider": "qerl-nvfp4", "lora_rank": 32, "kv": "fp8"}
    row |= {"head": "bf16", "target_entropy": 2.0, "batch": 8, "prompt_tokens": 256, "max_tokens": 1024}
    figures = {"abs_diff": 0.00712, "kl": 8.4e-5, "max_diff": 0.31, "entropy": 2.12, "exact": False}
    text = markdown([row | figures | ORIGIN])
    assert "| fp8 | bf16 | 8 x 1,024 |  | 2.12 | 7.12e-03 | 8.4e-05 | 0.31 |" in text
    exact = row | figures | {"abs_diff": 0.0, "kl": 0.0, "max_diff": 0.0, "exact": True, "exact_mode": True}
    text = markdown([row | figures | ORIGIN, exact | ORIGIN])
    assert "| 8 x 1,024 | yes | 2.12 | 0.00e+00 | 0.0e+00 | 0 |" in text and "| 7.12e-03 |" in text


def test_settings_make_cases_of_their_own():
    rows = [step(**TAKEN), step(cap_gb=80, **TAKEN), step(recompute="layer", **TAKEN), step(**TAKEN)]
    assert len(latest(rows)) == 3
    assert len(latest([step(**TAKEN), step(exact_mode=False, **TAKEN), step(exact_mode=True, **TAKEN)])) == 2


def test_the_short_table_has_the_usual_case_of_each_side_and_leaves_open_what_was_not_measured():
    rows = [decode(8, 3218.4), decode(8, 1469.0, provider="qerl-bf16"), decode(64, 1.0, head="nvfp4")]
    lines = summary(rows).splitlines()
    assert "| 7B, 8 samples at a time, tokens/s | 3,218 | 1,469 |" in lines
    assert "| 7B, 64 samples at a time, tokens/s |  |  |" in lines
    assert lines[0].startswith("**One NVIDIA H200**")
