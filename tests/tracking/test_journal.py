"""The run's folder: what a step writes, and what is there after a kill and a resume."""

import dataclasses
import io
import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import time

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from qerl.config import AdapterConfig, CheckpointConfig, LearnConfig, RolloutConfig, RunConfig, TaskConfig
from qerl.errors import RunError, StoppedAtOnce, UserError
from qerl.tracking import Journal, is_timing
from qerl.types import Group, Prompt, Sample

NUM_STEPS = 6


def open_journal(folder, console=None):
    return Journal(folder, num_steps=NUM_STEPS, console=console or Console(file=io.StringIO(), width=200))


def group(step, text="3"):
    prompt = Prompt(index=17, text="1 + 2?", tokens_T=[5, 6], messages=None, columns={"answer": 3})
    rewards = ((1.0, 0.5), (None, 0.0))
    return Group(
        prompt=prompt,
        samples_G=[
            Sample(
                tokens_T=[7, 2],
                logprobs_T=[-1, -2],
                text=text,
                finish="stop",
                version=step,
                reward=r,
                advantage=a,
            )
            for r, a in rewards
        ],
    )


def take_steps(journal, first, last):
    for step in range(first, last):
        with journal.step(step) as log:
            with log.span("rollout"):
                log.samples([group(step, text=f"it is {step}\n")])
            log.add(reward=step / 10, entropy=1.5, sampled_tokens=4)


def records(folder, name="metrics"):
    """Without their checksums."""
    lines = (folder / f"{name}.jsonl").read_bytes().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "crc32"} for line in lines]


def timeless(folder):
    metrics = [{k: v for k, v in record.items() if not is_timing(k)} for record in records(folder)]
    return metrics, records(folder, "samples")


def test_a_step_is_one_line_of_its_metrics_and_times(tmp_path):
    with open_journal(tmp_path) as journal, journal.step(0) as log:
        with log.span("rollout"):
            time.sleep(0.02)
        log.add(reward=0.25, sampled_tokens=30)
        log.add(reward=0.5)
    (record,) = records(tmp_path)
    assert (record["step"], record["reward"], record["sampled_tokens"]) == (0, 0.5, 30)
    assert 0.02 <= record["rollout_s"] <= record["step_s"] < 5
    assert record["tokens_per_s"] == 30 / record["rollout_s"]
    assert abs(record["wall_time"] - time.time()) < 60 and 0.01 < record["memory_gb"] < 100


def test_every_sample_has_a_line(tmp_path):
    with open_journal(tmp_path) as journal, journal.step(4) as log:
        log.samples([group(4)])
    expected = {
        "step": 4,
        "prompt_index": 17,
        "sample_index": 0,
        "prompt": "1 + 2?",
        "text": "3",
        "reward": 1.0,
        "advantage": 0.5,
        "finish": "stop",
        "num_tokens": 2,
        "version": 4,
        "answer": "3",
    }
    assert records(tmp_path, "samples") == [
        expected,
        expected | {"sample_index": 1, "reward": None, "advantage": 0.0},
    ]


@pytest.mark.parametrize(("columns", "answer"), [({"solution": 4}, "4"), ({"answer": "5"}, "5"), ({}, None)])
def test_a_samples_answer_is_the_tasks_column(tmp_path, columns, answer):
    one = group(0)
    one = dataclasses.replace(one, prompt=dataclasses.replace(one.prompt, columns=columns))
    with open_journal(tmp_path) as journal:
        journal.start(RunConfig(task=TaskConfig(answer_column="solution")))
        with journal.step(0) as log:
            log.samples([one])
    assert records(tmp_path, "samples")[0]["answer"] == answer


