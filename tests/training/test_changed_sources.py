"""A run whose reward, rows or number of steps change is refused by name, or goes on and says so."""

import dataclasses
import json
import shutil

import pytest

import qerl
import tiny_run
from qerl.cli import main
from qerl.config import ModelConfig, NoiseConfig, RunConfig
from qerl.config.stored import parse_run_config
from qerl.errors import UserError
from qerl.trl import GRPOConfig, GRPOTrainer


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_run.write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def files(model, tmp_path):
    """Rows and rewards of their own, which each test may edit."""
    return write_files(model, tmp_path)


def write_files(model, folder):
    tiny_run.write_task(folder)
    for path in model.iterdir():
        (folder / path.name).symlink_to(path)
    return folder


@pytest.fixture(scope="module")
def kept(model, tmp_path_factory):
    """(a folder with a finished run, a copy of it): the run knows its rows and rewards by their paths."""
    folder = tmp_path_factory.mktemp("runs") / "finished"
    folder.mkdir()
    finish(write_files(model, folder))
    return folder, shutil.copytree(folder, folder.with_name("copy"), symlinks=True)


@pytest.fixture
def finished(kept):
    """The folder with a run of two steps as the first test had it."""
    folder, copy = kept
    shutil.rmtree(folder)
    return shutil.copytree(copy, folder, symlinks=True)


def finish(files, *more):
    main.command(
        [
            "train",
            "demo_long",
            *tiny_run.options(files, files / "run"),
            "--num-steps",
            "2",
            "--noise.num-stages",
            "2",
            *more,
        ]
    )


def edited(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def run_json(files):
    return json.loads((files / "run" / "run.json").read_text())


def texts(files):
    return [json.loads(line)["text"] for line in (files / "run" / "events.jsonl").read_text().splitlines()]


def num_steps(files):
    return (files / "run" / "metrics.jsonl").read_text().count("\n")


@pytest.mark.parametrize(
    ("name", "old", "new", "named"),
    [
        (
            "even.py",
            "% 2 == 0",
            "% 2 == 1",
            r"another reward even \(even\.py\) \([0-9a-f]{8}, now [0-9a-f]{8}\)",
        ),
        (
            "sums.jsonl",
            '"answer": "1"',
            '"answer": "2"',
            r"began with other rows of sums\.jsonl \([0-9a-f]{8}, now",
        ),
    ],
)
def test_a_finished_run_with_an_edited_file_is_refused_by_its_name(finished, name, old, new, named):
    finish(finished)  # the same command again is fine
    edited(finished / name, old, new)
    with pytest.raises(UserError, match=named + ".*--accept-changes"):
        finish(finished)
    assert "history" not in run_json(finished)


def test_accepted_changes_and_more_steps_are_recorded_with_their_step(finished):
    before = run_json(finished)["sources"]["reward even (even.py)"]
    edited(finished / "even.py", "% 2 == 0", "% 2 == 1")
    finish(finished, "--num-steps", "4", "--accept-changes")
    now = run_json(finished)
    after = now["sources"]["reward even (even.py)"]
    changed = {"config.num_steps": [2, 4], "sources.reward even (even.py)": [before, after]}
    assert before != after and now["history"] == [{"step": 2, "changed": changed}]
    said = [text for text in texts(finished) if "from step 3 on" in text]
    assert len(said) == 2 and any(
        f"was {before[:8]} and is {after[:8]}" in text and "of the former one" in text for text in said
    )
    assert num_steps(finished) == 4
    finish(finished, "--num-steps", "4")  # accepted once, it is the run's own
    assert len(run_json(finished)["history"]) == 1


def test_a_finished_run_given_more_steps_goes_on_as_a_run_of_so_many(finished):
    finish(finished, "--num-steps", "4")
    records = [json.loads(line) for line in (finished / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [0, 1, 2, 3]
    finish(finished, "--num-steps", "4", "--out", str(finished / "whole"))
    whole = [json.loads(line) for line in (finished / "whole" / "metrics.jsonl").read_text().splitlines()]
    for name in ("learning_rate", "sigma"):
        assert [record[name] for record in records[2:]] == [record[name] for record in whole[2:]]
    assert any(
        "learning rate and sigma are then those of a run of that many steps" in text
        for text in texts(finished)
    )
    evaluations = json.loads((finished / "run" / "evaluations.json").read_text())
    assert list(evaluations) == ["before", "after_2_steps", "after"]
    assert parse_run_config(run_json(finished)["config"]).num_steps == 4
    with pytest.raises(UserError, match="num_steps = 4, not 2"):
        finish(finished)


def test_a_run_killed_after_it_was_given_more_steps_is_not_taken_for_complete(finished, monkeypatch):
    with monkeypatch.context() as context:
        context.setattr(
            "qerl.training.session.run", lambda *given, **more: (_ for _ in ()).throw(MemoryError)
        )
        with pytest.raises(MemoryError):
            finish(finished, "--num-steps", "4")
    assert num_steps(finished) == 2
    finish(finished, "--num-steps", "4")
    assert num_steps(finished) == 4


def test_a_function_given_to_train_is_compared_by_its_body(files):
    given = {"num_steps": 2, "num_prompts": 2, "num_generations": 2, "out": str(files / "run")}
    stored = {"model": {"path": str(files), "dtype": "fp32"}, "sample": {"max_tokens": 4}}
    task = {"name": str(files / "sums.jsonl"), "template": "{prompt}", "num_held_out": 4}
    evaluate, noise = {"num_prompts": 2}, {"schedule": "none"}
    config = parse_run_config({**given, **stored, "task": task, "evaluate": evaluate, "noise": noise})
    assert isinstance(config, RunConfig)
    scopes = []
    for sign in "+-":
        scope = {"__name__": "__main__"}
        text = f"def score(completion_ids, **columns): return [{sign}float(ids[0]) for ids in completion_ids]"
        exec(text, scope)
        scopes.append(scope)
    qerl.train(config, rewards=[scopes[0]["score"]])
    with pytest.raises(UserError, match="another reward score"):
        qerl.train(config, rewards=[scopes[1]["score"]])
    with pytest.raises(UserError, match=r"another reward score \([0-9a-f]{8}, now absent\)"):
        qerl.train(config)


def test_a_trainers_reward_is_compared_by_its_body_and_may_be_accepted(files):
    args = GRPOConfig(
        str(files / "run"),
        max_steps=2,
        num_generations=2,
        per_device_train_batch_size=4,
        max_completion_length=4,
    )
    rows = [{"prompt": f"{i} + 1 ="} for i in range(8)]

    def trained(sign, *, num_steps=2, **given):
        scope = {"__name__": "__main__"}
        exec(
            f"def score(completion_ids, **columns): return [{sign}float(ids[0]) for ids in completion_ids]",
            scope,
        )
        base = RunConfig(noise=NoiseConfig(schedule="none"), model=ModelConfig(dtype="fp32"), **given)
        more = dataclasses.replace(args, max_steps=num_steps)
        return GRPOTrainer(str(files), scope["score"], more, rows, base=base).train()

    trained("+")
    with pytest.raises(UserError, match="another reward score"):
        trained("-")
    trained("-", num_steps=3, accept_changes=True)
    assert run_json(files)["history"][0]["step"] == 2 and num_steps(files) == 3
