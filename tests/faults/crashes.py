"""A power cut at every write of a run, and what is left when it goes on.

PYTHONPATH=src python tests/faults/crashes.py [SECONDS]    every operation, 8 disks each; until the time is up
some of them are gone on with to the end and compared with the uninterrupted run
"""

import contextlib
import dataclasses
import functools
import io
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import safetensors.torch
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1]))
import tiny_run
from faults import recorded_disk, runs
from faults.recorded_disk import Disk, Mark, Operation, Recorder
from qerl.config import RunConfig
from qerl.config.stored import parse_run_config
from qerl.errors import RunError, UserError
from qerl.learner import checkpoint
from qerl.tracking import Journal, is_timing, provenance, sample_files
from qerl.tracking.json_lines import read_lines
from qerl.training.run_checkpoints import check_vanished
from stored_samples import read_samples

NAME = "run"
KEEP_ONE = ("--checkpoint.keep", "1")


@dataclasses.dataclass(frozen=True, slots=True)
class Recording:
    """A run's operations, and what the run left in the end."""

    operations: list[Operation]
    whole: Path
    config: RunConfig
    sources: dict[str, str]
    adapters: dict[int, dict[str, Any]]
    """The adapter of each checkpoint, by its number of steps."""

    @property
    def num_cuts(self) -> int:
        """Operations of the process itself."""
        return len(self.operations) - self.operations.index(Mark("begun", True))

    @classmethod
    def of(cls, log: Path, whole: Path) -> "Recording":
        operations = recorded_disk.operations(log)
        facts = json.loads((whole / "run.json").read_bytes())
        saved = [mark.value for mark in operations if isinstance(mark, Mark) and mark.name == "saved"]
        adapters = {next_step: safetensors.torch.load(data) for next_step, data in saved}
        config = parse_run_config(facts["config"])
        sources = {k: v for k, v in facts["sources"].items() if k.startswith(("reward ", "rows of "))}
        return cls(operations, whole, config, sources, adapters)


def record(files: Path, folder: Path, *more: str) -> Recording:
    """Record a run in an empty folder, or the rest of the one that is there."""
    out, log = folder / NAME, folder / "operations"
    run = runs.start(files, out, *more, first=lambda: _install(out, log), log=folder / "log")
    assert run.wait() == 0, run.said
    return Recording.of(log, out)


def _install(out: Path, log: Path) -> None:
    small_files()
    recorder = Recorder(out, log)
    recorder.install()
    for path in sorted(out.glob("checkpoints/step-*")):
        recorder.mark("saved", (int(path.name[5:]), (path / "adapter_model.safetensors").read_bytes()))
    recorder.mark("steps", runs.num_steps(out))
    recorder.mark("begun", True)
    write, take, cut, finish = checkpoint.write, Journal._record, Journal.resume, Journal.finish

    def saved(folder: Path, state: checkpoint.Snapshot, **more: Any) -> Path:
        path = write(folder, state, **more)
        recorder.mark("saved", (state.next_step, (path / "adapter_model.safetensors").read_bytes()))
        return path

    def taken(self: Journal, log: Any, step_s: float) -> None:
        take(self, log, step_s)
        recorder.mark("steps", log.step + 1)

    def resumed(self: Journal, next_step: int) -> None:
        recorder.mark("steps", next_step)  # from now on the later ones are void
        cut(self, next_step)

    def finished(self: Journal, result: dict[str, Any]) -> None:
        finish(self, result)
        recorder.mark("finished", True)

    checkpoint.write, Journal._record, Journal.resume, Journal.finish = saved, taken, resumed, finished


def small_files() -> None:
    """Compress the samples of every second step or so."""
    sample_files.SEGMENT_BYTES = 5000


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Declared:
    """The progress that the run took to be on the disk."""

    begun: bool = False
    saved: int = 0
    steps: int = 0
    finished: bool = False


def disks(
    recording: Recording, num_each: float, seed: int
) -> Iterator[tuple[int, Disk, Declared, list[int]]]:
    """Yield (operation, disk after it, what was declared by then, seeds) for each operation of the run."""
    disk, declared, num_before = Disk(), Declared(), 0
    for index, operation in enumerate(recording.operations):
        disk.take(operation)
        if isinstance(operation, Mark):
            value = operation.value[0] if operation.name == "saved" else operation.value
            declared = dataclasses.replace(declared, **{operation.name: value})
        if not declared.begun:  # on the disk before
            continue
        num_so_far = int((index + 1) * num_each)
        yield index, disk, declared, [hash((seed, i)) for i in range(num_before, num_so_far)]
        num_before = num_so_far


class Loaded:
    """Takes what a learner is given of a checkpoint."""

    adapter: dict[str, Any] | None = None

    def load(self, adapter: dict[str, Any], *_: object) -> None:
        self.adapter = adapter


def wrong(recording: Recording, out: Path, declared: Declared) -> str | None:
    """Resume a run in this folder and return what is wrong with it; None if nothing is."""
    try:
        return _gone_on(recording, out, declared)
    except (UserError, RunError) as error:
        return f"refused: {error}"