def test_a_step_is_on_the_disk_before_the_next_begins(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync

    def recorded(number):
        synced.append(os.readlink(f"/proc/self/fd/{number}"))
        fsync(number)

    with open_journal(tmp_path) as journal:
        monkeypatch.setattr(os, "fsync", recorded)
        take_steps(journal, 0, 1)
        assert synced == [str(tmp_path / "samples.jsonl"), str(tmp_path / "metrics.jsonl")]


def test_every_name_is_on_the_disk_before_the_first_step_is(tmp_path, monkeypatch):
    """A file that was flushed is lost with a name that was not, and with the name of a folder above it."""
    synced, fsync = [], os.fsync

    def recorded(number):
        synced.append((os.readlink(f"/proc/self/fd/{number}"), set(os.listdir(folder))))
        fsync(number)

    folder = tmp_path / "runs" / "today" / "run"
    monkeypatch.setattr(os, "fsync", recorded)
    monkeypatch.setattr(os, "listdir", lambda path, real=os.listdir: real(path) if path.exists() else [])
    with open_journal(folder):
        names = dict(synced)
        assert {str(tmp_path), str(tmp_path / "runs"), str(folder.parent)} <= set(names)
        assert {"metrics.jsonl", "samples.jsonl", "events.jsonl"} <= names[str(folder)]


@pytest.mark.parametrize(
    ("noted", "timed", "expected"),
    [
        ([], {}, 0),
        ([2, 4], {}, 4),
        ([4, 0], {}, 0),
        ([], {2: {"checkpoint_hold_s": 0.1}}, 0),  # copied, and perhaps never written
        ([], {2: {"checkpoint_hold_s": 0.1}, 4: {"checkpoint_write_s": 0.1}}, 2),
        (
            [],
            {2: {"checkpoint_hold_s": 0.1}, 3: {"checkpoint_hold_s": 0.1, "checkpoint_write_s": 0.1}},
            2,
        ),
    ],
)
def test_the_newest_checkpoint_is_known_from_what_is_recorded(tmp_path, noted, timed, expected):
    """Where its event is lost, durations in the steps that follow tell it."""
    with open_journal(tmp_path) as journal:
        for step in range(5):
            with journal.step(step) as log:
                log.add(**timed.get(step, {}))
        for next_step in noted:
            journal.saved(next_step)
    with open_journal(tmp_path) as journal:
        assert journal.last_saved == expected
        journal.resume(1)
        assert journal.last_saved == min(expected, 1)


def test_a_step_that_raises_leaves_nothing(tmp_path):
    with open_journal(tmp_path) as journal:
        with pytest.raises(KeyboardInterrupt), journal.step(0) as log:
            with log.span("learn"):
                log.samples([group(0)])
                log.add(reward=1)
            raise KeyboardInterrupt
        take_steps(journal, 0, 1)
    (record,) = records(tmp_path)
    assert record["reward"] == 0 and "learn_s" not in record
    assert [s["text"] for s in records(tmp_path, "samples")] == ["it is 0\n"] * 2


def test_a_phase_that_comes_twice_adds_up_and_phases_do_not_nest(tmp_path):
    with open_journal(tmp_path) as journal, journal.step(0) as log:
        for _ in range(2):
            with log.span("rollout"):
                time.sleep(0.02)
        inside = pytest.raises(AssertionError, match="span publish inside span learn")
        with log.span("learn"), inside, log.span("publish"):
            pass
    assert records(tmp_path)[0]["rollout_s"] >= 0.04


def test_time_between_steps_is_counted_with_the_step_that_follows(tmp_path):
    with open_journal(tmp_path) as journal:
        take_steps(journal, 0, 1)
        with journal.span("checkpoint_hold"):
            time.sleep(0.01)
        journal.carry(checkpoint_write_s=2.5)
        take_steps(journal, 1, 3)
    found = records(tmp_path)
    assert [record.get("checkpoint_hold_s", 0) >= 0.01 for record in found] == [False, True, False]
    assert [record.get("checkpoint_write_s") for record in found] == [None, 2.5, None]


def test_the_time_of_writing_a_step_is_in_the_next_ones_record(tmp_path, monkeypatch):
    with open_journal(tmp_path) as journal:
        write = journal._metrics.append
        monkeypatch.setattr(journal._metrics, "append", lambda lines: (time.sleep(0.02), write(lines)))
        take_steps(journal, 0, 2)
    first, second = records(tmp_path)
    assert "record_s" not in first and second["record_s"] >= 0.02 > second["step_s"]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken")
    with open_journal(folder) as journal:
        take_steps(journal, 0, NUM_STEPS)
    return folder


@pytest.mark.parametrize("kept_bytes", [0, 1, 37, 200])
@pytest.mark.parametrize("torn", ["metrics", "samples"])
def test_a_killed_run_that_goes_on_leaves_the_files_of_an_unbroken_one(unbroken, tmp_path, torn, kept_bytes):
    folder = tmp_path / "killed"
    shutil.copytree(unbroken, folder)
    lines = (folder / f"{torn}.jsonl").read_bytes().splitlines(keepends=True)
    safe = b"".join(line for line in lines if json.loads(line)["step"] < 3)
    (folder / f"{torn}.jsonl").write_bytes(b"".join(lines)[: len(safe) + kept_bytes])
    with open_journal(folder) as journal:
        journal.resume(3)
        take_steps(journal, 3, NUM_STEPS)
    assert timeless(folder) == timeless(unbroken)


def test_pages_the_disk_never_got_are_dropped(unbroken, tmp_path):
    folder = tmp_path / "cut"
    shutil.copytree(unbroken, folder)
    content = (folder / "samples.jsonl").read_bytes()
    size = content.index(b'{"step": 4')
    (folder / "samples.jsonl").write_bytes(content[:size] + bytes(50) + content[size + 50 :])
    with open_journal(folder) as journal:
        journal.resume(4)
        take_steps(journal, 4, NUM_STEPS)
    assert timeless(folder) == timeless(unbroken)


@pytest.mark.parametrize("name", ["metrics", "samples"])
def test_a_damaged_line_is_told_with_its_number_and_left_out(unbroken, tmp_path, name):
    folder = tmp_path / "damaged"
    shutil.copytree(unbroken, folder)
    path = folder / f"{name}.jsonl"
    before = path.read_bytes()
    number = 2 if name == "metrics" else 3
    path.write_bytes(before.replace(b'{"step": 1', b'{"step": 0', 1))  # JSON as good as any other
    with open_journal(folder) as journal:
        journal.resume(4)
        take_steps(journal, 4, NUM_STEPS)
        assert [r["step"] for r in journal.steps()] == [0, *([1] if name == "samples" else []), 2, 3, 4, 5]
    texts = [event["text"] for event in records(folder, "events")]
    assert f"{name}.jsonl: skipped 1 damaged line: {number}" in texts
    missing = "metrics.jsonl is missing 1 of 4 completed steps"
    assert (missing in texts) == (name == "metrics")  # the other sample of the step is there
    assert path.read_bytes().startswith(before.replace(b'{"step": 1', b'{"step": 0', 1)[:500])


def test_lines_out_of_order_are_refused(unbroken, tmp_path):
    folder = tmp_path / "damaged"
    shutil.copytree(unbroken, folder)
    path = folder / "metrics.jsonl"
    first, *others = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*others, first]))
    before = path.read_bytes()
    message = r"metrics.jsonl: line 4 is of a later step than line 6; restore the file or remove it"
    with open_journal(folder) as journal, pytest.raises(UserError, match=message):
        journal.resume(4)
    assert path.read_bytes() == before


