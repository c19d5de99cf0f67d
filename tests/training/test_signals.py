"""A signal may arrive anywhere, in the write of a line to the console too."""

import io
import signal
import threading

import pytest
from rich.console import Console

from qerl.tracking import Journal
from qerl.training.signals import StopSignal


class SignalledOutput(io.RawIOBase):
    """An output that a signal interrupts in its first write, as a terminal's or a pipe's."""

    def __init__(self, number: int):
        self._number: int | None = number
        self.written = b""

    def writable(self) -> bool:
        return True

    def write(self, data) -> int:
        if self._number is not None:
            number, self._number = self._number, None
            signal.raise_signal(number)
        self.written += bytes(data)
        return len(data)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_within_the_write_of_a_line_is_deferred_and_told_after_it(tmp_path, number):
    output = SignalledOutput(number)
    stream = io.TextIOWrapper(io.BufferedWriter(output), encoding="utf-8", line_buffering=True)
    with Journal(tmp_path, num_steps=2, console=Console(file=stream, width=200)) as journal:
        stop = StopSignal(journal.notice)
        with stop.handling(), stop.deferred():
            journal.notice("the line")
    assert stop.requested == number
    said = f"{signal.Signals(number).name}: finishing and saving this step; press again to stop at once"
    assert output.written.decode().splitlines() == ["the line", said]
    assert said in (tmp_path / "events.jsonl").read_text()


def test_a_second_signal_ends_the_run_and_its_first_was_told():
    told = []
    stop = StopSignal(told.append)
    with pytest.raises(SystemExit) as ended, stop.handling(), stop.deferred():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
    assert ended.value.code == 143 and len(told) == 1
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert not [thread for thread in threading.enumerate() if thread.name == "signals"]


def test_a_console_that_is_gone_does_not_end_the_run():
    def announce(text):
        raise BrokenPipeError

    stop = StopSignal(announce)
    with stop.handling(), stop.deferred():
        signal.raise_signal(signal.SIGTERM)
    assert stop.exit_code == 143
