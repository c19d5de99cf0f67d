import contextlib
import fcntl
import os

from qerl.tracking.atomic_file import write_atomic


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
