"""Tables show the latest row of each case, figures of enough runs, and nothing else."""

import pytest

from benchmarks.pages import TABLES, fill
from benchmarks.rows import coverage, latest, read_rows
from benchmarks.summary import exact_table, speed_table
from benchmarks.table import (
    decode_tables,
    learn_tables,
    linear_tables,
    memory_tables,
    parity_tables,
    rollout_tables,
    step_tables,
)
from qerl.bench.record import RESULTS, ROOT
from qerl.errors import UserError

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
H100 = {"gpu": "NVIDIA H100 80GB HBM3"}


def linear(batch, ms, *, provider="qerl-nvfp4", rank=0, fraction=0.5, **more):
    row = {"bench": "linear", "shape": "qwen2.5-7b", "batch": batch, "provider": provider, "lora_rank": rank}
    return row | {"ms": ms, "runs": 21, "floor_fraction": fraction} | ORIGIN | more


def decode(batch, tok_per_s, **more):
    row = {"bench": "decode", "shape": "qwen2.5-7b", "batch": batch, "provider": "qerl-nvfp4", "runs": 3}
    row |= {"lora_rank": 32, "noise_sigma": 0.0, "group_size": 1, "kv": "bf16", "head": "bf16"}
    row |= {
        "kernels": "hopper",
        "prompt_tokens": 256,
        "max_tokens": 1024,
        "tok_per_s": tok_per_s,
        "floor_fraction": 0.6,
    }
    return row | ORIGIN | more


def step(bench="step", **more):
    row = {"bench": bench, "shape": "qwen2.5-7b", "provider": "qerl-nvfp4", "batch": 8, "group_size": 8}
    row |= {"prompt_tokens": 256, "max_tokens": 1024, "lora_rank": 32, "recompute": "none", "kv": "bf16"}
    row |= {"head": "bf16", "micro_tokens": 8192, "optimizer": "adamw", "kv_gb": None, "cap_gb": None}
    row |= {"kernels": "hopper"}
    return row | ORIGIN | more


TAKEN = {"step_s": 3.214, "rollout_s": 2.5, "learn_s": 0.7, "peak_gb": 15.04, "steps": 3}


def test_both_values_of_a_line_are_of_one_commit_if_there_are_such_rows():
    """Machines differ by more than some ratios do."""
    other = "89abcde" + "a" * 33
    rows = [decode(8, 3000.0), decode(8, 1500.0, provider="qerl-bf16"), decode(8, 3600.0, commit=other)]
    assert "| 3,000 | 1,500 | 2.00x |" in speed_table(rows)
    newer = decode(8, 1600.0, provider="qerl-bf16", commit=other)
    assert "| 3,600 | 1,600 | 2.25x |" in speed_table([*rows, newer])
    assert "| 3,600 | not measured |" in speed_table(rows[2:])


def test_the_linear_table_has_a_line_per_library_and_a_column_per_batch():
    rows = [linear(64, 2.213), linear(8, 1.394, fraction=0.5884), linear(8, 3.89, provider="cublas-bf16")]
    lines = linear_tables(rows).splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("| library"))
    assert lines[at : at + 4] == [
        "| library | LoRA rank | 8 | 64 |",
        "| --- | --- | --- | --- |",
        "| qerl-nvfp4 | 0 | 1.39 (59%) | 2.21 (50%) |",
        "| cublas-bf16 | 0 | 3.89 (50%) | not measured |",
    ]
    assert lines[-1] == "Measured at commit 0123456 (2026-11-21, torch 2.11, triton 3.6, driver 580)."


def test_the_sampling_table_always_names_rank_and_kv_and_other_settings_where_they_differ():
    text = decode_tables([decode(8, 3218.4), decode(32, 10646.0)])
    assert "| weights | LoRA rank | KV | 8 | 32 |\n" in text
    assert "| qerl-nvfp4 | 32 | bf16 | 3,218 (47%) | 10,646 (47%) |" in text
    text = decode_tables([decode(8, 3218.4), decode(8, 3210.0, noise_sigma=0.01)])
    assert "| weights | LoRA rank | KV | noise | 8 |\n" in text
    assert "| qerl-nvfp4 | 32 | bf16 | 0.01 | 3,210 (47%) |" in text


