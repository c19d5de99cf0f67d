import contextlib
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
