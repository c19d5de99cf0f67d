"""Processes of code rewards that a server forks: they begin as if Python had started, and share nothing."""

import dataclasses
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from processes import all_running, comes_true, has_ended
from qerl.tasks.code import launch, sandbox
from qerl.tasks.code.runner import Limits, SandboxUnavailable, run_call, run_test, run_with_input
from qerl.tasks.code.script import read_script
from qerl.tasks.code.values import decode

SANDBOX = sandbox.choose(unsafe=True)
if SANDBOX.backend == "bwrap":  # which starts Python itself, so that these need the other
    SANDBOX = dataclasses.replace(SANDBOX, backend="landlock")
LIMITS = Limits(20.0, memory_bytes=512 << 20, output_bytes=1 << 20, backend=SANDBOX.backend)
confined = pytest.mark.skipif(SANDBOX.backend == "unsafe", reason=str(SANDBOX))
pytestmark = pytest.mark.skipif(not launch._has_pidfds(), reason="this kernel has no pidfds")


@pytest.fixture(autouse=True)
def own_servers():
    stop_servers()
    yield
    stop_servers()


def stop_servers():
    for one in list(launch._servers.values()):
        one.stop()


def printed(program, stdin="", limits=LIMITS):
    return run_with_input(textwrap.dedent(program), stdin, limits)


def called(program, limits=LIMITS):
    """What f of the program returns."""
    value = run_call(textwrap.dedent(program), "f", [], limits)
    return None if value is None else decode(value[0])


def server(mode="stdin") -> int:
    return launch._servers[mode, sys.executable, launch.CHILD].pid


def descriptors(pid) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


PARENT = "import os; print(os.getppid())"


def test_a_server_forks_the_processes_of_its_mode():
    parents = {printed(PARENT) for _ in range(5)}
    assert parents == {f"{server()}\n"}
    assert Path(f"/proc/{server()}/comm").read_text() == "qerl-fork\n"
    test = read_script("import os\nassert f() != os.getppid() > 0")
    assert run_test("import os\nf = os.getppid", test, LIMITS)
    assert len({server(mode) for mode in ("stdin", "serve", "test")}) == 3 == len(launch._servers)


DESCRIBED = """
    import ctypes, fcntl, gc, os, resource, signal, sys, threading, warnings

    def name():
        text = ctypes.create_string_buffer(16)
        ctypes.CDLL(None).prctl(16, text, 0, 0, 0)
        return text.value

    def file(each):
        return (each.name, each.mode, each.encoding, each.errors, each.line_buffering, each.write_through,
                each.seekable(), each.isatty(), each.fileno(), type(each.buffer), each.newlines)

    def is_open(number):
        try: return fcntl.fcntl(number, fcntl.F_GETFD) >= 0
        except OSError: return False

    ASKED = {
        "name": name,
        "arguments": lambda: [*sys.argv[:2], len(sys.argv), sys.argv[4]],
        "modules": lambda: sorted(sys.modules),
        "main": lambda: sorted(vars(sys.modules["__main__"])),
        "Python": lambda: (sys.path, sys.flags, sys.getrecursionlimit(), gc.isenabled(), gc.get_threshold()),
        "files": lambda: [file(each) for each in (sys.stdin, sys.stdout, sys.stderr)],
        "open": lambda: [fcntl.fcntl(number, fcntl.F_GETFD) for number in range(3)],
        "more": lambda: sum(is_open(number) for number in range(3, 64)),
        "environment": lambda: sorted(os.environ),
        "folder": lambda: (os.environ["HOME"] == os.environ["TMPDIR"] == os.getcwd(), os.listdir()),
        "session": lambda: os.getsid(0) == os.getpgrp() == os.getpid(),
        "signals": lambda: [str(signal.getsignal(number)) for number in signal.valid_signals()],
        "limits": lambda: {key: resource.getrlimit(number) for key, number in vars(resource).items()
                           if key.startswith("RLIMIT_") and key != "RLIMIT_NPROC"},
        "threads": threading.active_count,
        "warnings": lambda: [str(each) for each in warnings.filters],
        "users": lambda: (os.getuid() == 0, os.getgid() == 0, os.getgroups()),
        "seconds": lambda: resource.getrusage(resource.RUSAGE_SELF).ru_utime < 1,
    }

    def f():
        lines = []
        for key, ask in ASKED.items():
            try: lines.append(f"{key}: {ask()}")
            except Exception as error: lines.append(f"{key}: {error!r}")
        return "; ".join(lines)
"""


