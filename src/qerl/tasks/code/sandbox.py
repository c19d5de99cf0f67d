"""Sandbox the calling process, irreversibly, before it runs a sample's program.

    rlimits     CPU seconds, address space, file size, open files, tasks, no core dump
    user        root becomes nobody (65534); no new privileges
    Landlock    read Python's files and system libraries, write in one folder; /proc, the data and everything
                else are not accessible (Linux 5.13; without it only the user's permissions apply)
    seccomp     no sockets, so no network; no fork or exec, so no children; no signals, tracing or limits for
                other processes; no mounts, memory files, System V objects or chmod

It runs in a bare `python -I` with the sample, so it is one file that imports the standard library only.
seccomp needs no privilege and works in a container, where namespaces often do not; if it is unavailable,
OSError is raised before the sample is read. System calls newer than the last number known here are refused.
"""

import ctypes
import os
import platform
import resource
import struct
import sys

NOBODY = 65534
MORE_TASKS = 64
"""Threads beyond the number of tasks that the whole machine runs, which includes this user's tasks."""
_LIBC = ctypes.CDLL(None, use_errno=True)
_MAX_SYSCALL = 470

# Numbers of refused system calls on x86-64 and aarch64. From 424 on they are the same.
_REFUSED = {
    "x86_64": (
        # socket, fork, exec, kill, ptrace
        *(41, 57, 58, 59, 322, 62, 200, 234, 129, 297, 101, 310, 311, 312),
        # chmod and its kin
        *(90, 91, 268, 92, 93, 94, 260, 76, 132, 235, 261, 280, *range(188, 191), *range(197, 200)),
        # mount, unshare, bpf, keys
        *(165, 166, 155, 161, 272, 308, 321, 298, 323, 248, 249, 250),
        # kernel modules, clocks, names, accounting
        *(175, 313, 176, 246, 320, 169, 167, 168, 170, 171, 164, 227, 159, 305, 163, 179, 303, 304),
        # shm, memfd, priority
        *(29, 30, 64, 68, 240, 319, 141, 203, 144, 314, 142, 251, 256, 279, 112, 109),
    ),
    "aarch64": (
        *(198, 221, 281, 129, 130, 131, 138, 240, 117, 270, 271, 272),
        *(52, 53, 54, 55, 45, 88, 5, 6, 7, 14, 15, 16),
        *(40, 39, 41, 51, 97, 268, 280, 241, 282, 217, 218, 219),
        *(105, 273, 106, 104, 294, 142, 224, 225, 161, 162, 170, 112, 171, 266, 89, 60, 264, 265),
        *(194, 196, 190, 186, 180, 279, 140, 122, 119, 274, 118, 30, 238, 239, 157, 154),
    ),
}
_REFUSED_ON_ALL = (424, 425, 426, 427, *range(428, 434), 434, 438, 440, 442, 452, 463, 466)
_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE3 = 435
_PRCTL = {"x86_64": 157, "aarch64": 167}
_PRLIMIT = {"x86_64": 302, "aarch64": 261}
_FCNTL = {"x86_64": 72, "aarch64": 25}
_IOCTL = {"x86_64": 16, "aarch64": 29}
_CLONE_THREAD, _PR_SET_PDEATHSIG = 0x10000, 1


def confine(folder: str, *, cpu_s: int, memory_bytes: int, file_bytes: int) -> bool:
    """Sandbox this process. Return True if Landlock is active; raise OSError if anything else fails."""
    machine = platform.machine()
    if sys.platform != "linux" or machine not in _ARCH:
        raise OSError(f"the sandbox does not support {sys.platform} on {machine}")
    parent = os.getppid()
    has_landlock = _landlock_version() >= 1
    _limit(cpu_s=cpu_s, memory_bytes=memory_bytes, file_bytes=file_bytes)
    if os.geteuid() == 0:
        _leave_root(keeps_reading=has_landlock)
    _prctl(38, 1, 0)  # no new privileges
    _prctl(4, 0, 0)  # not dumpable: other processes of the user cannot read its memory
    _prctl(_PR_SET_PDEATHSIG, 9, 0)  # after leaving root, which would undo it
    if os.getppid() != parent:
        raise OSError("the parent process has ended")
    if has_landlock:
        _landlock(folder)
    _seccomp(machine)
    return has_landlock


def _limit(*, cpu_s: int, memory_bytes: int, file_bytes: int) -> None:
    with open("/proc/loadavg") as file:
        num_tasks = int(file.read().split()[3].partition("/")[2])
    limits = {
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_FSIZE: file_bytes,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_NPROC: num_tasks + MORE_TASKS,
        resource.RLIMIT_CORE: 0,
    }
    for name, limit in limits.items():
        hard = resource.getrlimit(name)[1]
        soft = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(name, (soft, soft))


