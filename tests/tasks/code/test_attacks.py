"""Statements that attack the machine are refused, and those of honest programs run, in each backend.

One process runs all statements of a kind; each test is one statement in one backend.
"""

import dataclasses
import functools
import json
import os
import platform
import textwrap

import pytest

from qerl.tasks.code.runner import Limits, SandboxUnavailable, probe, run_with_input

LIMITS = Limits(deadline_s=120.0, memory_bytes=1 << 30, output_bytes=1 << 20)
EPERM, ENOENT, ENXIO, EACCES, EROFS, ENOSYS = 1, 2, 6, 13, 30, 38
NEW = f"qerl-attack-{os.getpid()}"  # a name that no file has
ARM = platform.machine() == "aarch64"
PREPARED = """
import asyncio, ctypes, fcntl, json, multiprocessing, os, resource, signal, socket, subprocess, time
LIBC = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    if LIBC.syscall(number, *map(ctypes.c_long, arguments)) < 0:
        raise OSError(ctypes.get_errno(), "refused")
pipe = os.pipe()[0]
"""
RUN = """
outcomes = []
for statement in json.load(__import__("sys").stdin):
    try:
        exec(statement, globals())
        outcomes.append(None)
    except BaseException as error:
        outcomes.append([type(error).__name__, getattr(error, "errno", None), str(error)])
print(json.dumps(outcomes))
"""


def number(x86_64, aarch64):
    return aarch64 if ARM else x86_64


@functools.cache
def unavailable(backend):
    try:
        probe(dataclasses.replace(LIMITS, backend=backend))
    except SandboxUnavailable as error:
        return str(error)
    return None


@functools.cache
def outcomes(backend, statements):
    limits = dataclasses.replace(LIMITS, backend=backend)
    printed = run_with_input(PREPARED + RUN, json.dumps(statements), limits)
    assert printed is not None
    return dict(zip(statements, json.loads(printed), strict=True))


@pytest.fixture(params=["bwrap", "landlock"])
def backend(request):
    if (reason := unavailable(request.param)) is not None:
        pytest.skip(f"{request.param}: {reason}")
    return request.param


