"""kill -9 at random moments of a run, and what is left when it goes on."""

import collections
import random
import shutil
import time
from pathlib import Path

from faults import runs

NUM_STEPS = 12
MORE = ("--num-steps", str(NUM_STEPS))


def unbroken(files: Path, folder: Path) -> tuple[Path, float]:
    """An unbroken run's folder, and the seconds that it took a second time."""
    runs.finish(files, folder / "unbroken", *MORE)
    begin = time.monotonic()
    runs.finish(files, folder / "again", *MORE)
    return folder / "unbroken", time.monotonic() - begin


def moments_s(count: int, seed: int, whole_s: float) -> list[float]:
    rng = random.Random(seed)
    return [rng.uniform(0.0, whole_s) for _ in range(count)]


def trial(files: Path, out: Path, whole: Path, moment_s: float) -> dict[str, object]:
    """One run killed after moment_s and gone on with at once."""
    run = runs.start(files, out, *MORE)
    time.sleep(moment_s)
    run.kill()
    run.wait()
    killed_in, num_left = place(out), runs.num_steps(out)
    end = time.monotonic() + 5.0
    again = runs.start(files, out, *MORE)  # at once: what the first left behind must not be in its way
    while run.processes() and time.monotonic() < end:
        time.sleep(0.01)
    code, survivors = again.wait(), len(run.processes())
    found = f"exit code {code}: {again.said[-300:]}" if code else runs.difference(out, whole)
    shutil.rmtree(out)
    return {"in": killed_in, "steps": num_left, "survivors": survivors, "difference": found}


def place(out: Path) -> str:
    """Return the place of a kill, by the files that it left."""
    if (out / "result.json").exists():
        return "after the result"
    checkpoints = list((out / "checkpoints").glob("*"))
    if any(path.name.startswith(".unfinished") for path in checkpoints):
        return "while a checkpoint was written"
    if not runs.num_steps(out):
        return "before the first step was recorded"
    if runs.num_steps(out) < NUM_STEPS or not checkpoints:
        return "between or in steps"
    return "in the last evaluation or checkpoint"


def figures(trials: list[dict[str, object]]) -> dict[str, object]:
    return {
        "kills": len(trials),
        "same": sum(one["difference"] is None for one in trials),
        "survivors": sum(int(str(one["survivors"])) for one in trials),
        "places": dict(collections.Counter(str(one["in"]) for one in trials).most_common()),
    }