@pytest.mark.parametrize("described", [printed, called])
def test_a_forked_process_begins_as_one_that_python_started(described, monkeypatch):
    program = textwrap.dedent(DESCRIBED) + ("print(f())" if described is printed else "")
    forked = (described(program) or "failed").split("; ")
    assert server("stdin" if described is printed else "call")
    monkeypatch.setattr(launch, "_has_pidfds", lambda: False)
    assert "session: True" in forked and forked == (described(program) or "").split("; ")


SPOILS = {
    "builtins": "import builtins; builtins.len = lambda x: -1",
    "modules": "import sys; sys.modules.clear()",
    "environment": "import os; os.environ['A'] = '1'; os.chdir('/usr/lib')",
    "random": "import random; random.seed(1)",
    "files": "open('kept', 'w').write('1')",
    "descriptors": "import os\nwhile True: os.dup(0)",
    "closed": "import os; os.closerange(0, 64)",
    "threads": "import threading, time; threading.Thread(target=time.sleep, args=(60,)).start()",
    "at exit": "import atexit, time; atexit.register(time.sleep, 60)",
    "exit": "raise SystemExit(3)",
    "sudden exit": "import os; os._exit(0)",
    "signal": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "stopped": "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
    "deep": "f = lambda: f()\nf()",
    "memory": "x = bytearray(1 << 30)",
}
UNSPOILT = """
    import os, random
    print(len("ab"), sorted(os.environ), os.getcwd() == os.environ["HOME"], os.listdir(), input())
"""


@pytest.mark.parametrize("kind", SPOILS)
def test_nothing_of_a_program_is_left_to_the_next(kind):
    expected = printed(UNSPOILT, "typed\n")
    first, begin = server(), time.monotonic()
    printed(SPOILS[kind], limits=dataclasses.replace(LIMITS, deadline_s=1.0))
    assert printed(UNSPOILT, "typed\n") == expected and server() == first
    assert expected is not None and expected.endswith("True [] typed\n")
    assert time.monotonic() - begin < 20  # some would go on for 60


def test_random_numbers_of_two_processes_differ():
    assert len({printed("import random; print(random.random())") for _ in range(4)}) == 4


def memory(pid) -> bytes:
    """What a process can write."""
    regions = []
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", buffering=0) as file:
        for line in maps:
            addresses, rights = line.split()[:2]
            if rights.startswith("rw"):
                begin, end = (int(number, 16) for number in addresses.split("-"))
                file.seek(begin)
                regions.append(file.read(end - begin) or b"")
    return b"".join(regions)


def test_a_server_never_holds_a_program_or_a_test():
    secret = "".join(["se", "cret of ", "the test"])
    test = read_script(f"assert f() == 1, '{secret}'")
    assert run_test(f"def f(): return len('{secret}') - 17", test, LIMITS)
    for mode in ("serve", "test"):
        try:
            held = memory(server(mode))
        except PermissionError:
            pytest.skip("the memory of a process of this one's cannot be read here")
        assert b"qerl-fork" in held and secret.encode() not in held


@confined
def test_a_program_does_not_reach_its_server():
    first = (printed(PARENT), server())
    attack = """
        import os, signal
        for act in (
            lambda: os.kill(os.getppid(), signal.SIGKILL),
            lambda: signal.pidfd_send_signal(os.pidfd_open(os.getppid()), signal.SIGKILL),
            lambda: open(f"/proc/{os.getppid()}/mem"),
        ):
            try: act(); print("done")
            except OSError as error: print("refused")
    """
    assert printed(attack) == "refused\n" * 3
    assert (printed(PARENT), server()) == first


def test_a_server_that_was_killed_is_replaced():
    assert printed("print(1)") == "1\n"
    os.kill(first := server(), signal.SIGKILL)
    assert printed("print(2)") == "2\n" and server() != first


def test_processes_end_with_their_server():
    """Their programs have failed: a server does not end by itself."""
    begin, printed_then = time.monotonic(), []
    running = threading.Thread(target=lambda: printed_then.append(printed("import time; time.sleep(15)")))
    assert printed("print(1)") == "1\n"
    running.start()
    children = Path(f"/proc/{server()}/task/{server()}/children")
    assert comes_true(lambda: children.read_text() != "")
    (child,) = map(int, children.read_text().split())
    time.sleep(0.5)  # until it is confined
    os.kill(server(), signal.SIGKILL)
    running.join()
    assert printed_then == [None] and time.monotonic() - begin < 12 and has_ended(child)


