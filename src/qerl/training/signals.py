"""Ctrl-C and SIGTERM: inside a step they wait until the step is saved; elsewhere they end the run at once."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignal:
    """Remembers the first signal while deferred; a second, or one outside, raises SystemExit."""

    def __init__(self, announce: Callable[[str], None], *, echo_s: float = 0.0):
        """echo_s: a signal that comes so soon after the first is the same one, passed on by a launcher."""
        self.requested: int | None = None
        """The signal's number once one has come."""
        self._announce, self._echo_s = announce, echo_s
        self._requested_at = 0.0
        self._is_deferring = False

    @property
    def exit_code(self) -> int:
        """130 after Ctrl-C, 143 after SIGTERM."""
        assert self.requested is not None
        return 128 + self.requested

    @contextmanager
    def handling(self) -> Iterator[None]:
        """Signals come here inside, if this is the main thread: no other can ask for them."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {number: signal.signal(number, self._receive) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        self._is_deferring = True
        try:
            yield
        finally:
            self._is_deferring = False

    def request(self, number: int) -> None:
        """As if the signal had come now, deferred."""
        self.requested, self._requested_at = number, time.monotonic()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        is_first = self.requested is None
        if not is_first and time.monotonic() - self._requested_at < self._echo_s:
            return
        self.request(number)
        if not (is_first and self._is_deferring):
            raise SystemExit(128 + number)
        name = signal.Signals(number).name
        self._announce(f"{name}: finishing this step and saving it; once more stops at once")
