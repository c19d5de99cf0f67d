"""The choice of a backend, and attacks that need a setting of their own: each fails without one mechanism."""

import contextlib
import dataclasses
import json
import os
import pty
import select
import shutil
import subprocess
import sys
import termios
import textwrap
import threading
import time
import warnings
from pathlib import Path

import pytest

import tiny_run
from qerl.cli import main
from qerl.config import CodeConfig, TaskConfig
from qerl.errors import UserError
from qerl.tasks import RewardPool
from qerl.tasks.code import backends, confine, launch, sandbox
from qerl.tasks.code.grade import code
from qerl.tasks.code.runner import Limits, SandboxUnavailable, probe, run_with_input

LIMITS = Limits(deadline_s=30.0, memory_bytes=1 << 30, output_bytes=1 << 20)
TASK = TaskConfig(rewards=("code",), answer_column="tests", code=CodeConfig(test_timeout_s=20.0))
UNSAFE = dataclasses.replace(TASK, code=dataclasses.replace(TASK.code, unsafe=True))
NO_LANDLOCK = "\n_landlock_version = lambda: 0\n"
NO_SECCOMP = "\ndef _seccomp(steps): raise OSError(22, 'no seccomp')\n"


def limits_of(backend):
    limits = dataclasses.replace(LIMITS, backend=backend)
    try:
        probe(limits)
    except SandboxUnavailable as error:
        pytest.skip(f"{backend}: {error}")
    return limits


@pytest.fixture(params=["bwrap", "landlock"])
def limits(request):
    return limits_of(request.param)


def printed(program, limits):
    return run_with_input(textwrap.dedent(program), "", limits)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Stand for another machine: one without bwrap, and with these lines at the end of confine.py."""

    def without(*lines):
        folder = tmp_path / "code"
        source = Path(backends.__file__).with_name("confine.py").read_text()
        shutil.copytree(Path(backends.__file__).parent, folder, dirs_exist_ok=True)
        (folder / "confine.py").write_text(source + "".join(lines))
        monkeypatch.setattr(launch, "CHILD", folder / "child.py")
        monkeypatch.setenv("PATH", str(tmp_path))

    return without


def command(tmp_path, text):
    (path := tmp_path / "bwrap").write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_a_backend_that_does_not_work_is_skipped_with_its_reason(machine, tmp_path):
    machine()
    assert sandbox.choose(unsafe=True).skipped["bwrap"] == "bwrap is not installed"
    command(tmp_path, "echo 'bwrap: No permissions to create new namespace' >&2; exit 1")
    chosen = sandbox.choose(unsafe=True)
    assert chosen.skipped["bwrap"] == "bwrap: No permissions to create new namespace"
    assert chosen.backend in str(chosen) and "No permissions" in str(chosen)
    command(tmp_path, "exit 0")
    assert sandbox.choose(unsafe=True).skipped["bwrap"] == "the process ended before it was confined"
    with pytest.raises(
        SandboxUnavailable, match="ended before it was confined"
    ):  # it fails later: no wrong answer
        printed("print(1)", dataclasses.replace(LIMITS, backend="bwrap"))


def test_where_nothing_confines_a_program_the_reward_is_refused(machine):
    machine(NO_LANDLOCK)
    with pytest.raises(
        UserError, match=r"none works here .*not installed; landlock: .*no Landlock.*code.unsafe"
    ):
        code(TASK)
    machine(NO_SECCOMP)
    with pytest.raises(UserError, match="none works here"):
        code(TASK)
    with pytest.raises(SandboxUnavailable):
        printed("print(1)", LIMITS)


def test_unsafe_runs_programs_with_what_there_is_and_says_so(machine):
    machine(NO_LANDLOCK, NO_SECCOMP)
    reward = code(UNSAFE)
    assert reward(completions=["print(4)"], tests=[{"inputs": [""], "outputs": ["4"]}]) == [1.0]
    assert "confined by unsafe, without landlock and seccomp" in vars(reward)["notice"]
    assert "landlock skipped: OSError: the kernel has no Landlock" in vars(reward)["notice"]


def test_unsafe_changes_nothing_where_a_backend_works():
    try:
        assert sandbox.choose(unsafe=True).backend == sandbox.choose().backend != "unsafe"
    except SandboxUnavailable as error:
        pytest.skip(str(error))


def test_the_log_names_the_backend():
    with RewardPool(UNSAFE) as pool:
        (notice,) = pool.notices
    assert notice.startswith(f"programs are confined by {sandbox.choose(unsafe=True).backend}")


def test_a_run_and_its_evaluation_name_the_backend(tmp_path, capsys):
    files, run = tiny_run.write_files(tmp_path / "files"), tmp_path / "run"
    rows = [{"prompt": f"{i}?", "tests": {"inputs": [""], "outputs": [str(i)]}} for i in range(40)]
    (files / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = ["--num-steps", "1", "--noise.num-stages", "2", "--evaluate.num-prompts", "0", "--task.code.unsafe"]
    own += ["--num-prompts", "1", "--task.rewards", "code", "--task.answer-column", "tests"]
    main.command(["train", "demo_long", *tiny_run.options(files, run), *own])
    backend = f"confined by {sandbox.choose(unsafe=True).backend}"
    assert backend in (run / "events.jsonl").read_text()
    capsys.readouterr()
    evaluate = ["--num-prompts", "1", "--num-samples", "1", "--task.code.unsafe"]
    main.command(["eval", str(run), *evaluate])
    assert backend in " ".join(capsys.readouterr().err.split())


@contextlib.contextmanager
def forks():
    """Fork although the process has threads, of which Python 3.12 warns: the child only starts a program."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


