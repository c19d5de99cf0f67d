"""Ctrl-C and SIGTERM: inside a step they wait until the step is saved; elsewhere they end the run at once."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """Remembers the first signal while deferred; a second, or one outside, raises SystemExit."""

    def __init__(self, announce: Callable[[str], None]):
        self.requested: int | None = None
        """The signal's number once one has come."""
        self._announce = announce
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

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.requested is not None or not self._is_deferring:
            self.requested = number
            raise SystemExit(128 + number)
        self.requested = number
        name = signal.Signals(number).name
        self._announce(f"{name}: finishing this step and saving it; once more stops at once")
