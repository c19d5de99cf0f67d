"""Start child.py for one program or test: by a command, or as a fork of a server.

A box with a command (Bubblewrap) starts Python anew. Else the process is forked from a server, which has
imported what the mode needs: a sixth of the time. A worker has a server for each mode, which starts with
its first process, starts again if it was killed, and ends with the worker.
"""

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple, Protocol

from qerl.tasks.code import cgroup
from qerl.tasks.code.backends import Box

CHILD = Path(__file__).with_name("child.py")
_ANSWER_S = 60.0
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    # Up to eight arenas for a core, which glibc makes for threads, take 64 MiB each of the limited addresses:
    # the 32 threads that ThreadPoolExecutor makes on many cores would have no place in 1 GiB.
    "MALLOC_ARENA_MAX": "1",
}


class SandboxUnavailable(RuntimeError):
    """The process could not be sandboxed, so the program was not run."""


class Descriptors(NamedTuple):
    """Those of a process, which the caller closes."""

    stdin: int
    stdout: int
    stderr: int
    result: int
    order: int
    link: int | None

    @property
    def channels(self) -> list[int]:
        return [self.result, self.order, *([] if self.link is None else [self.link])]


class Process(Protocol):
    def exit_code(self, end: float) -> int | None:
        """Wait for the process's end, and return None if it has not ended by this time of the clock."""
        ...

    def kill(self) -> None:
        """Kill it, and wait until it is gone."""
        ...


def start(mode: str, box: Box, group: Path | None, descriptors: Descriptors) -> Process:
    """group: file of the control group that it joins. Raise SandboxUnavailable or OSError."""
    if box.command or not _has_pidfds():
        return _Spawned(mode, box, group, descriptors)
    reason = ""
    for _ in range(2):  # a server may have ended since it forked the last one
        server = _server(mode)
        try:
            return server.fork(box.folder, group, descriptors)
        except _ServerEnded as error:
            reason = server.stop() or str(error)
    raise SandboxUnavailable(f"the fork server ended: {reason}")


class _Spawned:
    def __init__(self, mode: str, box: Box, group: Path | None, descriptors: Descriptors):
        self._popen = subprocess.Popen(
            [*cgroup.join_command(group), *box.command, *_python(mode, *[*descriptors.channels, 0][:3])],
            stdin=descriptors.stdin,
            stdout=descriptors.stdout,
            stderr=descriptors.stderr,
            pass_fds=descriptors.channels,
            cwd=box.cwd,
            env=_ENVIRONMENT | {"HOME": box.folder, "TMPDIR": box.folder},
            start_new_session=True,
        )

    def exit_code(self, end: float) -> int | None:
        try:
            return self._popen.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        self._popen.kill()
        self._popen.wait()


class _Forked:
    def __init__(self, pidfd: int, status: int):
        self._pidfd, self._status = pidfd, status

    def exit_code(self, end: float) -> int | None:
        if not _is_readable(self._status, max(0.0, end - time.monotonic())):
            return None
        text = os.read(self._status, 20)
        return int(text) if text else None

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        _is_readable(self._pidfd, None)
        os.close(self._pidfd)
        os.close(self._status)


class _ServerEnded(Exception):
    pass


class _ForkServer:
    """A process that forks one for each request (fork_server.py)."""

    def __init__(self, mode: str):
        self._control, control_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(_ANSWER_S)
        self._lock = threading.Lock()
        self._errors = os.memfd_create("qerl")
        stdin, worker = os.memfd_create("qerl"), os.pidfd_open(os.getpid())
        reader, stdout = os.pipe()
        os.close(reader)
        passed = [control_end.fileno(), worker]
        try:
            # Python takes its standard files as they are at the start: of the kinds that its processes get.
            self._popen = subprocess.Popen(
                _python(mode, *passed),
                stdin=stdin,
                stdout=stdout if mode == "stdin" else subprocess.DEVNULL,
                stderr=self._errors,
                pass_fds=passed,
                env=_ENVIRONMENT | {"HOME": "/", "TMPDIR": "/"},  # until a process has its own
                start_new_session=True,
            )
        except OSError:
            os.close(self._errors)
            self._control.close()
            raise
        finally:
            control_end.close()
            for descriptor in (stdin, stdout, worker):
                os.close(descriptor)

    @property
    def pid(self) -> int:
        return self._popen.pid

    def fork(self, folder: str, group: Path | None, descriptors: Descriptors) -> _Forked:
        status, status_end = os.pipe()
        text = json.dumps({"folder": folder, "group": None if group is None else str(group)}).encode()
        passed = [*descriptors[:3], status_end, *descriptors.channels]
        try:
            with self._lock:
                socket.send_fds(self._control, [text], passed)
                answer, pidfds, *_ = socket.recv_fds(self._control, 1000, 1, socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            os.close(status)
            raise _ServerEnded(str(error)) from error
        finally:
            os.close(status_end)
        if pidfds:
            return _Forked(pidfds[0], status)
        os.close(status)
        if answer:
            raise SandboxUnavailable(f"the fork server: {answer.decode()}")
        raise _ServerEnded("without a word")

    def stop(self) -> str:
        """Kill it and return the last of its errors. Threads that share it may all do so."""
        with _lock:
            for key in [key for key, server in _servers.items() if server is self]:
                del _servers[key]
        with self._lock:
            self._popen.kill()
            self._popen.wait()
            if self._control.fileno() < 0:
                return ""
            self._control.close()
            with os.fdopen(self._errors, "rb") as file:
                file.seek(0)
                return file.read().decode(errors="replace").strip()[-300:]


_lock = threading.Lock()
_servers: dict[tuple[str, str, Path], _ForkServer] = {}
"""By mode and what it runs."""
_of_the_parent: list[dict[tuple[str, str, Path], _ForkServer]] = []


def _server(mode: str) -> _ForkServer:
    key = (mode, sys.executable, CHILD)
    with _lock:
        if key not in _servers:
            try:
                _servers[key] = _ForkServer(mode)
            except OSError as error:
                raise SandboxUnavailable(str(error)) from error
        return _servers[key]


def _leave_to_parent() -> None:
    """A fork of the worker has servers of its own. Its parent's are kept here: deleting them would warn."""
    global _lock, _servers
    _of_the_parent.append(_servers)
    _lock, _servers = threading.Lock(), {}


@atexit.register
def _stop_servers() -> None:
    """Servers end by themselves, but Python warns of processes that still run."""
    for server in list(_servers.values()):
        server.stop()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_leave_to_parent)


@cache
def _has_pidfds() -> bool:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


def _python(mode: str, *descriptors: int) -> list[str]:
    return [sys.executable, "-I", "-B", str(CHILD), mode, *map(str, descriptors)]


def _is_readable(descriptor: int, within_s: float | None) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(None if within_s is None else within_s * 1000))
