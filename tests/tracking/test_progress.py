import io
import itertools
from types import SimpleNamespace

import pytest
from rich.console import Console

from qerl.tracking import progress
from qerl.tracking.progress import work, work_lines


def _clock(monkeypatch, step):
    """Let each look at the clock find it `step` seconds later."""
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=itertools.count(step=step).__next__))


def test_an_evaluation_without_a_terminal_has_a_line_every_ten_seconds(monkeypatch):
    _clock(monkeypatch, 2.5)
    lines = []
    with work_lines(lines.append, "gsm8k") as report:
        for done in range(0, 1320, 100):
            report(done, 1319, f"samples, {1000 * done:,} tokens")
    assert lines[0] == "gsm8k" and lines[-1].endswith("s") and "1,300 of 1,319 samples" in lines[-1]
    seconds = [float(line.split()[-2]) for line in lines[1:-1]]
    assert 10 <= seconds[0] <= 15 and all(10 <= b - a <= 15 for a, b in itertools.pairwise(seconds))
    assert "of 1,319 samples, " in lines[1] and "tokens, 12 s" in lines[1]


def test_quick_work_has_one_line_or_none(monkeypatch):
    _clock(monkeypatch, 0.1)
    lines = []
    for begins in (True, False):
        with work_lines(lines.append, "reading rows", begins=begins) as report:
            report(1, 2, "rows")
    assert lines == ["reading rows"]


def test_work_that_fails_says_no_end(monkeypatch):
    _clock(monkeypatch, 5.0)
    lines = []
    with pytest.raises(ValueError), work_lines(lines.append, "loading"):
        raise ValueError
    assert lines == ["loading"]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_has_a_bar_and_a_pipe_has_lines(is_terminal):
    out = io.StringIO()
    console = Console(file=out, force_terminal=is_terminal, width=100)
    with work(console, "loading [model]") as report:
        report(14, 28, "layers")
    assert ("14/28 layers" in out.getvalue()) == is_terminal
    assert ("\x1b[" in out.getvalue()) == is_terminal
    assert "loading [model]" in out.getvalue()