WORKER = """
import os, sys, time
from qerl.tasks.code import launch
from qerl.tasks.code.runner import *
limits = Limits(30.0, 1 << 29, 1000, {backend!r})
assert run_with_input("print(1)", "", limits) == "1\\n"
print(*(server.pid for server in launch._servers.values()), flush=True)
{then}
"""


@pytest.mark.parametrize("then", ["os.kill(os.getpid(), 9)", "sys.exit(0)", "os._exit(0)"])
def test_a_server_ends_with_its_worker(then):
    code = WORKER.format(backend=LIMITS.backend, then=then)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-Werror", "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert has_ended(int(done.stdout), within_s=10) and done.stderr == ""


def test_a_server_ends_though_another_process_has_its_socket():
    """As a process that the worker has forked does."""
    then = "if os.fork() == 0: time.sleep(30); os._exit(0)\nos.kill(os.getpid(), 9)"
    code = WORKER.format(backend=LIMITS.backend, then=then)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        assert has_ended(int(worker.stdout.readline()), within_s=10)
        others = [pid for pid, fields in all_running().items() if fields[2] == str(worker.pid)]
        for pid in others:
            os.kill(pid, 9)


def test_a_server_outlives_the_thread_that_started_it():
    found = []
    thread = threading.Thread(target=lambda: found.append(printed(PARENT)))
    thread.start()
    thread.join()
    time.sleep(0.2)
    assert found == [printed(PARENT)] == [f"{server()}\n"]


def test_a_fork_of_the_worker_has_servers_of_its_own():
    first = printed(PARENT)
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        os.write(write, (printed(PARENT) or "failed").encode())
        os._exit(0)
    os.waitpid(pid, 0)
    other = os.read(read, 100).decode()
    os.close(read)
    os.close(write)
    assert other not in (first, "failed") and printed(PARENT) == first
    assert has_ended(int(other), within_s=10)


def test_threads_run_programs_at_the_same_time():
    program = "import time; time.sleep(1); print(int(input()) ** 2)"
    begin = time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        squares = [*pool.map(lambda number: printed(program, f"{number}\n"), range(8))]
    assert squares == [f"{number**2}\n" for number in range(8)]
    assert time.monotonic() - begin < 6  # 8 in turn


def test_no_descriptor_is_left_open():
    test = read_script("assert f() == 1")

    def run():
        assert run_test("def f(): return 1", test, LIMITS) and printed("print(1)") == "1\n"
        assert printed("import os; os.abort()") is None and called("def f(): return 1") == 1

    run()
    before = descriptors(os.getpid())
    for _ in range(20):
        run()
    assert descriptors(os.getpid()) == before
    if os.geteuid() != 0:  # who may not look into what cannot be dumped
        return
    # Once it has reaped, a server has its standard files, its socket and a pidfd of the worker.
    for each in launch._servers.values():
        assert comes_true(lambda pid=each.pid: descriptors(pid) == 5)


def test_a_server_that_does_not_start_gives_its_reason(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(SandboxUnavailable, match="No such file"):
        printed("print(1)")
    monkeypatch.undo()
    shutil.copytree(launch.CHILD.parent, tmp_path / "code")
    (tmp_path / "code" / "values.py").write_text("raise ImportError('no values here')")
    monkeypatch.setattr(launch, "CHILD", tmp_path / "code" / "child.py")
    with pytest.raises(SandboxUnavailable, match="no values here"):
        printed("print(1)")
    assert launch._servers == {}


def test_what_a_server_cannot_fork_is_its_reason(monkeypatch):
    """The server goes on: the machine may have had no process left."""
    assert printed("print(1)") == "1\n"
    (one,) = launch._servers.values()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        theirs.send(b"BlockingIOError: no process is free")
        with monkeypatch.context() as patch, pytest.raises(SandboxUnavailable, match="no process is free"):
            patch.setattr(one, "_control", ours)
            printed("print(1)")
    assert printed(PARENT) == f"{one.pid}\n"


def test_an_answer_that_does_not_come_ends_the_server(monkeypatch):
    assert printed("print(1)") == "1\n"
    (one,) = launch._servers.values()
    os.kill(one.pid, signal.SIGSTOP)
    one._control.settimeout(0.5)
    assert printed("print(2)") == "2\n" and server() != one.pid and has_ended(one.pid)
