"""The benchmark of calibration measures its arms over one set of samples."""

import json

import pytest

import tiny_run
from benchmarks.calibration import Arm, CalibrationOptions, bench_calibration
from qerl.config import TaskConfig
from qerl.errors import UserError
from qerl.models.quantize.gptq import FLOAT

ALL = "gptq+float0.5+fp32+kept0.4+tokens200+unweighted+damping0.2+nvfp4"


def test_each_arm_has_a_row_over_the_same_samples(tmp_path, capsys):
    task = TaskConfig(name=str(tiny_run.write_task(tmp_path)), rewards=("exact",), num_held_out=8)
    model = tiny_run.write_model(tmp_path / "model")
    arms = ("plain", "mse", "gptq", "gptq+kept0.4", ALL)
    bench_calibration(
        CalibrationOptions(model=str(model), task=task, arms=arms, num_prompts=3, max_tokens=8, tokens=300)
    )
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    parts = [row["part"] for row in rows]
    assert parts == ["load", "samples", "arm", "arm", "arm", "kept", "arm", "samples", "arm"]
    plain, mse, gptq, kept, both = (row for row in rows if row["part"] == "arm")
    assert all(0 < row["kl"] < 1 and 0 < row["answer_kl"] < 1 for row in (plain, mse, gptq, kept, both))
    assert len({(row["num_tokens"], row["answer_num_tokens"]) for row in (plain, mse, gptq, kept, both)}) == 1
    assert kept["linears_bytes"] > gptq["linears_bytes"] == plain["linears_bytes"]
    assert mse["tokens"] == 0 and both["tokens"] < gptq["tokens"]


def test_an_arm_is_read_as_it_is_written():
    arm = Arm.parse(ALL)
    assert arm.settings is not None and arm.settings.select_scales is not FLOAT.select_scales
    assert (arm.settings.float_share, arm.settings.damping, arm.kept_share, arm.tokens) == (
        0.5,
        0.2,
        0.4,
        200,
    )
    assert arm.runs_in_fp32
    assert arm.sampled_in == "nvfp4" and Arm.parse("gptq").settings == FLOAT


@pytest.mark.parametrize("arm", ["rows", "plain+fp32", "gptq+row", "gptq+float", "gptq+kept0"])
def test_an_unknown_arm_is_refused_by_name(arm):
    with pytest.raises(UserError, match=f"arms: {arm.replace('+', '.')}"):
        CalibrationOptions(arms=(arm,))
