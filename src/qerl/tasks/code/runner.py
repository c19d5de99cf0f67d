"""Start sandboxed processes, read their output up to a limit, and kill them at the deadline.

    run_with_input    program + standard input           -> what it printed
    run_call          program + function + arguments     -> the function's value
    run_test          program | test, one process each   -> True if the test passed

None stands for a program that failed: it raised, was killed, took too long or printed too much. A process has
an empty folder as its working directory and HOME, an environment of seven names, no descriptors but its own
and no controlling terminal. It has a session of its own, and dies with the worker.
"""

import dataclasses
import json
import math
import os
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from qerl.tasks.code import backends, cgroup, values
from qerl.tasks.code.script import Script

_CHILD = Path(backends.__file__).with_name("child.py")
_RESULT_BYTES = 1000
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


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one process: Limits(deadline_s=4.0, memory_bytes=1 << 30, output_bytes=1 << 20)."""

    deadline_s: float
    memory_bytes: int
    output_bytes: int
    backend: str = "landlock"
    """A key of backends.BACKENDS; sandbox.choose returns one that works here."""
    cgroup: Path | None = None
    """Group in which each process gets one of its own; None where that is not allowed."""


def probe(limits: Limits) -> set[str]:
    """Run a program of one line and return which of landlock and seccomp are active. Raise SandboxUnavailable
    with the reason if the backend does not work."""
    if not hasattr(os, "memfd_create"):
        raise SandboxUnavailable(f"the sandbox needs Linux, this is {sys.platform}")
    order = {"source": "f = int", "function": "f", "arguments": []}
    try:
        with _start_child("call", order, limits, stderr=subprocess.PIPE) as (popen, result):
            output = _read({result: _RESULT_BYTES}, time.monotonic() + 60)[result]
            popen.kill()
            errors = popen.communicate()[1].decode(errors="replace").strip()
    except OSError as error:  # no such command
        raise SandboxUnavailable(str(error)) from error
    try:
        active = int(_check(output, math.inf)[:1])
    except SandboxUnavailable as error:
        raise SandboxUnavailable(errors[-300:] or str(error)) from error
    return {name for bit, name in ((1, "landlock"), (2, "seccomp")) if active & bit}


def run_with_input(program: str, stdin: str, limits: Limits) -> str | None:
    end = time.monotonic() + limits.deadline_s
    with _start_child("stdin", {"source": program}, limits, stdin=stdin) as (popen, result):
        assert popen.stdout is not None
        stdout = popen.stdout.fileno()
        output = _read({stdout: limits.output_bytes, result: _RESULT_BYTES}, end)
        _check(output[result], end)
        if len(output[stdout]) > limits.output_bytes or _exit_code(popen, end) != 0:
            return None
        return output[stdout].decode(errors="replace")


def run_call(program: str, function: str, arguments: list[Any], limits: Limits) -> tuple[Any] | None:
    """Return (value,), so that the value may be None, as `values.encode` makes it."""
    order = {"source": program, "function": function, "arguments": values.encode(arguments)}
    end = time.monotonic() + limits.deadline_s
    with _start_child("call", order, limits) as (_, result):
        output = _check(_read({result: limits.output_bytes}, end)[result], end)
    try:
        return (json.loads(output[1:]),)
    except (ValueError, RecursionError, MemoryError):  # the program may write anything
        return None


def run_test(program: str, test: Script, limits: Limits) -> bool:
    """Return True if the test passes; raise ValueError if it does what is not supported, such as giving the
    program an object that cannot leave its own process, or has assertions that never run."""
    sockets = socket.socketpair()
    deadline = time.monotonic() + limits.deadline_s
    with sockets[0], sockets[1], ExitStack() as stack:
        _, server = stack.enter_context(_start_child("serve", {"source": program}, limits, link=sockets[0]))
        order = {"test": dataclasses.asdict(test)}
        _, tester = stack.enter_context(_start_child("test", order, limits, link=sockets[1]))
        for end in sockets:
            end.close()
        output = _read(dict.fromkeys((tester, server), _RESULT_BYTES), deadline)
        outcome = _check(output[tester], deadline)[1:].decode(errors="replace")
        if outcome.startswith("refused "):
            raise ValueError(f"the test {outcome.removeprefix('refused ')}"[:500])
        return bool(_check(output[server], deadline)) and outcome == "passed"


@contextmanager
def _start_child(
    mode: str,
    order: dict[str, Any],
    limits: Limits,
    *,
    stdin: str = "",
    link: socket.socket | None = None,
    stderr: int = subprocess.DEVNULL,
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Yield the process and the descriptor from which its result is read; kill the process at the end."""
    with ExitStack() as stack:
        backend = backends.BACKENDS[limits.backend]
        box = stack.enter_context(backend.open_box(_CHILD))
        bounds = {"memory_bytes": limits.memory_bytes, "max_tasks": backends.MAX_TASKS}
        join = stack.enter_context(cgroup.own_group(limits.cgroup, **bounds))
        seconds = math.ceil(limits.deadline_s) + 1
        settings = backends.confine_settings(backend, box, cpu_s=seconds, memory_bytes=limits.memory_bytes)
        order_file = stack.enter_context(_memory_file(json.dumps(order | {"confine": settings})))
        stdin_file = stack.enter_context(_memory_file(stdin))
        result, child_end = os.pipe()
        stack.callback(os.close, result)
        passed = [child_end, order_file, *([link.fileno()] if link else [])]
        python = [sys.executable, "-I", "-B", str(_CHILD), mode, *map(str, [*passed, 0][:3])]
        try:
            popen = subprocess.Popen(
                [*join, *box.command, *python],
                stdin=stdin_file,
                stdout=subprocess.PIPE if mode == "stdin" else subprocess.DEVNULL,
                stderr=stderr,
                pass_fds=passed,
                cwd=box.cwd,
                env=_ENVIRONMENT | {"HOME": box.folder, "TMPDIR": box.folder},
                start_new_session=True,
            )
        finally:
            os.close(child_end)
        stack.callback(_kill, popen)
        yield popen, result


