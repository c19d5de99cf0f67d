"""kill -9 at random moments; `python tests/faults/figures.py` does it 50 times and more."""

import pytest

from faults import commands, kills, runs
from qerl.errors import UserError
from qerl.tracking import Journal


@pytest.fixture(scope="module")
def unbroken(files, tmp_path_factory):
    return kills.unbroken(files, tmp_path_factory.mktemp("runs"))


def test_killed_at_random_moments_and_started_at_once_a_run_is_the_unbroken_one(files, unbroken, tmp_path):
    whole, whole_s = unbroken
    trials = [
        kills.trial(files, tmp_path / str(i), whole, moment_s)
        for i, moment_s in enumerate(kills.moments_s(3, 1, whole_s))
    ]
    differences = [one["difference"] for one in trials]
    assert differences == [None] * 3, "\n".join(map(str, differences))
    assert not any(one["survivors"] for one in trials)


def test_a_run_killed_again_and_again_gets_there_all_the_same(files, unbroken, tmp_path):
    out = tmp_path / "run"
    for target in (1, 4, 7):
        run = runs.start(files, out, *kills.MORE)
        run.wait_for(lambda target=target: runs.num_steps(out) >= target)
        run.kill()
        assert run.wait() == -9
    runs.finish(files, out, *kills.MORE)
    assert runs.difference(out, unbroken[0]) is None


def test_the_lock_goes_with_the_run_and_not_with_its_workers(files, tmp_path):
    """A worker hangs on; the run's folder is free as soon as the run is gone."""
    (tmp_path / "slow.py").write_text("import time\ndef slow(completions, **_):\n    time.sleep(60)\n")
    given = ("--task.rewards", f"{tmp_path / 'slow.py'}:slow", "--task.reward-workers", "2")
    run = runs.start(files, tmp_path / "run", *given)
    run.wait_for(lambda: len(run.processes()) >= 4 and (tmp_path / "run" / "run.json").exists())
    with pytest.raises(UserError, match=rf"another run is writing here \(process {run.pid}\)"):
        Journal(tmp_path / "run", num_steps=1)
    second = runs.start(files, tmp_path / "run")
    assert second.wait() == 2
    (error,) = [line for line in second.said.splitlines() if line.startswith("qerl: ")]
    assert f"process {run.pid}" in error and "Traceback" not in second.said
    workers = [pid for pid in run.processes() if pid != run.pid]
    run.kill()
    run.wait()
    with Journal(tmp_path / "run", num_steps=1):
        left = run.processes()  # before the warden has looked
        assert workers and run.pid not in left


CALIBRATED = ("--model.calibrate", "gptq", "--num-steps", "2")


def base_of(out):
    note = "qerl_calibrated.json"  # with the seconds that it took
    return {path.name: path.read_bytes() for path in (out / "base").iterdir() if path.name != note}


def test_killed_while_it_calibrates_and_started_again_a_run_is_the_unbroken_one(files, tmp_path, monkeypatch):
    """While it samples, and at a flush of the calibrated model."""
    monkeypatch.setenv("QERL_CACHE", str(tmp_path / "cache"))
    whole = tmp_path / "whole"
    runs.finish(files, whole, *CALIBRATED)
    for cut in (None, 20):
        out = tmp_path / str(cut)
        monkeypatch.setenv("QERL_CACHE", str(tmp_path / f"cache-{cut}"))
        first = (lambda: None) if cut is None else commands.killed_at(cut)
        run = runs.start(files, out, *CALIBRATED, first=first)
        if cut is None:
            run.wait_for(lambda run=run: run.log.exists() and "quantizing" in run.said)
            run.kill()
        assert run.wait() == -9 and runs.num_steps(out) == 0
        runs.finish(files, out, *CALIBRATED)
        assert base_of(out) == base_of(whole) and runs.difference(out, whole) is None
        left = [path.name for folder in (out, tmp_path / f"cache-{cut}") for path in folder.rglob("*")]
        assert not [name for name in left if "unfinished" in name or name.endswith(".part")]
