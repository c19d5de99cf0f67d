"""Start sandboxed processes, read their output up to a limit, and kill them at the deadline.

    run_with_input    program + standard input           -> what it printed
    run_call          program + function + arguments     -> the function's value
    run_test          program | test, one process each   -> True if the test passed

None stands for a program that failed: it raised, was killed, took too long or printed too much. A process has
an empty folder as its working directory and HOME, an environment of six names, and no descriptors but its
own; it stays in the process group of the worker, and dies with it.
"""

import dataclasses
import json
import math
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from qerl.tasks.code import sandbox, values
from qerl.tasks.code.script import Script

_CHILD = Path(sandbox.__file__).with_name("child.py")
_FILE_BYTES = 1 << 20
_RESULT_BYTES = 1000


class SandboxUnavailable(RuntimeError):
    """The process could not be sandboxed, so the program was not run."""


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one process: Limits(deadline_s=4.0, memory_bytes=1 << 30, output_bytes=1 << 20)."""

    deadline_s: float
    memory_bytes: int
    output_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class _ChildProcess:
    popen: subprocess.Popen[bytes]
    result: int
    """Descriptor from which the parent reads the result."""


def probe(limits: Limits) -> bool:
    """Return True if Landlock is available; raise SandboxUnavailable if no program can be run."""
    if not hasattr(os, "memfd_create"):
        raise SandboxUnavailable(f"the sandbox needs Linux, this is {sys.platform}")
    with _start_child("call", {"source": "f = int", "function": "f", "arguments": []}, limits) as process:
        output = _read({process.result: _RESULT_BYTES}, time.monotonic() + 60)
        if not (result := _check(output[process.result])):
            raise SandboxUnavailable(f"{sys.executable} exited before the sandbox was set up")
        return result[:1] == b"L"


def run_with_input(program: str, stdin: str, limits: Limits) -> str | None:
    end = time.monotonic() + limits.deadline_s
    with _start_child("stdin", {"source": program}, limits, stdin=stdin) as process:
        assert process.popen.stdout is not None
        stdout = process.popen.stdout.fileno()
        output = _read({stdout: limits.output_bytes, process.result: _RESULT_BYTES}, end)
        _check(output[process.result])
        if len(output[stdout]) > limits.output_bytes or _exit_code(process, end) != 0:
            return None
        return output[stdout].decode(errors="replace")


def run_call(program: str, function: str, arguments: list[Any], limits: Limits) -> tuple[Any] | None:
    """Return (value,), so that the value may be None, as `values.encode` makes it."""
    order = {"source": program, "function": function, "arguments": values.encode(arguments)}
    end = time.monotonic() + limits.deadline_s
    with _start_child("call", order, limits) as process:
        output = _check(_read({process.result: limits.output_bytes}, end)[process.result])
    try:
        return (json.loads(output[1:]),)
    except (ValueError, RecursionError, MemoryError):  # the program may write anything
        return None


def run_test(program: str, test: Script, limits: Limits) -> bool:
    sockets = socket.socketpair()
    deadline = time.monotonic() + limits.deadline_s
    with sockets[0], sockets[1], ExitStack() as stack:
        server = stack.enter_context(_start_child("serve", {"source": program}, limits, link=sockets[0]))
        order = {"test": dataclasses.asdict(test)}
        tester = stack.enter_context(_start_child("test", order, limits, link=sockets[1]))
        for end in sockets:
            end.close()
        output = _read({tester.result: _RESULT_BYTES, server.result: _RESULT_BYTES}, deadline)
        return _check(output[tester.result])[1:] == b"passed" and bool(_check(output[server.result]))


@contextmanager
def _start_child(
    mode: str, order: dict[str, Any], limits: Limits, *, stdin: str = "", link: socket.socket | None = None
) -> Iterator[_ChildProcess]:
    with ExitStack() as stack:
        folder = stack.enter_context(_temporary_folder())
        sandbox_limits = {
            "folder": folder,
            "cpu_s": math.ceil(limits.deadline_s) + 1,
            "memory_bytes": limits.memory_bytes,
            "file_bytes": _FILE_BYTES,
        }
        order_file = stack.enter_context(_memory_file(json.dumps(order | {"limits": sandbox_limits})))
        stdin_file = stack.enter_context(_memory_file(stdin))
        result, child_end = os.pipe()
        stack.callback(os.close, result)
        passed = [child_end, order_file, *([link.fileno()] if link else [])]
        try:
            popen = subprocess.Popen(
                [sys.executable, "-I", "-B", str(_CHILD), mode, *map(str, [*passed, 0][:3])],
                stdin=stdin_file,
                stdout=subprocess.PIPE if mode == "stdin" else subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=passed,
                cwd=folder,
                env=_environment(folder),
            )
        finally:
            os.close(child_end)
        stack.callback(_kill, popen)
        yield _ChildProcess(popen, result)


def _environment(folder: str) -> dict[str, str]:
    return dict.fromkeys(("HOME", "TMPDIR"), folder) | {
        "PATH": "/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }


@contextmanager
def _temporary_folder() -> Iterator[str]:
    folder = tempfile.mkdtemp(prefix="qerl-code-")
    try:
        if os.geteuid() == 0:
            os.chown(folder, sandbox.NOBODY, sandbox.NOBODY)
        yield folder
    finally:
        try:
            os.rmdir(folder)
        except OSError:  # not empty; rm removes any depth, unlike shutil, once it may read the folders
            subprocess.run(["chmod", "-R", "u+rwX", folder], stderr=subprocess.DEVNULL, check=False)
            subprocess.run(["rm", "-rf", folder], stderr=subprocess.DEVNULL, check=False)


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


def _exit_code(process: _ChildProcess, end: float) -> int | None:
    try:
        return process.popen.wait(max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None


def _check(result: bytes) -> bytes:
    """Raise SandboxUnavailable if the first letter, written before the program was loaded, is E."""
    if result[:1] == b"E":
        raise SandboxUnavailable(result[1:].decode(errors="replace"))
    return result