def test_recorded_steps_are_not_written_twice(tmp_path):
    with open_journal(tmp_path) as journal:
        take_steps(journal, 0, 2)
    with open_journal(tmp_path) as journal:
        with pytest.raises(AssertionError, match="step 1 is recorded already"):
            take_steps(journal, 1, 2)
        journal.resume(1)
        take_steps(journal, 1, 2)
    assert [record["step"] for record in records(tmp_path)] == [0, 1]


def test_missing_steps_are_a_notice(tmp_path):
    with open_journal(tmp_path) as journal:
        take_steps(journal, 0, 2)
        journal.resume(4)
    assert "metrics.jsonl is missing 2 of 4 completed steps" in [
        e["text"] for e in records(tmp_path, "events")
    ]


def test_a_step_that_found_no_group_to_keep_is_not_missed(tmp_path):
    with open_journal(tmp_path) as journal:
        take_steps(journal, 0, 1)
        with journal.step(1) as log:
            log.add(trained_samples=0)
        with journal.step(2) as log:
            log.add(trained_samples=4)
        journal.resume(3)
    texts = [event["text"] for event in records(tmp_path, "events")]
    assert texts == ["samples.jsonl is missing 1 of 3 completed steps", "resuming after step 3/6"]


def test_a_number_that_is_not_finite_is_null_and_does_not_stop_the_run(tmp_path):
    for terminal in (False, True):
        with open_journal(tmp_path, Console(file=io.StringIO(), force_terminal=terminal)) as journal:
            journal.resume(0)
            with journal.step(0) as log:
                log.add(reward=math.nan, grad_norm=math.inf)
            journal.resume(1)
            take_steps(journal, 1, 2)
    first, second = records(tmp_path)
    assert first["reward"] is None and first["grad_norm"] is None and second["reward"] == 0.1
    assert b"NaN" not in (tmp_path / "metrics.jsonl").read_bytes()


