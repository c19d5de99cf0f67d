"""Samples that are compressed, cut, removed and damaged."""

import gzip
import io
import random

import pytest
from rich.console import Console

from qerl.config import RunConfig, SamplesConfig
from qerl.errors import UserError
from qerl.models.quantize.calibration import _last_records
from qerl.tracking import Journal, sample_files
from qerl.tracking.dashboard.follow import RunFollower
from qerl.tracking.report.read import read_run
from qerl.tracking.sample_files import SampleFiles, segments
from stored_samples import read_samples


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Two steps fill a file."""
    monkeypatch.setattr(sample_files, "SEGMENT_BYTES", 300)


def sample(step, index=0, text="x" * 40):
    return {"step": step, "prompt_index": index, "prompt": "1 + 2 =", "text": text, "finish": "length"}


def written(folder, first, last, **limits):
    folder.mkdir(exist_ok=True)
    files = SampleFiles(folder)
    files.config = SamplesConfig(**limits)
    files.cut(first)
    for step in range(first, last):
        files.append([sample(step), sample(step, 1)])
    files.close()
    return files


def names(folder):
    return [segment.path.name.removesuffix(".jsonl.gz") for segment in segments(folder)]


def steps(folder):
    return [record["step"] for record in read_samples(folder)]


def twice(values):
    return [value for value in values for _ in range(2)]


def test_full_files_are_compressed_and_read_as_one(tmp_path):
    written(tmp_path, 0, 7)
    assert names(tmp_path) == ["000000-000001", "000002-000003", "000004-000005"]
    assert steps(tmp_path) == twice(range(7))
    with gzip.open(tmp_path / "samples" / "000000-000001.jsonl.gz") as file:
        assert file.readline().startswith(b'{"step": 0, "prompt_index": 0')


@pytest.mark.parametrize("next_step", range(8))
def test_a_run_that_goes_back_into_a_compressed_file_leaves_the_uninterrupted_ones(tmp_path, next_step):
    written(tmp_path / "whole", 0, 7)
    written(tmp_path / "run", 0, 7)
    written(tmp_path / "run", next_step, 7)
    ours, theirs = (
        {path.name: path.read_bytes() for path in [folder / "samples.jsonl", *(folder / "samples").iterdir()]}
        for folder in (tmp_path / "run", tmp_path / "whole")
    )
    assert ours == theirs


@pytest.mark.parametrize("next_step", [2, 3, 4, 5, 7])
def test_steps_in_both_files_after_a_kill_are_read_once(tmp_path, next_step):
    written(tmp_path, 0, 4)
    newest = (tmp_path / "samples.jsonl").read_bytes()
    written(tmp_path, 4, 5)
    (tmp_path / "samples.jsonl").write_bytes(newest)  # as before steps 2 and 3 left it
    assert names(tmp_path)[-1] == "000002-000003" and steps(tmp_path) == twice(range(4))
    files = SampleFiles(tmp_path)
    kept = files.cut(next_step)
    files.close()
    assert next_step < 4 or not (tmp_path / "samples.jsonl").read_bytes()
    assert kept.steps == set(range(min(next_step, 4))) and steps(tmp_path) == twice(range(min(next_step, 4)))


def test_what_is_kept_is_limited_by_steps(tmp_path):
    written(tmp_path, 0, 20, keep_steps=6)
    assert steps(tmp_path)[-12:] == twice(range(14, 20)) and len(steps(tmp_path)) <= 2 * 9
    files = SampleFiles(tmp_path)
    files.config = SamplesConfig(keep_steps=6)
    assert files.cut(20).steps == set(range(20))  # what was removed on purpose is not missed
    files.close()


def test_what_is_kept_is_limited_by_bytes(tmp_path):
    rng = random.Random(0)
    files = SampleFiles(tmp_path)
    files.config = SamplesConfig(keep_mb=1)
    sample_files.SEGMENT_BYTES = 1 << 30
    for step in range(40):
        files.append([sample(step, i, rng.randbytes(1000).hex()) for i in range(40)])
    files.close()
    kept_bytes = sum(segment.path.stat().st_size for segment in segments(tmp_path))
    assert 500_000 < kept_bytes <= 1_000_000 and min(steps(tmp_path)) > 0 and max(steps(tmp_path)) == 39


def followed(folder):
    with Journal(folder, num_steps=9, console=Console(file=io.StringIO())) as journal:
        journal.start(RunConfig(loggers=()))
        journal.resume(0)
        follower = RunFollower(folder, "run")
        for step in range(5):
            journal._samples.append([sample(step, text=f"text of {step} " + "x" * 140)])
            with journal.step(step):
                pass
            follower.refresh()
            assert follower.steps() == list(range(step + 1))
            for shown in range(step + 1):
                (group,) = follower.groups(shown)
                assert group["samples"][0]["text"].startswith(f"text of {shown} ")
    return follower


def test_watch_and_report_read_compressed_samples(tmp_path):
    follower = followed(tmp_path)
    assert names(tmp_path) == ["000000-000001", "000002-000003"]
    (prompt,) = {group["prompt_index"] for group in follower.groups(4)}
    assert [group["step"] for group in follower.groups_of(prompt)] == list(range(5))
    run = read_run(tmp_path, "run", max_samples=9)
    assert [group["step"] for group in run.groups] == [0, 1, 2, 3, 4] and not run.notices
    assert read_run(tmp_path, "run", max_samples=2).coverage


@pytest.mark.parametrize("harm", ["flip", "truncate", "empty"])
def test_a_damaged_compressed_file_is_told(tmp_path, harm):
    followed(tmp_path)
    path = segments(tmp_path)[0].path
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes({"flip": bytes(data), "truncate": bytes(data[:40]), "empty": b""}[harm])
    told = f"{path.name}: is damaged after line" if harm != "empty" else ""
    for notices in (
        read_run(tmp_path, "run", max_samples=9).notices,
        RunFollower(tmp_path, "run").run().notices,
    ):
        assert told in " ".join(notices)
    assert steps(tmp_path)[-3:] == [2, 3, 4]
    with Journal(tmp_path, num_steps=9, console=Console(file=io.StringIO())) as journal:
        journal.start(RunConfig(loggers=()))
        journal.resume(5)
    assert "samples.jsonl is missing" in (tmp_path / "events.jsonl").read_text()


def test_calibration_reads_on_in_compressed_samples(tmp_path):
    written(tmp_path, 0, 7)
    found = [record["step"] for record in _last_records(tmp_path / "samples.jsonl", 5)]
    assert found == [6, 6, 5, 5, 4]
    segments(tmp_path)[-1].path.write_bytes(b"no gzip")
    with pytest.raises(UserError, match=r"samples.jsonl: cannot be read"):
        _last_records(tmp_path / "samples.jsonl", 5)
