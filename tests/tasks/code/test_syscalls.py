"""The seccomp filter, interpreted for both architectures: what passes, and with which arguments."""

import re
import struct
from pathlib import Path

import pytest

from qerl.tasks.code.syscalls import ARCHITECTURES, BY_VALUE, allowed, seccomp_filter

ALLOW, KILL, EPERM, ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
# The kernel's headers: x86-64 has a table of its own, aarch64 the generic one.
HEADERS = {
    "x86_64": ("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "/usr/include/asm/unistd_64.h"),
    "aarch64": ("/usr/include/asm-generic/unistd.h",),
}
REFUSED = {  # name: numbers on x86-64 and aarch64
    **{
        "socket": (41, 198),
        "connect": (42, 203),
        "bind": (49, 200),
        "sendmsg": (46, 211),
        "fork": (57, None),
    },
    **{"execve": (59, 221), "execveat": (322, 281), "kill": (62, 129), "tgkill": (234, 131)},
    **{"ptrace": (101, 117), "process_vm_writev": (311, 271), "unshare": (272, 97), "setns": (308, 268)},
    **{"mount": (165, 40), "chroot": (161, 51), "bpf": (321, 280), "keyctl": (250, 219)},
    **{"shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180)},
    **{"fanotify_init": (300, 262), "inotify_init1": (294, 26), "memfd_create": (319, 279)},
    **{"open_by_handle_at": (304, 265), "perf_event_open": (298, 241), "userfaultfd": (323, 282)},
    **{"setuid": (105, 146), "setgroups": (116, 159), "chmod": (90, None), "fchmodat": (268, 53)},
    **{"seccomp": (317, 277), "personality": (135, 92), "setsid": (112, 157), "io_setup": (206, 0)},
}
ABSENT = {
    "clone3": 435,
    "openat2": 437,
    "pidfd_open": 434,
    "io_uring_setup": 425,
    "landlock_restrict_self": 446,
}
ABSENT |= {"memfd_secret": 447, "open_tree": 428, "open_tree_attr": 467, "mseal": 462, "not yet": 1000}


def verdict(machine, number, arguments=(), architecture=None):
    """Interpret the filter for one call, as the kernel does."""
    values = [*arguments, 0, 0, 0, 0, 0, 0][:6]
    data = struct.pack("=IIQ6Q", number, architecture or ARCHITECTURES[machine], 0, *values)
    steps = list(struct.iter_unpack("=HBBI", seccomp_filter(machine)))
    at, loaded = 0, 0
    tests = {0x15: lambda k: loaded == k, 0x35: lambda k: loaded >= k, 0x45: lambda k: bool(loaded & k)}
    while True:
        code, then, otherwise, value = steps[at]
        at += 1
        if code == 0x06:
            return value
        if code == 0x20:
            (loaded,) = struct.unpack_from("=I", data, value)
        else:
            at += then if tests[code](value) else otherwise


MACHINES = pytest.mark.parametrize("machine", ARCHITECTURES)


@MACHINES
def test_exactly_the_listed_calls_are_allowed(machine):
    column = list(ARCHITECTURES).index(machine)
    with_conditions = {56, 53} if machine == "x86_64" else {220, 199}
    with_conditions |= {numbers[column] for numbers, _, _ in BY_VALUE.values()}
    passing = {number for number in range(1100) if verdict(machine, number) == ALLOW}
    assert passing - with_conditions == set(allowed(machine).values())
    assert all(verdict(machine, 0x40000000 | number) == ENOSYS for number in range(600))  # x32


@MACHINES
def test_dangerous_calls_are_refused_and_new_ones_absent(machine):
    column = list(ARCHITECTURES).index(machine)
    refused = {name: numbers[column] for name, numbers in REFUSED.items() if numbers[column] is not None}
    assert {name for name, number in refused.items() if verdict(machine, number) != EPERM} == set()
    assert {name for name, number in ABSENT.items() if verdict(machine, number) != ENOSYS} == set()


@MACHINES
def test_a_call_of_another_architecture_kills(machine):
    others = set(ARCHITECTURES.values()) - {ARCHITECTURES[machine]} | {0x40000003, 0x40000028}
    assert {verdict(machine, 1, architecture=other) for other in others} == {KILL}


@MACHINES
def test_clone_makes_threads_and_nothing_else(machine):
    clone = {"x86_64": 56, "aarch64": 220}[machine]
    glibc, musl, sigchld = 0x3D0F00, 0x7D0F00, 17
    namespaces = (0x80, 0x20000, *(1 << bit for bit in range(25, 31)))
    assert [verdict(machine, clone, [flags]) for flags in (glibc, musl)] == [ALLOW, ALLOW]
    forks = [0, sigchld, glibc & ~0x10000, glibc | sigchld, *(glibc | space for space in namespaces)]
    assert {verdict(machine, clone, [flags]) for flags in forks} == {EPERM}


@MACHINES
def test_arguments_decide_by_the_half_that_the_kernel_reads(machine):
    column = list(ARCHITECTURES).index(machine)
    number = {name: numbers[column] for name, (numbers, _, _) in BY_VALUE.items()}
    number["socketpair"] = (53, 199)[column]
    tiocsti, tioclinux, tiocsctty, fiosetown = 0x5412, 0x541C, 0x540E, 0x8901
    commands = (tiocsti, tioclinux, tiocsctty, fiosetown, 0x5452, 1 << 32 | tiocsti)
    assert {verdict(machine, number["ioctl"], [0, command]) for command in commands} == {EPERM}
    assert {verdict(machine, number["ioctl"], [0, c]) for c in (0x5401, 0x5421, 1 << 32 | 0x5401)} == {ALLOW}
    owners = (8, 15, 10, 1024, 1026, 1031, 1033)
    assert {verdict(machine, number["fcntl"], [0, command]) for command in owners} == {EPERM}
    assert {verdict(machine, number["fcntl"], [0, command]) for command in (0, 1, 2, 3, 4, 1030)} == {ALLOW}
    assert [verdict(machine, number["prlimit64"], [pid]) for pid in (0, 1, 1 << 32)] == [ALLOW, EPERM, ALLOW]
    assert [verdict(machine, number["prctl"], [option]) for option in (15, 1, 4, 22, 38)] == [ALLOW] + 4 * [
        EPERM
    ]
    stream, datagram, cloexec = 1, 2, 0x80000
    assert verdict(machine, number["socketpair"], [1, stream | cloexec]) == ALLOW
    pairs = ([1, datagram], [1, 5], [2, stream], [10, stream], [1, stream | 16])
    assert {verdict(machine, number["socketpair"], pair) for pair in pairs} == {EPERM}


@MACHINES
def test_the_numbers_are_those_of_the_kernels_headers(machine):
    column = list(ARCHITECTURES).index(machine)
    found = [Path(path) for path in HEADERS[machine] if Path(path).exists()]
    if not found:
        pytest.skip(f"no {HEADERS[machine][0]} here")
    defined = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)\b", found[0].read_text())
    header = {name: int(number) for name, number in defined}
    header.setdefault("newfstatat", header.get("fstatat", -1))
    ours = allowed(machine) | {name: numbers[column] for name, (numbers, _, _) in BY_VALUE.items()}
    ours |= {name: numbers[column] for name, numbers in REFUSED.items() if numbers[column] is not None}
    ours |= {"clone": (56, 220)[column], "socketpair": (53, 199)[column]}
    assert {name: number for name, number in ours.items() if header.get(name, number) != number} == {}
    assert len(ours.keys() & header.keys()) > 0.9 * len(ours)
    if machine == "aarch64":
        assert not {"open", "stat", "pipe", "fork"} & allowed(machine).keys()
