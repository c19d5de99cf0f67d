"""Commands that write a folder, killed or refused space at any flush, and what the next one finds."""

import builtins
import errno
import functools
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from faults import runs

NAMES = {
    "export-peft": ("export", "{run}", "{out}", "--as", "peft"),
    "export-merged": ("export", "{run}", "{out}", "--as", "merged"),
    "export-nvfp4": ("export", "{run}", "{out}", "--as", "nvfp4", "--calibration-tokens", "64"),
    "quantize": ("quantize", "{model}", "{out}"),
}
"""Commands that write a folder."""


def arguments(name: str, files: Path, run: Path, out: Path) -> list[str]:
    places = {"run": run, "out": out, "model": files}
    return [part.format(**places) for part in NAMES[name]]


def whole(name: str, files: Path, run: Path, out: Path) -> tuple[int, float]:
    """Run it to its end; return the number of flushes and renames, and the seconds it took."""
    count = out.with_name(f"{out.name}.count")

    def counting() -> None:
        _patch_all(lambda real, *given: (_append(count), real(*given))[1])

    begin = time.monotonic()
    run_ = runs.start_command(arguments(name, files, run, out), out.with_name("whole.log"), counting)
    assert run_.wait() == 0, run_.said
    return count.stat().st_size, time.monotonic() - begin


def killed_at(allowed: int) -> Callable[[], None]:
    """From then on the process kills itself at the next flush or rename after so many."""
    left = [allowed]

    def change(real, *given):
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*given)

    return lambda: _patch_all(change)


def failing_at(allowed: int, number: int) -> Callable[[], None]:
    """From then on each flush or rename after so many fails, and so does opening a file to write it."""
    left, open_file = [allowed], builtins.open

    def refuse() -> None:
        os.write(2, b"[refused]\n")
        raise OSError(number, os.strerror(number))

    def change(real, *given):
        left[0] -= 1
        return refuse() if left[0] < 0 else real(*given)

    def opened(file, mode="r", *more, **how):
        writes = not set(mode) <= set("rbt") and not isinstance(file, int)
        return refuse() if writes and left[0] < 0 else open_file(file, mode, *more, **how)

    def work() -> None:
        _patch_all(change)
        builtins.open = opened

    return work


def _patch_all(change: Callable[..., object]) -> None:
    for name in ("fsync", "rename", "replace", "mkdir"):
        setattr(os, name, functools.partial(change, getattr(os, name)))


def _append(path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(descriptor, b"x")
    os.close(descriptor)


def difference(a: Path, b: Path) -> str | None:
    """Return what differs between two folders; None: the same files with the same bytes."""
    ours, theirs = (
        {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
        for folder in (a, b)
    )
    if ours.keys() != theirs.keys():
        return f"files: {sorted(ours.keys() ^ theirs.keys())}"
    return next((name for name in ours if ours[name] != theirs[name]), None)


def trial(
    name: str,
    files: Path,
    run: Path,
    reference: Path,
    folder: Path,
    first: Callable[[], None],
    moment_s: float | None,
) -> str | None:
    """Return what is wrong with a command that was killed, and then given again; None: nothing."""
    out = folder / "out"
    folder.mkdir()
    given = arguments(name, files, run, out)
    one = runs.start_command(given, folder.with_name(f"{folder.name}.log"), first)
    if moment_s is not None:
        time.sleep(moment_s)
        one.kill()
    code = one.wait()
    if moment_s is None and code != -signal.SIGKILL:
        return f"was not killed: {one.said[-800:]}"
    if out.exists() and (found := difference(out, reference)) is not None:
        return f"a half-written folder stands in its place: {found}"
    again = runs.start_command(given, folder.with_name(f"{folder.name}.again.log"))
    second, was_whole = again.wait(), code in (0, -signal.SIGKILL) and "exists already" in again.said
    if second and not was_whole:
        return f"exit code {second}: {again.said[-800:]}"
    left = [path.name for path in folder.iterdir() if path != out]
    found = difference(out, reference) or (f"left: {left}" if left and not was_whole else None)
    shutil.rmtree(folder)
    return found


def refusal(run: runs.Run, reason: int = errno.ENOSPC) -> str | None:
    """Return what is wrong with the end of a command that was refused; None: one line with the reason."""
    code, lines = run.wait(), run.said.splitlines()
    errors = [line for line in lines if line.startswith("qerl: ")]
    if "[refused]" not in run.said:
        return f"was not refused anything: {run.said[-800:]}"
    if code not in (1, 2) or "Traceback" in run.said or len(errors) != 1:
        return f"exit code {code}: {run.said[-1500:]}"
    return None if os.strerror(reason) in errors[0] else errors[0]


def moments(seed: int, count: int, whole_s: float) -> Sequence[float]:
    rng = random.Random(seed)
    return [rng.uniform(0.0, whole_s) for _ in range(count)]
