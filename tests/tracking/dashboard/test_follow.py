"""Follow a run that grows, is resumed, is damaged or is complete."""

import json
import subprocess

import pytest

from qerl.errors import UserError
from qerl.tracking.dashboard.follow import LineReader, RunFollower, step_of
from qerl.tracking.json_lines import decode
from qerl.tracking.report.read import read_run
from stored_samples import checked_line
from tracking.dashboard.parts import run_of, take_step


def line(step, **fields):
    return checked_line(json.dumps({"step": step, **fields}))


def test_a_line_comes_once_and_a_half_one_when_it_is_whole(tmp_path):
    path = tmp_path / "metrics.jsonl"
    reader, whole = LineReader(path), line(1, reward=0.5)
    assert reader.read_new() == (False, [])
    path.write_bytes(line(0) + whole[:9])
    assert reader.read_new() == (False, [(0, {"step": 0})])
    for end in range(9, len(whole)):
        path.write_bytes(line(0) + whole[:end])
        assert reader.read_new() == (False, [])
    path.write_bytes(line(0) + whole)
    assert reader.read_new() == (False, [(len(line(0)), {"step": 1, "reward": 0.5})])
    assert reader.read_new() == (False, []) and reader.damaged == []


@pytest.mark.parametrize("num_after", [1, 2, 5])
def test_a_file_that_was_cut_and_has_grown_again_is_read_anew(tmp_path, num_after):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(line(i, wall_time=i) for i in range(3)))
    reader = LineReader(path)
    reader.read_new()
    path.write_bytes(line(0, wall_time=0) + b"".join(line(i, wall_time=9) for i in range(1, 1 + num_after)))
    is_void, lines = reader.read_new()
    assert is_void and [record["wall_time"] for _, record in lines] == [0] + [9] * num_after


def test_a_damaged_line_is_skipped_with_a_notice(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(
        line(0) + b'{"step": 1, "rew\n[3]\n' + checked_line('{"no": 1}') + line(2)
    )
    run = RunFollower(tmp_path, "run").run()
    assert [record["step"] for record in run.records] == [0, 2]
    assert run.notices == ["metrics.jsonl: skipped 2 damaged lines: 2, 3"]


@pytest.mark.parametrize("name", ["metrics", "samples"])
def test_a_digit_that_changed_is_told_by_watch_and_report(tmp_path, name):
    with run_of(tmp_path) as journal:
        for step in range(3):
            take_step(journal, step)
    path = tmp_path / f"{name}.jsonl"
    path.write_bytes(
        path.read_bytes().replace(b'"reward": 0.25', b'"reward": 0.75').replace(b"is 1?", b"is 7?")
    )
    expected = [f"{name}.jsonl: skipped 1 damaged line: 2"]
    follower = RunFollower(tmp_path, "run")
    assert follower.run().notices[:1] == expected
    assert follower.steps() == ([0, 2] if name == "samples" else [0, 1, 2])
    run = read_run(tmp_path, "run", max_samples=9)
    assert run.notices == expected and len(run.groups) + len(run.records) == 5


def test_what_a_journal_writes_is_known_after_the_next_refresh(tmp_path):
    with run_of(tmp_path) as journal:
        follower = RunFollower(tmp_path, "run")
        assert follower.steps() == [] and follower.state()["text"] == "step 0 of 10"
        tags = {follower.tag}
        for step in range(3):
            take_step(journal, step)
            follower.refresh()
            tags.add(follower.tag)
            follower.refresh()
            assert follower.tag in tags and len(tags) == step + 2
        assert follower.steps() == [0, 1, 2] and follower.groups(1)[0]["prompt"] == "What is 1? three"
        assert follower.run().values("reward") == [0.0, 0.25, 0.5]
        journal.resume(1)
        take_step(journal, 1, text="four")
        follower.refresh()
        assert follower.steps() == [0, 1] and follower.groups(1)[0]["samples"][0]["text"] == "four"
        assert follower.run().progress[-1].endswith("resuming after step 1/10")


@pytest.mark.parametrize(
    "text",
    [
        '{"step": 3, "prompt_index": 7, "text": "}"}',
        '{"step": 3, "prompt_index": null, "text": "}"}',
        '{"step": 3, "text": "}"}',
        '{"text": "a", "step": 3}',
        '{"step": 3}',
        '{"step":3,"a":1}',
        '{"step": 3, "te',
    ],
)
def test_the_step_of_a_sample_is_that_of_its_object(text):
    content = text.encode() + b"\n"
    for name in ("step", "prompt_index"):
        assert (step_of(content) or {}).get(name) == (decode(content) or {}).get(name)


def test_a_steps_samples_are_shown_when_its_metrics_are_there(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(line(0))
    (tmp_path / "samples.jsonl").write_bytes(line(0, text="a") + line(1, text="b"))
    follower = RunFollower(tmp_path, "run")
    assert follower.steps() == [0]
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(line(1))
    follower.refresh()
    assert follower.steps() == [0, 1]


def test_a_run_is_running_then_stopped_then_complete(tmp_path):
    with run_of(tmp_path) as journal:
        take_step(journal, 0)
        follower = RunFollower(tmp_path, "run")
        assert follower.state()["state"] == "running" and follower.state()["done"] == 0.1
        with subprocess.Popen(["true"]) as ended:
            ended.wait()
        (tmp_path / ".lock").write_text(f"{ended.pid}\n")
        assert follower.state()["text"] == "stopped, step 1 of 10"
        journal.finish({"accuracy_after": 0.5})
    follower.refresh()
    assert follower.state()["state"] == "complete" and follower.run().result == {"accuracy_after": 0.5}


@pytest.mark.parametrize("content", ["", "0", "-1", "word", "9" * 30])
def test_a_lock_that_names_no_process_is_a_stopped_run(tmp_path, content):
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / ".lock").write_text(content)
    assert RunFollower(tmp_path, "run").state()["state"] == "stopped"


def test_files_that_vanish_leave_an_empty_run(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(line(0))
    follower = RunFollower(tmp_path, "run")
    (tmp_path / "metrics.jsonl").unlink()
    follower.refresh()
    assert follower.run().records == []


def test_a_folder_that_is_no_runs_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"has no metrics\.jsonl"):
        RunFollower(tmp_path, "run")
