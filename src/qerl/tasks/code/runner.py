"""Starts confined processes, reads what they say up to a limit, and kills them at the deadline.

    run_with_input    program + standard input           -> what it printed
    run_call          program + function + arguments     -> what the function gave
    run_test          program | test, a process each     -> whether the test held

None stands for a program that failed: it raised, was killed, took too long or printed too much. A process has
an empty folder as its working directory and HOME, an environment of six names, and no descriptor but its own;
it stays in the process group of the worker, and dies with it.
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

from qerl.tasks.code import child, sandbox

_CHILD = Path(child.__file__)
_FILE_BYTES = 1 << 20
_VERDICT_BYTES = 1000


class SandboxUnavailable(RuntimeError):
    """The process could not be confined, so the program was not run."""


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """Limits(deadline_s=4.0, memory_bytes=1 << 30, output_bytes=1 << 20), of one process."""

    deadline_s: float
    memory_bytes: int
    output_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Process:
    popen: subprocess.Popen[bytes]
    verdict: int


def probe(limits: Limits) -> bool:
    """Whether Landlock holds here; Unconfined where a program cannot be run at all."""
    if not hasattr(os, "memfd_create"):
        raise SandboxUnavailable(f"programs are confined on Linux only, this is {sys.platform}")
    with _started("call", {"text": "f = int", "function": "f", "given": []}, limits) as process:
        said = _read({process.verdict: _VERDICT_BYTES}, time.monotonic() + 60)
        if not (verdict := _checked(said[process.verdict])):
            raise SandboxUnavailable(f"{sys.executable} ended before it was confined")
        return verdict[:1] == b"L"


def run_with_input(program: str, given: str, limits: Limits) -> str | None:
    end = time.monotonic() + limits.deadline_s
    with _started("input", {"text": program}, limits, given=given) as process:
        assert process.popen.stdout is not None
        output = process.popen.stdout.fileno()
        said = _read({output: limits.output_bytes, process.verdict: _VERDICT_BYTES}, end)
        _checked(said[process.verdict])
        if len(said[output]) > limits.output_bytes or _exit_code(process, end) != 0:
            return None
        return said[output].decode(errors="replace")


def run_call(program: str, function: str, given: list[Any], limits: Limits) -> tuple[Any] | None:
    """(value,), so that None can be one."""
    order = {"text": program, "function": function, "given": child.encode(given)}
    end = time.monotonic() + limits.deadline_s
    with _started("call", order, limits) as process:
        said = _read({process.verdict: limits.output_bytes}, end)[process.verdict]
    try:
        return (child.decode(json.loads(_checked(said)[1:])),)
    except (ValueError, TypeError, AttributeError, RecursionError):  # said by the program: it may be anything
        return None


def run_test(program: str, test: str, limits: Limits) -> bool:
    ends = socket.socketpair()
    deadline = time.monotonic() + limits.deadline_s
    with ends[0], ends[1], ExitStack() as stack:
        theirs = stack.enter_context(_started("serve", {"text": program}, limits, line=ends[0]))
        ours = stack.enter_context(_started("judge", {"text": test}, limits, line=ends[1]))
        for end in ends:
            end.close()
        said = _read({ours.verdict: _VERDICT_BYTES, theirs.verdict: _VERDICT_BYTES}, deadline)
        return _checked(said[ours.verdict])[1:] == b"passed" and bool(_checked(said[theirs.verdict]))


@contextmanager
def _started(
    way: str, order: dict[str, Any], limits: Limits, *, given: str = "", line: socket.socket | None = None
) -> Iterator[_Process]:
    with ExitStack() as stack:
        folder = stack.enter_context(_folder())
        confined = {
            "folder": folder,
            "cpu_s": math.ceil(limits.deadline_s) + 1,
            "memory_bytes": limits.memory_bytes,
            "file_bytes": _FILE_BYTES,
        }
        told = stack.enter_context(_memory(json.dumps(order | {"limits": confined})))
        stdin = stack.enter_context(_memory(given))
        verdict, said = os.pipe()
        stack.callback(os.close, verdict)
        passed = [said, told, *([line.fileno()] if line else [])]
        try:
            popen = subprocess.Popen(
                [sys.executable, "-I", "-B", str(_CHILD), way, *map(str, [*passed, 0][:3])],
                stdin=stdin,
                stdout=subprocess.PIPE if way == "input" else subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=passed,
                cwd=folder,
                env=_environment(folder),
            )
        finally:
            os.close(said)
        stack.callback(_end, popen)
        yield _Process(popen, verdict)


def _environment(folder: str) -> dict[str, str]:
    of_folder = dict.fromkeys(("HOME", "TMPDIR"), folder)
    return of_folder | {
        "PATH": "/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }


@contextmanager
def _folder() -> Iterator[str]:
    folder = tempfile.mkdtemp(prefix="qerl-code-")
    try:
        if os.geteuid() == 0:
            os.chown(folder, sandbox.NOBODY, sandbox.NOBODY)
        yield folder
    finally:
        try:
            os.rmdir(folder)
        except OSError:  # not empty. rm takes any depth, which shutil does not, once it may look inside
            subprocess.run(["chmod", "-R", "u+rwX", folder], stderr=subprocess.DEVNULL, check=False)
            subprocess.run(["rm", "-rf", folder], stderr=subprocess.DEVNULL, check=False)


@contextmanager
def _memory(text: str) -> Iterator[int]:
    """A file without a name, to be read from its start."""
    with os.fdopen(os.memfd_create("qerl"), "r+b") as file:
        file.write(text.encode(errors="surrogatepass"))
        file.seek(0)
        yield file.fileno()


def _end(popen: subprocess.Popen[bytes]) -> None:
    popen.kill()
    popen.wait()
    if popen.stdout is not None:
        popen.stdout.close()


def _read(limits: dict[int, int], end: float) -> dict[int, bytes]:
    """What came from each descriptor until all are closed, one is over its limit, or time is up."""
    said = {descriptor: bytearray() for descriptor in limits}
    with selectors.DefaultSelector() as selector:
        for descriptor in limits:
            selector.register(descriptor, selectors.EVENT_READ)
        while selector.get_map() and (left := end - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                part = os.read(key.fd, 1 << 16)
                said[key.fd] += part
                if not part:
                    selector.unregister(key.fd)
                elif len(said[key.fd]) > limits[key.fd]:
                    return {descriptor: bytes(text) for descriptor, text in said.items()}
    return {descriptor: bytes(text) for descriptor, text in said.items()}


def _exit_code(process: _Process, end: float) -> int | None:
    try:
        return process.popen.wait(max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None


def _checked(verdict: bytes) -> bytes:
    """Its first letter was written before the program was there."""
    if verdict[:1] == b"E":
        raise SandboxUnavailable(verdict[1:].decode(errors="replace"))
    return verdict