# The arguments do no harm where the call is not refused. EFAULT or EINVAL would mean that it was made.
CALLS = (
    # processes
    "if os.fork() == 0: os._exit(0)",
    "os.execv('/bin/true', ['true'])",
    "os.posix_spawn('/bin/true', ['true'], {})",
    "subprocess.run(['/bin/true'])",
    "multiprocessing.Process(target=print).start()",
    f"call({number(322, 281)}, -1, 0, 0, 0, 0)  # execveat",
    "call(435, 0, 0)  # clone3",
    f"call({number(272, 97)}, 0x10000000)  # unshare",
    f"call({number(308, 268)}, -1, 0)  # setns",
    "os.setsid()",
    "os.setpgid(0, 0)",
    # other processes
    "os.kill(os.getppid(), 0)",
    "os.kill(-1, 0)",
    "os.killpg(os.getpgrp(), 0)",
    f"call({number(200, 130)}, os.getppid(), 0)  # tkill",
    f"call({number(129, 138)}, os.getppid(), 0, 0)  # rt_sigqueueinfo",
    "call(434, os.getppid(), 0)  # pidfd_open",
    "call(424, -1, 0, 0, 0)  # pidfd_send_signal",
    f"call({number(101, 117)}, 16, os.getppid(), 0, 0)  # ptrace attach",
    f"call({number(310, 270)}, os.getppid(), 0, 0, 0, 0, 0)  # process_vm_readv",
    f"call({number(311, 271)}, os.getppid(), 0, 0, 0, 0, 0)  # process_vm_writev",
    "resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1))",
    "os.setpriority(os.PRIO_PROCESS, 0, 5)",
    "os.sched_setaffinity(0, os.sched_getaffinity(0))",
    # sockets
    "socket.socket(socket.AF_INET)",
    "socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)",
    "socket.socket(socket.AF_UNIX)",
    "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
    "socket.socket(38, socket.SOCK_SEQPACKET)  # AF_ALG",
    "socket.socket(40)  # AF_VSOCK",
    "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)",
    "socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)",
    "socket.socketpair()[0].connect('/run/x')",
    "socket.socketpair()[0].bind('x')",
    "socket.socketpair()[0].listen()",
    "socket.socketpair()[0].sendmsg([b'x'])",
    "socket.send_fds(socket.socketpair()[0], [b'x'], [0])",
    # shared memory and queues
    f"call({number(29, 194)}, 0, 4096, 0o1600)  # shmget",
    f"call({number(64, 190)}, 0, 1, 0o1600)  # semget",
    f"call({number(68, 186)}, 0, 0o1600)  # msgget",
    f"call({number(240, 180)}, 0, 0, 0, 0)  # mq_open",
    "os.memfd_create('x')",
    "call(447, 0)  # memfd_secret",
    # the kernel's larger doors
    "call(425, 1, 0)  # io_uring_setup",
    f"call({number(321, 280)}, 0, 0, 0)  # bpf",
    f"call({number(298, 241)}, 0, 0, -1, -1, 0)  # perf_event_open",
    f"call({number(323, 282)}, 0)  # userfaultfd",
    f"call({number(300, 262)}, 0, 0)  # fanotify_init",
    f"call({number(294, 26)}, 0)  # inotify_init1",
    f"call({number(250, 219)}, 0, 0, 0, 0, 0)  # keyctl",
    f"call({number(317, 277)}, 0, 0, 0)  # seccomp",
    "call(444, 0, 0, 1)  # landlock_create_ruleset",
    f"call({number(135, 92)}, 0xFFFFFFFF)  # personality",
    f"call({number(157, 167)}, 4, 1, 0, 0, 0)  # prctl: dumpable",
    f"call({number(157, 167)}, 1, 0, 0, 0, 0)  # prctl: outlive the worker",
    # mounts and files
    f"call({number(165, 40)}, 0, 0, 0, 0, 0)  # mount",
    f"call({number(161, 51)}, 0)  # chroot",
    "call(428, -1, 0, 0)  # open_tree",
    "call(467, -1, 0, 0, 0, 0)  # open_tree_attr",
    "call(430, 0, 0)  # fsopen",
    f"call({number(304, 265)}, -1, 0, 0)  # open_by_handle_at",
    "os.mkfifo('x')",
    "os.symlink('/etc', 'x')",
    "os.chmod('.', 0o777)",
    "os.chown('.', os.getuid(), os.getgid())",
    "os.utime('.')",
    "os.setxattr('.', 'user.x', b'x')",
    # identity
    "os.setuid(os.getuid())",
    "os.setgroups([])",
    # descriptors and terminals
    "fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())",
    "fcntl.fcntl(pipe, 10, 9)  # F_SETSIG",
    "fcntl.fcntl(pipe, 1024, 0)  # F_SETLEASE",
    "fcntl.fcntl(pipe, 1031, 1 << 20)  # F_SETPIPE_SZ",
    "fcntl.ioctl(pipe, 0x5412, b'x')  # TIOCSTI",
    "fcntl.ioctl(pipe, 0x541C, b'x')  # TIOCLINUX",
    "fcntl.ioctl(pipe, 0x540E, 0)  # TIOCSCTTY",
    "fcntl.ioctl(pipe, 0x5452, b'1234')  # FIOASYNC",
)
OPENS = (
    *(f"open({path!r})" for path in ("/etc/passwd", "/etc/shadow", "/etc/hostname", "/proc/version")),
    *(f"open('/proc/self/{name}')" for name in ("maps", "environ", "status")),
    *(f"open({path!r}, 'r+b', 0)" for path in ("/dev/tty", "/dev/mem", "/proc/self/mem", "/dev/kmsg")),
    "open(f'/proc/{os.getppid()}/environ')",
    "open(f'/proc/{os.getppid()}/mem', 'r+b', 0)",
    "os.listdir('/proc/self/fd')",
    *(f"os.listdir({path!r})" for path in ("/sys", "/run", "/boot", "/proc")),
    f"open({__file__!r})",
    f"os.listdir({os.path.dirname(__file__)!r})",
    *(f"open('{folder}/{NEW}', 'w')" for folder in ("/tmp", "/var/tmp", "/dev/shm", "/usr/lib")),
    "open(json.__file__, 'a')",
    f"os.mkdir('/tmp/{NEW}')",
    "os.rename(json.__file__, json.__file__)",
)


@pytest.mark.parametrize("statement", CALLS)
def test_a_system_call_is_refused(statement, backend):
    outcome = outcomes(backend, CALLS)[statement]
    assert outcome is not None and outcome[1] in (EPERM, ENOSYS), outcome


