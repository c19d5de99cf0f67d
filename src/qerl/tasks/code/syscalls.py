"""Build the seccomp filter: the system calls that a program may make. Every other call is refused.

    allowed     what Python, its standard library and NumPy need with files, memory, threads, time and pipes
    some        with some arguments only: threads but no processes; a pair of connected sockets but no socket
                that could reach another; the process's own limits; harmless commands of fcntl and ioctl
    ENOSYS      the rest from number 424 on (Linux 5.1): libraries try these calls and live without them
    EPERM       the rest below it

A call of another architecture kills the process. Arguments are compared by their low 32 bits: those that the
kernel reads. The numbers are those of the kernel's headers: `tests/tasks/code/test_syscalls.py`.
"""

import struct

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
EPERM, ENOSYS = 1, 38
_FIRST_PROBED = 424

_TABLE = """
    read 0 63, write 1 64, readv 19 65, writev 20 66, lseek 8 62, pread64 17 67, pwrite64 18 68,
    preadv 295 69, pwritev 296 70, preadv2 327 286, pwritev2 328 287, sendfile 40 71,
    copy_file_range 326 285, open 2 -, openat 257 56, creat 85 -, close 3 57, close_range 436 436,
    stat 4 -, fstat 5 80, lstat 6 -, newfstatat 262 79, statx 332 291, access 21 -, faccessat 269 48,
    faccessat2 439 439, readlink 89 -, readlinkat 267 78, statfs 137 43, fstatfs 138 44, umask 95 166,
    dup 32 23, dup2 33 -, dup3 292 24, flock 73 32, fsync 74 82, fdatasync 75 83, truncate 76 45,
    ftruncate 77 46, fallocate 285 47, fadvise64 221 223, getdents 78 -, getdents64 217 61, getcwd 79 17,
    chdir 80 49, fchdir 81 50, rename 82 -, renameat 264 38, renameat2 316 276, mkdir 83 -, mkdirat 258 34,
    rmdir 84 -, unlink 87 -, unlinkat 263 35,
    mmap 9 222, munmap 11 215, mremap 25 216, mprotect 10 226, brk 12 214, madvise 28 233, msync 26 227,
    mincore 27 232, membarrier 324 283,
    pipe 22 -, pipe2 293 59, poll 7 -, ppoll 271 73, select 23 -, pselect6 270 72, epoll_create 213 -,
    epoll_create1 291 20, epoll_ctl 233 21, epoll_wait 232 -, epoll_pwait 281 22, eventfd 284 -,
    eventfd2 290 19, timerfd_create 283 85, timerfd_settime 286 86, timerfd_gettime 287 87, sendto 44 206,
    recvfrom 45 207, shutdown 48 210, getsockopt 55 209, getsockname 51 204, getpeername 52 205,
    rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, rt_sigpending 127 136,
    rt_sigsuspend 130 133, rt_sigtimedwait 128 137, sigaltstack 131 132, pause 34 -, alarm 37 -,
    setitimer 38 103, getitimer 36 102, restart_syscall 219 128, futex 202 98, futex_waitv 449 449,
    set_robust_list 273 99, set_tid_address 218 96, rseq 334 293, exit 60 93, exit_group 231 94,
    wait4 61 260, waitid 247 95, sched_yield 24 124, sched_getaffinity 204 123, sched_getparam 143 121,
    sched_getscheduler 145 120, sched_get_priority_max 146 125, sched_get_priority_min 147 126,
    getpriority 140 141, getcpu 309 168,
    clock_gettime 228 113, clock_getres 229 114, clock_nanosleep 230 115, nanosleep 35 101,
    gettimeofday 96 169, time 201 -, times 100 153, getrusage 98 165, getrlimit 97 163, setrlimit 160 164,
    getrandom 318 278, gettid 186 178, getpid 39 172, getppid 110 173, getuid 102 174, geteuid 107 175,
    getgid 104 176, getegid 108 177, getgroups 115 158, getresuid 118 148, getresgid 120 150,
    getpgrp 111 -, getpgid 121 155, getsid 124 156, uname 63 160, sysinfo 99 179
"""
"""Name, number on x86-64, number on aarch64, which lacks some: files; memory; waiting, pipes and connected
sockets; the process's own signals, threads and end; time, limits, random bytes and names."""

