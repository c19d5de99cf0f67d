"""Tiny runs in forked processes: started in milliseconds, with a fault put in beforehand, killed at will."""

import contextlib
import dataclasses
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[1]))
import tiny_run
from processes import SESSION, all_running
from qerl.cli import main
from qerl.tracking import is_timing
from qerl.tracking.json_lines import read_lines
from stored_samples import read_samples


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """A process with a session of its own: whatever it starts is found by it."""

    pid: int
    log: Path

    @property
    def said(self) -> str:
        """Its stdout and stderr so far."""
        return self.log.read_text()

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout_s: float = 120.0) -> int:
        """Its exit code, negative for a signal."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.005)
        self.kill()
        os.waitpid(self.pid, 0)
        raise TimeoutError(f"{self.log}: not done after {timeout_s} s: {self.said}")

    def wait_for(self, holds: Callable[[], bool], timeout_s: float = 60.0) -> None:
        end = time.monotonic() + timeout_s
        while not holds():
            assert time.monotonic() < end, self.said
            assert os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None, self.said
            time.sleep(0.002)

    def wait_for_all(self, timeout_s: float = 60.0) -> None:
        """Until whatever it started has ended too."""
        end = time.monotonic() + timeout_s
        while self.processes():
            assert time.monotonic() < end, self.said
            time.sleep(0.01)

    def processes(self) -> list[int]:
        """Those of its session that still run, itself included."""
        return [pid for pid, stat in all_running().items() if int(stat[SESSION]) == self.pid]


def start(
    files: Path, out: Path, *more: str, first: Callable[[], object] = lambda: None, log: Path | None = None
) -> Run:
    """`qerl train demo_long` on the tiny files, after first() in its process."""
    return start_command(_training(files, out, *more), log or _log_of(out), first)


def start_command(arguments: list[str], log: Path, first: Callable[[], object] = lambda: None) -> Run:
    log.parent.mkdir(parents=True, exist_ok=True)
    return Run(tiny_run.forked(_command(arguments, first), log, log), log)


def finish(files: Path, out: Path, *more: str) -> str:
    """A whole run, or the rest of one, in this process; what it said, and those before it."""
    log = _log_of(out)
    log.parent.mkdir(parents=True, exist_ok=True)
    code, said = tiny_run.done_here(_command(_training(files, out, *more)), log, log), log.read_text()
    assert code == 0, (code, said)
    return said


def _training(files: Path, out: Path, *more: str) -> list[str]:
    return ["train", "demo_long", *tiny_run.options(files, out), *more]


def _log_of(out: Path) -> Path:
    return out.with_name(f"{out.name}.log")


def _command(arguments: list[str], first: Callable[[], object] = lambda: None) -> Callable[[], None]:
    def work() -> None:
        first()
        sys.argv = ["qerl", *map(str, arguments)]
        main.main()

    return work


def wait_until(holds: Callable[[], bool], timeout_s: float = 120.0) -> None:
    end = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.002)


def num_steps(out: Path) -> int:
    path = out / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def difference(a: Path, b: Path) -> str | None:
    """Return what differs between two ended runs beside times; None: the same adapter, moments, metrics and
    samples."""
    if _metrics(a) != _metrics(b):
        return "metrics.jsonl"
    if list(read_samples(a)) != list(read_samples(b)):
        return "samples.jsonl"
    if (a / "evaluations.json").read_bytes() != (b / "evaluations.json").read_bytes():
        return "evaluations.json"
    for name in ("adapter_model.safetensors", "optimizer.safetensors"):
        ours, theirs = (load_file(max((out / "checkpoints").glob("step-*")) / name) for out in (a, b))
        if ours.keys() != theirs.keys() or not all(ours[key].equal(theirs[key]) for key in ours):
            return name
    return None


@contextlib.contextmanager
def small_disk(num_bytes: int) -> Iterator[Path]:
    """A file system of that size, made anew; OSError where this process may not mount one."""
    folder = Path(tempfile.mkdtemp(prefix="qerl-disk-"))
    try:
        if os.geteuid() or os.system(f"mount -t tmpfs -o size={num_bytes} qerl {folder} 2>/dev/null"):
            raise PermissionError(f"{folder}: no file system can be mounted here")
        try:
            yield folder
        finally:
            os.system(f"umount -l {folder}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _metrics(out: Path) -> list[dict[str, object]]:
    lines = list(read_lines(out / "metrics.jsonl"))
    return [{key: value for key, value in line.items() if not is_timing(key)} for line in lines]
