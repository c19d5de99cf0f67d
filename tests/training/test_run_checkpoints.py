"""Checkpoints of a run: a thread writes them, and no step waits but for what it must."""

import threading
import time

import pytest

from learner.saver import mark
from learner.tiny import tiny_learner
from qerl.config import CheckpointConfig, RunConfig
from qerl.errors import RunError
from qerl.learner import checkpoint
from qerl.learner.checkpoint import CheckpointError, latest_adapter
from qerl.learner.distributed import ALONE
from qerl.tracking import Journal
from qerl.training.run_checkpoints import RunCheckpoints


class SlowDisk:
    """checkpoint.write, which waits before it begins until it may; `begun` counts its calls."""

    def __init__(self, monkeypatch):
        self.may_write, self.begun, self._write = threading.Event(), 0, checkpoint.write
        monkeypatch.setattr(checkpoint, "write", self)

    def __call__(self, *given, **more):
        self.begun += 1
        assert self.may_write.wait(30)
        return self._write(*given, **more)


@pytest.fixture
def disk(monkeypatch):
    slow = SlowDisk(monkeypatch)
    yield slow
    slow.may_write.set()


@pytest.fixture
def journal(tmp_path):
    with Journal(tmp_path / "run", num_steps=9) as opened:
        opened.start(RunConfig(loggers=()))
        opened.resume(0)
        yield opened


def checkpoints_of(journal, learner, keep=9):
    return RunCheckpoints(journal.place(), CheckpointConfig(every=1, keep=keep), learner, journal, ALONE)


def take_step(journal, checkpoints, step):
    with journal.step(step):
        pass
    checkpoints.finished(step + 1)


def names(journal):
    folder = journal.place() / "checkpoints"
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def full_disk(*given, **more):
    raise CheckpointError("cannot write the checkpoint: No space left on device")


def test_steps_go_on_while_a_checkpoint_is_written_of_the_state_at_its_step(disk, journal):
    learner = tiny_learner()
    with checkpoints_of(journal, learner) as checkpoints:
        mark(learner, 1)
        take_step(journal, checkpoints, 0)
        checkpoints.save(1)
        for step in (1, 2, 3):
            mark(learner, step + 1)
            take_step(journal, checkpoints, step)
        assert names(journal) == [] and journal.last_saved == 0
        disk.may_write.set()
    assert names(journal) == ["step-000001"] and journal.last_saved == 1
    adapter = latest_adapter(journal.place() / "checkpoints")
    assert all((tensor == 1).all() for tensor in adapter.values())


def test_a_checkpoint_waits_for_the_one_before_and_the_time_is_recorded(disk, journal):
    learner = tiny_learner()
    with checkpoints_of(journal, learner) as checkpoints:
        take_step(journal, checkpoints, 0)
        checkpoints.save(1)
        take_step(journal, checkpoints, 1)
        threading.Timer(0.1, disk.may_write.set).start()
        checkpoints.save(2)
        assert "step-000001" in names(journal)
        take_step(journal, checkpoints, 2)
        checkpoints.wait()
        take_step(journal, checkpoints, 3)
    held, written = (
        [record.get(key, 0.0) for record in journal.steps()]
        for key in ("checkpoint_hold_s", "checkpoint_write_s")
    )
    assert disk.begun == 2 and held[0] == 0.0 and held[1] < 0.1 < held[2] + 0.05
    assert written[:2] == [0.0, 0.0] and written[2] >= 0.1 and written[3] > 0.0
    assert names(journal) == ["step-000001", "step-000002"]


def test_a_write_that_fails_ends_the_run_after_the_next_step_with_its_cause(monkeypatch, journal):
    monkeypatch.setattr(checkpoint, "write", full_disk)
    with (
        pytest.raises(RunError, match="No space left"),
        checkpoints_of(journal, tiny_learner()) as checkpoints,
    ):
        take_step(journal, checkpoints, 0)
        checkpoints.save(1)
        time.sleep(0.05)
        take_step(journal, checkpoints, 1)
        pytest.fail("the step after the failure was not the last")
    assert [record["step"] for record in journal.steps()] == [0, 1] and journal.last_saved == 0


def test_a_write_that_fails_at_the_end_is_an_error_and_beside_another_error_a_notice(monkeypatch, journal):
    monkeypatch.setattr(checkpoint, "write", full_disk)
    with pytest.raises(CheckpointError), checkpoints_of(journal, tiny_learner()) as checkpoints:
        checkpoints.save(1)
    with pytest.raises(ZeroDivisionError), checkpoints_of(journal, tiny_learner()) as checkpoints:
        checkpoints.save(1)
        raise ZeroDivisionError
    assert (journal.place() / "events.jsonl").read_text().count("No space left") == 1


def test_whoever_reads_checkpoints_waits_for_them(disk, journal):
    threading.Timer(0.05, disk.may_write.set).start()
    with checkpoints_of(journal, tiny_learner()) as checkpoints:
        checkpoints.save(1, waits=True)
        assert names(journal) == ["step-000001"]


def test_a_folder_that_is_moved_during_a_write_gets_the_checkpoint_in_its_new_place(disk, journal, tmp_path):
    learner, place = tiny_learner(), tmp_path / "elsewhere"
    with (
        pytest.raises(RunError, match=r"moved to .*elsewhere"),
        checkpoints_of(journal, learner) as checkpoints,
    ):
        checkpoints.save(1)
        (tmp_path / "run").rename(place)
        (tmp_path / "run").write_text("in the way")
        disk.may_write.set()
        checkpoints.wait()
        assert names(journal) == ["step-000001"] and checkpoints.is_due(2, 9)
        checkpoints.save(2)
    assert names(journal) == ["step-000001", "step-000002"] and journal.place() == place


def test_a_folder_that_is_moved_during_the_last_write_has_the_checkpoint(disk, journal, tmp_path):
    with checkpoints_of(journal, tiny_learner()) as checkpoints:
        checkpoints.save(9)
        (tmp_path / "run").rename(tmp_path / "elsewhere")
        (tmp_path / "run").write_text("in the way")
        disk.may_write.set()
    assert names(journal) == ["step-000009"]


def test_what_cannot_be_written_to_the_new_place_either_is_not_called_saved(monkeypatch, journal, tmp_path):
    with (
        pytest.raises(CheckpointError, match="No space left"),
        checkpoints_of(journal, tiny_learner()) as checkpoints,
    ):
        (tmp_path / "run").rename(tmp_path / "elsewhere")
        monkeypatch.setattr(checkpoint, "write", full_disk)
        checkpoints.save(1)


def test_a_full_disk_does_not_hide_what_ended_the_run(monkeypatch, journal):
    def no_space(text):
        raise RunError("events.jsonl: No space left on device")

    monkeypatch.setattr(checkpoint, "write", full_disk)
    monkeypatch.setattr(journal, "notice", no_space)
    with pytest.raises(ZeroDivisionError), checkpoints_of(journal, tiny_learner()) as checkpoints:
        checkpoints.save(1)
        raise ZeroDivisionError
