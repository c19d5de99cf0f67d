"""The long demo's own model, merged and loaded in NVFP4, keeps 0.9 of its accuracy by model.calibrate.

About five minutes on a GPU, half an hour on two CPU cores. test_calibrated.py holds the same of a tiny model.
"""

import json

import pytest
import torch

from qerl.cli.main import command


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="half an hour without a GPU")
def test_the_merged_demo_keeps_nine_tenths_of_its_accuracy_by_calibration(smollm2, tmp_path, capsys):
    def accuracy(out, *options):
        command(["train", "demo_long", "--out", str(tmp_path / out), "--json", *options])
        result = json.loads(capsys.readouterr().out.splitlines()[-1])
        return result["accuracy_before"], result["accuracy_after"]

    base, learned = accuracy("demo")
    merged = str(tmp_path / "merged")
    command(["export", str(tmp_path / "demo"), merged, "--as", "merged"])
    capsys.readouterr()
    one = "--model.path", merged, "--num-steps", "1"
    (whole, _), (plain, _), (kept, _) = (
        accuracy("whole", *one, "--model.format", "bf16"),
        accuracy("plain", *one),
        accuracy("kept", *one, "--model.calibrate", "gptq"),
    )
    assert whole > 0.9 * learned > 5 * base
    assert plain < 0.2 * whole
    assert kept > 0.9 * whole
