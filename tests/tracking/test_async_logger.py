"""Loggers: each step arrives once, in one remote run, whatever fails."""

import importlib.util
import io
import json
import os
import signal
import sqlite3
import struct
import subprocess
import sys
import threading
import time
import types

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from qerl.config import RunConfig
from qerl.errors import UserError, redact
from qerl.tracking import Journal, journal, loggers
from qerl.tracking.async_logger import AsyncLogger
from qerl.tracking.loggers import LOGGERS, check_loggers
from stored_samples import checked_line

KEY = "5" * 20 + "a" * 20
PROCESS = """
import json, os, pathlib, signal, sys, time
from qerl.config import RunConfig
from qerl.tracking import Journal

out, names = pathlib.Path(sys.argv[1]), tuple(sys.argv[2].split())
first, last = map(int, sys.argv[3:])
with Journal(out, num_steps=6) as journal:
    journal.start(RunConfig(loggers=names, seed=41))
    journal.resume(first)
    for step in range(first, last):
        with journal.step(step) as log:
            log.add(reward=step / 10, entropy=float("nan"))
    if last < 6:
        states = [out / "loggers" / f"{name}.json" for name in names]
        while not all(s.exists() and json.loads(s.read_text())["steps"] == last for s in states):
            time.sleep(0.05)
        if {"wandb", "trackio"} & set(names):
            time.sleep(2)  # they write what they were given a little later
        os.kill(os.getpid(), signal.SIGKILL)
    journal.finish({"accuracy": 0.5})
"""
INSTALLED = [name for name in LOGGERS if importlib.util.find_spec(name) is not None]


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A run with every logger that is installed, killed after step 3 of 6, gone on with from its step 2."""
    root = tmp_path_factory.mktemp("loggers")
    environment = os.environ | {
        "WANDB_MODE": "offline",
        "WANDB_API_KEY": KEY,
        "WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL": "0.2",  # 15 s otherwise, which kill -9 loses offline
        "MLFLOW_TRACKING_URI": f"file:{root / 'mlflow'}",
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "TRACKIO_DIR": str(root / "trackio"),
        "HF_TOKEN": KEY,
    }
    outputs = []
    for first, last, code in ((0, 4, -signal.SIGKILL), (2, 6, 0)):
        command = [
            sys.executable,
            "-c",
            PROCESS,
            str(root / "run"),
            " ".join(INSTALLED),
            str(first),
            str(last),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
        assert done.returncode == code, done.stderr
        outputs.append(done.stdout + done.stderr)
    return root, "".join(outputs)


def tensorboard_points(root):
    board = EventAccumulator(str(root / "run" / "tensorboard"))
    board.Reload()
    return [(event.step, round(event.value, 6)) for event in board.Scalars("metric/reward")]


def mlflow_points(root):
    (path,) = (root / "mlflow").glob("*/*/metrics/metric/reward")
    (kept,) = path.parents[2].glob("params/seed")
    assert kept.read_text() == "41"
    assert (path.parents[2] / "tags" / "result.accuracy").read_text() == "0.5"
    return [(int(step), float(value)) for _, value, step in map(str.split, path.read_text().splitlines())]


def trackio_points(root):
    with sqlite3.connect(root / "trackio" / "qerl.db") as database:
        rows = database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY step").fetchall()
    assert len({name for name, _, _ in rows}) == 1
    return [(step, json.loads(metrics)["metric/reward"]) for _, step, metrics in rows]


def wandb_points(root):
    points, run_ids = [], set()
    for path in sorted((root / "run" / "wandb").glob("offline-run-*/run-*.wandb")):
        for record in wandb_records(path.read_bytes()):
            if record.HasField("run"):
                run_ids.add(record.run.run_id)
            if record.HasField("history"):
                items = {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
                points.append((record.history.step.num, float(items["metric/reward"])))
    assert len(run_ids) == 1
    return points


def wandb_records(content):
    """The records of a .wandb file: LevelDB's log format, blocks of 32 KiB, a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    position, data = 7, b""
    while position + 7 <= len(content):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, size, kind = struct.unpack("<IHB", content[position : position + 7])
        data += content[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # whole, or the last part
            record = Record()
            record.ParseFromString(data)
            yield record
            data = b""


POINTS = {
    "tensorboard": tensorboard_points,
    "wandb": wandb_points,
    "mlflow": mlflow_points,
    "trackio": trackio_points,
}


@pytest.mark.parametrize("name", LOGGERS)
def test_a_killed_run_goes_on_in_the_same_remote_run_with_each_step_once(killed, name):
    if name not in INSTALLED:
        pytest.skip(f"{name} is not installed")
    assert POINTS[name](killed[0]) == [(step, step / 10) for step in range(6)]


def test_no_key_reaches_the_runs_folder_or_the_console(killed):
    root, output = killed
    assert KEY not in output
    files = [path for path in root.rglob("*") if path.is_file()]
    assert len(files) > 5 and not [path for path in files if KEY.encode() in path.read_bytes()]


class Kept:
    """A logger in memory that fails while `failures` are left."""

    can_rewind = False

    def __init__(self, folder, config, *, run_id, first_step):
        type(self).opened += 1
        self.run_id, self.first_step = run_id or "one", first_step

    def log(self, step, metrics, wall_time):
        if self.failures:
            raise self.failures.pop()
        self.steps.append((step, metrics["metric/reward"]))

    def finish(self, result):
        self.results.append(result)


@pytest.fixture
def kept(monkeypatch):
    fresh = type("Fresh", (Kept,), {"opened": 0, "steps": [], "failures": [], "results": []})
    monkeypatch.setitem(loggers.LOGGERS, "tensorboard", fresh)
    return fresh


def take_steps(folder, first, last, *, config=RunConfig(), between=lambda step: None, result=None):  # noqa: B008
    with Journal(folder, num_steps=6, console=Console(file=io.StringIO())) as run:
        run.start(config)
        run.resume(first)
        for step in range(first, last):
            with run.step(step) as log:
                log.add(reward=step / 10)
            between(step)
        if result is not None:
            run.finish(result)


def notices(folder):
    return [json.loads(line)["text"] for line in (folder / "events.jsonl").read_text().splitlines()]


def test_a_logger_that_fails_is_noticed_once_and_the_run_goes_on(tmp_path, kept):
    kept.failures += [ConnectionError("down")] * 99
    take_steps(tmp_path, 0, 6, between=lambda step: time.sleep(0.02), result={"accuracy": 1.0})
    (notice,) = [text for text in notices(tmp_path) if "tensorboard" in text]
    assert "ConnectionError: down" in notice
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 6 and not kept.steps


def test_a_logger_that_failed_gets_what_it_missed_at_the_end(tmp_path, kept):
    kept.failures.append(ConnectionError("down"))
    take_steps(tmp_path, 0, 6, between=lambda step: time.sleep(0.02), result={"accuracy": 1.0})
    assert kept.steps == [(step, step / 10) for step in range(6)]
    assert kept.opened == 2 and kept.results == [None, {"accuracy": 1.0}]
    assert "tensorboard works again and has all 6 steps" in notices(tmp_path)


def test_a_run_that_has_ended_gives_a_logger_the_rest_once(tmp_path, kept):
    kept.failures += [ConnectionError("down")] * 99
    take_steps(tmp_path, 0, 6, result={"accuracy": 1.0})
    kept.failures.clear()
    kept.results.clear()
    for _ in range(2):
        with Journal(tmp_path, num_steps=6, console=Console(file=io.StringIO())) as run:
            run.start(RunConfig())
            run.catch_up()
    assert kept.steps == [(step, step / 10) for step in range(6)] and kept.results == [{"accuracy": 1.0}]


def test_a_run_that_went_on_without_a_logger_shows_it_all_later(tmp_path, kept):
    take_steps(tmp_path, 0, 2)
    take_steps(tmp_path, 2, 4, config=RunConfig(loggers=()))
    assert kept.steps == [(0, 0.0), (1, 0.1)]
    take_steps(tmp_path, 4, 6)
    assert kept.steps == [(step, step / 10) for step in range(6)]


def test_steps_taken_again_are_not_sent_again(tmp_path, kept):
    take_steps(tmp_path, 0, 4)
    take_steps(tmp_path, 1, 6)
    assert [step for step, _ in kept.steps] == list(range(6))


def test_a_remote_run_that_lost_steps_gets_them_again(tmp_path, kept, monkeypatch):
    take_steps(tmp_path, 0, 4)
    del kept.steps[1:]
    monkeypatch.setattr(
        kept,
        "__init__",
        lambda self, *place, run_id, first_step: vars(self).update(run_id=run_id, first_step=1),
    )
    take_steps(tmp_path, 4, 6)
    assert [step for step, _ in kept.steps] == list(range(6))


@pytest.mark.parametrize(("is_offline", "first_step"), [(False, 3), (True, 5)])
def test_wandb_online_says_what_it_lacks(tmp_path, monkeypatch, is_offline, first_step):
    """Against what wandb documents of `init` and of a run's `offline` and `starting_step`."""
    asked = {}

    def init(**arguments):
        asked.update(arguments)
        return types.SimpleNamespace(offline=is_offline, starting_step=3)

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init, Settings=dict))
    made = loggers.WandbLogger(tmp_path, {"seed": 1}, run_id="abc", first_step=5)
    assert (made.run_id, made.first_step) == ("abc", first_step)
    assert (asked["id"], asked["resume"], asked["config"]) == ("abc", "allow", {"seed": 1})


