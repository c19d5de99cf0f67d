"""An agent whose programs print hundreds of megabytes: neither memory nor time goes to them."""

import json
import os
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest
from agent_episodes import load_tiny, playing

from qerl.config import TaskConfig
from qerl.serve.agents.outcomes import Outcome, OutcomePipe
from qerl.tasks.scoring import Failure
from qerl.tasks.worker_process import MAX_PRINTED

pytest.importorskip("starlette")
pytest.importorskip("openai")
MB = 1 << 20
NUM_MB = 200
PROGRAM = f"import os\nfor _ in range({NUM_MB}):\n    for part in range(16): os.write(%d, b'x' * {MB // 16})"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_tiny(tmp_path_factory.mktemp("model"))


def children(pid):
    """The process ids of the processes below this one."""
    found = []
    for each in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (each / "children").read_text().split()):
            found += [child, *children(child)]
    return found


def peaks_mb():
    """Return {process id: peak of its own memory in MB}, of this process and those below it."""
    peaks = {}
    for pid in (os.getpid(), *children(os.getpid())):
        (kb,) = re.findall(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
        peaks[pid] = int(kb) / 1024
    return peaks


def printing(client, row):
    """Runs a program that prints to the agent's own stdout or stderr, or one whose output it keeps."""
    client.chat.completions.create(model="any", messages=HELLO, max_tokens=2)
    if row["to"] == "kept":
        done = subprocess.run([sys.executable, "-c", PROGRAM % 1], stdout=subprocess.PIPE, check=True)
        return float(len(done.stdout) == NUM_MB * MB)
    if row["to"] is not None:
        subprocess.run([sys.executable, "-c", PROGRAM % row["to"]], check=True)
    return 1.0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_a_program_of_an_agent_prints_is_dropped_and_fills_nothing(model, capfd):
    with playing(model, printing, max_concurrent=2) as play:
        play({"to": None}, num_samples=1)
        before, start_s = peaks_mb(), time.monotonic()
        groups = play({"to": 1}, {"to": 2}, num_samples=1)
        took_s, after = time.monotonic() - start_s, peaks_mb()
    assert [s.failure for group in groups for s in group.samples_G] == [None, None]
    grown = {pid: after[pid] - before[pid] for pid in after.keys() & before.keys()}
    assert len(grown) >= 4 and max(grown.values()) < 50, grown  # of 400 MB
    shown = capfd.readouterr().err
    assert len(shown) < (took_s + 2) * 1.2 * MAX_PRINTED and took_s < 60
    dropped = sum(map(int, re.findall(r"omitted (\d+) more bytes printed", shown)))
    assert dropped > NUM_MB * MB


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is of Linux")
def test_an_agent_that_keeps_more_than_its_memory_loses_that_episode_alone(model):
    task = TaskConfig(reward_memory_gb=0.15)
    with playing(model, printing, task=task, max_concurrent=1) as play:
        groups = play({"to": None}, {"to": "kept"}, {"to": None}, num_samples=1)
    fine, kept, after = (group.samples_G[0] for group in groups)
    assert (fine.failure, after.failure) == (None, None) and kept.reward is None
    assert kept.failure[0] == "raised MemoryError"


def test_a_long_reason_in_any_script_fits_in_a_line_that_is_not_torn(monkeypatch):
    """A pipe takes 4,096 bytes at once; what is cut first is the metrics."""
    pipe, lines = OutcomePipe(), []
    monkeypatch.setattr(os, "write", lambda end, line: lines.append(line))
    for text in ("\N{GRINNING FACE}" * 600, "\0" * 600, "\ud800" * 600):
        failure = Failure(cause=text, message=text)
        pipe.say_ended(1, 2, Outcome(failure=failure, metrics={f"m{i}" * 50: 0.5 for i in range(32)}))
    monkeypatch.undo()
    assert len(lines) == 3 and all(len(line) <= select.PIPE_BUF for line in lines)
    call, index, reward, (cause, message), metrics = json.loads(lines[0])
    assert (call, index, reward, metrics) == (1, 2, None, {})
    assert (cause, message) == ("\N{GRINNING FACE}" * 100, "\N{GRINNING FACE}" * 500)
