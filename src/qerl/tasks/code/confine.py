"""Confine the calling process, irreversibly, before it runs a sample's program.

    rlimits     CPU seconds, address space, file size, open files, no core dump, and the number of threads: in
                a user namespace, or as a user of its own, the program's alone count
    user        root becomes another user without groups and capabilities; no new privileges
    Landlock    read Python's files and system libraries, write in one folder; /proc, the data and everything
                else are not accessible; newer versions also deny TCP and signals out of it
    seccomp     the system calls of syscalls.py

It runs in a bare `python -I` with the sample, so it is one file that imports the standard library only. What
it allows is decided outside, in backends.py.
"""

import ctypes
import os
import resource
import struct
import sys
from collections.abc import Collection

_LIBC = ctypes.CDLL(None, use_errno=True)
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NAME = 1, 4, 15
_PR_SET_KEEPCAPS, _PR_SET_NO_NEW_PRIVS = 8, 38
_CAP_DAC_READ_SEARCH = 1 << 2
_CLONE_NEWUSER = 0x10000000


def confine(
    *,
    folder: str,
    reads: list[str],
    user: int | None,
    seccomp: str,
    required: Collection[str],
    limits: dict[str, int],
    num_other_tasks: int,
) -> set[str]:
    """Return which of seccomp and landlock are active; raise OSError if a required one is not.

    user: whom root becomes; seccomp: the BPF program in hexadecimal, or ""; num_other_tasks: those that the
    kernel may count with the program's own."""
    if sys.platform != "linux":
        raise OSError(f"the sandbox needs Linux, this is {sys.platform}")
    has_landlock = _landlock_version() >= 1
    if "landlock" in required and not has_landlock:
        raise OSError("the kernel has no Landlock")
    if user is None and _LIBC.unshare(_CLONE_NEWUSER) == 0:
        num_other_tasks = 0
    _limit(limits | {"RLIMIT_NPROC": limits["RLIMIT_NPROC"] + num_other_tasks})
    keeps_reading = False
    if user is not None:
        prctl(_PR_SET_KEEPCAPS, 1)  # until _keep_capabilities
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
        # Python may be in /root; Landlock then limits what the capability to read any file is good for.
        is_readable = all(os.access(path, os.R_OK) for path in (folder, *reads))
        keeps_reading = not is_readable and (has_landlock or not required)
    _keep_capabilities(_CAP_DAC_READ_SEARCH if keeps_reading else 0)
    prctl(_PR_SET_NO_NEW_PRIVS, 1)
    prctl(PR_SET_DUMPABLE, 0)  # other processes of the user cannot read its memory
    prctl(PR_SET_PDEATHSIG, 9)  # after the changes of user, which would undo it
    active = {"landlock"} if has_landlock else set()
    if has_landlock:
        _landlock(folder, reads)
    try:
        _seccomp(bytes.fromhex(seccomp))
    except OSError:
        if "seccomp" in required:
            raise
        return active
    return active | {"seccomp"}


def _limit(limits: dict[str, int]) -> None:
    for name, limit in limits.items():
        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        soft = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (soft, soft))


def _keep_capabilities(bits: int) -> None:
    data = struct.pack("=6I", bits, bits, 0, 0, 0, 0)
    _check_result(_LIBC.capset(struct.pack("=II", 0x20080522, 0), data), "capset")


def _landlock_version() -> int:
    return _LIBC.syscall(444, None, 0, 1)


def _landlock(folder: str, reads: list[str]) -> None:
    """Bits: 0 execute, 1 write file, 2 read file, 3 list, 4 to 12 remove and make, 13 move, 14 truncate, 15
    ioctl of devices. Ports: 0 bind, 1 connect. Scopes: 0 abstract sockets, 1 signals."""
    version = _landlock_version()
    files = (1 << 13) - 1
    for bit, since in ((13, 2), (14, 3), (15, 5)):
        files |= 1 << bit if version >= since else 0
    rules = [files, *([3] if version >= 4 else []), *([3] if version >= 6 else [])]
    attributes = struct.pack(f"={len(rules)}Q", *rules)
    ruleset = _LIBC.syscall(444, attributes, len(attributes), 0)
    _check_result(ruleset, "landlock_create_ruleset")
    writes = (1 << 1 | 1 << 2 | 1 << 3 | 1 << 4 | 1 << 5 | 1 << 7 | 1 << 8 | 1 << 13 | 1 << 14) & files
    _allow(ruleset, folder, writes)
    _allow(ruleset, "/dev/null", 1 << 1 | 1 << 2)
    for path in reads:
        _allow(ruleset, path, 1 << 2 | (1 << 3 if os.path.isdir(path) else 0))
    _check_result(_LIBC.syscall(446, ruleset, 0), "landlock_restrict_self")
    os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    rule = struct.pack("=Qi", rights, descriptor)
    _check_result(_LIBC.syscall(445, ruleset, 1, rule, 0), f"landlock_add_rule {path}")
    os.close(descriptor)


def _seccomp(steps: bytes) -> None:
    code = ctypes.create_string_buffer(steps, max(1, len(steps)))
    program = struct.pack("HxxxxxxP", len(steps) // 8, ctypes.addressof(code))
    _check_result(_LIBC.prctl(22, 2, program, 0, 0), "seccomp")


def prctl(option: int, value: int | bytes) -> None:
    _check_result(_LIBC.prctl(option, value, 0, 0, 0), f"prctl {option}")


def _check_result(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
