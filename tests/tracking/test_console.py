"""The console: the exact plain line, and the parts of the panel."""

import io
import math
import time

import pytest
from rich.console import Console

from qerl.tracking.console import PanelDisplay, PlainDisplay
from qerl.tracking.metric_text import clock, is_timing, one_line, plain_line, seconds_left, sparkline

METRICS = {
    "memory_gb": 1.94,
    "tokens_per_s": 812.4,
    "sigma": 0.0,
    "mismatch_kl": 2.14e-4,
    "entropy": 1.606,
    "accuracy": 0.414,
    "reward": 0.4119,
    "grad_norm": 0.1,
    "step_s": 10.0,
}


def panel(width=100, *, encoding="utf-8"):
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict")
    return PanelDisplay(Console(file=file, force_terminal=True, width=width), 30, "runs/demo")


def drawn(display, width=100):
    console = Console(file=io.StringIO(), width=width)
    console.print(display.render())
    return console.file.getvalue()


def test_the_plain_line_has_a_fixed_order():
    line = plain_line(METRICS, steps_done=3, num_steps=30, left_s=271)
    assert line == (
        "step 3/30  reward 0.412  accuracy 0.41  entropy 1.61  mismatch 2.1e-04"
        "  tokens/s 812  memory 1.9 GB  left 4:31"
    )


def test_what_a_step_did_not_measure_is_left_out():
    line = plain_line(
        {"sigma": 0.0095, "reward": math.nan, "eval_accuracy": 1.0}, steps_done=1, num_steps=2, left_s=None
    )
    assert line == "step 1/2  reward nan  held-out 1.00  sigma 0.0095"


def test_a_held_out_reward_is_shown_unless_it_is_the_accuracy():
    shown = [
        plain_line({"eval_reward": 0.5, **more}, steps_done=1, num_steps=2, left_s=None)
        for more in ({}, {"eval_accuracy": 0.5}, {"eval_accuracy": 0.25})
    ]
    assert shown == [
        "step 1/2  held-out reward 0.500",
        "step 1/2  held-out 0.50",
        "step 1/2  held-out 0.25  held-out reward 0.500",
    ]


def test_a_line_is_one_line_however_narrow_the_file():
    console = Console(file=io.StringIO(), width=20)
    PlainDisplay(console, 3, "").finished(2, METRICS, "sample")
    assert console.file.getvalue().count("\n") == 1 and "left 0:00" in console.file.getvalue()


def test_the_first_step_says_how_long_the_run_takes_with_its_last_evaluation(monkeypatch):
    console, seconds = Console(file=io.StringIO()), iter((5.0, 36.0))
    monkeypatch.setattr(time, "monotonic", lambda: next(seconds))
    display = PlainDisplay(console, 4, "")
    display.end_s = 9.0
    for step in range(2):
        display.finished(step, METRICS, "sample")
    first, total, second = console.file.getvalue().splitlines()
    assert first.endswith("left 0:39") and second.endswith("left 0:29")
    assert total == "about 1:10 in all, by the speed of this step"


def test_a_resumed_run_shows_the_time_left_alone():
    console = Console(file=io.StringIO())
    display = PlainDisplay(console, 30, "")
    display.restore([METRICS])
    display.finished(2, METRICS, "sample")
    assert "in all" not in console.file.getvalue()


def test_the_time_left_follows_the_last_20_steps():
    assert seconds_left([100.0] * 50 + [2.0] * 20, 5) == 10
    assert seconds_left([], 5) is None


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (271, "4:31"), (3600, "1:00:00"), (7471, "2:04:31")]
)
def test_clock(seconds, text):
    assert clock(seconds) == text


def test_which_keys_are_times():
    times = ("rollout_s", "step_s", "prefill_tokens_per_s", "tokens_per_s", "memory_gb", "wall_time")
    assert all(map(is_timing, times))
    assert not any(map(is_timing, ("reward", "sampled_tokens", "num_failed_rewards", "step", "sigma")))


def test_the_sparkline_spans_its_bars():
    assert sparkline([0, 1, 2, 3.5], width=10, is_ascii=False) == "\u2581\u2583\u2585\u2588"
    assert sparkline([0, 0, 1, 1], width=2, is_ascii=True) == "_#"
    assert sparkline([5, 5], width=9, is_ascii=True) == "__"
    assert sparkline([], width=9, is_ascii=True) == ""


def test_text_of_a_model_cannot_drive_the_terminal():
    assert one_line(" a\r\n\tb\x1b]0;title\x07\u202ec ") == "a b?]0;title??c"


def test_the_panel_shows_the_run():
    display = panel()
    display.phase("rollout")
    display.finished(0, METRICS | {"reward": 0.1}, "[bold]it is\n 3[/bold] \x1b[31m")
    display.finished(1, METRICS, None)
    display.phase("learn")
    shown = drawn(display)
    display.close()
    for text in (
        "runs/demo",
        "step 2/30",
        "left 4:40",
        "learn",
        "\u2581\u2588",
        "0.412",
        "2.1e-04",
        "1.9 GB",
    ):
        assert text in shown
    assert "[bold]it is 3[/bold] ?[31m" in shown


def test_a_long_sample_takes_one_line():
    display = panel(width=60)
    display.finished(0, {"step_s": 1.0, "reward": 0.5}, "word " * 500)
    shown = drawn(display, width=60)
    display.close()
    assert shown.count("\n") == 6 and shown.count("word") < 15


def test_earlier_steps_count_after_going_on():
    display = panel()
    display.restore([{"step": i, "step_s": 2.0, "reward": r} for i, r in enumerate([0.0, None, 1.0])])
    shown = drawn(display)
    display.close()
    assert "step 3/30" in shown and "left 0:54" in shown and "\u2581\u2588" in shown


def test_a_terminal_without_unicode_gets_plain_bars():
    display = panel(encoding="ascii")
    display.restore([{"step": i, "step_s": 2.0, "reward": r} for i, r in enumerate([0.0, 1.0])])
    assert "_#" in drawn(display)
    display.close()


def test_notices_stand_above_the_panel():
    display = panel()
    display.finished(0, METRICS, "sample")
    display.notice("checkpoint [red]saved[/red]")
    display.close()
    display._console.file.seek(0)
    written = display._console.file.read()
    assert "checkpoint [red]saved[/red]" in written
    assert written.index("checkpoint [red]saved") < written.rindex("runs/demo")
