"""A signal may arrive anywhere, in the write of a line to the console too."""

import io
import signal
import threading
import time

import pytest
from rich.console import Console

from qerl.errors import StoppedAtOnce
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
    with pytest.raises(StoppedAtOnce) as ended, stop.handling(), stop.deferred():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
    assert ended.value.code == 143 and len(told) == 1
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert not [thread for thread in threading.enumerate() if thread.name == "signals"]


def test_a_signal_within_the_handler_of_another_is_not_a_second_first_one(monkeypatch):
    """torchrun's copy of a signal may arrive before the handler of the first has noted it."""
    now, told = time.monotonic, []
    stop = StopSignal(told.append, echo_s=2.0)

    def interrupted() -> float:
        monkeypatch.setattr(time, "monotonic", now)
        signal.raise_signal(signal.SIGTERM)
        return now()

    monkeypatch.setattr(time, "monotonic", interrupted)
    with stop.handling(), stop.deferred():
        signal.raise_signal(signal.SIGTERM)
    assert len(told) == 1 and stop.requested == signal.SIGTERM


def test_a_signal_soon_after_a_request_is_its_echo_whenever_the_first_one_came():
    """A rank that ends after a long step makes torchrun signal the others."""
    stop = StopSignal(lambda line: None, echo_s=0.2)
    with stop.handling(), stop.deferred():
        signal.raise_signal(signal.SIGTERM)
        time.sleep(0.3)
        stop.request(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        time.sleep(0.3)
        with pytest.raises(SystemExit):
            signal.raise_signal(signal.SIGTERM)


def test_a_console_that_is_gone_does_not_end_the_run():
    def announce(text):
        raise BrokenPipeError

    stop = StopSignal(announce)
    with stop.handling(), stop.deferred():
        signal.raise_signal(signal.SIGTERM)
    assert stop.exit_code == 143