def test_any_text_survives_the_file(tmp_path):
    text = "\ud800 </script> \u2028 \x00 \u00e9\n\r\x85 \U0001f600"
    with open_journal(tmp_path) as journal, journal.step(0) as log:
        log.samples([group(0, text)])
    lines = (tmp_path / "samples.jsonl").read_bytes().split(b"\n")
    assert json.loads(lines[0])["text"] == text and len(lines) == 3


def test_tensorboard_shows_each_step_once_after_going_on(tmp_path):
    with open_journal(tmp_path) as journal:
        take_steps(journal, 0, 4)
    with open_journal(tmp_path) as journal:
        journal.resume(2)
        take_steps(journal, 2, NUM_STEPS)
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    points = [(event.step, round(event.value, 6)) for event in board.Scalars("metric/reward")]
    assert points == [(step, step / 10) for step in range(NUM_STEPS)]
    assert "timing/rollout_s" in board.Tags()["scalars"]


def test_notices_are_kept_with_their_step(tmp_path):
    console = Console(file=io.StringIO(), width=20)
    with open_journal(tmp_path, console) as journal:
        journal.notice("before [red]it[/red] \x1b[2Jand much longer than the console")
        with journal.step(0):
            journal.notice("within")
    events = records(tmp_path, "events")
    assert [event["step"] for event in events] == [None, 0]
    assert events[0]["text"].startswith("before [red]it[/red] \x1b[2J")
    shown = console.file.getvalue()
    assert shown.startswith("before [red]it[/red] ?[2Jand much longer than the console\nwithin\nstep 1/6")


@pytest.mark.parametrize("is_saved", [False, True])
def test_a_run_that_is_stopped_at_once_says_whether_a_step_is_saved(tmp_path, is_saved):
    said = io.StringIO()
    with pytest.raises(StoppedAtOnce), open_journal(tmp_path, Console(file=said, width=200)) as journal:
        take_steps(journal, 0, 2)
        if is_saved:
            journal.saved(1)
        raise StoppedAtOnce(143)
    saved = "step 1 is saved; the same command resumes from it" if is_saved else "no step is saved"
    assert said.getvalue().splitlines()[-1] == f"stopped at once; {saved}"


