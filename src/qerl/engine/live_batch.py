"""Requests that join and leave a running batch: continuous batching for a server.

    add      a request joins the batch at the next step, also while a burst of decode steps runs
    abort    its samples leave it there, and their rows and pages are free again
    step     launch a burst, read one, or rebuild the batch (generation.py)

Each request has sampling parameters of its own (row_sampler.py). Its tokens are functions of its prompt's
index, as in `PagedEngine.generate` with seed and step 0, and not of the requests beside it.
"""

import dataclasses
import functools
from collections.abc import Callable

from torch import Tensor

from qerl.engine.generation import Generation, StoppingCriteria
from qerl.engine.sampling.prompt_logprobs import PromptLogprobs
from qerl.engine.schedule.constraint import AllowedLog, TokenConstraint
from qerl.engine.schedule.live_sample import LiveGroup, LiveSample
from qerl.errors import UserError
from qerl.types import Prompt, Sample, Sampling, TokenLogprob


@dataclasses.dataclass(eq=False, kw_only=True, slots=True)
class LiveRequest:
    """A prompt, how to sample it, and the function that gets its tokens."""

    prompt: Prompt
    num_samples: int = 1
    sampling: Sampling
    on_token: Callable[[int, TokenLogprob, Sample | None], None]
    """Called with (sample index, newest token, the sample if that token ended it)."""
    is_streamed: bool = True
    """True if on_token is called for every token; else for the last of each sample, which costs less."""
    has_text: bool = True
    """False if nobody reads Sample.text, which is empty then: a long one takes a millisecond."""
    on_failure: Callable[[Exception], None] | None = None
    """Called if a sample or on_token fails, while the other requests go on; None: the step raises it."""
    constraint: Callable[[], TokenConstraint] | None = None
    """Makes the constraint of one sample."""
    is_learned: bool = False
    """True if samples have Sample.allowed and Sample.routes, which a learner needs."""
    episode: object | None = None
    """The episode whose later requests may begin with this one and its answer (kept_pages.py), if any."""
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end a sample besides the engine's."""
    table_row: int = 0
    """Number of its row in the decoder's noise table and adapter bank."""
    num_top_logprobs: int = 0
    """Most likely tokens that are reported with each sampled one."""
    prompt_logprobs: PromptLogprobs | None = None
    """Filled before the first token is sampled."""
    samples_G: list[LiveSample] | None = None
    """Set once it is added. Added again, to the batch after a failed one, it goes on from their tokens."""


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Live:
    request: LiveRequest
    group: LiveGroup
    stopping: StoppingCriteria


@dataclasses.dataclass(frozen=True, slots=True)
class LiveCallbacks:
    """Those of StoppingCriteria."""

    on_token: Callable[[LiveSample], bool]
    skips_on_token: Callable[[LiveSample, list[int]], bool]
    on_failure: Callable[[LiveSample, Exception], None]


