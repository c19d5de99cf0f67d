"""A disk that becomes full at any moment of a run, and what is left when there is room again."""

import builtins
import errno
import os
import shutil
from pathlib import Path

from faults import runs


def num_syncs(files: Path, out: Path) -> int:
    """Count the fsyncs of an unbroken run, which is left in `out`."""
    count = out.with_name("syncs")
    sync = os.fsync

    def counted(descriptor: int) -> None:
        with count.open("a") as file:
            file.write("x")
        sync(descriptor)

    run = runs.start(files, out, first=lambda: setattr(os, "fsync", counted))
    assert run.wait() == 0, run.said
    return count.stat().st_size


def refusing(allowed: int):
    """From then on each fsync but the first `allowed` fails, as where space is allotted late."""
    sync, left = os.fsync, [allowed]

    def refuse(descriptor: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            os.write(2, b"[sync refused]\n")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    os.fsync = refuse


def turning_read_only(allowed: int):
    """From the first fsync but so many on, whatever would change the disk fails, as where a kernel that has
    read nonsense mounts a file system read-only beneath a run."""
    sync, left = os.fsync, [allowed]

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    def refuse_from_now_on(descriptor: int) -> None:
        left[0] -= 1
        if left[0] >= 0:
            return sync(descriptor)
        os.write(2, b"[read-only]\n")
        os.mkdir = os.replace = os.rename = os.unlink = refuse
        open_file = builtins.open
        builtins.open = lambda file, mode="r", *more, **how: (
            open_file(file, mode, *more, **how) if set(mode) <= set("rbt") else refuse()
        )
        return refuse()

    os.fsync = refuse_from_now_on


def read_only_trial(files: Path, out: Path, whole: Path, allowed: int) -> str | None:
    """Return what is wrong with a run whose disk turns read-only after so many syncs, and then is not; None:
    nothing."""
    run = runs.start(files, out, first=lambda: turning_read_only(allowed))
    wrong = _clean_end(run, os.strerror(errno.EROFS))
    if "[read-only]" not in run.said:
        return f"the disk did not turn read-only: {run.said[-1500:]}"
    return wrong or _goes_on(files, out, whole)


def sync_trial(files: Path, out: Path, whole: Path, allowed: int) -> str | None:
    """Return what is wrong with a run whose disk is full after so many syncs, and then is not; None if
    nothing is."""
    run = runs.start(files, out, first=lambda: refusing(allowed))
    wrong = _clean_end(run)
    # How often the logger's thread asks depends on its speed: a run may have come to its end before.
    was_full = "[sync refused]" in run.said
    return (wrong if was_full else None) or _goes_on(files, out, whole)


def space_trial(files: Path, folder: Path, log: Path, whole: Path, free_bytes: int) -> str | None:
    """The same on a file system of its own with so much left, freed afterwards."""
    ballast, out = folder / "ballast", folder / "run"
    with ballast.open("wb") as file:
        space = os.statvfs(folder)
        file.write(bytes(max(0, space.f_bavail * space.f_frsize - free_bytes)))
    wrong = _clean_end(runs.start(files, out, log=log)) if free_bytes < needed_bytes(whole) else None
    ballast.unlink()
    wrong = wrong or _goes_on(files, out, whole)
    shutil.rmtree(out)
    return wrong


def needed_bytes(whole: Path) -> int:
    """A run takes a little more than it leaves; with less it cannot end."""
    return sum(-(-path.stat().st_size // 4096) * 4096 for path in whole.rglob("*") if path.is_file()) // 2


def _clean_end(run: runs.Run, reason: str = "No space left on device") -> str | None:
    code = run.wait()
    lines = run.said.splitlines()
    errors = [line for line in lines if line.startswith("qerl: ")]
    # TensorBoard's own threads print what ends them; its metrics are sent again once there is room.
    has_traceback = run.said.count("Traceback (") > run.said.count("Exception in thread ")
    if code not in (1, 2) or has_traceback or len(errors) != 1:
        return f"exit code {code}: {run.said[-1500:]}"
    return None if reason in errors[0] else errors[0]


def _goes_on(files: Path, out: Path, whole: Path) -> str | None:
    run = runs.start(files, out)
    code = run.wait()
    return f"exit code {code}: {run.said[-1500:]}" if code else runs.difference(out, whole)