def test_run_json_holds_all_that_the_run_was_made_from(tmp_path):
    config = RunConfig(out=str(tmp_path), seed=5)
    with open_journal(tmp_path) as journal:
        journal.start(config)
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["config"] == json.loads(json.dumps(dataclasses.asdict(config)))
    assert run["torch"] == __import__("torch").__version__ and run["command"] and run["device"]
    assert {"commit", "is_dirty", "python", "qerl", "transformers", "triton", "start_time"} <= set(run)


def test_a_run_that_took_no_step_gives_its_folder_up(tmp_path):
    for seed in (0, 1):
        with open_journal(tmp_path) as journal:
            journal.start(RunConfig(seed=seed))
    assert json.loads((tmp_path / "run.json").read_text())["config"]["seed"] == 1


def test_a_start_that_fails_takes_only_its_own_files_away(tmp_path):
    def fails(folder, error=UserError, num_steps=0):
        with pytest.raises(error), open_journal(folder) as journal:
            journal.start(RunConfig(seed=1))
            take_steps(journal, 0, num_steps)
            raise error("a value is wrong")

    mine = tmp_path / "mine" / "notes.txt"
    mine.parent.mkdir()
    mine.write_text("keep")
    fails(tmp_path / "new" / "run")
    fails(mine.parent)
    assert sorted(tmp_path.rglob("*")) == [mine.parent, mine]
    fails(tmp_path / "crash", RunError)
    fails(tmp_path / "later", num_steps=1)
    fails(tmp_path / "later")  # what an earlier start recorded stays
    assert len(records(tmp_path / "later")) == 1
    assert all((tmp_path / name / "run.json").exists() for name in ("crash", "later"))


def test_a_folder_where_a_run_would_overwrite_other_files_is_refused(tmp_path):
    def refused(name):
        path = tmp_path / name
        path.write_text("a line\n")
        lacks = rf"has {name}, which a run would write, but no run\.json; choose another folder"
        with pytest.raises(UserError, match=lacks):
            open_journal(tmp_path)
        assert list(tmp_path.iterdir()) == [path] and path.read_text() == "a line\n"
        path.unlink()

    for name in ("samples.jsonl", "result.json", "report.html"):
        refused(name)
    (tmp_path / "train.log").touch()
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "samples.jsonl").write_text("a line\n")
    with pytest.raises(UserError, match=r"has samples\.jsonl, which"):
        open_journal(tmp_path)
    (tmp_path / "checkpoints" / "step-000010").mkdir()  # what remains of a run that was removed while it ran
    for _ in range(2):
        with open_journal(tmp_path) as journal:
            journal.start(RunConfig())


def test_another_config_in_the_same_folder_is_refused_by_field(tmp_path):
    with open_journal(tmp_path) as journal:
        journal.start(RunConfig())
        take_steps(journal, 0, 1)
    before = (tmp_path / "run.json").read_bytes()
    changed = RunConfig(seed=1, learn=LearnConfig(learning_rate=0.5, betas=(0.9, 0.95), weight_decay=0.5))
    message = (
        r"run.json: the existing run has seed = 0, not 1, learn.learning_rate = 1e-05, not 0.5, "
        r"learn.betas = \[0.9, 0.99\], not \[0.9, 0.95\] and 1 more; choose another folder"
    )
    with open_journal(tmp_path) as journal, pytest.raises(UserError, match=message):
        journal.start(changed)
    assert (tmp_path / "run.json").read_bytes() == before


def test_fields_that_change_no_number_may_change_and_are_a_notice(tmp_path):
    with open_journal(tmp_path) as journal:
        journal.start(RunConfig())
        take_steps(journal, 0, 1)
    with open_journal(tmp_path) as journal:
        journal.start(RunConfig(out="elsewhere", checkpoint=CheckpointConfig(every=3)))
    texts = [event["text"] for event in records(tmp_path, "events")]
    assert texts == ["config.checkpoint.every is now 3; the run started with 10"]


