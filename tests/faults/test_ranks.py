"""Ranks that are frozen or killed: the others end with their step saved, and the run can be resumed."""

import json
import os
import signal

import pytest

import tiny_run
from faults import runs
from training.ranks import StartedRanks

MAIN = "from qerl.cli.main import main\n\nif __name__ == '__main__':\n    main()\n"
FROZEN = f"""\
import os, signal
from qerl.tasks import RewardPool

attempt, num_calls = RewardPool.attempt, 0
def freeze(self, groups):
    global num_calls
    num_calls += 1
    if os.environ["RANK"] == "RANK_" and num_calls == 6:  # two before training, then those of four steps
        os.kill(os.getpid(), signal.SIGSTOP)
    return attempt(self, groups)
RewardPool.attempt = freeze
{MAIN}"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tiny_run.write_files(tmp_path_factory.mktemp("tiny"))
    (folder / "qerl").write_text(MAIN)
    for rank in "01":
        (folder / f"frozen-{rank}").write_text(FROZEN.replace("RANK_", rank))
    return folder


def start(files, out, *more, script="qerl"):
    given = (*tiny_run.options(files, out), "--model.device", "cpu", *more)
    return StartedRanks(2, str(files / script), "train", "demo_long", *given)


def finish(files, out, *more):
    process = start(files, out, *more)
    stdout, stderr = process.communicate(timeout=240)
    assert process.returncode == 0, stderr
    return stdout


@pytest.fixture(scope="module")
def whole(files, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "whole"
    finish(files, out)
    return out


def gathered(out):
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["gathered_bytes"], line["added_bytes"]) for line in lines]


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_rank_is_noticed_and_the_step_before_is_saved(files, whole, tmp_path, frozen):
    """No checkpoint is due before the last step: the only one is that of the loss."""
    out = tmp_path / "run"
    rarely, soon = ("--checkpoint.every", "100"), ("--rank-timeout-s", "5")
    process = start(files, out, *rarely, *soon, script=f"frozen-{frozen}")
    other = process.processes[1 - frozen]
    _, stderr = other.communicate(timeout=240)
    assert other.returncode == 1, stderr
    if frozen == 1:
        assert "qerl: rank 1: silent for 5 s (rank_timeout_s): another rank is lost" in stderr
    assert process.processes[frozen].poll() is None
    os.kill(process.processes[frozen].pid, signal.SIGCONT)
    _, stderr = process.processes[frozen].communicate(timeout=240)
    assert process.processes[frozen].returncode == 1 and "Traceback" not in stderr, stderr
    assert [path.name for path in (out / "checkpoints").glob("step-*")] == ["step-000003"]
    finish(files, out, *rarely)
    assert runs.difference(out, whole) is None and gathered(out) == gathered(whole)


def test_the_bytes_between_ranks_are_equal_after_a_kill(files, whole, tmp_path):
    out = tmp_path / "run"
    process = start(files, out)
    runs.wait_until(lambda: runs.num_steps(out) >= 3)
    for rank in process.processes:
        rank.kill()
    process.communicate(timeout=60)
    assert runs.num_steps(out) < 6
    assert "resuming after step" in finish(files, out)
    assert gathered(out) == gathered(whole)
