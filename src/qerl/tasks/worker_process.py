"""Start the processes of a worker pool, and carry messages between them.

    message    length (8 bytes, big-endian), pickle; an item to the worker, its outcome back

A keeper is the parent of one worker. It reports the worker's end in place of an outcome, and kills the
worker's process group when the pool hangs up or has ended. It blocks every signal that can be blocked: code
that signals its parent reaches the keeper, not the run. It also ends a worker that has more memory than it
may (memory_limit.py).
"""

import contextlib
import ctypes
import dataclasses
import gc
import os
import pickle
import resource
import select
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

from qerl.tasks.memory_limit import limit_memory, limit_softly, resident_bytes
from qerl.tasks.scoring import Failure

MAX_PRINTED = 1 << 16
"""Bytes per second forwarded to stderr."""
END_FORWARDING = signal.SIGUSR1
MORE_TASKS = 2048
"""Processes and threads of the user beyond the number on the whole machine when the worker started."""
_MAX_MESSAGE_BYTES = 1 << 30
_HEADER_BYTES = 8
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_STOPS = (signal.SIGINT, signal.SIGTERM)
_PR_SET_PDEATHSIG = 1
_WATCH_S = 0.5
_SPARE_BYTES = 64 << 20  # a worker at its limit gets MemoryError first
_CHILD_POLL_S = 0.02  # where the end of a child cannot be waited for beside other events


class WorkerLost(Failure):
    """A job without outcome: `WorkerLost("died", "its process was killed by SIGSEGV")`."""


def lost(code: int) -> WorkerLost:
    """code: as in subprocess, negative for a signal."""
    if code < 0:
        return WorkerLost("died", f"its process was killed by {signal_name(-code)}")
    return WorkerLost("ended its process", f"exit code {code}")


def signal_name(number: int) -> str:
    """Return "SIGSEGV", or "signal 40": real-time signals between the first and the last have no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@dataclasses.dataclass(slots=True)
class ForkedProcess:
    """A child process, collected once."""

    pid: int
    code: int | None = None
    """Exit code as in subprocess: negative for a signal."""

    def poll(self) -> int | None:
        """Return its exit code, or None while it runs."""
        return self._wait(os.WNOHANG)

    def wait(self, timeout_s: float) -> int | None:
        end_s = time.monotonic() + timeout_s
        while self.poll() is None and time.monotonic() < end_s:
            time.sleep(0.001)
        return self.code

    def end(self, number: int, timeout_s: float) -> None:
        """Send it this signal, and kill it if it has not ended by then."""
        if self.poll() is None:
            os.kill(self.pid, number)
            self.wait(timeout_s)
        self.kill()

    def kill(self) -> int:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
        code = self._wait(0)
        assert code is not None
        return code

    def kill_group(self) -> None:
        """Kill the group that it leads, also where it has just ended itself."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self.kill()

    def _wait(self, options: int) -> int | None:
        if self.code is None:
            try:
                pid, status = os.waitpid(self.pid, options)
            except ChildProcessError:  # another waitpid(-1) collected it
                pid, status = self.pid, 0
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code


OWN_ENDS: "weakref.WeakSet[socket.socket | Connection]" = weakref.WeakSet()
"""This process' ends of the ways to others, which forks close: their jobs could write to them."""


