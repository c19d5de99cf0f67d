"""One thread that runs the engine's live batch: requests enter and leave it between two bursts of steps.

The random numbers of a request depend on its own seed, which its prompts carry as their index, and not on
what runs beside it. A failure that belongs to one sample fails its request. Where a step of the whole batch
fails, its requests enter a new batch one after the other and go on from their tokens: the one with which it
fails again is the cause.
"""

import dataclasses
import itertools
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from qerl.engine import LiveBatch, LiveRequest
from qerl.engine.local_engine import LocalEngine
from qerl.engine.sampling.prompt_logprobs import PromptLogprobs
from qerl.engine.schedule.constraint import TokenConstraint
from qerl.errors import UserError
from qerl.types import Prompt, Sample, Sampling, TokenLogprob

_SHUTDOWN_TIMEOUT_S = 10
_MAX_FAILURES = 3  # batches that fail without a cause among their requests, before these fail

_logger = logging.getLogger("uvicorn.error")


class BusyError(Exception):
    """The queue is full or closed."""


class CancelledRequestError(Exception):
    """The request was cancelled, or the server shut down before it was complete."""


class OverdueRequestError(CancelledRequestError):
    """The request was not complete in its time."""


@dataclasses.dataclass(eq=False, kw_only=True, slots=True)
class PendingRequest:
    prompts_P: list[Prompt]
    num_samples: int
    sampling: Sampling
    constraint: Callable[[], TokenConstraint] | None = None
    """Makes the constraint of one choice."""
    is_learned: bool = False
    """True if samples keep what a learner needs: Sample.allowed and Sample.routes."""
    num_top_logprobs: int = 0
    table_row: int = 0
    """LiveRequest.table_row."""
    prompt_logprobs_P: list[PromptLogprobs] | None = None
    """To be filled, one for each prompt."""
    on_token: Callable[[int, TokenLogprob, Sample | None], None] | None = None
    """Called by the batcher's thread with (choice, newest token, the sample if that token ended it). Choices
    are numbered prompt by prompt, sample by sample."""
    on_choice: Callable[[int, Sample], None] | None = None
    """Called by the batcher's thread with (choice, its sample), before on_token gets the last token."""
    episode: object | None = None
    """The episode whose later requests may begin with this one and its answer, if any."""
    timeout_s: float | None = None
    """Seconds from entering the queue in which all choices must be complete."""
    recorded: list[Sample] | None = None
    """Choices that were sampled before and are given again, without the engine."""
    is_cancelled: bool = False
    """Set when the client is gone (`Batcher.cancel`)."""
    entered_s: float = 0.0
    """The time at which the request entered the queue, by the monotonic clock."""
    first_token_s: float | None = None
    num_failures: int = 0
    """Batches that failed while it was in them, since a cause was last found."""
    future: Future[list[Sample]] = dataclasses.field(default_factory=Future)
    """All choices, set when the last of them has ended."""
    samples: dict[int, Sample] = dataclasses.field(default_factory=dict)
    tokens: dict[int, list[TokenLogprob]] = dataclasses.field(default_factory=dict)
    """The tokens of each choice so far."""

    @property
    def num_choices(self) -> int:
        return len(self.prompts_P) * self.num_samples

    @property
    def has_begun(self) -> bool:
        """True once a token is sampled, or nobody waits for one."""
        return bool(self.tokens) or self.is_cancelled or self.future.done()

    @property
    def is_overdue(self) -> bool:
        return self.timeout_s is not None and time.monotonic() - self.entered_s > self.timeout_s

    def live_requests(self) -> list[LiveRequest]:
        return [self._live_request(i, prompt) for i, prompt in enumerate(self.prompts_P)]

    def _live_request(self, i: int, prompt: Prompt) -> LiveRequest:
        return LiveRequest(
            prompt=prompt,
            num_samples=self.num_samples,
            sampling=self.sampling,
            on_token=lambda g, token, ended: self._add_token(i * self.num_samples + g, token, ended),
            on_failure=self.fail,
            constraint=self.constraint,
            is_learned=self.is_learned,
            episode=self.episode,
            num_top_logprobs=self.num_top_logprobs,
            table_row=self.table_row,
            prompt_logprobs=None if self.prompt_logprobs_P is None else self.prompt_logprobs_P[i],
        )

    def give_recorded(self, samples: list[Sample]) -> None:
        """Give these choices as if they were sampled now."""
        for choice, sample in enumerate(samples):
            tokens = list(map(TokenLogprob, sample.tokens_T, sample.logprobs_T))
            for number, token in enumerate(tokens, 1):
                self._add_token(choice, token, sample if number == len(tokens) else None)

    def fail(self, error: Exception) -> None:
        """End the request with this error, unless it has ended."""
        if not isinstance(error, UserError | CancelledRequestError | BusyError):
            _logger.error("a request failed", exc_info=error)
        if not self.future.done():
            self.future.set_exception(error)

    def _add_token(self, choice: int, token: TokenLogprob, ended: Sample | None) -> None:
        if self.is_cancelled or self.future.done():
            return
        if self.first_token_s is None:
            self.first_token_s = time.monotonic()
        self.tokens.setdefault(choice, []).append(token)
        if ended is not None and self.on_choice is not None:
            self.on_choice(choice, ended)
        if self.on_token is not None:
            self.on_token(choice, token, ended)
        if ended is not None:
            self.samples[choice] = ended
            if len(self.samples) == self.num_choices:
                self.future.set_result([self.samples[i] for i in range(self.num_choices)])


