"""The ways to confine a program: what starts it, and what must be active before the program is loaded.

    bwrap       Bubblewrap: mount, process, IPC, host name and network namespaces, in which only Python's
                files and a tmpfs exist; inside it what `landlock` does, Landlock if the kernel has it
    landlock    rlimits, Landlock and seccomp (confine.py); needs no privilege and works in containers
    unsafe      the same, without what the machine lacks

Each process has a session of its own, hence no controlling terminal.
"""

import functools
import os
import platform
import secrets
import shutil
import site
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from qerl.tasks.code import syscalls
from qerl.tasks.worker_process import num_tasks

NOBODY = 65534
MAX_TASKS = 64
"""Threads of a program."""
_FILE_BYTES = 1 << 20
_FOLDER_BYTES = 64 << 20
_FIRST_USER, _NUM_USERS = 0x7FFE0000, 1 << 16
"""Users that no system gives to anyone: root makes each program one of them, which has no other tasks."""
_TO_CHANGE_USER = 1 << 0 | 1 << 6 | 1 << 7
"""CAP_CHOWN, CAP_SETGID and CAP_SETUID, which root may lack in a container."""
_BOX = "/sandbox"
_REMOVE = 'rm -rf "$0" || { chmod -R u+rwX "$0"; rm -rf "$0"; }'
"""rm removes any depth, unlike shutil, once it may read the folders."""


class Box(NamedTuple):
    """Place of one process. Box(command=[], folder="/tmp/qerl-code-x", cwd="/tmp/qerl-code-x", user=None)"""

    command: list[str]
    """Arguments before the interpreter's."""
    folder: str
    """The process's folder, as it sees it."""
    cwd: str | None
    user: int | None
    """Whom root becomes."""


class Backend(NamedTuple):
    confines: str
    required: tuple[str, ...]
    """Names of the parts that must be active."""
    open_box: Callable[[Path], AbstractContextManager[Box]]
    """Make the box of a process that runs this file."""


def confine_settings(backend: Backend, box: Box, *, cpu_s: int, memory_bytes: int) -> dict[str, Any]:
    """Return the arguments of confine.confine."""
    machine = platform.machine()
    is_known = machine in syscalls.ARCHITECTURES
    return {
        "folder": box.folder,
        "reads": _readable(),
        "user": box.user,
        "seccomp": syscalls.seccomp_filter(machine).hex() if is_known else "",
        "required": backend.required,
        "num_other_tasks": 0 if (box.user or 0) >= _FIRST_USER else num_tasks(),
        "limits": {
            "RLIMIT_CPU": cpu_s,
            "RLIMIT_AS": memory_bytes,
            "RLIMIT_FSIZE": _FILE_BYTES,
            "RLIMIT_NOFILE": 64,
            "RLIMIT_NPROC": MAX_TASKS,
            "RLIMIT_CORE": 0,
        },
    }


@functools.cache
def _readable() -> list[str]:
    """Return the interpreter's files: standard library, packages, shared libraries, time zones."""
    python = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    python += [*site.getsitepackages(), f"{sys.base_prefix}/lib", f"{sys.base_exec_prefix}/lib"]
    system = ["/usr/lib", "/usr/lib64", "/usr/local/lib", "/lib", "/lib64", "/nix/store", "/gnu/store"]
    system += ["/usr/share/zoneinfo", "/etc/ld.so.cache", "/etc/localtime", "/dev/zero", "/dev/urandom"]
    paths = sorted({os.path.normpath(path) for path in python + system if os.path.exists(path)})
    return [path for path in paths if not any(path.startswith(f"{other}/") for other in paths)]


def _new_user() -> int | None:
    """Return a user for one program of root; None where this process cannot change its user."""
    capabilities = int(Path("/proc/self/status").read_text().partition("CapEff:")[2].split()[0], 16)
    if os.geteuid() != 0 or capabilities & _TO_CHANGE_USER != _TO_CHANGE_USER:
        return None
    user = _FIRST_USER + secrets.randbelow(_NUM_USERS)
    lines = Path("/proc/self/uid_map").read_text().splitlines()
    spans = [(int(first), int(count)) for first, _, count in map(str.split, lines)]
    return user if any(first <= user < first + count for first, count in spans) else NOBODY


@contextmanager
def _temporary_folder(child: Path) -> Iterator[Box]:
    folder = tempfile.mkdtemp(prefix="qerl-code-")
    try:
        user = _new_user()
        if user is not None:
            os.chown(folder, user, user)
        yield Box([], folder, folder, user)
    finally:
        try:
            os.rmdir(folder)
        except OSError:
            _remove_in_background(folder)


def _remove_in_background(folder: str) -> None:
    """Remove a folder that is not empty, without waiting: removing the folders that a program can make in its
    time may take longer than its deadline (3 s for 200,000 of them). The shell has a
    session of its own, so that the end of this process does not end it."""
    command = ["nice", "sh", "-c", f"({_REMOVE}) </dev/null >/dev/null 2>&1 &", folder]
    subprocess.run(command, start_new_session=True, check=False)


@contextmanager
def _namespaces(child: Path) -> Iterator[Box]:
    if (bwrap := shutil.which("bwrap")) is None:
        raise FileNotFoundError("bwrap is not installed")
    user = _new_user()
    yield Box([bwrap, *_bwrap_options(user is not None, child), "--"], _BOX, None, user)


@functools.cache
def _bwrap_options(is_root: bool, child: Path) -> list[str]:
    """Root makes no user namespace, in which it could not become another user; it keeps the capabilities to
    do so until confine.py."""
    spaces = [f"--unshare-{name}" for name in ("pid", "ipc", "uts", "net", "cgroup-try")]
    spaces += [] if is_root else ["--unshare-user-try"]
    capabilities = ["--cap-drop", "ALL"]
    capabilities += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"] if is_root else []
    executable = os.path.realpath(sys.executable)
    files = [executable, f"{sys.prefix}/pyvenv.cfg", str(child.parent)]
    paths = [*_readable(), *files, "/dev/null"]
    parents = {str(parent) for path in [*paths, sys.executable] for parent in Path(path).parents} - {"/"}
    binds: list[str] = []
    for parent in sorted(parents):  # those that it makes by itself are closed to other users
        binds += ["--perms", "0755", "--dir", parent]
    for path in paths:
        binds += ["--dev-bind-try" if path.startswith("/dev/") else "--ro-bind-try", path, path]
    if executable != sys.executable:
        binds += ["--symlink", executable, sys.executable]
    if sys.base_prefix != "/usr":  # without /proc, $ORIGIN of the interpreter is unknown
        binds += ["--setenv", "LD_LIBRARY_PATH", f"{sys.base_prefix}/lib"]
    folder = ["--perms", "0777", "--size", str(_FOLDER_BYTES), "--tmpfs", _BOX]
    end = ["--remount-ro", "/", "--chdir", _BOX, "--die-with-parent"]
    return [*spaces, *capabilities, *binds, *folder, *end]


BACKENDS = {
    "bwrap": Backend(
        "namespaces (files, processes, network, IPC), a tmpfs as folder, system calls by allow-list, limits",
        ("seccomp",),
        _namespaces,
    ),
    "landlock": Backend(
        "files by Landlock, system calls by allow-list (no network, processes, IPC), limits",
        ("landlock", "seccomp"),
        _temporary_folder,
    ),
    "unsafe": Backend("what this machine has of Landlock and seccomp, limits", (), _temporary_folder),
}
"""By name, the better first; unsafe only if task.code.unsafe allows it."""