def fork_process(main: Callable[..., None], *arguments: Any) -> ForkedProcess:
    """Start a process that runs main(*arguments) and exits. The handlers of Ctrl-C and SIGTERM wait until it
    is forked, and do nothing in it before main has set its own."""
    sys.stdout.flush()
    sys.stderr.flush()
    with _signals_held():
        with warnings.catch_warnings():
            # Python 3.12 warns about forks beside threads; the workers use no thread of the parent.
            warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            gc.freeze()  # collecting the parent's objects here would free its GPU memory
            try:
                for end in OWN_ENDS:
                    end.close()
                main(*arguments)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
    return ForkedProcess(pid)


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM wait for the end of the block: what their handlers raise in a function that
    os.fork calls is lost. Only the main thread runs handlers, and only it can set them."""
    handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
    received: list[int] = []
    is_held = True

    def receive(number: int, frame: FrameType | None) -> None:
        if is_held:
            received.append(number)
        else:
            handlers[number](number, frame)

    try:
        if threading.current_thread() is threading.main_thread():
            for number in _STOPS:
                if callable(handler := signal.getsignal(number)):
                    handlers[number] = handler
                    signal.signal(number, receive)
        yield
    finally:
        is_held = False  # from here on a signal may interrupt: a handler that stays set passes it on
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in received:
            handlers[number](number, None)


class Channel:
    """The pool's end of a worker's socket. Neither sending nor receiving waits for the worker for ever: its
    code may write to the socket itself, or stop the process."""

    def __init__(self, end: socket.socket):
        end.setblocking(False)
        OWN_ENDS.add(end)
        self.socket = end
        self._received = bytearray()

    def send(self, message: Any, *, end_s: float) -> None:
        """Send it, or as much of it as the worker takes until end_s by time.monotonic()."""
        data = memoryview(_packed(message))
        # A worker that has ended, or takes nothing, is handled where its outcome is awaited.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while data and time.monotonic() < end_s:
                try:
                    data = data[self.socket.send(data) :]
                except BlockingIOError:
                    _poll({self.socket.fileno(): select.POLLOUT}, _WATCH_S)

    def receive(self) -> tuple[Any] | None:
        """Return (message,), or None while it is not whole; raise EOFError if the worker has ended, and
        ValueError if what came is no message."""
        while True:
            header = self._received[:_HEADER_BYTES]
            num_bytes = _HEADER_BYTES + int.from_bytes(header) if len(header) == _HEADER_BYTES else None
            if num_bytes is not None and num_bytes > _MAX_MESSAGE_BYTES:
                raise ValueError(f"a message of {num_bytes} bytes")
            if num_bytes is not None and len(self._received) >= num_bytes:
                break
            try:
                chunk = self.socket.recv(1 << 16)
            except BlockingIOError:
                return None
            except OSError as error:
                raise EOFError from error
            if not chunk:
                raise EOFError
            self._received += chunk
        data, self._received = self._received, bytearray()
        try:
            return (pickle.loads(memoryview(data)[_HEADER_BYTES:num_bytes]),)
        except Exception as error:  # bytes that are not a pickle may raise anything
            raise ValueError(f"not a message: {error}") from error

    def is_idle(self) -> bool:
        """True if nothing has come and the worker is there."""
        try:
            return not self._received and self.receive() is None and not self._received
        except (EOFError, ValueError):
            return False

    def close(self) -> None:
        """Hang up, also where another process has inherited the socket."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


def _packed(message: Any) -> bytes:
    data = pickle.dumps(message)
    return len(data).to_bytes(_HEADER_BYTES) + data


def _poll(events: dict[int, int], timeout_s: float) -> bool:
    """Wait for one of the events of these file descriptors, or a hang-up; return True if one has happened."""
    poller = select.poll()
    for descriptor, event in events.items():
        poller.register(descriptor, event)
    return bool(poller.poll(1000 * timeout_s))


def forward_output(parent: int, output: int) -> None:
    """Main function of the process that copies what workers print to stderr, at a limited rate. It polls,
    which works on every Unix and from any forking thread; END_FORWARDING ends it."""
    for number in _STOPS:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(END_FORWARDING, _stop)
    os.setpgid(0, 0)
    window_end, left, num_dropped = 0.0, 0, 0
    with contextlib.suppress(_Stopped):
        while os.getppid() == parent:
            text = os.read(output, 4096) if select.select([output], [], [], _WATCH_S)[0] else b""
            if time.monotonic() >= window_end:
                _say_omitted(num_dropped)
                window_end, left, num_dropped = time.monotonic() + 1.0, MAX_PRINTED, 0
            if text:
                shown = text[:left] if _write_stderr(text[:left]) else b""
                left -= len(shown)
                num_dropped += len(text) - len(shown)
    _say_omitted(num_dropped)