def test_a_run_that_keeps_caches_keeps_the_steps_of_its_checkpoints(tmp_path):
    keeps = RunConfig(rollout=RolloutConfig(partial=True, keep_kv_cache=True))
    with open_journal(tmp_path) as journal:
        journal.start(keeps)
        take_steps(journal, 0, 1)
    refused = pytest.raises(UserError, match=r"checkpoint\.every = 10, not 3")
    with open_journal(tmp_path) as journal, refused:
        journal.start(dataclasses.replace(keeps, checkpoint=CheckpointConfig(every=3)))


def test_what_learning_keeps_in_memory_may_change_and_is_recorded_with_the_step(tmp_path):
    with open_journal(tmp_path) as journal:
        journal.start(RunConfig())
        take_steps(journal, 0, 2)
    given = LearnConfig(logprob_chunk_tokens=64, max_tokens_per_microbatch=2048)
    with open_journal(tmp_path) as journal:
        journal.start(RunConfig(learn=given))
        journal.resume(2)
    facts = json.loads((tmp_path / "run.json").read_text())
    changed = {
        "config.learn.max_tokens_per_microbatch": [None, 2048],
        "config.learn.logprob_chunk_tokens": [1024, 64],
    }
    assert facts["history"] == [{"step": 2, "changed": changed}]
    assert facts["config"]["learn"]["logprob_chunk_tokens"] == 64
    texts = [event["text"] for event in records(tmp_path, "events")]
    named = "learn.logprob_chunk_tokens was 1024 and is 64 from step 3 on"
    assert f"{named}: logprobs and gradients may be rounded otherwise" in texts


def test_metrics_without_a_run_are_not_taken_over(tmp_path):
    with open_journal(tmp_path) as journal:
        take_steps(journal, 0, 1)
    with open_journal(tmp_path) as journal, pytest.raises(UserError, match=r"no run.json"):
        journal.start(RunConfig())


def test_a_damaged_run_json_is_the_users_to_mend(tmp_path):
    with open_journal(tmp_path) as journal:
        take_steps(journal, 0, 1)
    (tmp_path / "run.json").write_text('{"config": ')
    with open_journal(tmp_path) as journal, pytest.raises(UserError, match=r"run.json: is damaged"):
        journal.start(RunConfig())


def test_the_result_is_there_once_the_run_has_ended(tmp_path):
    with open_journal(tmp_path) as journal:
        assert journal.result is None
        journal.finish({"after": {"accuracy": 0.5, "error": math.nan}})
    with open_journal(tmp_path) as journal:
        assert journal.result == {"after": {"accuracy": 0.5, "error": None}}
    assert not list(tmp_path.glob("*.part"))


