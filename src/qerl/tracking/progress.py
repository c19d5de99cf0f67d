"""Show how far a long piece of work is: a bar on a terminal, elsewhere a line every ten seconds.

with work(console, "loading model") as report:
    report(3, 28, "layers")
"""

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from qerl.types import Report

EVERY_S = 10.0
_WORTH_A_LINE_S = 1.0


Work = Callable[[str], contextlib.AbstractContextManager[Report]]
"""Shows a block's progress under this name."""


def silent(name: str) -> contextlib.AbstractContextManager[Report]:
    """Show nothing."""
    return contextlib.nullcontext(ignore)


def ignore(done: int, total: int, unit: str) -> None:
    """Report nothing."""


@contextlib.contextmanager
def work(console: Console, name: str, *, begins: bool = True) -> Iterator[Report]:
    """Show a block's progress on the console, in a bar on a terminal."""
    if console.is_terminal and not console.is_dumb_terminal:
        with _bar(console, name) as report:
            yield report
    else:
        with work_lines(lambda line: print_line(console, line), name, begins=begins) as report:
            yield report


@contextlib.contextmanager
def work_lines(show: Callable[[str], None], name: str, *, begins: bool = True) -> Iterator[Report]:
    """Show a block's progress in lines: one when it begins, one every ten seconds, and one with its seconds
    when it ends, if it took a second. begins: show the first one, which another line may stand for."""
    begin = shown = time.monotonic()
    latest = ""
    if begins:
        show(name)

    def report(done: int, total: int, unit: str) -> None:
        nonlocal shown, latest
        latest = f"{done:,} of {total:,} {unit}, "
        if time.monotonic() - shown >= EVERY_S:
            shown = time.monotonic()
            show(f"{name}: {latest}{shown - begin:.0f} s")

    yield report
    seconds = time.monotonic() - begin
    if seconds >= _WORTH_A_LINE_S:
        show(f"{name}: {latest}{seconds:.1f} s")


@contextlib.contextmanager
def _bar(console: Console, name: str) -> Iterator[Report]:
    columns = TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.fields[counts]}")
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bars:
        bar = bars.add_task(name, total=None, counts="")

        def report(done: int, total: int, unit: str) -> None:
            bars.update(bar, completed=done, total=total, counts=f"{done:,}/{total:,} {unit}")

        yield report


def print_line(console: Console, line: str, *, name: str = "") -> None:
    """Print the line as it is, after the name of the work; a bar on the same console moves down for it."""
    text = f"{name}: {line}" if name else line
    console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)