class _Stopped(Exception):
    pass


def _stop(*_: Any) -> None:
    signal.signal(END_FORWARDING, signal.SIG_IGN)
    raise _Stopped


def _say_omitted(num_bytes: int) -> None:
    if num_bytes:
        _write_stderr(f"\n[omitted {num_bytes} more bytes printed by rewards]\n".encode())


def _write_stderr(text: bytes) -> bool:
    """Return True if the text could be written without blocking; a slow reader must not stop us."""
    try:
        return bool(select.select([], [2], [], 0)[1]) and bool(os.write(2, text))
    except OSError:
        return False


def keep(pool: int, end: socket.socket, output: int, memory_bytes: int, work: Callable[[Any], Any]) -> None:
    """Main function of a keeper, which leads the group of its worker."""
    os.setpgid(0, 0)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    max_bytes = resident_bytes(os.getpid()) + memory_bytes + _SPARE_BYTES
    worker = fork_process(_serve, mask, end, output, memory_bytes, work)
    events, watch_s = {end.fileno(): 0}, _CHILD_POLL_S
    with contextlib.suppress(AttributeError, OSError):  # Linux from 5.3 on
        events[os.pidfd_open(worker.pid)] = select.POLLIN
        watch_s = _WATCH_S
    while os.getppid() == pool and not _poll({end.fileno(): 0}, 0):
        if worker.code is None and (loss := _loss(worker, max_bytes)) is not None:
            events = {end.fileno(): 0}
            with contextlib.suppress(OSError):
                end.sendall(_packed(loss))
        _poll(events, watch_s)
    worker.kill()
    os.killpg(0, signal.SIGKILL)


def _loss(worker: ForkedProcess, max_bytes: int) -> WorkerLost | None:
    """Return how the worker has ended, or None while it runs; kill it if it has more memory than that."""
    if (code := worker.poll()) is not None:
        return lost(code)
    if resident_bytes(worker.pid) <= max_bytes:
        return None
    worker.kill()
    return WorkerLost("took too much memory", f"its process had more than {max_bytes / 1e9:.2f} GB")


def _serve(
    mask: set[int], end: socket.socket, output: int, memory_bytes: int, work: Callable[[Any], Any]
) -> None:
    """Main function of a worker. mask: the signals that the pool's process blocks."""
    _set_up_worker(output, memory_bytes)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    pid = os.getpid()
    with end.makefile("rb") as incoming:
        while header := incoming.read(_HEADER_BYTES):
            outcome = work(pickle.loads(incoming.read(int.from_bytes(header))))
            if os.getpid() != pid:
                os._exit(0)  # a child forked by the job returned here: it must not continue as a worker
            for timer in _TIMERS:
                signal.setitimer(timer, 0)  # one that the job left behind would end another job
            end.sendall(_packed(outcome))
    os._exit(0)


def _set_up_worker(output: int, memory_bytes: int) -> None:
    pid = os.getpid()

    def ignore(number: int, frame: FrameType | None) -> None:
        if os.getpid() != pid:  # a child that a job forked
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    for number in _STOPS:
        signal.signal(number, ignore)  # not SIG_IGN, which programs that a job starts would inherit
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    sys.stdout = sys.stderr = open(1, "w", buffering=1, errors="replace", closefd=False)  # noqa: SIM115
    import torch  # by now it is imported: a command's first checks run without it

    torch.set_num_threads(1)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a job may have killed its keeper
        limit_memory(memory_bytes)
        limit_softly(resource.RLIMIT_NPROC, num_tasks() + MORE_TASKS)


def num_tasks() -> int:
    """Return the number of tasks on the machine: at least that of the user's."""
    return int(Path("/proc/loadavg").read_text().split()[3].partition("/")[2])