def test_all_fractions_of_sampling_count_the_head_that_the_row_has():
    """Older rows stored a fraction (here 0.6) of a floor with a head in the linears' format."""
    rows = [decode(8, 2751.6, head=head, shape="qwen3.5-9b") for head in ("bf16", "nvfp4")]
    assert [line.split("|")[5] for line in decode_tables(rows).splitlines() if "2,752" in line] == [
        " 2,752 (54%) ",
        " 2,752 (43%) ",
    ]


def test_the_latest_row_of_a_case_counts():
    rows = [linear(8, 2.0), linear(8, 1.5, rank=32), linear(8, 1.0, commit="b" * 40)]
    assert [row["ms"] for row in latest(rows)] == [1.0, 1.5]
    assert "2.00" not in linear_tables(rows)


def test_a_later_row_of_too_few_runs_does_not_replace_a_median():
    rows = [decode(8, 3000.0), decode(8, 4000.0, runs=1)]
    assert [row["tok_per_s"] for row in latest(rows)] == [3000.0]
    assert [row["tok_per_s"] for row in latest([*rows, decode(8, 3100.0)])] == [3100.0]


def test_lengths_gpus_and_shapes_have_their_own_tables():
    rows = [decode(8, 1), decode(8, 2, max_tokens=64), decode(8, 3, gpu="NVIDIA L40S", capability="8.9")]
    assert decode_tables(rows).count("| weights |") == 3


def test_gpus_without_rows_are_not_measured():
    assert coverage([]).startswith("Hopper, Ampere, Ada, Blackwell: not measured. ")
    shown = coverage([linear(8, 1.0)]).replace("\n", " ")
    assert shown.startswith("Hopper: measured (H200). Ampere, Ada, Blackwell: not measured. ")


def test_a_gpu_with_unknown_limits_has_no_fraction():
    assert "| 1.00 |" in linear_tables([linear(8, 1.0, fraction=None)])


def test_every_committed_row_is_of_a_clean_commit():
    for row in read_rows(ROOT / RESULTS):
        assert len(row["commit"]) == 40 and row["is_dirty"] is False


def test_a_step_is_a_line_and_one_that_failed_names_the_error():
    text = step_tables([step(**TAKEN), step(batch=64, error="OutOfMemoryError: CUDA out of memory.")])
    start, case = "| qwen2.5-7b | qerl-nvfp4 | 32 |", "none | 8,192 | bf16 | bf16 | hopper | 2 | bf16 | no |"
    assert f"{start} 8 x 1,024 | {case} 3.21 | 2.50 | 0.70 | 15.0 |" in text
    assert f"{start} 64 x 1,024 | {case}  |  |  | OutOfMemoryError |" in text


def test_times_of_fewer_than_three_steps_are_not_measured():
    text = step_tables([step(**TAKEN | {"steps": 2})])
    assert "| no | not measured | not measured | not measured | 15.0 |" in text


@pytest.mark.parametrize(("steps", "growth"), [(3, "0.00"), (2, "not measured")])
def test_memory_is_shown_by_step_and_growth_over_at_least_three(steps, growth):
    figures = TAKEN | {"peaks_gb": [70.25, 73.5, 73.5], "growth_gb": 0.0, "steps": steps}
    assert f"| 15.0 | 80 | 70.2, 73.5, 73.5 | {growth} |" in memory_tables(
        [step("memory", cap_gb=80, **figures)]
    )


UPDATE = {"bench": "learn", "shape": "qwen2.5-7b", "provider": "qerl-nvfp4", "lora_rank": 32, "runs": 3}
UPDATE |= {
    "tokens": 8192,
    "sequence_tokens": 2048,
    "micro_tokens": 8192,
    "mfu": 0.666,
    "peak_gb": 11.14,
} | ORIGIN