_Running = tuple[PendingRequest, list[LiveRequest]]


@dataclasses.dataclass(frozen=True, slots=True)
class _Trial:
    """A request of a failed batch that has entered a new one."""

    request: PendingRequest
    num_tokens: int
    """Number of tokens at which its samples have passed the step that failed."""

    @property
    def is_passed(self) -> bool:
        return (
            self.request.future.done()
            or self.request.is_cancelled
            or _num_tokens(self.request) >= self.num_tokens
        )


@dataclasses.dataclass(frozen=True, slots=True)
class PromptTokens:
    num_reused: int = 0
    """Tokens whose pages were kept from an earlier request."""
    num_computed: int = 0
    """The others, and all that were computed again."""

    def __add__(self, other: "PromptTokens") -> "PromptTokens":
        return PromptTokens(self.num_reused + other.num_reused, self.num_computed + other.num_computed)

    def __sub__(self, other: "PromptTokens") -> "PromptTokens":
        return PromptTokens(self.num_reused - other.num_reused, self.num_computed - other.num_computed)


class Batcher:
    def __init__(
        self,
        engine: LocalEngine,
        *,
        max_waiting: int,
        max_positions: int,
        is_paused: bool = False,
        kept_fraction: float = 0.0,
    ):
        """max_positions: longest prompt and answer together, in tokens. is_paused: until `resume`.
        kept_fraction: of the KV cache's pages, for those kept between requests of an episode."""
        self.batch: LiveBatch | None = None
        """None before the first request, and after a failure."""
        self._engine, self._max_waiting, self._max_positions = engine, max_waiting, max_positions
        self._kept_fraction, self._earlier = kept_fraction, PromptTokens()
        self._over: list[object] = []  # episodes
        self._queue: list[PendingRequest] = []
        self._running: list[_Running] = []
        self._suspects: list[_Running] = []  # of a failed batch
        self._trial: _Trial | None = None
        self._changed = threading.Condition()
        self._is_closed = self._has_ended = self._is_busy = False
        self._is_paused = is_paused
        self._num_earlier = {"num_tokens": 0, "unfused_tokens": 0}  # by name in Stats
        self.num_prompt_tokens = 0
        """Number of prompt tokens of all requests that have entered a batch."""
        self._thread = threading.Thread(target=self._run, name="batcher", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop at the next burst and reject all requests that are not complete."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def close(self) -> None:
        """Stop, and wait for it."""
        self.stop()
        self._thread.join(_SHUTDOWN_TIMEOUT_S)

    def pause(self) -> None:
        """End the batch, which frees the engine for other calls, and take no request until `resume`. Requests
        that are not complete fail."""
        with self._changed:
            self._is_paused = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._is_busy or self._has_ended)
            queue, self._queue = self._queue, []
        error = CancelledRequestError("the request was cancelled: the engine is paused")
        for request in filter(_is_wanted, queue):
            request.future.set_exception(error)

    def resume(self) -> None:
        with self._changed:
            self._is_paused = False
            self._changed.notify_all()

    @property
    def has_died(self) -> bool:
        """True if the thread has ended though nobody closed the batcher."""
        return self._has_ended and not self._is_closed

    @property
    def num_waiting(self) -> int:
        """Number of requests without a token whose clients still wait."""
        with self._changed:
            requests = [*self._queue, *(request for request, _ in [*self._running, *self._suspects])]
        return sum(not request.has_begun for request in requests)

    @property
    def num_running(self) -> int:
        """Number of requests in the batch that have a token and are not complete."""
        with self._changed:
            requests = [request for request, _ in [*self._running, *self._suspects]]
        return sum(bool(request.tokens) and not request.future.done() for request in requests)

    @property
    def num_generated_tokens(self) -> int:
        """Number of tokens sampled by all batches."""
        return self._num_of_all("num_tokens")

    @property
    def num_unfused_tokens(self) -> int:
        """Number of tokens drawn from logits in memory where kernels of the head draw others."""
        return self._num_of_all("unfused_tokens")

    def _num_of_all(self, name: str) -> int:
        with self._changed:
            running = 0 if self.batch is None else getattr(self.batch.generation.stats, name)
            return self._num_earlier[name] + running

    @property
    def prefilled(self) -> "PromptTokens":
        """Tokens of prompts that all batches reused and computed."""
        with self._changed:
            if self.batch is None:
                return self._earlier
            generation = self.batch.generation
            return self._earlier + PromptTokens(generation.stats.reused_tokens, generation.num_prefilled)

    @property
    def kv_pages(self) -> tuple[int, int]:
        """(used, all) pages of the running batch's KV cache; zeros without one."""
        batch = self.batch
        return (0, 0) if batch is None else (batch.generation.num_used_pages, batch.generation.num_pages)

    def submit(self, request: PendingRequest) -> None:
        if request.recorded is not None:
            request.entered_s = time.monotonic()
            request.give_recorded(request.recorded)
            return
        num_waiting = self.num_waiting
        with self._changed:
            if self.has_died:
                raise BusyError("the engine has died; the server must be started again")
            if self._is_paused:
                raise BusyError("the engine is paused; retry later")
            if self._is_closed or num_waiting >= self._max_waiting:
                raise BusyError(f"the server is busy: {num_waiting} requests are waiting; retry later")
            request.entered_s = time.monotonic()
            self._queue.append(request)
            self._changed.notify_all()

    def cancel(self, request: PendingRequest) -> None:
        """Free the request's place: at once in the queue, at the next burst in the batch."""
        with self._changed:
            request.is_cancelled = True
            is_queued = request in self._queue
            if is_queued:
                self._queue.remove(request)
        if is_queued and request.future.set_running_or_notify_cancel():
            request.future.set_exception(CancelledRequestError("the request was cancelled"))

    def forget(self, episode: object) -> None:
        """Keep no pages for an episode whose requests have ended or were cancelled."""
        with self._changed:
            self._over.append(episode)

    def _run(self) -> None:
        """Run batches until the batcher is closed; however the thread ends, no request waits for ever."""
        error = CancelledRequestError("the engine's thread has ended")
        try:
            self._run_batches()
            error = CancelledRequestError("the server is shutting down")
        finally:
            with self._changed:
                self._has_ended, queue, self._queue = True, self._queue, []
            self._fail_running(error)
            for request in filter(_is_wanted, queue):
                request.future.set_exception(BusyError(str(error)))

    def _run_batches(self) -> None:
        while self._wait():
            try:
                with self._engine.live_batch(self._max_positions, self._kept_fraction) as self.batch:
                    while self._wait(in_batch=True):
                        self._step(self.batch)
                if self._is_paused:
                    self._fail_running(CancelledRequestError("the request was cancelled"))
            except Exception as failure:  # a failed batch must not end the server
                if self.batch is None:  # it could not be made
                    self._take_queue()
                    self._fail_running(failure)
                else:
                    self._find_cause(failure)
            with self._changed:
                self._earlier = self.prefilled
                self._num_earlier = {name: self._num_of_all(name) for name in self._num_earlier}
                self.batch = None
                self._is_busy = False
                self._changed.notify_all()

    def _wait(self, *, in_batch: bool = False) -> bool:
        """Wait until there is something to do; False once closed, and in a batch once paused."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._is_closed
                    or (in_batch and self._is_paused)
                    or (not self._is_paused and (self._queue or self._running or self._suspects))
                )
            )
            self._is_busy = not (self._is_closed or (in_batch and self._is_paused))
            return self._is_busy

    def _step(self, batch: LiveBatch) -> None:
        with self._changed:
            over, self._over = self._over, []
        for request, live in self._take():
            try:
                for each in live:
                    batch.add(each)
            except Exception as error:
                request.fail(error)
        for request, _ in self._running:
            if not request.future.done() and (request.is_cancelled or request.is_overdue):
                request.fail(_reason(request))
        self._remove_ended(batch)
        batch.forget(over)
        batch.step()
        self._remove_ended(batch)

    def _remove_ended(self, batch: LiveBatch) -> None:
        ended = [pair for pair in self._running if pair[0].future.done()]
        failed = [live for request, live in ended if len(request.samples) < request.num_choices]
        batch.abort(list(itertools.chain(*failed)))
        with self._changed:
            self._running = [pair for pair in self._running if pair not in ended]

    def _take(self) -> list[_Running]:
        """Return what enters the batch: the queue, or after a failed batch its next request, and then nothing
        until that has passed the step that failed."""
        if self._trial is not None and not self._trial.is_passed:
            return []
        self._trial = None
        if not self._suspects:
            return self._take_queue()
        with self._changed:
            pair = self._suspects.pop(0)
            self._running.append(pair)
        num_unfinished = pair[0].num_choices - len(pair[0].samples)
        self._trial = _Trial(pair[0], _num_tokens(pair[0]) + num_unfinished)
        return [pair]

    def _take_queue(self) -> list[_Running]:
        """Move the queue to the running requests, without cancelled ones; return those moved."""
        with self._changed:
            queue, self._queue = self._queue, []
            new = [(request, request.live_requests()) for request in queue if _is_wanted(request)]
            self._running += new
        self.num_prompt_tokens += sum(len(p.tokens_T) for request, _ in new for p in request.prompts_P)
        return new

    def _find_cause(self, failure: Exception) -> None:
        """Fail the request that has just been let into the failed batch, or was alone in it. Without one, the
        requests enter the next batch one after the other."""
        with self._changed:
            left = [pair for pair in self._running if not pair[0].future.done()]
            self._running, trial, self._trial = [], self._trial, None
            cause = left[0][0] if len(left) == 1 else trial and trial.request
            self._suspects = left + self._suspects
        if cause is None:
            _logger.error(
                "a step of %d requests failed; they are tried one by one", len(left), exc_info=failure
            )
        for request, _ in left:
            request.num_failures = request.num_failures + 1 if cause is None else 0
            if request is cause or request.num_failures == _MAX_FAILURES:
                request.fail(failure)
        with self._changed:
            self._suspects = [pair for pair in self._suspects if not pair[0].future.done()]

    def _fail_running(self, error: Exception) -> None:
        for request, _ in [*self._running, *self._suspects]:
            request.fail(error)
        with self._changed:
            self._running, self._suspects, self._trial = [], [], None


def _num_tokens(request: PendingRequest) -> int:
    return sum(map(len, request.tokens.values()))


def _reason(request: PendingRequest) -> CancelledRequestError:
    if request.is_cancelled:
        return CancelledRequestError("the request was cancelled")
    return OverdueRequestError(f"the answer was not complete after {request.timeout_s:g} s")


def _is_wanted(request: PendingRequest) -> bool:
    """True if nobody cancelled the request; its future cannot be cancelled after this."""
    return request.future.set_running_or_notify_cancel() and not request.is_cancelled
