"""Every file of a run's folder damaged in every way, and what the next start makes of it."""

import itertools
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

from faults import runs
from qerl.learner import checkpoint

CHECKPOINT = (
    *("adapter_model.safetensors", "adapter_config.json", "optimizer.safetensors", "state.json"),
    "manifest.json",
)
RECORD = (
    *("run.json", "metrics.jsonl", "samples.jsonl", "events.jsonl", "evaluations.json", ".lock"),
    *("loggers/tensorboard.json", "tensorboard/"),
)
MORE = ("--num-steps", "8")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(bytes(data))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def delete(path: Path) -> None:
    path.unlink()


HARMS = {harm.__name__: harm for harm in (flip, truncate, empty, delete)}


def half_done(files: Path, out: Path) -> Path:
    """The folder of a run that kills itself with two checkpoints and five steps, some of them logged."""
    write, num_written = checkpoint.write, itertools.count(1)
    sent = out / "loggers" / "tensorboard.json"

    def written(*given: Any, **more: Any) -> Path:
        path = write(*given, **more)
        if next(num_written) == 2:  # in a thread, beside the next step
            while runs.num_steps(out) < 5 or not sent.exists():
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGKILL)
        return path

    run = runs.start(files, out, *MORE, first=lambda: setattr(checkpoint, "write", written))
    assert run.wait() == -signal.SIGKILL, run.said
    return out


def trial(files: Path, half: Path, out: Path, whole: Path, name: str, harm: str) -> str:
    """`same run`; `refused: ...` in one line that names the file; `told`: it goes on without what is lost;
    `not noticed`: a changed letter in a text; or `wrong: ...`."""
    shutil.copytree(half, out)
    HARMS[harm](_found(out, name))
    run = runs.start(files, out, *MORE)
    code = run.wait()
    errors = [line for line in run.said.splitlines() if line.startswith("qerl: ")]
    if "Traceback" in run.said:
        return f"wrong: {run.said[-1500:]}"
    if code in (1, 2) and len(errors) == 1 and name in errors[0]:
        return f"refused: {errors[0].replace(str(out.parent), '')}"
    if code:
        return f"wrong: exit code {code}: {run.said[-1500:]}"
    different = runs.difference(out, whole)
    if different is None:
        return "same run"
    if different != name:
        return f"wrong: {different} differs"
    return "told" if name in run.said else "not noticed"


def _found(out: Path, name: str) -> Path:
    if name in CHECKPOINT:
        return max((out / "checkpoints").glob("step-*")) / name
    if name.endswith("/"):
        return next((out / name).iterdir())
    return out / name
