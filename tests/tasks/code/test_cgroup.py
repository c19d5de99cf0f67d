"""A cgroup for each program: in a made-up hierarchy, and in the machine's own where it allows that."""

import contextlib
import dataclasses
import errno
import functools
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from processes import is_running
from qerl.config import CodeConfig, TaskConfig
from qerl.tasks.code import backends, cgroup, launch, sandbox
from qerl.tasks.code.grade import code
from qerl.tasks.code.runner import Limits, SandboxUnavailable, run_call, run_with_input

FILES = ("memory.max", "memory.swap.max", "memory.oom.group", "pids.max", "cgroup.procs", "cgroup.kill")
STARTED = ["mkdir", *FILES[:4], "start"]
REMOVED = ["cgroup.kill", "rmdir"]
MOUNTS = "23 1 0:2 / / rw - ext4 /dev/vda rw\n31 23 0:28 / {} rw,relatime shared:4 - cgroup2 cgroup2 rw\n"


class Kernel:
    """Stand for the kernel's part of a hierarchy in a folder: a new group has files, which vanish with it."""

    def __init__(self, folder, monkeypatch):
        self.root, self.proc = folder / "a cgroup", folder / "proc"
        self.root.mkdir()
        self.proc.mkdir()
        (self.root / "cgroup.controllers").write_text("cpu memory pids\n")
        (self.root / "cgroup.subtree_control").write_text("cpu\n")
        self.write_proc("0::/\n", MOUNTS.format(str(self.root).replace(" ", "\\040")))
        self.files, self.events, self.removed = FILES, [], []
        self.refused: dict[str, list[int]] = {}
        """Errors of the next actions, by file or call."""
        real = os.mkdir, os.rmdir, os.open, launch.start

        def mkdir(path, *rest, **keywords):
            real[0](path, *rest, **keywords)
            if Path(path).parent == self.root:
                self.events.append("mkdir")
                for name in self.files:
                    (Path(path) / name).write_text("max\n" if name.endswith(".max") else "")

        def rmdir(path, **keywords):
            if Path(path).parent != self.root:
                return real[1](path, **keywords)
            self._refuse("rmdir")
            self.events.append("rmdir")
            self.removed.append({file.name: file.read_text() for file in Path(path).iterdir()})
            for file in Path(path).iterdir():
                file.unlink()
            real[1](path, **keywords)

        def opened(path, flags, *rest, **keywords):
            if flags & os.O_WRONLY and not flags & os.O_CREAT and self.root in Path(path).parents:
                self._refuse(Path(path).name)
                self.events.append(Path(path).name)
            return real[2](path, flags, *rest, **keywords)

        def start(*arguments):
            self._refuse("start")
            self.events.append("start")
            return real[3](*arguments)

        for name, function in (("mkdir", mkdir), ("rmdir", rmdir), ("open", opened)):
            monkeypatch.setattr(os, name, function)
        monkeypatch.setattr(launch, "start", start)

    def write_proc(self, own, mounts):
        (self.proc / "cgroup").write_text("4:memory:/a\n" + own)
        (self.proc / "mountinfo").write_text(mounts)

    def _refuse(self, name):
        if errors := self.refused.get(name):
            raise OSError(errors[0], os.strerror(errors.pop(0)), name)

    def groups(self):
        return [path for path in self.root.iterdir() if path.is_dir()]


@pytest.fixture
def backend():
    return sandbox.choose(unsafe=True).backend


@pytest.fixture
def kernel(tmp_path, monkeypatch, backend):
    return Kernel(tmp_path, monkeypatch)


@pytest.fixture
def limits(kernel, backend):
    return Limits(30.0, 512 << 20, 1 << 20, backend=backend, cgroup=kernel.root)


