import contextlib
import fcntl
import os
import time

import pytest

from qerl.errors import UserError
from qerl.tasks.worker_process import fork_process
from qerl.tracking import atomic_file
from qerl.tracking.atomic_file import Lock, write_atomic


def test_two_processes_that_write_the_same_file_do_not_take_each_others_part(tmp_path, monkeypatch):
    path, replace = tmp_path / "results.json", os.replace

    def replace_after_the_other(part, target):
        monkeypatch.setattr(os, "replace", replace)
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                write_atomic(path, b"the other's")
                os._exit(0)
            os._exit(1)
        assert os.waitpid(pid, 0)[1] == 0 and path.read_bytes() == b"the other's"
        replace(part, target)

    monkeypatch.setattr(os, "replace", replace_after_the_other)
    write_atomic(path, b"ours")
    assert path.read_bytes() == b"ours" and list(tmp_path.iterdir()) == [path]


def test_parts_of_ended_processes_are_removed_and_those_that_are_written_are_not(tmp_path):
    """Of other files and other names too nothing is touched."""
    path, pid = tmp_path / "results.json", os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    dead = tmp_path / f"results.json.{pid}.part"
    living = [tmp_path / name for name in (f"results.json.{os.getppid()}.part", f"other.json.{pid}.part")]
    living.append(tmp_path / f"results.json.{pid}0000000.part")  # of another machine, which has it locked
    for part in (dead, *living, tmp_path / "results.json.x.part"):
        part.write_text("half")
    with living[-1].open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        write_atomic(path, b"whole")
    left = sorted([path, *living, tmp_path / "results.json.x.part"])
    assert sorted(tmp_path.iterdir()) == left and path.read_bytes() == b"whole"


def kill_beside_a_fork(folder, fork_s):
    """Kill a process that has locked the folder and just forked another, whose Python begins so late."""
    reading, writing = os.pipe()

    def work():
        os.register_at_fork(after_in_child=lambda: (os.write(writing, b"."), time.sleep(fork_s)))
        lock = Lock(folder)
        fork_process(time.sleep, 0)
        time.sleep(60)
        lock.close()

    process = fork_process(work)
    assert os.read(reading, 1)
    process.kill()
    os.close(reading)
    os.close(writing)
    return process.pid


def test_a_fork_of_a_killed_process_that_still_has_its_lock_is_waited_for(tmp_path):
    kill_beside_a_fork(tmp_path, 0.3)
    Lock(tmp_path).close()


def test_a_lock_that_outlives_its_process_is_waited_for_no_longer_than_that(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic_file, "RELEASE_S", 0.1)
    pid = kill_beside_a_fork(tmp_path, 5.0)
    with pytest.raises(UserError, match=rf"another run is writing here \(process {pid}\)"):
        Lock(tmp_path)
