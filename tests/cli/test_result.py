import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from qerl.cli.export import usage_lines
from qerl.cli.result import print_result, result_lines, take_flag
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


def write_adapter(folder, **entries):
    """Write an adapter of two linears of one layer, and of its experts if they have target_parameters."""
    folder.mkdir()
    names = [f"base_model.model.model.layers.0.self_attn.{each}" for each in ("q_proj", "k_proj")]
    tensors = {f"{name}.lora_{side}.weight": torch.zeros(1, 1) for name in names for side in "AB"}
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"r": 8, "lora_alpha": 16.0} | entries))
    return folder


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
    out = write_adapter(tmp_path / "out", rank_pattern={"q_proj": 48}, alpha_pattern={"q_proj": 96.0})
    (out / "weights").write_bytes(bytes(2_500_000))
    lines = usage_lines(ExportOptions(run=Path("run"), out=out, form=form), "owner/base")
    assert "2.5 MB" in lines[0] and str(out) in lines[0]
    assert any(said.replace("OUT", str(out)) in line for line in lines)


def test_an_adapter_of_a_quantized_base_is_not_shown_on_the_original_weights(tmp_path):
    """On those it computes something else: the README.md that is written with it has its base's commands."""
    options = ExportOptions(run=Path("run"), out=write_adapter(tmp_path / "out"), form="peft")
    assert usage_lines(options, None)[1:] == [
        f"  PEFT, vLLM   {options.out}/README.md says how to load it on that base"
    ]


@pytest.mark.parametrize(
    "entries",
    [
        {"rank_pattern": {"q_proj": 48}},
        {"alpha_pattern": {"q_proj": 32.0}},
        {"rank_pattern": {"q_proj": 32}, "alpha_pattern": {"q_proj": 64.0}, "use_rslora": True},
        {"rank_pattern": {"mlp.experts.down_proj": 4}, "target_parameters": ["mlp.experts.down_proj"]},
        {"rank_pattern": {".*_proj": 4}},  # every module has one factor, which is not lora_alpha / r
        {"rank_pattern": {"q_proj": 4, ".*": 8}, "alpha_pattern": {"k_proj": 8.0}},
    ],
)
def test_an_adapter_of_several_factors_is_not_offered_to_vllm(tmp_path, entries):
    options = ExportOptions(run=Path("run"), out=write_adapter(tmp_path / "out", **entries), form="peft")
    assert usage_lines(options, "owner/base")[-1].startswith("  vLLM   vLLM computes something else")


@pytest.mark.parametrize(
    "entries",
    [
        {"rank_pattern": {"q_proj": 4}, "alpha_pattern": {r"layers\.0\.self_attn\.q_proj": 8.0}},
        {"rank_pattern": {"q_proj": 4, ".*_proj": 16}, "alpha_pattern": {"k_proj": 32.0, ".*": 8.0}},
        {"rank_pattern": {"v_proj": 4}},  # of no module of the adapter
    ],
)
def test_patterns_are_compared_by_the_modules_that_they_match(tmp_path, entries):
    options = ExportOptions(run=Path("run"), out=write_adapter(tmp_path / "out", **entries), form="peft")
    assert usage_lines(options, "owner/base")[-1].startswith("  vLLM   vllm serve owner/base --enable-lora")