def test_an_update_is_a_line():
    row = UPDATE | {"recompute": "layer", "tok_per_s": 12403.0, "used_micro_tokens": 4096}
    text = learn_tables([row])
    assert (
        "| qwen2.5-7b | qerl-nvfp4 | 32 | layer | 4 x 2,048 | 2 | bf16 | 4,096 | 12,403 | 67% | 11.1 |"
        in text
    )
    assert "| layer | 96 samples of a rollout | 2 |" in learn_tables([row | {"num_samples": 96}])
    del row["tok_per_s"], row["used_micro_tokens"], row["peak_gb"]
    text = learn_tables([row | {"error": "UserError: too little", "mfu": None}])
    assert "| layer | 4 x 2,048 | 2 | bf16 | 8,192 |  |  | UserError |" in text


def test_updates_with_flash_attention_4_and_2_stand_apart():
    older = UPDATE | {"recompute": "none", "tok_per_s": 510.0}
    newer = older | {"flash_attention": 4, "tok_per_s": 900.0}
    text = learn_tables([newer, older])
    lines = [line.split(" | ") for line in text.splitlines() if "qwen2.5-7b" in line]
    assert [(line[5], line[8]) for line in lines] == [("4", "900"), ("2", "510")]
    bf16 = older | {"provider": "qerl-bf16", "tok_per_s": 500.0}
    for rows in ([bf16, older, newer], [bf16, newer, older], [newer, bf16, older]):
        text = speed_table(rows)
        assert "1.02x" in text and "1.80x" not in text


def test_a_rollout_names_its_lengths_and_an_older_floor_is_not_shown():
    row = {
        "bench": "rollout",
        "shape": "qwen2.5-7b",
        "provider": "qerl-nvfp4",
        "kv": "bf16",
        "head": "nvfp4",
        "kernels": "hopper",
    }
    row |= {
        "lengths": "log-normal",
        "median_tokens": 600,
        "sigma": 0.8,
        "max_tokens": 4096,
        "num_samples": 256,
    }
    row |= {
        "rows": 256,
        "first_s": 19.54,
        "call_s": 16.5,
        "tok_per_s": 12871.5,
        "floor_fraction": 0.43,
        "runs": 3,
    }
    row |= {"tail_8_s": 3.61, "tail_16_s": 5.04, "tail_32_s": 6.72, "peak_gb": 68.32} | ORIGIN
    equal = row | {"lengths": "constant", "median_tokens": 8192, "floor_head": "bf16", "runs": 2}
    text = rollout_tables([row, equal])
    lengths = "| 256 | median 600, sigma 0.8, at most 4,096 | 256 | bf16 | nvfp4 | hopper"
    assert f"{lengths} | 19.5 | 16.5 | 12,872 |  | 3.6 | 5.0 | 6.7 | 68.3 | {ORIGIN['commit'][:7]} |" in text
    assert "| 8,192 each | 256 | bf16 | nvfp4 | hopper | 19.5 | not measured | not measured | 43% |" in text


def test_parity_gives_the_target_entropy_and_the_measured_one():
    row = {"bench": "parity", "shape": "qwen2.5-7b", "provider": "qerl-nvfp4", "lora_rank": 32, "kv": "fp8"}
    row |= {"head": "bf16", "target_entropy": 2.0, "batch": 8, "prompt_tokens": 256, "max_tokens": 1024}
    figures = {"abs_diff": 0.00712, "kl": 8.4e-5, "max_diff": 0.31, "entropy": 2.12, "exact": False}
    text = parity_tables([row | figures | ORIGIN])
    assert "| fp8 | bf16 | 8 x 1,024 | no | - | 2 | 2.12 | 7.12e-03 | 8.4e-05 | 0.31 |" in text
    exact = row | figures | {"abs_diff": 0.0, "kl": 0.0, "max_diff": 0.0, "exact": True, "exact_mode": True}
    text = parity_tables([row | figures | ORIGIN, exact | ORIGIN])
    assert "| 8 x 1,024 | yes | - | 2 | 2.12 | 0.00e+00 | 0.0e+00 | 0 |" in text and "| 7.12e-03 |" in text
    replays = [row | figures | ORIGIN | {"router_replay": value, "num_layers": 4} for value in (True, False)]
    text = parity_tables(replays)
    assert "| no | yes | 2 |" in text and "| no | no | 2 |" in text and "| qwen2.5-7b, 4 layers |" in text


