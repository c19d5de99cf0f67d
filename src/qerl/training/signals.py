"""Ctrl-C and SIGTERM: during a step they wait until it is saved; otherwise they end the run at once.

The handler only records the signal, and a thread announces it: Python runs a handler within any call of the
main thread, and if that is the write of a line to the console, a second write there raises RuntimeError.
"""

import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from qerl.errors import RunError, StoppedAtOnce

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
ECHO_S = 2.0  # torchrun forwards to its workers a signal that the terminal has already sent them


class StopSignal:
    """Record the first signal while deferred; raise StoppedAtOnce on a second one, or on one outside."""

    def __init__(self, announce: Callable[[str], None], *, echo_s: float = 0.0):
        """announce: called in a thread. echo_s: a signal within this many seconds of the first is the same,
        forwarded by a launcher."""
        self._announce, self._echo_s = announce, echo_s
        self._first: dict[str, tuple[int, float]] = {}
        self._is_deferring = False
        self._received: queue.SimpleQueue[int | None] = queue.SimpleQueue()  # its put may be interrupted

    @property
    def requested(self) -> int | None:
        """Number of the first signal; None before one arrives."""
        return self._first["signal"][0] if self._first else None

    @property
    def exit_code(self) -> int:
        """130 after Ctrl-C, 143 after SIGTERM."""
        assert self.requested is not None
        return 128 + self.requested

    @contextmanager
    def handling(self) -> Iterator[None]:
        """Handle signals in this context; only the main thread can install handlers."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        announcer = threading.Thread(target=self._announce_received, name="signals", daemon=True)
        announcer.start()
        previous = {number: signal.signal(number, self._receive) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
            self._received.put(None)
            announcer.join()

    @contextmanager
    def deferred(self) -> Iterator[None]:
        self._is_deferring = True
        try:
            yield
        finally:
            self._is_deferring = False

    def request(self, number: int) -> None:
        """Act as if the first signal had arrived now, deferred."""
        self._first["signal"] = number, time.monotonic()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        received = number, time.monotonic()
        # A handler may run within another: `setdefault` is one step, so only one of them is first.
        first = self._first.setdefault("signal", received)
        is_first = first is received
        if not is_first and received[1] - first[1] < self._echo_s:
            return
        if not (is_first and self._is_deferring):
            raise StoppedAtOnce(128 + number)
        self._received.put(number)

    def _announce_received(self) -> None:
        while (number := self._received.get()) is not None:
            with suppress(OSError, RunError):  # a full disk or closed console, as the next line finds
                name = signal.Signals(number).name
                self._announce(f"{name}: finishing and saving this step; press again to stop at once")
