"""Where requests wait for the engine: one thread takes those that are alike and answers them in one call.

Alike are requests of the same sampling and the same number of samples. The oldest goes first, and every other
of its kind along with it; a request that arrives during a call waits for its end. A request's random numbers
follow from its own seed, which its prompts carry as their index, and not from the call that it is part of.
"""

import dataclasses
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future

from qerl.engine import Engine
from qerl.errors import UserError
from qerl.types import Prompt, Sample, Sampling

_CLOSE_S = 10


class BusyError(Exception):
    """Too many wait already, or the desk is closed."""


class GoneError(Exception):
    """Nobody waits for the answer any more."""


@dataclasses.dataclass(eq=False, kw_only=True, slots=True)
class PendingRequest:
    prompts_P: list[Prompt]
    num_samples: int
    sampling: Sampling
    watch: Callable[[int, int, Sample | None], None] | None = None
    """(choice, newest token, the sample if that ended it), called by the desk's thread. Choices are numbered
    prompt by prompt, sample by sample."""
    is_gone: bool = False
    """Set by who no longer waits for it: its samples end with their next token."""
    future: Future[list[Sample]] = dataclasses.field(default_factory=Future)
    """All choices, as soon as the last of them has ended."""
    samples: dict[int, Sample] = dataclasses.field(default_factory=dict)

    @property
    def num_choices(self) -> int:
        return len(self.prompts_P) * self.num_samples

    def see(self, choice: int, token: int, ended: Sample | None) -> None:
        if self.watch is not None:
            self.watch(choice, token, ended)
        if ended is not None:
            self.samples[choice] = ended
            if len(self.samples) == self.num_choices:
                self.future.set_result([self.samples[i] for i in range(self.num_choices)])


class Batcher:
    def __init__(self, engine: Engine, *, max_waiting: int, gather_s: float = 0.01):
        """A call waits gather_s for more of its kind: requests sent together arrive a little apart."""
        self.num_calls = 0
        self._engine, self._max_waiting, self._gather_s = engine, max_waiting, gather_s
        self._waiting: list[PendingRequest] = []
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name="desk", daemon=True)

    def open(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Ends what runs with its next token, and turns away what waits."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(_CLOSE_S)

    def submit(self, job: PendingRequest) -> None:
        with self._changed:
            if self._is_closed or len(self._waiting) >= self._max_waiting:
                raise BusyError(f"{len(self._waiting)} requests wait already")
            self._waiting.append(job)
            self._changed.notify()

    def _work(self) -> None:
        while (jobs := self._next()) is not None:
            if jobs:
                self._answer(jobs)
        with self._changed:
            for job in filter(_is_wanted, self._waiting):
                job.future.set_exception(BusyError("the server ends"))

    def _next(self) -> list[PendingRequest] | None:
        """The oldest job and all like it, but those that nobody waits for; None once the desk is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._waiting)
        time.sleep(0 if self._is_closed else self._gather_s)
        with self._changed:
            if self._is_closed:
                return None
            first = self._waiting[0]
            kind = (first.sampling, first.num_samples)
            alike = [job for job in self._waiting if (job.sampling, job.num_samples) == kind]
            self._waiting = [job for job in self._waiting if (job.sampling, job.num_samples) != kind]
        return [job for job in alike if _is_wanted(job)]

    def _answer(self, jobs: list[PendingRequest]) -> None:
        places = [(job, place) for job in jobs for place in range(len(job.prompts_P))]  # the call's prompts

        def watch(index: int, sample_index: int, token: int, ended: Sample | None) -> bool:
            job, place = places[index]
            if not job.is_gone:
                job.see(place * job.num_samples + sample_index, token, ended)
            return job.is_gone or self._is_closed

        self.num_calls += 1
        error: Exception = GoneError()
        try:
            self._engine.generate(
                [job.prompts_P[place] for job, place in places],
                num_samples=jobs[0].num_samples,
                sampling=jobs[0].sampling,
                seed=0,
                step=0,
                watch=watch,
            )
        except Exception as failure:  # one call's failure is not the server's end
            error = failure
            if not isinstance(failure, UserError):
                traceback.print_exception(failure, file=sys.stderr)
        for job in jobs:
            if not job.future.done():
                job.future.set_exception(error)


def _is_wanted(job: PendingRequest) -> bool:
    """From here on its future cannot be cancelled."""
    return job.future.set_running_or_notify_cancel() and not job.is_gone