class LiveBatch:
    def __init__(
        self,
        make_generation: Callable[[LiveCallbacks], Generation],
        new_group: Callable[[int, Prompt, int, int], LiveGroup],
        stopping: Callable[[tuple[str, ...]], StoppingCriteria],
        to_sample: Callable[[LiveSample, StoppingCriteria | None], Sample],
        logits: Callable[[Tensor], Tensor],
        *,
        max_positions: int,
    ):
        callbacks = LiveCallbacks(self._on_token, self._skips_on_token, self._on_failure)
        self.generation = make_generation(callbacks)
        self._new_group, self._stopping, self._to_sample = new_group, stopping, to_sample
        self._logits, self._max_positions = logits, max_positions
        self._live: dict[int, _Live] = {}
        self._num_added = 0

    def add(self, request: LiveRequest) -> None:
        """Raise UserError if the prompt leaves no room for a token."""
        index = self._num_added
        group = self._group(index, request)
        self._num_added += 1
        self._live[index] = _Live(request, group, self._stopping(request.sampling.stop))
        self.generation.add([group])

    def abort(self, requests: list[LiveRequest]) -> None:
        """Remove those of the requests that are not complete."""
        gone = [live.group for live in self._live.values() if live.request in requests]
        if gone:
            self.generation.abort(gone)
        for group in gone:
            self._live.pop(group.index, None)  # the tokens that abort read may have ended it

    def forget(self, episodes: list[object]) -> None:
        """Keep no pages for these episodes any more."""
        self.generation.forget(episodes)

    def step(self) -> None:
        if not self.generation.is_done:
            self.generation.step()

    def _group(self, index: int, request: LiveRequest) -> LiveGroup:
        prompt, sampling = request.prompt, request.sampling
        num_left = self._max_positions - len(prompt.tokens_T)
        if num_left < 1:
            raise UserError(
                f"the prompt has {len(prompt.tokens_T)} tokens; the limit is {self._max_positions - 1}"
            )
        group = self._new_group(index, prompt, request.num_samples, min(sampling.max_tokens, num_left))
        group.sampling, group.num_top_logprobs = sampling, request.num_top_logprobs
        group.episode, group.noise_row = request.episode, request.table_row
        group.stop_token_ids = request.stop_token_ids
        if (logprobs := request.prompt_logprobs) is not None:
            group.on_prompt_hidden = functools.partial(logprobs.add, self._logits, prompt.tokens_T)
        for s in group.samples_G:
            s.noise_row = request.table_row
            s.constraint = None if request.constraint is None else request.constraint()
            s.allowed_log = AllowedLog() if s.constraint and request.is_learned else None
        for s, before in zip(group.samples_G, request.samples_G or (), strict=request.samples_G is not None):
            s.tokens_T, s.logprobs_T, s.finish = before.tokens_T, before.logprobs_T, before.finish
            s.constraint, s.allowed_log, s.routes = before.constraint, before.allowed_log, before.routes
        request.samples_G = group.samples_G
        return group

    def _on_token(self, s: LiveSample) -> bool:
        try:
            self._notify(s, self._live[s.group.index])
        except Exception as error:  # of this request's text, grammar or callback
            s.finish = "stop"
            self._on_failure(s, error)
        self._forget_ended(s.group)
        return False

    def _skips_on_token(self, s: LiveSample, tokens: list[int]) -> bool:
        live = self._live[s.group.index]
        needs_each = live.request.is_streamed or s.constraint is not None or live.stopping.detokenizer.stop
        return not needs_each and live.request.stop_token_ids.isdisjoint(tokens)

    def _on_failure(self, s: LiveSample, error: Exception) -> None:
        if (on_failure := self._live[s.group.index].request.on_failure) is None:
            raise error
        s.group.episode = None  # its pages are of no use
        on_failure(error)
        self._forget_ended(s.group)

    def _forget_ended(self, group: LiveGroup) -> None:
        if all(s.finish is not None for s in group.samples_G):
            self._live.pop(group.index, None)

    def _notify(self, s: LiveSample, live: _Live) -> None:
        is_complete = live.stopping.detokenizer.has_stop(s.tokens_T)
        is_complete |= s.tokens_T[-1] in live.request.stop_token_ids
        if s.allowed_log is not None and s.allowed_V is not None:
            s.allowed_log.add(s.allowed_V)
        if s.constraint is not None:
            s.constraint.accept(s.tokens_T[-1])
            is_complete |= s.constraint.is_complete
        if is_complete:  # also with the last token that the limit allows
            s.finish = "stop"
        if s.finish is None and not live.request.is_streamed:
            return
        token = TokenLogprob(s.tokens_T[-1], s.logprobs_T[-1], s.top_logprobs)
        if s.finish is not None and live.request.is_learned:
            self.generation.keep_routes(s)
        stopping = live.stopping if live.request.has_text else None
        ended = None if s.finish is None else self._to_sample(s, stopping)
        live.request.on_token(s.sample_index, token, ended)