def _gone_on(recording: Recording, out: Path, declared: Declared) -> str | None:
    """As training.session begins, without a model."""
    config, learner = recording.config, Loaded()
    said = io.StringIO()
    with Journal(out, num_steps=config.num_steps, console=Console(file=said, width=200)) as journal:
        steps = {record["step"] for record in journal.steps()}
        journal.start(config, recording.sources)
        if journal.result is not None:
            return None if declared.saved == config.num_steps else "a result before the last checkpoint"
        check_vanished(out, journal, accepts_changes=config.accept_changes)
        found = checkpoint.load_latest(out / "checkpoints", learner)  # pyright: ignore[reportArgumentType]
        next_step = 0 if found is None else found.next_step
        journal.resume(next_step)
    if declared.finished:
        return "the result is lost"
    if not steps >= set(range(declared.steps)):
        return f"{declared.steps} steps were recorded, {sorted(steps)} are left"
    if next_step < declared.saved:
        return f"{declared.saved} steps were saved, the run goes on from {next_step}"
    if found is not None:
        expected = recording.adapters[next_step]
        assert learner.adapter is not None
        if not all(expected[name].equal(tensor) for name, tensor in learner.adapter.items()):
            return f"the adapter is not that of step {next_step}"
    notices = [line for line in said.getvalue().splitlines() if not line.startswith("resuming")]
    return next(iter(notices), None) or _different(out, recording.whole, next_step)


def _different(out: Path, whole: Path, next_step: int) -> str | None:
    """The file whose steps before next_step are not the uninterrupted run's."""
    ours, theirs = (
        [{k: v for k, v in line.items() if not is_timing(k)} for line in read_lines(f / "metrics.jsonl")]
        for f in (out, whole)
    )
    if ours != [line for line in theirs if line["step"] < next_step]:
        return "metrics.jsonl differs"
    theirs = [sample for sample in _samples(whole) if sample["step"] < next_step]
    return None if list(read_samples(out)) == theirs else "samples.jsonl differs"


@functools.cache
def _samples(folder: Path) -> list[dict[str, Any]]:
    return list(read_samples(folder))


def half_done(files: Path, folder: Path, *more: str) -> Path:
    """The folder of a run that was killed after a checkpoint and a step."""
    run = runs.start(files, folder / NAME, *more, first=small_files, log=folder / "first.log")
    run.wait_for(lambda: runs.num_steps(folder / NAME) >= 3)
    run.kill()
    run.wait()
    return folder / NAME


def recordings(files: Path, folder: Path) -> list[Recording]:
    """A run from its first step to its end, and one that goes on after it was killed."""
    for name in ("first", "again"):
        (folder / name).mkdir(parents=True)
    half_done(files, folder / "again")
    return [record(files, folder / "first", *KEEP_ONE), record(files, folder / "again")]


@contextlib.contextmanager
def quick() -> Iterator[None]:
    """Without flushes to the disk below, and with one look at the versions of all packages."""
    fsync, environment = os.fsync, provenance.environment
    os.fsync, provenance.environment = lambda descriptor: None, functools.cache(environment)
    try:
        yield
    finally:
        os.fsync, provenance.environment = fsync, environment


def cut_points(
    recording: Recording, folder: Path, num_each: float, seed: int
) -> Iterator[tuple[str, Path, Declared]]:
    """Yield (name, folder that a power cut left, what was declared) for each operation."""
    for index, disk, declared, seeds in disks(recording, num_each, seed):
        for one in seeds:
            out = folder / NAME
            shutil.rmtree(out, ignore_errors=True)
            disk.crash(random.Random(one), NAME, out)
            yield f"operation {index}, seed {one}: {recording.operations[index]!r:.200}", out, declared


def main() -> None:
    """Count the cut points that end well; a tenth of them are gone on with to the end."""
    end_s = time.monotonic() + float(sys.argv[1] if len(sys.argv) > 1 else 3600)
    rng, counts, ill = random.Random(0), {"looked at": 0, "run to the end": 0}, []
    with tempfile.TemporaryDirectory() as place, quick():
        files = tiny_run.write_files(Path(place))
        for recording in recordings(files, Path(place) / "recorded"):
            for name, out, declared in cut_points(recording, Path(place), 8, 0):
                is_run = rng.random() < 0.1 and time.monotonic() < end_s
                if is_run:
                    shutil.rmtree(copied := Path(place) / "copied", ignore_errors=True)
                    if out.exists():
                        shutil.copytree(out, copied)
                    runs.finish(files, copied)
                    counts["run to the end"] += 1
                    found = runs.difference(copied, recording.whole)
                    ill += [f"{name}: {found}"] if found else []
                counts["looked at"] += 1
                found = wrong(recording, out, declared)
                ill += [f"{name}: {found}"] if found else []
    print("\n".join(ill))
    print(json.dumps({**counts, "wrong": len(ill)}))
    sys.exit(bool(ill))


if __name__ == "__main__":
    main()
