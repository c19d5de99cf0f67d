"""A scheduler's SIGTERM, a clock that leaps, a gradient without an end, a key in the wrong place."""

import json
import os
import random
import signal
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

from faults import runs
from learner.samples import random_groups
from learner.tiny import VOCAB, tiny_learner
from qerl.config import RunConfig
from qerl.errors import RunError, redact
from qerl.tasks.scoring import Failure, RewardCall, reward_arguments, score
from qerl.tracking.provenance import run_facts

HELD = """
import pathlib, time
place = pathlib.Path(__file__).parent
def held(completion_ids, **_):
    if (place / "hold").exists():
        (place / "held").touch()
        time.sleep(1)
    return [float(ids[0] % 2 == 0) for ids in completion_ids]
"""


def test_a_sigterm_to_every_process_of_the_run_costs_no_sample(files, whole, tmp_path):
    """As systemd, docker and Slurm may send it: to the workers and the supervisor as well."""
    out, reward = tmp_path / "run", ("--task.rewards", f"{tmp_path / 'held.py'}:held")
    (tmp_path / "held.py").write_text(HELD)
    run = runs.start(files, out, *reward)
    run.wait_for(lambda: runs.num_steps(out) >= 2)
    (tmp_path / "hold").touch()
    run.wait_for((tmp_path / "held").exists)
    (tmp_path / "hold").unlink()
    for pid in run.processes():  # the workers at work
        os.kill(pid, signal.SIGTERM)
    assert run.wait() == 143 and "SIGTERM: finishing and saving this step" in run.said
    assert f"step {runs.num_steps(out)} is saved; the same command resumes from it" in run.said
    assert not run.processes() and 2 <= runs.num_steps(out) < 6
    runs.finish(files, out, *reward)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["num_failed_rewards"] for line in lines] == [0] * 6
    assert runs.difference(out, whole) is None


def leaping_clock() -> None:
    """time.time() is up to a day before or after the time with each look."""
    real, rng = time.time, random.Random(0)
    time.time = lambda: real() + rng.uniform(-86400, 86400)


def test_leaps_of_the_clock_change_nothing_but_the_time_of_day(files, whole, tmp_path):
    out = tmp_path / "run"
    run = runs.start(files, out, first=leaping_clock)
    assert run.wait() == 0, run.said
    assert runs.difference(out, whole) is None
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    seconds = [
        value for line in lines for key, value in line.items() if key.endswith("_s") and "_per_" not in key
    ]
    assert seconds and all(0 <= value < 60 for value in seconds)
    times = [line["wall_time"] for line in lines]
    assert max(times) - min(times) > 3600  # the clock did leap
    assert 0 <= json.loads((out / "result.json").read_text())["train_s"] < 60


def broken(groups):
    """The same samples, one of them with an advantage that no gradient survives."""
    import dataclasses

    bad = dataclasses.replace(groups[0].samples_G[0], advantage=float("inf"))
    return [dataclasses.replace(groups[0], samples_G=[bad, *groups[0].samples_G[1:]]), *groups[1:]]


def test_a_row_of_gradients_that_are_not_finite_ends_the_run_and_fewer_do_not(rng):
    groups = random_groups(4, 3, vocab=VOCAB, rng=rng)
    learner = tiny_learner(learn={"max_nonfinite_updates": 3})
    for _ in range(2):
        assert learner.step(broken(groups))["nonfinite_updates"] == 1
    assert learner.step(groups)["nonfinite_updates"] == 0  # the count begins anew
    before = {name: master.clone() for name, master in learner.adapter_state().items()}
    for _ in range(2):
        learner.step(broken(groups))
    learner.step([])  # nothing to learn says nothing of gradients
    with pytest.raises(RunError, match=r"3 updates in a row .*learn\.max_nonfinite_updates"):
        learner.step(broken(groups))
    assert all(before[name].equal(master) for name, master in learner.adapter_state().items())


def nan_in_the_third_gradient() -> None:
    """The clock leaps too: one run shows both."""
    leaping_clock()
    backward, num_calls = torch.Tensor.backward, 0

    def injected(loss, *arguments, **how):
        nonlocal num_calls
        num_calls += 1
        if num_calls == 3:
            loss.register_hook(lambda gradient: gradient * float("nan"))
        return backward(loss, *arguments, **how)

    torch.Tensor.backward = injected  # type: ignore[method-assign]


