"""Confines the process that calls it, for good: what a sample's program may then ask of the kernel.

    rlimits     CPU seconds, address space, size of a file, open files, tasks, no core
    user        root becomes nobody (65534); no new privileges
    Landlock    reads Python's own files and the system's libraries; writes in one folder; /proc, the data and
                everything else are out of reach (Linux 5.13; without it the user's rights alone hold)
    seccomp     no sockets, so no network; no fork and no exec, so no children; no signals, no tracing and no
                limits for other processes; no mounts, no memory files, no System V objects, no chmod

It runs in a bare `python -I` beside the sample, so it is one file that imports the standard library alone.
seccomp needs no privilege and works inside a container, where namespaces often do not; the process that
cannot have it raises OSError before the sample is read. A list of what is refused cannot know the calls of
later kernels: those above the last number listed here are refused too.
"""

import ctypes
import os
import platform
import resource
import struct
import sys

NOBODY = 65534
MORE_TASKS = 64
"""Threads that may be added to all that the machine runs, which is no less than what this user runs."""
_LIBC = ctypes.CDLL(None, use_errno=True)
_MAX_SYSCALL = 470

# Refused system calls; x86-64's numbers, then those of aarch64. From 424 on they are the same.
_REFUSED = {
    "x86_64": (
        *(
            41,
            57,
            58,
            59,
            322,
            62,
            200,
            234,
            129,
            297,
            101,
            310,
            311,
            312,
        ),  # socket, fork, exec, kill, ptrace
        *(
            90,
            91,
            268,
            92,
            93,
            94,
            260,
            76,
            132,
            235,
            261,
            280,
            *range(188, 191),
            *range(197, 200),
        ),  # chmod ...
        *(165, 166, 155, 161, 272, 308, 321, 298, 323, 248, 249, 250),  # mount, unshare, bpf, keys
        *(
            175,
            313,
            176,
            246,
            320,
            169,
            167,
            168,
            170,
            171,
            164,
            227,
            159,
            305,
            163,
            179,
            303,
            304,
        ),  # modules ...
        *(29, 30, 64, 68, 240, 319, 141, 203, 144, 314, 142, 251, 256, 279, 112, 109),  # shm, memfd, priority
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
_OWNERS = {"fcntl": (8, 15), "ioctl": (0x8901, 0x8902)}
"""Commands that name the process to get a file's signals, which would be a way around kill."""


def confine(folder: str, *, cpu_s: int, memory_bytes: int, file_bytes: int) -> bool:
    """Whether Landlock holds too; OSError where anything else does not."""
    machine = platform.machine()
    if sys.platform != "linux" or machine not in _ARCH:
        raise OSError(f"no confinement for {sys.platform} on {machine}")
    parent = os.getppid()
    has_landlock = _landlock_version() >= 1
    _limit(cpu_s=cpu_s, memory_bytes=memory_bytes, file_bytes=file_bytes)
    if os.geteuid() == 0:
        _leave_root(keeps_reading=has_landlock)
    _prctl(38, 1, 0)  # no new privileges
    _prctl(4, 0, 0)  # not dumpable: its memory is closed to others of its user
    _prctl(_PR_SET_PDEATHSIG, 9, 0)  # after leaving root, which would undo it
    if os.getppid() != parent:
        raise OSError("the parent is gone")
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
        kept = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(name, (kept, kept))


def _leave_root(*, keeps_reading: bool) -> None:
    """keeps_reading: Python may lie in /root, where nobody may not look; Landlock then says what is read."""
    _prctl(8, 1, 0)  # keep the capabilities over the change of user, to give up all but one
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    kept = 1 << 2 if keeps_reading else 0  # CAP_DAC_READ_SEARCH
    _checked(
        _LIBC.capset(struct.pack("=II", 0x20080522, 0), struct.pack("=6I", kept, kept, 0, 0, 0, 0)), "capset"
    )


def _landlock_version() -> int:
    return _LIBC.syscall(444, None, 0, 1)


def _landlock(folder: str) -> None:
    """Rights by bit: 0 execute, 1 write, 2 read a file, 3 list, 4 to 12 remove and make, 13 move, 14 cut."""
    version = _landlock_version()
    handled = (1 << 13) - 1 | (1 << 13 if version >= 2 else 0) | (1 << 14 if version >= 3 else 0)
    ruleset = _checked(_LIBC.syscall(444, struct.pack("=Q", handled), 8, 0), "landlock_create_ruleset")
    writes = (1 << 1 | 1 << 2 | 1 << 3 | 1 << 4 | 1 << 5 | 1 << 7 | 1 << 8 | 1 << 13 | 1 << 14) & handled
    _allow(ruleset, folder, writes)
    _allow(ruleset, "/dev/null", 1 << 1 | 1 << 2)
    for path in ("/dev/zero", "/dev/urandom", "/etc/ld.so.cache", "/etc/localtime"):
        _allow(ruleset, path, 1 << 2)
    for path in {"/usr", "/lib", "/lib64", sys.prefix, sys.base_prefix} - {"/"}:
        _allow(ruleset, path, 1 << 0 | 1 << 2 | 1 << 3)
    _checked(_LIBC.syscall(446, ruleset, 0), "landlock_restrict_self")
    os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    rule = struct.pack("=Qi", rights, place)
    _checked(_LIBC.syscall(445, ruleset, 1, rule, 0), f"landlock_add_rule {path}")
    os.close(place)


def _seccomp(machine: str) -> None:
    filters = _program(machine)
    code = ctypes.create_string_buffer(b"".join(filters))
    program = struct.pack("HxxxxxxP", len(filters), ctypes.addressof(code))
    _checked(_LIBC.prctl(22, 2, program, 0, 0), "seccomp")


def _program(machine: str) -> list[bytes]:
    """BPF over (number, architecture, address, arguments): its jumps are relative to the next instruction."""

    def load(offset: int) -> bytes:
        return struct.pack("=HBBI", 0x20, 0, 0, offset)

    def jump(code: int, value: int, then: int, otherwise: int) -> bytes:
        return struct.pack("=HBBI", code, then, otherwise, value)

    def give(value: int) -> bytes:
        return struct.pack("=HBBI", 0x06, 0, 0, value)

    equal, above, has_bits = 0x15, 0x25, 0x45
    allow, kill, refuse, unknown = give(0x7FFF0000), give(0x80000000), give(0x00050001), give(0x00050026)
    number, argument, command = load(0), load(16), load(24)
    steps = [load(4), jump(equal, _ARCH[machine], 1, 0), kill, number]
    steps += [jump(above, _MAX_SYSCALL, 0, 1), unknown]  # x86's second table of numbers lies there too
    steps += [jump(equal, _CLONE3, 0, 1), unknown]  # its flags cannot be seen; libc then takes clone
    for refused in (*_REFUSED[machine], *_REFUSED_ON_ALL):
        steps += [jump(equal, refused, 0, 1), refuse]
    steps += [
        jump(equal, _CLONE[machine], 0, 4),
        argument,
        jump(has_bits, _CLONE_THREAD, 0, 1),
        allow,
        refuse,
    ]
    steps += [jump(equal, _PRLIMIT[machine], 0, 4), argument, jump(equal, 0, 0, 1), allow, refuse]
    steps += [
        jump(equal, _PRCTL[machine], 0, 4),
        argument,
        jump(equal, _PR_SET_PDEATHSIG, 0, 1),
        refuse,
        allow,
    ]
    for call, commands in ((_FCNTL[machine], _OWNERS["fcntl"]), (_IOCTL[machine], _OWNERS["ioctl"])):
        steps += [jump(equal, call, 0, 5), command]
        steps += [jump(equal, commands[0], 1, 0), jump(equal, commands[1], 0, 1), refuse, allow]
    return [*steps, allow]


def _prctl(option: int, first: int, second: int) -> None:
    _checked(_LIBC.prctl(option, first, second, 0, 0), f"prctl {option}")


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result
