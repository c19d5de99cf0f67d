"""Queue of requests: one thread takes all requests with equal sampling and answers them in one engine call.

Requests are equal in their sampling parameters and number of samples. The oldest request goes first, together
with every equal one; a request that arrives during a call waits for its end. The random numbers of a request
depend on its own seed, which its prompts carry as their index, and not on the call that it is part of.
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

_SHUTDOWN_TIMEOUT_S = 10


class BusyError(Exception):
    """The queue is full or closed."""


class CancelledRequestError(Exception):
    """The request was cancelled, or the server shut down before it was complete."""


@dataclasses.dataclass(eq=False, kw_only=True, slots=True)
class PendingRequest:
    prompts_P: list[Prompt]
    num_samples: int
    sampling: Sampling
    on_token: Callable[[int, int, Sample | None], None] | None = None
    """Called by the batcher's thread with (choice, newest token, the sample if that token ended it). Choices
    are numbered prompt by prompt, sample by sample."""
    is_cancelled: bool = False
    """Set when the client is gone; sampling stops at the next token."""
    future: Future[list[Sample]] = dataclasses.field(default_factory=Future)
    """All choices, set when the last of them has ended."""
    samples: dict[int, Sample] = dataclasses.field(default_factory=dict)

    @property
    def num_choices(self) -> int:
        return len(self.prompts_P) * self.num_samples

    def add_token(self, choice: int, token: int, ended: Sample | None) -> None:
        if self.on_token is not None:
            self.on_token(choice, token, ended)
        if ended is not None:
            self.samples[choice] = ended
            if len(self.samples) == self.num_choices:
                self.future.set_result([self.samples[i] for i in range(self.num_choices)])


class Batcher:
    def __init__(self, engine: Engine, *, max_waiting: int, batch_wait_s: float = 0.01):
        """Each call first waits batch_wait_s, so that requests sent together are in one batch."""
        self.num_calls = 0
        self._engine, self._max_waiting, self._batch_wait_s = engine, max_waiting, batch_wait_s
        self._queue: list[PendingRequest] = []
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="batcher", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop the running call at its next token and reject the waiting requests."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(_SHUTDOWN_TIMEOUT_S)

    def submit(self, request: PendingRequest) -> None:
        with self._changed:
            if self._is_closed or len(self._queue) >= self._max_waiting:
                raise BusyError(f"the server is busy: {len(self._queue)} requests are waiting; retry later")
            self._queue.append(request)
            self._changed.notify()

    def _run(self) -> None:
        while (batch := self._next_batch()) is not None:
            if batch:
                self._generate(batch)
        with self._changed:
            for request in filter(_is_wanted, self._queue):
                request.future.set_exception(BusyError("the server is shutting down"))

    def _next_batch(self) -> list[PendingRequest] | None:
        """Return the oldest request and all equal ones, without cancelled ones; None once closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._queue)
        time.sleep(0 if self._is_closed else self._batch_wait_s)
        with self._changed:
            if self._is_closed:
                return None
            kind = (self._queue[0].sampling, self._queue[0].num_samples)
            batch = [request for request in self._queue if (request.sampling, request.num_samples) == kind]
            self._queue = [request for request in self._queue if request not in batch]
        return [request for request in batch if _is_wanted(request)]

    def _generate(self, batch: list[PendingRequest]) -> None:
        prompts = [(request, i) for request in batch for i in range(len(request.prompts_P))]

        def watch(index: int, sample_index: int, token: int, ended: Sample | None) -> bool:
            request, i = prompts[index]
            if not request.is_cancelled:
                request.add_token(i * request.num_samples + sample_index, token, ended)
            return request.is_cancelled or self._is_closed

        self.num_calls += 1
        error: Exception = CancelledRequestError("the server is shutting down")
        try:
            self._engine.generate(
                [request.prompts_P[i] for request, i in prompts],
                num_samples=batch[0].num_samples,
                sampling=batch[0].sampling,
                seed=0,
                step=0,
                on_token=watch,
            )
        except Exception as failure:  # a failed call must not end the server
            error = failure
            if not isinstance(failure, UserError):
                traceback.print_exception(failure, file=sys.stderr)
        for request in batch:
            if not request.future.done():
                request.future.set_exception(error)


def _is_wanted(request: PendingRequest) -> bool:
    """True if nobody cancelled the request; its future cannot be cancelled after this."""
    return request.future.set_running_or_notify_cancel() and not request.is_cancelled