def test_the_processs_own_group_is_found_and_gets_its_controllers_enabled(kernel):
    assert cgroup.find(kernel.proc) == kernel.root
    assert (kernel.root / "cgroup.subtree_control").read_text() == "+memory +pids"
    (kernel.root / "cgroup.subtree_control").write_text("pids cpu\n")
    cgroup.find(kernel.proc)
    assert (kernel.root / "cgroup.subtree_control").read_text() == "+memory"
    (kernel.root / "cgroup.subtree_control").write_text("pids memory\n")
    cgroup.find(kernel.proc)
    assert (kernel.root / "cgroup.subtree_control").read_text() == "pids memory\n"  # nothing is written


def test_the_group_is_found_where_a_part_of_the_hierarchy_is_mounted(kernel):
    own = kernel.root / "job"
    own.mkdir()
    for name in ("cgroup.controllers", "cgroup.subtree_control"):
        (own / name).write_text("memory pids\n")
    point = str(kernel.root).replace(" ", "\\040")
    kernel.write_proc("0::/docker/1/job\n", MOUNTS.format(point).replace("0:28 /", "0:28 /docker/1"))
    assert cgroup.find(kernel.proc) == own
    kernel.write_proc("0::/docker/2\n", MOUNTS.format(point).replace("0:28 /", "0:28 /docker/1"))
    with pytest.raises(OSError, match="/docker/2 is not below"):
        cgroup.find(kernel.proc)
    kernel.write_proc("0::/../job\n", MOUNTS.format(point))  # in another namespace
    with pytest.raises(OSError, match=r"/\.\./job is not below"):
        cgroup.find(kernel.proc)


def test_the_reason_is_given_where_there_can_be_no_group(kernel):
    (kernel.root / "cgroup.controllers").write_text("cpu pids\n")
    with pytest.raises(OSError, match=r"no controller memory in .*a cgroup"):
        cgroup.find(kernel.proc)
    (kernel.root / "cgroup.controllers").write_text("memory pids\n")
    kernel.refused["cgroup.subtree_control"] = [errno.EBUSY, errno.EACCES]
    with pytest.raises(OSError, match=r"a cgroup is not the root of cgroup v2 and holds this process"):
        cgroup.find(kernel.proc)
    with pytest.raises(PermissionError, match="subtree_control"):
        cgroup.find(kernel.proc)
    kernel.write_proc("", (kernel.proc / "mountinfo").read_text())
    with pytest.raises(OSError, match="not mounted"):
        cgroup.find(kernel.proc)
    kernel.write_proc("0::/\n", MOUNTS.format("/x").replace("cgroup2", "cgroup"))
    with pytest.raises(OSError, match="not mounted"):
        cgroup.find(kernel.proc)


def test_a_program_starts_in_a_group_with_its_limits_which_is_then_killed_and_removed(kernel, limits):
    assert run_with_input("print(int(input()) ** 2)", "7\n", limits) == "49\n"
    assert kernel.events == STARTED + REMOVED and kernel.groups() == []
    (files,) = kernel.removed
    assert files == {
        "memory.max": str((512 + 128) << 20),
        "memory.swap.max": "0",
        "memory.oom.group": "1",
        "pids.max": str(backends.MAX_TASKS),
        "cgroup.procs": "0\n",
        "cgroup.kill": "1",
    }
    run_call("f = abs", "f", [-1], limits)
    assert kernel.events == (STARTED + REMOVED) * 2


def test_a_group_is_removed_after_a_program_that_fails_or_does_not_end(kernel, limits):
    assert run_with_input("raise ValueError", "", limits) is None
    endless = dataclasses.replace(limits, deadline_s=1.0)
    assert run_with_input("while True: pass", "", endless) is None
    assert kernel.events == (STARTED + REMOVED) * 2 and kernel.groups() == []


def test_a_group_is_removed_where_the_program_does_not_start(kernel, limits, monkeypatch):
    kernel.refused["start"] = [errno.ENOMEM]
    with pytest.raises(OSError, match="memory"):
        run_with_input("print(1)", "", limits)
    assert kernel.events == STARTED[:-1] + REMOVED
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(SandboxUnavailable):
        run_with_input("print(1)", "", limits)
    kernel.files = tuple(name for name in FILES if name != "pids.max")
    with pytest.raises(FileNotFoundError, match=r"pids\.max"):
        run_with_input("print(1)", "", limits)
    assert kernel.events[-2:] == REMOVED and len(kernel.removed) == 3 and kernel.groups() == []


