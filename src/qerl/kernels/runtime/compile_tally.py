"""Count the kernels that this process compiles, reads from the disk cache, and waits for.

Several threads compile at once, and a run may load its weights meanwhile: `compile_s` is the time in which
at least one compilation ran, `waited_s` the time in which the run could do nothing else.
"""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator
from pathlib import Path


@dataclasses.dataclass(frozen=True, slots=True)
class CompileReport:
    """CompileReport(num_kernels=14, num_compiled=14, compile_s=2.1)"""

    num_kernels: int
    """Different files with definitions."""
    num_compiled: int
    """Number of these that were not in the cache."""
    compile_s: float
    waited_s: float | None = None
    """None: the run waited for all of compile_s."""
    error: str | None = None
    """The first error of compiling while weights were read."""

    def __str__(self) -> str:
        cached = self.num_kernels - self.num_compiled
        text = (
            f"compiled {self.num_compiled} kernels in {self.compile_s:.1f} s, {cached} were in the disk cache"
        )
        if self.waited_s is not None:
            text += f"; the run waited {self.waited_s:.1f} s for them"
        return text if self.error is None else f"{text}; not while weights were read: {self.error}"


class CompileTally:
    """Counts of one process. Threads may use it at the same time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._compiled: set[Path] = set()
        self._used: set[Path] = set()
        self._error: str | None = None
        self._num_running, self._start_s, self._compile_s, self._waited_s = 0, 0.0, 0.0, 0.0

    @contextlib.contextmanager
    def compiling(self, path: Path) -> Iterator[None]:
        """Compile this file of the cache inside."""
        with self._lock:
            if self._num_running == 0:
                self._start_s = time.perf_counter()
            self._num_running += 1
        try:
            yield
            self._compiled.add(path)
        finally:
            with self._lock:
                self._num_running -= 1
                if self._num_running == 0:
                    self._compile_s += time.perf_counter() - self._start_s

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Do nothing but wait for kernels inside; not to be nested."""
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self._waited_s += time.perf_counter() - start_s

    def use(self, path: Path) -> None:
        """Note that the run uses this file of the cache."""
        self._used.add(path)

    def note_error(self, error: Exception) -> None:
        """Note what stopped compiling ahead of the run; the report has the first one's first line."""
        self._error = self._error or f"{type(error).__name__}: {error}".partition("\n")[0]

    def report(self) -> CompileReport | None:
        """Return the counts so far; None if the process has neither compiled nor used a kernel."""
        paths = self._compiled | self._used
        if not paths:
            return None
        return CompileReport(len(paths), len(self._compiled), self._compile_s, self._waited_s, self._error)


TALLY = CompileTally()
"""The counts of this process."""


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock on this path inside, which no other thread and no other process holds at the same time.

    On a file system without locks it is not held: a kernel is then compiled twice, which costs time alone.
    """
    try:
        import fcntl  # not on Windows
    except ImportError:
        yield
        return
    with path.open("ab") as file:
        try:
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
            yield
        finally:
            path.unlink(missing_ok=True)  # who waits on it sees the compiled file first
            with contextlib.suppress(OSError):  # closing it would leave it to processes forked meanwhile
                fcntl.flock(file, fcntl.LOCK_UN)