def _leave_root(*, keeps_reading: bool) -> None:
    """Become nobody. keeps_reading: keep read access, limited by Landlock, because Python may be in /root."""
    _prctl(8, 1, 0)  # keep capabilities across the change of user, then drop all but one
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    capabilities = 1 << 2 if keeps_reading else 0  # CAP_DAC_READ_SEARCH
    data = struct.pack("=6I", capabilities, capabilities, 0, 0, 0, 0)
    _check_result(_LIBC.capset(struct.pack("=II", 0x20080522, 0), data), "capset")


def _landlock_version() -> int:
    return _LIBC.syscall(444, None, 0, 1)


def _landlock(folder: str) -> None:
    """Bits: 0 execute, 1 write file, 2 read file, 3 list, 4 to 12 remove and make, 13 move, 14 truncate."""
    version = _landlock_version()
    handled = (1 << 13) - 1 | (1 << 13 if version >= 2 else 0) | (1 << 14 if version >= 3 else 0)
    ruleset = _check_result(_LIBC.syscall(444, struct.pack("=Q", handled), 8, 0), "landlock_create_ruleset")
    writes = (1 << 1 | 1 << 2 | 1 << 3 | 1 << 4 | 1 << 5 | 1 << 7 | 1 << 8 | 1 << 13 | 1 << 14) & handled
    _allow(ruleset, folder, writes)
    _allow(ruleset, "/dev/null", 1 << 1 | 1 << 2)
    for path in ("/dev/zero", "/dev/urandom", "/etc/ld.so.cache", "/etc/localtime"):
        _allow(ruleset, path, 1 << 2)
    for path in {"/usr", "/lib", "/lib64", sys.prefix, sys.base_prefix} - {"/"}:
        _allow(ruleset, path, 1 << 0 | 1 << 2 | 1 << 3)
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


def _seccomp(machine: str) -> None:
    filters = _program(machine)
    code = ctypes.create_string_buffer(b"".join(filters))
    program = struct.pack("HxxxxxxP", len(filters), ctypes.addressof(code))
    _check_result(_LIBC.prctl(22, 2, program, 0, 0), "seccomp")


def _program(machine: str) -> list[bytes]:
    """Return a BPF filter of (number, architecture, address, arguments); jumps skip instructions."""

    def step(code: int, value: int, then: int = 0, otherwise: int = 0) -> bytes:
        return struct.pack("=HBBI", code, then, otherwise, value)

    def on_argument(call: int, test: int, value: int, then: bytes, otherwise: bytes) -> list[bytes]:
        return [step(equal, call, 0, 4), argument, step(test, value, 0, 1), then, otherwise]

    load, equal, above, has_bits, end = 0x20, 0x15, 0x25, 0x45, 0x06
    architecture, number, argument, command = (step(load, offset) for offset in (4, 0, 16, 24))
    allow, kill = step(end, 0x7FFF0000), step(end, 0x80000000)
    refuse, unknown = step(end, 0x00050001), step(end, 0x00050026)
    steps = [architecture, step(equal, _ARCH[machine], 1, 0), kill, number]
    steps += [step(above, _MAX_SYSCALL, 0, 1), unknown]  # the x32 numbers are above it too
    steps += [step(equal, _CLONE3, 0, 1), unknown]  # its flags cannot be read; libc falls back to clone
    for refused in (*_REFUSED[machine], *_REFUSED_ON_ALL):
        steps += [step(equal, refused, 0, 1), refuse]
    steps += on_argument(_CLONE[machine], has_bits, _CLONE_THREAD, allow, refuse)
    steps += on_argument(_PRLIMIT[machine], equal, 0, allow, refuse)
    steps += on_argument(_PRCTL[machine], equal, _PR_SET_PDEATHSIG, refuse, allow)
    # Commands that set the process that receives a file's signals, which would replace kill.
    for call, commands in ((_FCNTL[machine], (8, 15)), (_IOCTL[machine], (0x8901, 0x8902))):
        steps += [step(equal, call, 0, 5), command]
        steps += [step(equal, commands[0], 1, 0), step(equal, commands[1], 0, 1), refuse, allow]
    return [*steps, allow]


def _prctl(option: int, first: int, second: int) -> None:
    _check_result(_LIBC.prctl(option, first, second, 0, 0), f"prctl {option}")


def _check_result(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result