def test_a_group_without_cgroup_kill_is_removed_and_its_program_an_error(kernel, limits):
    kernel.files = tuple(name for name in FILES if name != "cgroup.kill")
    with pytest.raises(FileNotFoundError, match=r"cgroup\.kill"):
        run_with_input("print(1)", "", limits)
    assert kernel.groups() == []


def test_a_kernel_that_does_not_count_swap_has_no_limit_of_it(kernel, limits):
    kernel.files = tuple(name for name in FILES if name != "memory.swap.max")
    assert run_with_input("print(1)", "", limits) == "1\n"
    assert "memory.swap.max" not in kernel.events and kernel.groups() == []


def test_a_program_that_cannot_join_its_group_does_not_run(kernel, limits, backend):
    kernel.files = (*FILES[:4], "cgroup.kill")
    ran = []
    real = kernel._refuse

    def refuse(name):  # as the shell's redirection fails for root too
        if name == "start":
            (kernel.groups()[0] / "cgroup.procs").mkdir()
        if name == "rmdir":
            ran.extend(kernel.groups())
            (kernel.groups()[0] / "cgroup.procs").rmdir()
        real(name)

    kernel._refuse = refuse
    reason = "ended before it was confined" if backend == "bwrap" else "IsADirectoryError"
    with pytest.raises(SandboxUnavailable, match=reason):
        run_with_input("print(1)", "", limits)
    assert len(ran) == 1 and kernel.groups() == []


def test_a_group_is_removed_once_its_last_process_is_gone(kernel, limits, monkeypatch):
    kernel.refused["rmdir"] = [errno.EBUSY] * 3
    assert run_with_input("print(1)", "", limits) == "1\n"
    assert kernel.groups() == [] and not kernel.refused["rmdir"]
    monkeypatch.setattr(cgroup, "_REMOVE_S", 0.02)
    kernel.refused["rmdir"] = [errno.EBUSY] * 10_000
    with pytest.raises(OSError, match="busy"):
        run_with_input("print(1)", "", limits)


def test_the_log_says_that_a_cgroup_acts_and_the_reward_uses_it(kernel, monkeypatch):
    monkeypatch.setattr(cgroup, "find", functools.partial(cgroup.find, kernel.proc))
    settings = CodeConfig(test_timeout_s=20.0, memory_mb=700, unsafe=True)
    reward = code(TaskConfig(rewards=("code",), answer_column="tests", code=settings))
    assert f"each in a cgroup of its own in {kernel.root}: memory" in vars(reward)["notice"]
    assert "without a cgroup" not in vars(reward)["notice"]
    kernel.removed.clear()
    assert reward(completions=["print(4)"], tests=[{"inputs": [""], "outputs": ["4"]}]) == [1.0]
    assert [files["memory.max"] for files in kernel.removed] == [str((700 + 128) << 20)]


def test_where_no_group_can_be_made_programs_run_without_and_the_log_says_why(kernel, monkeypatch):
    monkeypatch.setattr(cgroup, "find", functools.partial(cgroup.find, kernel.proc))
    kernel.files = tuple(name for name in FILES if name != "memory.oom.group")
    chosen = sandbox.choose(unsafe=True)
    assert chosen.cgroup is None and kernel.groups() == []
    assert "; without a cgroup: " in str(chosen) and "memory.oom.group" in str(chosen)
    (kernel.root / "cgroup.controllers").write_text("")
    kernel.events.clear()
    settings = CodeConfig(test_timeout_s=20.0, unsafe=True)
    reward = code(TaskConfig(rewards=("code",), answer_column="tests", code=settings))
    assert "without a cgroup: cgroup v2 has no controller memory or pids" in vars(reward)["notice"]
    assert reward(completions=["print(4)"], tests=[{"inputs": [""], "outputs": ["4"]}]) == [1.0]
    assert set(kernel.events) == {"start"}


