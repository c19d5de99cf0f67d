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
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from qerl.tasks.code import backends, cgroup, launch, values
from qerl.tasks.code.launch import SandboxUnavailable
from qerl.tasks.code.script import Script

_RESULT_BYTES = 1000
_ERROR_BYTES = 1 << 16


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
        with _start_child("call", order, limits, pipes=("stderr",)) as child:
            (stderr,) = child.pipes
            texts = _read({child.result: _RESULT_BYTES, stderr: _ERROR_BYTES}, time.monotonic() + 60)
            output, errors = texts[child.result], texts[stderr].decode(errors="replace").strip()
    except OSError as error:  # no such command
        raise SandboxUnavailable(str(error)) from error
    try:
        active = int(_check(output, math.inf)[:1])
    except SandboxUnavailable as error:
        raise SandboxUnavailable(errors[-300:] or str(error)) from error
    return {name for bit, name in ((1, "landlock"), (2, "seccomp")) if active & bit}


def run_with_input(program: str, stdin: str, limits: Limits) -> str | None:
    end = time.monotonic() + limits.deadline_s
    with _start_child("stdin", {"source": program}, limits, stdin=stdin, pipes=("stdout",)) as child:
        (stdout,) = child.pipes
        output = _read({stdout: limits.output_bytes, child.result: _RESULT_BYTES}, end)
        _check(output[child.result], end)
        if len(output[stdout]) > limits.output_bytes or child.process.exit_code(end) != 0:
            return None
        return output[stdout].decode(errors="replace")


def run_call(program: str, function: str, arguments: list[Any], limits: Limits) -> tuple[Any] | None:
    """Return (value,), so that the value may be None, as `values.encode` makes it."""
    order = {"source": program, "function": function, "arguments": values.encode(arguments)}
    end = time.monotonic() + limits.deadline_s
    with _start_child("call", order, limits) as child:
        output = _check(_read({child.result: limits.output_bytes}, end)[child.result], end)
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
        server = stack.enter_context(
            _start_child("serve", {"source": program}, limits, link=sockets[0])
        ).result
        order = {"test": dataclasses.asdict(test)}
        tester = stack.enter_context(_start_child("test", order, limits, link=sockets[1])).result
        for end in sockets:
            end.close()
        output = _read(dict.fromkeys((tester, server), _RESULT_BYTES), deadline)
        outcome = _check(output[tester], deadline)[1:].decode(errors="replace")
        if outcome.startswith("refused "):
            raise ValueError(f"the test {outcome.removeprefix('refused ')}"[:500])
        return bool(_check(output[server], deadline)) and outcome == "passed"


class _Child(NamedTuple):
    process: launch.Process
    result: int
    """Descriptor from which its result is read."""
    pipes: list[int]
    """Descriptors of the asked standard files."""


@contextmanager
def _start_child(
    mode: str,
    order: dict[str, Any],
    limits: Limits,
    *,
    stdin: str = "",
    link: socket.socket | None = None,
    pipes: tuple[str, ...] = (),
) -> Iterator[_Child]:
    """Start a process and kill it at the end. pipes: of stdout and stderr, those that are read; others are
    dropped."""
    with ExitStack() as stack:
        backend = backends.BACKENDS[limits.backend]
        box = stack.enter_context(backend.open_box(launch.CHILD))
        bounds = {"memory_bytes": limits.memory_bytes, "max_tasks": backends.MAX_TASKS}
        group = stack.enter_context(cgroup.own_group(limits.cgroup, **bounds))
        seconds = math.ceil(limits.deadline_s) + 1
        settings = backends.confine_settings(backend, box, cpu_s=seconds, memory_bytes=limits.memory_bytes)
        with ExitStack() as writers:
            order_file = writers.enter_context(_memory_file(json.dumps(order | {"confine": settings})))
            ends = {name: _pipe(stack, writers) for name in ("result", *pipes)}
            dropped = _closed_by(writers, os.open(os.devnull, os.O_WRONLY))
            out, err, result = (ends.get(name, (0, dropped))[1] for name in ("stdout", "stderr", "result"))
            descriptors = launch.Descriptors(
                stdin=writers.enter_context(_memory_file(stdin)),
                stdout=out,
                stderr=err,
                result=result,
                order=order_file,
                link=None if link is None else link.fileno(),
            )
            process = launch.start(mode, box, group, descriptors)
        stack.callback(process.kill)
        yield _Child(process, ends["result"][0], [ends[name][0] for name in pipes])


def _pipe(reader: ExitStack, writer: ExitStack) -> tuple[int, int]:
    """Return a pipe's ends, each closed by its own stack."""
    read, write = os.pipe()
    return _closed_by(reader, read), _closed_by(writer, write)


def _closed_by(stack: ExitStack, descriptor: int) -> int:
    stack.callback(os.close, descriptor)
    return descriptor


@contextmanager
def _memory_file(text: str) -> Iterator[int]:
    """Yield the descriptor of an unnamed file that contains the text."""
    with os.fdopen(os.memfd_create("qerl"), "r+b") as file:
        file.write(text.encode(errors="surrogatepass"))
        file.seek(0)
        yield file.fileno()


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


def _check(result: bytes, end: float) -> bytes:
    """Raise SandboxUnavailable if the first letter, written before the program was loaded, is E, or if none
    came although time was left."""
    if result[:1] == b"E":
        raise SandboxUnavailable(result[1:].decode(errors="replace"))
    if not result and time.monotonic() < end:
        raise SandboxUnavailable("the process ended before it was confined")
    return result