def test_nan_in_one_gradient_skips_one_update_and_the_run_goes_on(files, tmp_path):
    out = tmp_path / "run"
    run = runs.start(files, out, "--noise.schedule", "none", first=nan_in_the_third_gradient)
    assert run.wait() == 0, run.said
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    skipped = [line["nonfinite_updates"] for line in lines]
    assert sum(skipped) == 1 and skipped[0] == skipped[-1] == 0 and len(skipped) == 6
    assert all(0 <= line["step_s"] < 60 for line in lines)
    adapter = load_file(out / "checkpoints" / "step-000006" / "adapter_model.safetensors")
    assert adapter and all(tensor.isfinite().all() for tensor in adapter.values())
    assert any(tensor.count_nonzero() for name, tensor in adapter.items() if "lora_B" in name)


def nothing_finite() -> None:
    torch.nn.utils.get_total_norm = lambda grads: torch.tensor(float("nan"))


def test_a_run_that_learns_nothing_any_more_ends_in_one_line_with_its_checkpoint(files, tmp_path):
    out, limit = tmp_path / "run", ("--learn.max-nonfinite-updates", "4")
    run = runs.start(files, out, *limit, first=nothing_finite)
    assert run.wait() == 1
    assert run.said.splitlines()[-1].startswith(
        "qerl: training diverged: 4 updates in a row had a non-finite gradient"
    )
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["nonfinite_updates"] for line in lines] == [1, 1, 1]
    assert (out / "checkpoints" / "step-000002").is_dir()


KEYS = {
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
    "HF_TOKEN": "hf_" + "Q" * 34,
    "JUDGE_SECRET": "a+b/c.d$e",
    "DB_PASSWORD": "correct horse",
}
LEAKING = """
import os
def leaks(completion_ids, **_):
    if sum(completion_ids[0]) % 3 == 0:
        names = ("WANDB_API_KEY", "HF_TOKEN", "JUDGE_SECRET", "DB_PASSWORD")
        raise ValueError("401: " + " and ".join(os.environ[name] for name in names))
    return [float(completion_ids[0][0] % 2)]
"""


def test_no_key_reaches_a_file_of_the_run_or_the_terminal(files, tmp_path):
    """A judge's client puts them into its exception."""
    (tmp_path / "leaks.py").write_text(LEAKING)
    reward = ("--task.rewards", f"{tmp_path / 'leaks.py'}:leaks", "--evaluate.num-prompts", "0")
    run = runs.start(files, tmp_path / "run", *reward, first=lambda: os.environ.update(KEYS))
    assert run.wait() == 0, run.said
    assert "raised ValueError: leaks: 401: *** and *** and *** and ***" in run.said
    texts = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert len(texts) > 10
    for value in KEYS.values():
        assert value not in run.said
        assert not [path for path, text in texts.items() if value.encode() in text]


def test_an_error_of_the_command_line_shows_no_key(files, tmp_path):
    always = LEAKING.replace("% 3 == 0", "* 0 == 0")
    (tmp_path / "leaks.py").write_text(always)
    reward = ("--task.rewards", f"{tmp_path / 'leaks.py'}:leaks")
    run = runs.start(files, tmp_path / "run", *reward, first=lambda: os.environ.update(KEYS))
    assert run.wait() == 2 and "no sample of the step has a reward" in run.said
    assert not [value for value in KEYS.values() if value in run.said]


def test_an_address_on_the_command_line_is_shown_without_its_password(tmp_path):
    run = runs.start_command(["eval", "https://me:hunter2@host/model", "gsm8k"], tmp_path / "log")
    assert run.wait() == 2
    assert "qerl: https://***@host/model: no such folder" in run.said and "hunter2" not in run.said


def test_a_script_started_with_a_key_is_recorded_without_it(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", KEYS["HF_TOKEN"])
    monkeypatch.setattr(sys, "argv", ["mine.py", "--key", KEYS["HF_TOKEN"]])
    assert run_facts(RunConfig())["command"] == "mine.py --key ***"


def test_what_a_reward_raised_leaves_its_process_without_keys(monkeypatch):
    monkeypatch.setenv("JUDGE_SECRET", KEYS["JUDGE_SECRET"])

    def leaks(completions):
        raise ValueError(f"401 {KEYS['JUDGE_SECRET']}")

    failure = score([leaks], RewardCall((0,), reward_arguments("p", "c", [1], {})))
    place = f"test_interruptions.py:{leaks.__code__.co_firstlineno + 1}"
    assert failure == Failure("raised ValueError", f"leaks: 401 *** ({place})")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://me:pw@host/x", "https://***@host/x"),
        ("Authorization: Bearer abc.def", "Authorization: Bearer ***"),
        ("Incorrect API key sk-proj-" + "a1B2" * 6, "Incorrect API key sk-***"),
        ("hf_" + "a1B2" * 6 + " is invalid", "hf_*** is invalid"),
        ("a mask-like sk-name and hf_hub stay", "a mask-like sk-name and hf_hub stay"),
    ],
)
def test_what_has_the_shape_of_a_key_is_not_shown(text, shown):
    assert redact(text) == shown