def test_an_error_of_the_kernel_names_the_file():
    with pytest.raises(OSError, match=r"No space left.*/dev/full"):
        cgroup._write(Path("/dev/full"), "1")


# The machine's own hierarchy.


def joined_group():
    """Return this process's group if a process may join a group that is made there; else skip."""
    try:
        own = cgroup._own_group(Path("/proc/self"))
        (group := own / f"qerl-test-{os.getpid()}").mkdir()
    except OSError as error:
        pytest.skip(f"no group can be made: {error}")
    try:
        joins = ["/bin/sh", "-c", f"echo 0 > '{group}/cgroup.procs'"]
        if subprocess.run(joins, stderr=subprocess.DEVNULL, check=False).returncode:
            pytest.skip(f"no process can join {group}")
        if not (group / "cgroup.kill").exists():
            pytest.skip("the kernel has no cgroup.kill")
    finally:
        group.rmdir()
    return own


@pytest.fixture
def own_group(monkeypatch):
    """Return the machine's group; where it has no controllers, their files are /dev/null."""
    group, real = joined_group(), os.open

    def opened(path, flags, *rest, **keywords):
        is_limit = Path(path).name in FILES[:4] and not Path(path).exists()
        return real("/dev/null" if is_limit else path, flags, *rest, **keywords)

    monkeypatch.setattr(os, "open", opened)
    return group


def programs(group):
    """Return the processes of child.py in groups of programs."""
    found = []
    for procs in group.glob("qerl-code-*/cgroup.procs"):
        with contextlib.suppress(OSError):
            for pid in procs.read_text().split():
                if os.fsencode(launch.CHILD) in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
    return found


def test_the_kernel_has_a_program_in_a_group_of_its_own(own_group, backend):
    limits = Limits(30.0, 512 << 20, 1 << 20, backend=backend, cgroup=own_group)
    printed = []
    arguments = ("import time; time.sleep(2); print(1)", "", limits)
    program = threading.Thread(target=lambda: printed.append(run_with_input(*arguments)))
    program.start()
    end = time.monotonic() + 20
    while not (found := programs(own_group)) and program.is_alive() and time.monotonic() < end:
        time.sleep(0.01)
    program.join()
    assert found and printed == ["1\n"]
    assert not any(map(is_running, found)) and not list(own_group.glob("qerl-code-*"))


def test_the_kernel_kills_what_a_command_leaves_behind(own_group):
    with cgroup.own_group(own_group, memory_bytes=1 << 30, max_tasks=64) as procs:
        folder = procs.parent
        leaves = "sleep 1000 </dev/null >/dev/null 2>&1 & echo $!"
        command = [*cgroup.join_command(procs), "setsid", "/bin/sh", "-c", leaves]
        left = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        assert left in (folder / "cgroup.procs").read_text().split()
    assert not folder.exists() and not is_running(left)


def test_the_kernel_bounds_memory_and_tasks():
    try:
        group = cgroup.find()
    except OSError as error:
        pytest.skip(str(error))
    joined_group()
    fills = "b'x' * (400 << 20)"
    for memory_bytes, returned in ((0, -9), (600 << 20, 0)):
        with cgroup.own_group(group, memory_bytes=memory_bytes, max_tasks=64) as procs:
            command = [*cgroup.join_command(procs), sys.executable, "-c", fills]
            assert subprocess.run(command, check=False).returncode == returned
    starts = """
import os, threading, time
count = 0
try:
    while count < 50:
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        count += 1
except RuntimeError: pass
print(count, flush=True)
os._exit(0)
"""
    with cgroup.own_group(group, memory_bytes=1 << 30, max_tasks=10) as procs:
        command = [*cgroup.join_command(procs), sys.executable, "-c", starts]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "9\n"