@contextmanager
def _memory_file(text: str) -> Iterator[int]:
    """Yield the descriptor of an unnamed file that contains the text."""
    with os.fdopen(os.memfd_create("qerl"), "r+b") as file:
        file.write(text.encode(errors="surrogatepass"))
        file.seek(0)
        yield file.fileno()


def _kill(popen: subprocess.Popen[bytes]) -> None:
    popen.kill()
    popen.wait()
    if popen.stdout is not None:
        popen.stdout.close()


def _read(limits: dict[int, int], end: float) -> dict[int, bytes]:
    """Read each descriptor until all are closed, one exceeds its limit in bytes, or time is up."""
    output = {descriptor: bytearray() for descriptor in limits}
    is_over = False
    with selectors.DefaultSelector() as selector:
        for descriptor in limits:
            selector.register(descriptor, selectors.EVENT_READ)
        while not is_over and selector.get_map() and (left_s := end - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                part = os.read(key.fd, 1 << 16)
                output[key.fd] += part
                if not part:
                    selector.unregister(key.fd)
                is_over |= len(output[key.fd]) > limits[key.fd]
    return {descriptor: bytes(text) for descriptor, text in output.items()}


def _exit_code(popen: subprocess.Popen[bytes], end: float) -> int | None:
    try:
        return popen.wait(max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None


def _check(result: bytes, end: float) -> bytes:
    """Raise SandboxUnavailable if the first letter, written before the program was loaded, is E, or if none
    came although time was left."""
    if result[:1] == b"E":
        raise SandboxUnavailable(result[1:].decode(errors="replace"))
    if not result and time.monotonic() < end:
        raise SandboxUnavailable("the process ended before it was confined")
    return result
