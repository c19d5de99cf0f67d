"""The benchmark of runs on several GPUs: how it kills a worker and what it counts; no GPU is needed."""

import dataclasses
import sys

import pytest

from benchmarks import samplers
from processes import is_running
from qerl.errors import RunError, UserError

RUN = """\
import subprocess, sys, time
from pathlib import Path
from qerl.tracking.json_lines import encode_line
out = Path(sys.argv[sys.argv.index("--out") + 1])
out.mkdir()
workers = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
for i, worker in enumerate(workers):
    print(f"sampler {i} is process {worker.pid}", flush=True)
for step in range(7):
    lost = False
    if step == 4:
        workers[1].wait()
        lost = True
    with (out / "metrics.jsonl").open("ab") as lines:
        lines.write(encode_line({"step": step, "replaced_samplers": float(lost)}))
workers[0].kill()
"""
PARENT = """\
import signal, subprocess, sys
from pathlib import Path
child = subprocess.Popen(["sleep", "60"], start_new_session=True)
def end(*_):
    child.kill()
    child.wait()
    sys.exit(1)
signal.signal(signal.SIGTERM, end)
Path(sys.argv[1]).write_text(str(child.pid))
while True:
    signal.pause()
"""
EVERY = {
    "rollout_s": 0.5,
    "publish_s": 0.25,
    "trained_samples": 64,
    "micro_tokens": 8192,
    "sampled_tokens": 100.0,
    "reward": 0.5,
    "entropy": 1.0,
    "staleness": 1.0,
}


def step(step_s, grad_norm, lost=0.0):
    own = {"step_s": step_s, "learn_s": step_s - 0.75, "grad_norm": grad_norm}
    return EVERY | own | {"replaced_samplers": lost, "resampled_prompts": 3 * lost}


def test_a_worker_is_killed_after_the_steps_that_were_asked_for(tmp_path):
    """The run waits for the death of its second worker before its fifth step."""
    script = tmp_path / "run.py"
    script.write_text(RUN)
    steps = samplers.run([sys.executable, str(script)], tmp_path / "out", kill_after=3, timeout_s=50)
    assert [s["replaced_samplers"] for s in steps] == [0, 0, 0, 0, 1, 0, 0]


def test_a_run_that_fails_or_hangs_is_an_error_with_what_it_printed(tmp_path):
    fails = [sys.executable, "-c", "print('no such model'); raise SystemExit(2)"]
    with pytest.raises(RunError, match="ended with 2: no such model"):
        samplers.run(fails, tmp_path / "fails", kill_after=None, timeout_s=50)
    with pytest.raises(RunError, match="hangs did not end"):
        samplers.run(
            [sys.executable, "-c", "import time; time.sleep(60)"],
            tmp_path / "hangs",
            kill_after=None,
            timeout_s=0.2,
        )


def test_a_run_that_ends_before_its_worker_is_killed_is_an_error(tmp_path):
    script = tmp_path / "run.py"
    script.write_text(RUN.replace("workers[1].wait()", "workers[1].kill()"))
    with pytest.raises(RunError, match="out ended before a worker was killed"):
        samplers.run([sys.executable, str(script)], tmp_path / "out", kill_after=8, timeout_s=50)


def test_a_run_that_hangs_may_end_what_has_a_session_of_its_own(tmp_path):
    """As torchrun ends its ranks."""
    script, pid = tmp_path / "run.py", tmp_path / "pid"
    script.write_text(PARENT)
    with pytest.raises(RunError, match="out did not end"):
        samplers.run([sys.executable, str(script), str(pid)], tmp_path / "out", kill_after=None, timeout_s=1)
    assert not is_running(int(pid.read_text()))


def test_figures_leave_out_the_first_steps_and_the_one_that_lost_a_worker():
    steps = [
        step(9.0, 0.1),
        step(8.0, 0.2),
        step(7.0, 0.3),
        step(20.0, 0.4, 1.0),
        step(1.0, 0.5),
        step(4.0, 0.6),
    ]
    found = samplers.figures(steps, [s | {"step_s": 1.0} for s in steps])
    assert (found["samples_per_s"], found["step_s"], found["learn_s"]) == (40.0, 2.5, 1.75)
    assert (found["lost_step_s"], found["replaced_samplers"], found["resampled_prompts"]) == (20.0, 1, 3)
    assert found["is_same"]
    others = [*steps[:-1], step(4.0, 0.7)]
    assert not samplers.figures(steps, others)["is_same"]
    assert "is_same" not in samplers.figures(steps, None)


def test_wrong_options_are_told():
    for name, wrong in (("gpus", 1), ("num_steps", 4), ("kill_after", 7)):
        with pytest.raises(UserError):
            dataclasses.replace(samplers.SamplersOptions(), **{name: wrong})