def test_a_logger_that_hangs_holds_the_end_no_longer_than_it_may(tmp_path, kept, monkeypatch):
    release = threading.Event()
    monkeypatch.setattr(kept, "log", lambda *arguments: release.wait(30))
    monkeypatch.setattr(journal, "_LOGGER_TIMEOUT_S", 0.2)
    begin = time.monotonic()
    try:
        take_steps(tmp_path, 0, 6, result={})
        assert time.monotonic() - begin < 25  # not the 30 s for which it hangs
        assert any(text.startswith("tensorboard does not have all steps yet") for text in notices(tmp_path))
    finally:
        release.set()


def test_a_logger_is_not_tried_again_before_its_time(tmp_path, kept):
    (tmp_path / "metrics.jsonl").write_bytes(checked_line('{"step": 0, "reward": 0.5}'))
    kept.failures += [OSError("down"), OSError("down")]
    logger = AsyncLogger("tensorboard", kept, tmp_path, {}, first_step=0, retry_s=60)
    for _ in range(20):
        logger.wake()
        time.sleep(0.005)
    assert len(kept.failures) == 1
    logger.end(None)
    logger.join(5)
    assert len(logger.notices()) == 1 and not kept.failures


def test_a_missing_package_and_an_unknown_logger_are_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(UserError, match=r"^loggers: trackio cannot be imported \(.*\); pip install trackio$"):
        take_steps(tmp_path, 0, 1, config=RunConfig(loggers=("trackio",)))
    with pytest.raises(UserError, match="loggers: unknown logger 'comet', choose from tensorboard, wandb"):
        check_loggers(("comet",))


def test_a_notice_has_no_secrets(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    text = redact(f"401 for key {KEY} at https://me:hunter2@mlflow.example/api")
    assert text == "401 for key *** at https://***@mlflow.example/api"