class Terminal:
    """Run a function in a session with a terminal; keep its output and the number of keys typed."""

    def __init__(self, function):
        self.output = b""
        with forks():
            pid, terminal = pty.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                attributes = termios.tcgetattr(0)
                attributes[3] &= ~(termios.ECHO | termios.ICANON)
                termios.tcsetattr(0, termios.TCSANOW, attributes)
                os.write(1, b"[" + function().encode() + b"]")
                time.sleep(0.2)
                os.write(1, b"typed:%d;" % len(select.select([0], [], [], 0)[0]))
            os._exit(0)
        end = time.monotonic() + 60
        while time.monotonic() < end and b";" not in self.output:
            if select.select([terminal], [], [], 0.1)[0]:
                try:
                    self.output += os.read(terminal, 1000)
                except OSError:
                    break
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        os.close(terminal)


TYPES = """
    import fcntl, os
    try:
        tty = os.open("/dev/tty", os.O_RDWR)
        fcntl.ioctl(tty, 0x5412, b"x")
        print("typed", end="")
    except OSError as error: print(type(error).__name__, end="")
"""


def test_a_program_cannot_type_into_the_terminal_not_even_without_landlock(machine):
    machine(NO_LANDLOCK)
    limits = dataclasses.replace(LIMITS, backend="unsafe")
    output = Terminal(lambda: printed(TYPES, limits) or "failed").output
    assert output in (b"[OSError]typed:0;", b"[PermissionError]typed:0;")
    # Neither is it there to be opened: the process has a session of its own.
    machine(NO_LANDLOCK, NO_SECCOMP)
    opens = "import os\ntry: os.open('/dev/tty', os.O_RDWR)\nexcept OSError as e: print(e.errno, end='')"
    assert Terminal(lambda: printed(opens, limits) or "opened").output.startswith(b"[6]")


def test_a_virtual_environment_in_the_project_folder_leaks_no_project_file(tmp_path, monkeypatch, limits):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path], check=True)
    (tmp_path / ".env").write_text("secret")
    (tmp_path / "tests.jsonl").write_text("expected")
    (tmp_path / "lib" / "tests.jsonl").write_text("expected")
    (tmp_path / "bin" / "run.sh").write_text("expected")
    for path in (tmp_path, *tmp_path.parents[:2]):  # of pytest
        with contextlib.suppress(OSError):
            path.chmod(path.stat().st_mode | 0o055)  # so that only the sandbox is in the way
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    paths = {name: str(tmp_path / "lib" / version / "site-packages") for name in ("purelib", "platlib")}
    real = backends.sysconfig.get_path
    monkeypatch.setattr(backends.sysconfig, "get_path", lambda name: paths.get(name) or real(name))
    monkeypatch.setattr(backends.site, "getsitepackages", lambda: list(paths.values()))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    backends._readable.cache_clear()
    backends._bwrap_options.cache_clear()
    try:
        program = f"""
            import os, sys, json
            print(sys.prefix)
            for name in (".env", "tests.jsonl", "lib/tests.jsonl", "bin/run.sh", "pyvenv.cfg"):
                try: print(open({str(tmp_path)!r} + "/" + name).read())
                except OSError: print("refused")
        """
        lines = (printed(program, limits) or "").split("\n")
    finally:
        backends._readable.cache_clear()
        backends._bwrap_options.cache_clear()
    assert lines[0] == str(tmp_path) and lines[1:5] == ["refused"] * 4


