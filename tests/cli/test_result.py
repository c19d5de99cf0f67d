import json
from pathlib import Path

import pytest

from qerl.cli.export import usage_lines
from qerl.cli.result import print_result, result_lines, take_flag
from qerl.config import AdapterConfig
from qerl.config.options import ExportOptions
from qerl.tracking.metric_text import plain_line

RESULT = {
    "accuracy_before": 0.40625,
    "accuracy_after": 0.75,
    "greedy_before": 0.5,
    "greedy_after": 2 / 3,
    "reward_before": 0.40625,
    "reward_after": 0.75,
    "greedy_reward_before": 0.51,
    "greedy_reward_after": 0.7,
    "train_s": 754.3,
    "run": "runs/my run",
}


def test_a_run_ends_with_a_table_and_the_next_commands():
    lines = [line for line in result_lines(RESULT) if line]
    assert [line.split() for line in lines[:5]] == [
        ["held", "out", "before", "after"],
        ["accuracy", "0.406", "0.750"],
        ["accuracy,", "greedy", "0.500", "0.667"],
        ["reward,", "greedy", "0.510", "0.700"],  # the reward at temperature 1 is the accuracy
        ["steps", "12:34"],
    ]
    quoted = "'runs/my run'"
    assert lines[5:] == [
        f"qerl eval {quoted}",
        f"qerl export {quoted} 'runs/my run-adapter'",
        f"qerl serve {quoted}",
    ]


def test_a_run_without_evaluation_has_its_time_and_the_commands():
    lines = [line for line in result_lines({"train_s": 3.0, "run": "runs/x"}) if line]
    assert lines[0].split() == ["steps", "0:03"] and len(lines) == 4


def test_json_has_at_most_four_digits(capsys):
    print_result(RESULT, as_json=True)
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["greedy_after"] == 0.6667 and json.loads(line)["run"] == "runs/my run"


def test_the_flag_is_taken_from_anywhere():
    assert take_flag(["demo", "--json", "--out", "x"], "--json") == (True, ["demo", "--out", "x"])
    assert take_flag(["demo"], "--json") == (False, ["demo"])


def test_the_step_s_line_has_accuracy_only_where_it_differs_from_the_reward():
    metrics = {"reward": 0.5, "accuracy": 0.5, "mean_tokens": 211.4, "cut_fraction": 0.125}
    metrics |= {"entropy": 0.31, "mismatch_kl": 1.2e-3}
    line = plain_line(metrics, steps_done=3, num_steps=30, left_s=271.0)
    assert line == ("step 3/30  reward 0.500  length 211  cut 12%  entropy 0.31  mismatch 1.2e-03  left 4:31")
    assert "accuracy 0.25" in plain_line(metrics | {"accuracy": 0.25}, steps_done=1, num_steps=2, left_s=None)


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ("peft", "vllm serve owner/base --enable-lora --max-lora-rank 64 --lora-modules out=OUT"),
        ("peft", 'PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("owner/base"), "OUT")'),
        ("nvfp4", "vllm serve OUT"),
        ("gguf-ready", "python convert_hf_to_gguf.py OUT"),
    ],
)
def test_an_export_says_what_it_wrote_and_how_it_is_used(tmp_path, form, said):
    out = tmp_path / "out"
    out.mkdir()
    (out / "weights").write_bytes(bytes(2_500_000))
    patterns = {"rank_pattern": (("q_proj", 48),), "alpha_pattern": (("q_proj", 96.0),)}
    adapter = AdapterConfig(rank=8, alpha=16.0, **patterns)
    lines = usage_lines(ExportOptions(run=Path("run"), out=out, form=form), "owner/base", adapter)
    assert "2.5 MB" in lines[0] and str(out) in lines[0]
    assert any(said.replace("OUT", str(out)) in line for line in lines)


@pytest.mark.parametrize(
    "fields",
    [
        {"rank_pattern": (("q_proj", 48),)},
        {"alpha_pattern": (("q_proj", 32.0),)},
        {"rank_pattern": (("q_proj", 32),), "alpha_pattern": (("q_proj", 64.0),), "use_rslora": True},
        {"experts": "per_expert", "expert_rank": 4},
    ],
)
def test_an_adapter_of_several_factors_is_not_offered_to_vllm(tmp_path, fields):
    adapter = AdapterConfig(rank=8, alpha=16.0, **fields)
    options = ExportOptions(run=Path("run"), out=tmp_path, form="peft")
    assert usage_lines(options, "owner/base", adapter)[-1].startswith("  vLLM   vLLM computes something else")
