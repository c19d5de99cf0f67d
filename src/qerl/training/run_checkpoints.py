"""The checkpoints of a run: the first rank reads and writes them, all ranks have the same learner.

    steps     step s | copy state | step s + 1 | step s + 2 ...
    thread                        | write, flush, rename |

A step waits while the state is copied to host memory, and while the checkpoint before is still written:
`checkpoint_hold_s`. A thread writes the copy: `checkpoint_write_s`. The end of a write, or its error, is
taken after the step that runs meanwhile, or before the next write.
"""

import contextlib
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from qerl.config import CheckpointConfig
from qerl.errors import RunError, require
from qerl.learner import Learner, checkpoint
from qerl.learner.checkpoint import CheckpointError
from qerl.learner.distributed import Ranks
from qerl.learner.host_copy import HostCopy
from qerl.tracking import Journal, NullJournal
from qerl.tracking.journal import resumes_from


class RunCheckpoints:
    """Use it as a context: its end waits until the last checkpoint is on the disk."""

    def __init__(
        self,
        folder: Path,
        config: CheckpointConfig,
        learner: Learner,
        journal: Journal | NullJournal,
        ranks: Ranks,
    ):
        self._folder, self._config, self._learner = folder, config, learner
        self._journal, self._ranks = journal, ranks
        self._finished: tuple[int, int, int, dict[str, Any] | None] | None = None
        self._last_saved = 0
        self._memory, self._thread = HostCopy(), ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[float] | None = None
        """The write in progress, or its seconds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.wait()
        except RunError as error:
            if kind is None:
                raise
            with contextlib.suppress(RunError):  # what ends the run already is its cause
                self._journal.notice(str(error))
        finally:
            self._thread.shutdown(wait=True)

    def load_latest(self) -> checkpoint.Resumed | None:
        """Load the newest intact checkpoint on the first rank, and copy the learner to the others, which may
        not see the folder; None if there is no checkpoint."""
        folder = self._folder / "checkpoints"
        resumed = self._ranks.from_first(lambda: checkpoint.load_latest(folder, self._learner))
        if resumed is not None and self._ranks.count > 1:
            state = self._ranks.from_first(self._learner.state)
            if not self._ranks.is_first:
                self._learner.load(*state)
        return resumed

    def is_due(self, next_step: int, num_steps: int) -> bool:
        """True if a checkpoint is due before this step, or the run's folder has been moved."""
        is_away = self._ranks.is_first and self._journal.place() != self._folder
        return next_step % self._config.every == 0 or next_step == num_steps or is_away

    def save(self, next_step: int, extra: dict[str, Any] | None = None, *, waits: bool = False) -> None:
        """Begin to save where the folder is now, and wait for the end if asked to; raise RunError, after
        saving, if that is not where the run began. extra: JSON values besides the learner."""
        self._last_saved = next_step
        if not self._ranks.is_first:
            return
        with self._journal.span("checkpoint_hold"):
            self.wait()
            place = self._journal.place()
            state = checkpoint.snapshot(self._learner, next_step=next_step, extra=extra, memory=self._memory)
            self._pending = self._thread.submit(self._write, place, state)
            if waits or place != self._folder:
                self.wait()
        if place != self._folder:
            raise RunError(_away_text(self._folder, place, next_step))

    def wait(self) -> None:
        """Wait until what `save` began is on the disk; raise RunError if it could not be written."""
        self._take(waits=True)

    def finished(self, next_step: int, extra: dict[str, Any] | None = None) -> None:
        """Remember that the steps before next_step are done; extra as in `save`. Raise the error of a write
        that has failed since."""
        self._finished = next_step, self._learner.version, self._learner.num_applied, extra
        self._take(waits=False)

    def _take(self, *, waits: bool) -> None:
        """Log the seconds of a write that has ended since the last call, or raise its error."""
        pending = self._pending
        if pending is None or not (waits or pending.done()):
            return
        pending.exception()  # waits; a signal's exception leaves the write pending
        self._pending = None
        self._journal.carry(checkpoint_write_s=pending.result())

    def _write(self, place: Path | None, state: checkpoint.Snapshot) -> float:
        """Write where the folder is; once more if it was moved or removed meanwhile. Return the seconds.
        place: where it was."""
        begin = time.perf_counter()
        try:
            self._write_to(place, state)
        except CheckpointError:
            if (now := self._journal.place()) == place:
                raise
            self._write_to(now, state)
        self._journal.saved(state.next_step)
        return time.perf_counter() - begin

    def _write_to(self, place: Path | None, state: checkpoint.Snapshot) -> None:
        checkpoint.write((place or self._folder) / "checkpoints", state, keep=self._config.keep)

    def save_finished(self) -> None:
        """Save the last finished step after another rank was lost in the next one. If that one has changed
        the adapter already, nothing is saved."""
        if self._finished is None or not self._ranks.is_first:
            return
        next_step, version, num_applied, extra = self._finished
        if next_step != self._last_saved and num_applied == self._learner.num_applied:
            self._learner.version = version
            self.save(next_step, extra)
        self.wait()
        self.notice_saved()

    def notice_saved(self) -> None:
        """Say how a run that ends now is resumed."""
        if self._last_saved:
            self._journal.notice(resumes_from(self._last_saved))


def check_vanished(folder: Path, journal: Journal | NullJournal, *, accepts_changes: bool) -> None:
    """Report that the newest recorded checkpoint is gone; without any, raise UserError unless accepted."""
    saved = journal.last_saved
    newest = max(checkpoint.saved_steps(folder / "checkpoints"), default=0)
    if saved <= newest:
        return
    gone = f"the checkpoint after step {saved} is gone"
    require(
        newest > 0 or accepts_changes,
        f"{folder}: metrics.jsonl has {len(list(journal.steps()))} steps, but {gone} and there is no other:"
        " put checkpoints/ back, or start again with --accept-changes, or in another folder with --out",
    )
    journal.notice(f"{gone}; " + (f"the one after step {newest} is used" if newest else "starting again"))


def _away_text(folder: Path, place: Path | None, next_step: int) -> str:
    if place is None:
        return (
            f"{folder}: was removed while the run wrote to it; step {next_step} is saved"
            " there again, and the same command resumes from it, without the record of these steps"
        )
    return (
        f"{folder}: was moved to {place} while the run wrote to it; step {next_step} is saved there,"
        f" and the same command with --out {place} resumes it"
    )
