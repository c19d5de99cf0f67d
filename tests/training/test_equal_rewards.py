"""A run whose rewards do not differ within groups says so after ten such steps."""

import json

import pytest

import tiny_run
from qerl.config import AlgoConfig, RunConfig
from qerl.training.equal_rewards import EqualRewards

EQUAL = """def equal(prompts, completions, **columns):
    return [0.25] * len(completions)
"""


def noticed(shares, **algo):
    rewards = EqualRewards(RunConfig(algo=AlgoConfig(**algo)))
    return [i for i, share in enumerate(shares) if rewards.notice({"reward": 0.5, "informative": share})]


def test_ten_steps_in_a_row_are_noticed_once():
    assert noticed([0.09] * 25) == [9]
    assert noticed([0.0] * 9 + [0.1] + [0.0] * 10) == [19]
    assert noticed([0.5] * 30) == []


@pytest.mark.parametrize(
    "algo", [{"branching": "deep"}, {"dynamic_sampling": True}, {"overlong": "shape", "overlong_buffer": 8}]
)
def test_runs_that_learn_otherwise_too_are_left_alone(algo):
    assert noticed([0.0] * 12, **algo) == []


def test_runs_without_rewards_are_left_alone():
    rewards = EqualRewards(RunConfig())
    assert not any(rewards.notice(metrics) for metrics in [{"informative": 0.0}, {"reward": 0.0}, {}] * 20)


@pytest.mark.parametrize(("reward", "count"), [("equal.py:equal", 1), ("even.py:even", 0)])
def test_a_run_says_that_its_rewards_teach_nothing(tmp_path, reward, count):
    files = tiny_run.write_files(tmp_path)
    (files / "equal.py").write_text(EQUAL)
    options = [
        *tiny_run.options(files, tmp_path / "run"),
        "--num-steps",
        "11",
        "--task.rewards",
        str(files / reward),
    ]
    process = tiny_run.started(*tiny_run.QERL, "train", "demo_long", *options)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    events = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    texts = [text for text in (json.loads(line)["text"] for line in events) if "teach nothing" in text]
    assert len(texts) == count
    assert all("mean reward of the last 0.250" in text for text in texts)