def confined_processes():
    """Return the status of each process of child.py that runs under a seccomp filter."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.fsencode(launch.CHILD) in (folder / "cmdline").read_bytes():
                lines = (folder / "status").read_text().splitlines()
                status = dict(line.split(":", 1) for line in lines)
                stat = (folder / "stat").read_text().rpartition(")")[2].split()
                if status["Seccomp"].strip() == "2":
                    found.append((status, {"session": int(stat[3]), "terminal": int(stat[4])}))
    return found


def test_a_process_has_no_capabilities_groups_privileges_or_terminal(limits):
    program = threading.Thread(target=printed, args=("import time; time.sleep(3)", limits))
    program.start()
    end = time.monotonic() + 30
    while not (found := confined_processes()) and time.monotonic() < end:
        time.sleep(0.02)
    program.join()
    ((status, ids),) = found
    # Landlock limits what CAP_DAC_READ_SEARCH reads. It stays where Python is in a folder of root's own.
    kept = {0} if limits.backend == "bwrap" or os.geteuid() != 0 else {0, 4}
    assert int(status["CapEff"], 16) in kept and int(status["CapPrm"], 16) in kept
    assert int(status["CapInh"], 16) == 0 and status["NoNewPrivs"].strip() == "1"
    assert ids["session"] != os.getsid(0) and ids["terminal"] == 0
    if os.geteuid() == 0:
        assert status["Groups"].strip() == "" and "0" not in status["Uid"].split()


def test_the_threads_of_a_program_are_bounded_by_its_own_number(limits):
    bomb = """
        import os, threading, time
        threading.stack_size(65536)
        count = 0
        try:
            while count < 5000:
                threading.Thread(target=time.sleep, args=(20,), daemon=True).start()
                count += 1
        except RuntimeError: pass
        print(os.getuid(), count, flush=True)
        os._exit(0)
    """
    user, count = map(int, (printed(bomb, limits) or "0 0").split())
    if user in (os.getuid(), backends.NOBODY if os.geteuid() == 0 else None):
        pytest.skip("no user namespaces or users for each program here: the machine's tasks count too")
    # Bubblewrap's own process counts where it has a user namespace.
    assert backends.MAX_TASKS - 3 <= count < backends.MAX_TASKS


def test_threads_leave_the_limited_addresses_to_the_program(limits):
    program = """
        import time
        from concurrent.futures import ThreadPoolExecutor
        def work(item):
            held = [bytes(1000) for _ in range(200)]
            time.sleep(1)
            return len(held)
        with ThreadPoolExecutor(32) as pool:
            lengths = pool.map(work, range(32))
            held = bytearray(400 << 20)
            try: bytearray(700 << 20)
            except MemoryError: print("MemoryError")
            print(sum(lengths))
    """
    assert printed(program, limits) == "MemoryError\n6400\n"


def test_the_tmpfs_of_bwrap_has_a_size(monkeypatch):
    limits = limits_of("bwrap")
    fill = """
        count = 0
        try:
            for count in range(100): open(str(count), "wb").write(bytes(1 << 20))
        except OSError as error: print(error.errno, count)
    """
    assert printed(fill, limits) == "28 64\n"


def test_root_without_capabilities_is_like_any_user():
    if os.geteuid() != 0:
        pytest.skip("needs root")
    limits = limits_of("landlock")
    reads, writes = os.pipe()
    with forks():
        pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            confine._keep_capabilities(0)
            os.write(writes, (printed("print(1)", limits) or "failed").encode())
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(writes)
    with os.fdopen(reads, "rb") as file:
        assert file.read() == b"1\n"


def test_root_makes_each_program_another_user():
    if os.geteuid() != 0 or "4294967295" not in Path("/proc/self/uid_map").read_text():
        pytest.skip("needs root outside of user namespaces")
    users = {
        printed("import os; print(os.getresuid(), os.getresgid())", limits_of("landlock")) for _ in range(3)
    }
    assert len(users) == 3 and not any("(0," in user or " 0)" in user for user in users)
