"""Give each program a group of its own in cgroup v2, which bounds what rlimits do not.

    memory.max          the limit of the address space and _BOX_BYTES; also counts files in a tmpfs, the box's
                        processes and the kernel's memory for pipes and threads
    memory.swap.max     0, where the kernel counts swap
    memory.oom.group    1: the kernel kills all of the group, not one process of it
    pids.max            processes and threads of the group, the box's included
    cgroup.kill         1 at the end

The groups are made in the worker's own. The kernel enables the controllers for children of a group that has
processes only in the root of the hierarchy, so elsewhere there are none: this never moves the worker. A
forked process joins the group before it loads the program, else a shell joins before it becomes the
program's process: nothing of it ever runs outside.
"""

import errno
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_CONTROLLERS = ("memory", "pids")
_BOX_BYTES = 128 << 20
"""Memory besides the address space: the box's tmpfs of 64 MiB, its processes, the kernel's part."""
_REMOVE_S = 10.0
_JOIN = 'echo 0 > "$0" && exec "$@"'


def find(proc: Path = Path("/proc/self")) -> Path:
    """Return this process's own group once the controllers act in groups that are made there; raise OSError
    with the reason if they cannot."""
    folder = _own_group(proc)
    available = (folder / "cgroup.controllers").read_text().split()
    if missing := [name for name in _CONTROLLERS if name not in available]:
        raise OSError(f"cgroup v2 has no controller {' or '.join(missing)} in {folder}")
    control = folder / "cgroup.subtree_control"
    enabled = control.read_text().split()
    if disabled := [f"+{name}" for name in _CONTROLLERS if name not in enabled]:
        try:
            _write(control, " ".join(disabled))
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            raise OSError(f"{folder} is not the root of cgroup v2 and holds this process") from error
    return folder


@contextmanager
def own_group(parent: Path | None, *, memory_bytes: int, max_tasks: int) -> Iterator[Path | None]:
    """Make a group in the parent and yield the file through which a process joins it; at the end kill what
    runs there and remove the group. Without a parent there is no group, and no file."""
    if parent is None:
        yield None
        return
    folder = parent / f"qerl-code-{secrets.token_hex(8)}"
    folder.mkdir()
    try:
        _write(folder / "memory.max", str(memory_bytes + _BOX_BYTES))
        if (folder / "memory.swap.max").exists():
            _write(folder / "memory.swap.max", "0")
        _write(folder / "memory.oom.group", "1")
        _write(folder / "pids.max", str(max_tasks))
        yield folder / "cgroup.procs"
    finally:
        try:
            _write(folder / "cgroup.kill", "1")
        finally:
            _remove(folder)


def join_command(procs: Path | None) -> list[str]:
    """Return the arguments before those of a command that starts it in the group of this file."""
    return ["/bin/sh", "-c", _JOIN, str(procs)] if procs else []


def _own_group(proc: Path) -> Path:
    lines = (proc / "cgroup").read_text().splitlines()
    paths = [line.removeprefix("0::") for line in lines if line.startswith("0::")]
    for line in (proc / "mountinfo").read_text().splitlines():
        mount, _, kind = line.partition(" - ")
        escaped = mount.split()[3:5]
        root, point = (re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), path) for path in escaped)
        if paths and kind.split()[0] == "cgroup2":
            inside = os.path.relpath(paths[0], root)
            if ".." in [*paths[0].split("/"), *inside.split("/")]:
                raise OSError(f"this process's group {paths[0]} is not below {point}")
            return Path(os.path.normpath(f"{point}/{inside}"))
    raise OSError("cgroup v2 is not mounted")


def _write(path: Path, text: str) -> None:
    """Write to a file of the kernel's, which must be there."""
    descriptor = os.open(path, os.O_WRONLY | os.O_TRUNC)
    try:
        os.write(descriptor, text.encode())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(descriptor)


def _remove(folder: Path) -> None:
    """Remove the group as soon as its last process, which has been killed, is gone."""
    end = time.monotonic() + _REMOVE_S
    while True:
        try:
            return folder.rmdir()
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > end:
                raise
            time.sleep(0.001)