_CLONE_THREAD = 0x10000
_NOT_OF_A_THREAD = 0xFFFFFFFF & ~0x7D0F00
"""Flags of clone that pthread_create of glibc and musl does not set: namespaces, a signal."""

# name: numbers, index of the argument, the argument's allowed values.
BY_VALUE: dict[str, tuple[tuple[int, int], int, tuple[int, ...]]] = {
    "prlimit64": ((302, 261), 0, (0,)),  # of this process
    "prctl": ((157, 167), 0, (15, 16)),  # set and get the thread's name
    # F_DUPFD to F_SETLKW, F_OFD_GETLK to F_OFD_SETLKW, F_DUPFD_CLOEXEC, F_GETPIPE_SZ
    "fcntl": ((72, 25), 1, (*range(8), 36, 37, 38, 1030, 1032)),
    # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX, TCGETS2
    "ioctl": ((16, 29), 1, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451, 0x802C542A)),
}
_CLONE, _SOCKETPAIR = (56, 220), (53, 199)
_AF_UNIX = 1
_STREAM_TYPES = (1, 0x801, 0x80001, 0x80801)
"""SOCK_STREAM, with SOCK_NONBLOCK and SOCK_CLOEXEC. A datagram socket could send to any address."""


def allowed(machine: str) -> dict[str, int]:
    """Return the calls that are allowed with any arguments, with their numbers."""
    column = 1 + list(ARCHITECTURES).index(machine)
    rows = [row.split() for row in _TABLE.split(",")]
    return {row[0]: int(row[column]) for row in rows if row[column] != "-"}


def seccomp_filter(machine: str) -> bytes:
    """Return the BPF program for platform.machine()."""
    column = list(ARCHITECTURES).index(machine)
    steps = [_load(4), _jump(_EQUAL, ARCHITECTURES[machine], 1, 0), _return(_KILL), _load(0)]
    flags = [_load(_argument(0)), _jump(_BITS, _CLONE_THREAD, 0, 2), _jump(_BITS, _NOT_OF_A_THREAD, 1, 0)]
    steps += _call(_CLONE[column], [*flags, _return(_ALLOW), _return(_error(EPERM))])
    is_unix = [_load(_argument(0)), _jump(_EQUAL, _AF_UNIX, 1, 0), _return(_error(EPERM))]
    steps += _call(_SOCKETPAIR[column], is_unix + _one_of(1, _STREAM_TYPES))
    for both, argument, values in BY_VALUE.values():
        steps += _call(both[column], _one_of(argument, values))
    numbers = allowed(machine).values()
    # The jumps lead over the rest of these and the three steps after them.
    steps += [_jump(_EQUAL, number, len(numbers) - i + 2, 0) for i, number in enumerate(numbers)]
    steps += [_jump(_AT_LEAST, _FIRST_PROBED, 0, 1), _return(_error(ENOSYS)), _return(_error(EPERM))]
    return b"".join([*steps, _return(_ALLOW)])


_EQUAL, _AT_LEAST, _BITS = 0x15, 0x35, 0x45
_ALLOW, _KILL = 0x7FFF0000, 0x80000000


def _error(number: int) -> int:
    return 0x00050000 | number


def _argument(index: int) -> int:
    """Return the offset of the low half of an argument in struct seccomp_data."""
    return 16 + 8 * index


def _load(offset: int) -> bytes:
    return struct.pack("=HBBI", 0x20, 0, 0, offset)


def _jump(test: int, value: int, then: int, otherwise: int) -> bytes:
    """Skip `then` steps if the test of the loaded value is true, else `otherwise` steps."""
    return struct.pack("=HBBI", test, then, otherwise, value)


def _return(action: int) -> bytes:
    return struct.pack("=HBBI", 0x06, 0, 0, action)


def _call(number: int, steps: list[bytes]) -> list[bytes]:
    """Run the steps, which must return, for this system call."""
    return [_jump(_EQUAL, number, 0, len(steps)), *steps]


def _one_of(argument: int, values: tuple[int, ...]) -> list[bytes]:
    """Allow the call if the argument is one of the values, else refuse it."""
    tests = [_jump(_EQUAL, value, len(values) - i, 0) for i, value in enumerate(values)]
    return [_load(_argument(argument)), *tests, _return(_error(EPERM)), _return(_ALLOW)]