def test_settings_make_cases_of_their_own():
    rows = [step(**TAKEN), step(cap_gb=80, **TAKEN), step(recompute="layer", **TAKEN), step(**TAKEN)]
    assert len(latest(rows)) == 3
    assert len(latest([step(**TAKEN), step(exact_mode=False, **TAKEN), step(exact_mode=True, **TAKEN)])) == 2


def test_the_speed_table_has_both_ranks_and_every_gpu_with_a_ratio():
    rows = [decode(8, 3200.0), decode(8, 1600.0, provider="qerl-bf16"), decode(8, 4000.0, lora_rank=0)]
    rows += [decode(8, 2000.0, **H100)]
    lines = speed_table(rows).splitlines()
    none = " | not measured" * 3
    name = "| sampling, 7B, 8 samples in parallel, tokens/s | bf16"
    assert "|  | KV | LoRA rank | H200 NVFP4 | BF16 | ratio | H100 NVFP4 | BF16 | ratio |" in lines
    assert f"{name} | 32 | 3,200 | 1,600 | 2.00x | 2,000 | not measured | not measured |" in lines
    assert f"{name} | 0 | 4,000 | not measured | not measured{none} |" in lines
    assert f"{name.replace('8', '64')} | 32{none}{none} |" in lines


def test_the_ratio_of_seconds_and_memory_is_that_of_the_gain():
    rows = [step(**TAKEN), step(provider="qerl-bf16", **TAKEN | {"step_s": 6.428})]
    assert "| 3.21 | 6.43 | 2.00x |" in speed_table(rows)


@pytest.mark.parametrize(
    "other",
    [{"kv": "fp8"}, {"head": "nvfp4"}, {"kv_gb": 7.2}, {"steps": 2}, {"optimizer": "adamw_8bit"}],
)
def test_a_row_with_another_setting_or_too_few_steps_is_not_compared(other):
    rows = [step(**TAKEN), step(provider="qerl-bf16", **TAKEN | other)]
    assert "| bf16 | 32 | 3.21 | not measured | not measured |" in speed_table(rows)


def test_a_row_of_another_gpu_is_not_compared():
    rows = [step(**TAKEN), step(provider="qerl-bf16", **TAKEN | H100)]
    missing = " | not measured"
    assert f"| bf16 | 32 | 3.21{missing}{missing}{missing} | 3.21{missing} |" in speed_table(rows)


def test_the_cost_of_exact_mode_is_a_ratio_of_equal_steps():
    rows = [step(exact_mode=False, **TAKEN), step(exact_mode=True, **TAKEN | {"step_s": 4.821})]
    assert "| H200 | bf16 | 32 | 3.21 | 4.82 | 1.50x |" in exact_table(rows)
    assert "| H200 | bf16 | 32 | 3.21 | not measured | not measured |" in exact_table(rows[:1])


def test_marked_tables_are_filled_and_the_rest_of_a_page_stays():
    text = "# Page\n\n<!-- table gpus -->\nold\n<!-- end -->\n\nrest\n"
    once = fill(text, [], "page.md")
    assert once == f"# Page\n\n<!-- table gpus -->\n\n{coverage([])}\n\n<!-- end -->\n\nrest\n"
    assert fill(once, [], "page.md") == once
    assert "speed" in TABLES
    with pytest.raises(UserError, match=r"page\.md: unknown table sped"):
        fill("<!-- table sped -->\n<!-- end -->", [], "page.md")
