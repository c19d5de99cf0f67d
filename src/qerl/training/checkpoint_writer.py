"""Write checkpoints in a background thread, one at a time, so that no step waits for the disk.

    steps     step s | copy state | step s + 1 | step s + 2 ...
    thread                        | write, flush, rename |

The end of a write, or its error, is taken after the step that runs meanwhile, or before the next write.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class CheckpointWriter:
    """Owns the thread; close() waits for it."""

    def __init__(self):
        self._pool = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[float] | None = None

    def start(self, write: Callable[[], object]) -> None:
        """Call `write` in the thread. `take` must have returned or raised the result of the call before."""
        assert self._pending is None, "a checkpoint is still being written"
        self._pending = self._pool.submit(_timed, write)

    def take(self, *, waits: bool) -> float | None:
        """Return the seconds of a write that has ended since the last call, or raise its error; None: none
        was begun, or if this does not wait, it has not ended."""
        pending = self._pending
        if pending is None or not (waits or pending.done()):
            return None
        pending.exception()  # waits; a signal's exception leaves the write pending
        self._pending = None
        return pending.result()

    def close(self) -> None:
        self._pool.shutdown(wait=True)


def _timed(write: Callable[[], object]) -> float:
    begin = time.perf_counter()
    write()
    return time.perf_counter() - begin