@pytest.mark.parametrize("statement", OPENS, ids=lambda statement: statement.replace(NEW, "NEW"))
def test_a_file_is_out_of_reach(statement, backend):
    outcome = outcomes(backend, OPENS)[statement]
    assert outcome is not None and outcome[1] in (EPERM, EACCES, ENOENT, EROFS, ENXIO), outcome


HONEST = (
    "import math, re, random, statistics; assert re.sub('a+', 'b', 'caat') == 'cbt'",
    "import collections, itertools, heapq, bisect, functools, operator, string, copy, pprint, typing, enum",
    "import decimal, fractions; assert decimal.Decimal('0.1') * 3 == decimal.Decimal('0.3')",
    "import datetime, calendar, zoneinfo; datetime.datetime.now().astimezone(); time.localtime()",
    "import zoneinfo; zoneinfo.available_timezones() and zoneinfo.ZoneInfo('Europe/Berlin')",
    "import hashlib, hmac, secrets, uuid, zlib, bz2, lzma, base64; secrets.token_hex(); uuid.uuid4()",
    "import pickle, csv, io, struct, array, textwrap, difflib, unicodedata, locale, logging, argparse",
    "import sqlite3; c = sqlite3.connect('base'); c.execute('create table t(x)'); c.commit(); c.close()",
    "import tempfile; f = tempfile.NamedTemporaryFile('w+'); f.write('x'); f.flush(); f.close()",
    "import tempfile\nwith tempfile.TemporaryDirectory() as t: open(t + '/a', 'w').close()",
    "import shutil, glob; open('a', 'w').write('x'); shutil.copyfile('a', 'b'); shutil.move('b', 'c')",
    "import pathlib; p = pathlib.Path('d/e'); p.mkdir(parents=True); p.rmdir(); p.parent.rmdir()",
    "import threading; t = threading.Thread(target=time.sleep, args=(0.01,)); t.start(); t.join()",
    "import concurrent.futures as c\nwith c.ThreadPoolExecutor(8) as p: assert max(p.map(abs, [2])) == 2",
    "import queue, threading, sched; threading.Timer(0.01, list).start(); threading.Event().wait(0.02)",
    "asyncio.run(asyncio.sleep(0.01))",
    "async def two(): return await asyncio.gather(*(asyncio.to_thread(abs, -i) for i in range(3)))\n"
    "assert asyncio.run(two()) == [0, 1, 2]",
    "import select; a, b = socket.socketpair(); a.sendall(b'x'); select.select([b], [], []); b.recv(1)",
    "import selectors; selectors.DefaultSelector().close()",
    "signal.signal(signal.SIGALRM, lambda *_: 0); signal.setitimer(signal.ITIMER_REAL, 0.01); time.sleep(.1)",
    "resource.setrlimit(resource.RLIMIT_STACK, resource.getrlimit(resource.RLIMIT_STACK)); os.times()",
    "import mmap; m = mmap.mmap(-1, 1 << 20); m[0] = 1; m.close()",
    "import ctypes; ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 1)()",
    "import gc, weakref, traceback, warnings, contextlib, types, dis, ast, platform; platform.machine()",
    "import sys; sys.setrecursionlimit(50000); sys.stdin.isatty(); os.urandom(8); os.getcwd()",
    "os.set_blocking(pipe, False); os.set_inheritable(pipe, True); os.close(os.dup(pipe)); os.cpu_count()",
    "import unittest, doctest; unittest.TestCase().assertEqual(1, 1)",
    "import importlib.util as u\nif u.find_spec('numpy'): import numpy as n; n.linalg.inv(n.eye(50))",
)


@pytest.mark.parametrize("statement", HONEST)
def test_an_honest_program_runs(statement, backend):
    assert outcomes(backend, HONEST)[statement] is None


def test_processes_of_an_honest_program_fail_with_an_error_that_it_can_catch(backend):
    program = """
        import concurrent.futures, multiprocessing
        for kind in (multiprocessing.Pool, concurrent.futures.ProcessPoolExecutor):
            try:
                with kind(2) as pool: print(list(pool.map(abs, [1])))
            except OSError: print("refused")
    """
    limits = dataclasses.replace(LIMITS, backend=backend)
    assert run_with_input(textwrap.dedent(program), "", limits) == "refused\nrefused\n"
