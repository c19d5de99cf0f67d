"""Tiny runs of `qerl sft` and `qerl dpo`: their options, and what must be the same of two of them."""

import json
import signal

from safetensors.torch import load_file
from test_session import metrics

import tiny_run
from qerl.cli.main import command
from training.ranks import StartedRanks


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def options_of(files, out, given, *more):
    """given: beside what both commands have."""
    shared = {"model.path": files, "model.dtype": "fp32", "adapter.rank": 4, "out": out}
    shared |= {"eval-max-tokens": 5, "checkpoint.every": 2, "learn.learning-rate": 0.02}
    return [*(part for name, value in (shared | given).items() for part in (f"--{name}", str(value))), *more]


def adapter_after(out, step):
    return load_file(out / "checkpoints" / f"step-{step:06d}" / "adapter_model.safetensors")


def stop_and_go_on(name, arguments, out):
    """Stop a run of this command in its second step, and complete it."""
    process = tiny_run.signals_itself(signal.SIGINT, 1, name, *arguments)
    said, errors = process.communicate()
    assert process.returncode == 130 and "is saved; the same command resumes from it" in said, errors
    assert [step["step"] for step in metrics(out)] == [0, 1]
    command([name, *arguments])


def run_by_two_ranks(name, arguments):
    ranks = StartedRanks(2, *tiny_run.QERL, name, *arguments)
    _, errors = ranks.communicate()
    assert ranks.returncode == 0, errors


def assert_same_run(a, b, step, *names):
    """names: of more files that are the same."""
    assert metrics(a) == metrics(b)
    for name in ("samples.jsonl", "evaluations.json", *names):
        assert (a / name).read_text() == (b / name).read_text()
    ours, theirs = adapter_after(a, step), adapter_after(b, step)
    assert all(ours[name].equal(theirs[name]) for name in ours)