def test_a_folder_that_cannot_be_made_is_the_users_to_mend(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write a run to"):
        open_journal(tmp_path / "file")


def test_a_write_that_fails_ends_the_run_in_one_line(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with open_journal(tmp_path) as journal:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        try:
            with pytest.raises(RunError, match=r"samples.jsonl: cannot be written: File too large"):
                take_steps(journal, 0, 1)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with open_journal(tmp_path):
        assert records(tmp_path, "samples") == records(tmp_path) == []


WRITER = """
import sys
from pathlib import Path
from qerl.tracking import Journal
with Journal(Path(sys.argv[1]), num_steps=100000) as journal:
    for step in range(100000):
        with journal.step(step) as log:
            log.add(reward=step, **{f"metric_{i}": i for i in range(2000)})
"""


def test_a_killed_process_leaves_whole_lines_and_no_lock(tmp_path):
    environment = {"PYTHONPATH": ":".join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, tmp_path], env=environment, stdout=subprocess.DEVNULL
    ) as run:
        try:
            metrics = tmp_path / "metrics.jsonl"
            while not metrics.exists() or metrics.read_bytes().count(b"\n") < 3:
                assert run.poll() is None
                time.sleep(0.05)
            with pytest.raises(UserError, match=rf"another run is writing here \(process {run.pid}\)"):
                open_journal(tmp_path)
        finally:
            run.send_signal(signal.SIGKILL)
    with open_journal(tmp_path):
        steps = [record["step"] for record in records(tmp_path)]
    assert steps == list(range(len(steps))) and len(steps) >= 3


def test_a_start_that_fails_leaves_no_lock(tmp_path):
    """In a notebook the process goes on."""
    with open_journal(tmp_path):
        pass
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(UserError, match="cannot write a run to"):
        open_journal(tmp_path)
    (tmp_path / "metrics.jsonl").rmdir()
    with open_journal(tmp_path):
        assert records(tmp_path) == []


def answered(text, reward):
    """Held-out answers of both kinds; the groups' own rewards are not those."""
    return {kind: ([group(0, text=text)], [[reward, 0.0]]) for kind in ("sampled", "greedy")}


def test_answers_to_held_out_problems_are_recorded_with_their_rewards(tmp_path):
    with open_journal(tmp_path) as journal:
        journal.start(RunConfig(loggers=()))
        journal.held_out(0, answered("a", 0.25))
        many = [group(0)] * 100
        journal.held_out(6, {"greedy": (many, [[1.0, 0.0]] * 100)})
    lines = records(tmp_path, "held_out")
    first = {"step": 0, "kind": "sampled", "prompt": "1 + 2?", "text": "a", "answer": "3", "reward": 0.25}
    assert first.items() <= lines[0].items() and lines[1]["reward"] == 0.0
    assert [line["kind"] for line in lines[:4]] == ["sampled"] * 2 + ["greedy"] * 2
    assert len(lines) == 4 + 2 * 64  # of the first 64 problems


@pytest.mark.parametrize(("next_step", "steps"), [(4, [0, 2, 4]), (3, [0, 2]), (1, [0])])
def test_a_resumed_run_has_the_answers_that_the_steps_left_have_given(tmp_path, next_step, steps):
    with open_journal(tmp_path) as journal:
        journal.start(RunConfig(loggers=()))
        for step in (0, 2, 4, 6):
            journal.held_out(step, answered("a", 1.0))
        take_steps(journal, 0, NUM_STEPS)
    with open_journal(tmp_path) as journal:
        journal.start(RunConfig(loggers=()))
        journal.resume(next_step)
    assert sorted({line["step"] for line in records(tmp_path, "held_out")}) == steps


def test_a_run_that_starts_anew_with_another_config_has_no_answers_of_the_former(tmp_path):
    for rank, num_lines in ((8, 4), (8, 4), (16, 0)):
        with open_journal(tmp_path) as journal:
            journal.start(RunConfig(loggers=(), adapter=AdapterConfig(rank=rank)))
            journal.resume(0)
            assert (
                not (tmp_path / "held_out.jsonl").exists() or len(records(tmp_path, "held_out")) == num_lines
            )
            if rank == 8 and not (tmp_path / "held_out.jsonl").exists():
                journal.held_out(0, answered("a", 1.0))


def test_a_damaged_answer_does_not_stop_a_run_that_resumes(tmp_path):
    with open_journal(tmp_path) as journal:
        journal.start(RunConfig(loggers=()))
        for step in (0, 2, 4):
            journal.held_out(step, answered("a", 1.0))
        take_steps(journal, 0, NUM_STEPS)
    path = tmp_path / "held_out.jsonl"
    content = path.read_bytes()
    for damaged in (content.replace(b'"step": 2', b'"step": 9', 1), content[:-7], b""):
        path.write_bytes(damaged)
        with open_journal(tmp_path) as journal:
            journal.start(RunConfig(loggers=()))
            journal.resume(4)
            journal.held_out(6, answered("a", 1.0))
        assert records(tmp_path, "held_out")[-1]["step"] == 6
