"""Sample for all requests that wait for one adapter, or for several, in one batch that others may join.

A request that is interrupted keeps its tokens and goes on from them: its prompt and they are computed again.
"""

import dataclasses
import itertools
import logging
import secrets
from collections.abc import Callable, Sequence

from qerl.algo.seeds import mix
from qerl.engine.live_batch import LiveBatch, LiveRequest
from qerl.engine.local_engine import LocalEngine
from qerl.engine.sampling.prompt_logprobs import PromptLogprobs
from qerl.errors import UserError
from qerl.tinker.wire import SampledTokens, write_sample_result
from qerl.tinker.worker import Job, LaneTurn
from qerl.types import Prompt, Sample, Sampling, TokenLogprob

_logger = logging.getLogger("uvicorn.error")


@dataclasses.dataclass(eq=False, kw_only=True, slots=True)
class ServedSampler:
    """The weights that a client samples with."""

    session_id: str
    model_path: str | None
    snapshot: int | None
    """Number of its masters in Snapshots; None: the base model."""
    rank: int
    sigma: float
    """Size of AQN's noise, relative to each norm's RMS; 0: none."""
    noise_seed: int
    num_requests: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SampleWork:
    sampler: ServedSampler
    tokens_T: list[int]
    num_samples: int
    sampling: Sampling
    stop_token_ids: frozenset[int]
    seed: int | None
    has_prompt_logprobs: bool
    num_top_prompt: int
    num_top: int


class _Collected:
    """A request in the batch, with the tokens of its samples so far."""

    def __init__(self, job: Job):
        self.job, work = job, job.work
        seed = secrets.randbits(62) if work.seed is None else work.seed
        is_scored = (work.has_prompt_logprobs or work.num_top_prompt > 0) and len(work.tokens_T) > 1
        self.prompt_logprobs = PromptLogprobs(work.num_top_prompt) if is_scored else None
        self._tops = [list[Sequence[tuple[int, float]]]() for _ in range(work.num_samples)]
        self._samples: list[Sample | None] = [None] * work.num_samples
        self._num_before = 0
        prompt = {"text": "", "tokens_T": work.tokens_T, "messages": None, "columns": {}}
        self.live = LiveRequest(
            prompt=Prompt(index=mix(seed), **prompt),
            num_samples=work.num_samples,
            sampling=work.sampling,
            on_token=self._on_token,
            is_streamed=work.num_top > 0,
            has_text=False,
            on_failure=job.fail,
            stop_token_ids=work.stop_token_ids,
            num_top_logprobs=work.num_top,
            prompt_logprobs=self.prompt_logprobs,
        )

    def begin(self, row: int) -> None:
        """Prepare to join a batch, again if it was interrupted."""
        self.live.table_row, self._num_before = row, self._num_tokens
        if self._num_tokens > 0:
            self.live.prompt_logprobs = None  # complete before the first token
        elif self.prompt_logprobs is not None:
            self.prompt_logprobs.tokens.clear()

    @property
    def has_gone_on(self) -> bool:
        """True if it has tokens from this turn."""
        return self._num_tokens > self._num_before

    @property
    def _num_tokens(self) -> int:
        return sum(len(s.tokens_T) for s in self.live.samples_G or ())

    @property
    def is_over(self) -> bool:
        return self.job.is_cancelled or self.job.future.done()

    def _on_token(self, index: int, token: TokenLogprob, ended: Sample | None) -> None:
        self._tops[index].append(token.top)
        self._samples[index] = ended
        if all(sample is not None for sample in self._samples) and not self.job.future.done():
            self.job.future.set_result(self._result())

    def _result(self) -> bytes:
        work, sequences = self.job.work, []
        for tops, sample in zip(self._tops, self._samples, strict=True):
            assert sample is not None
            sequences.append(
                SampledTokens(
                    tokens_T=sample.tokens_T,
                    logprobs_T=sample.logprobs_T,
                    stop_reason=sample.finish,
                    top_T=tops if work.num_top else None,
                )
            )
        scored = [] if self.prompt_logprobs is None else self.prompt_logprobs.tokens
        return write_sample_result(
            sequences,
            prompt_logprobs_T=[None, *(t.logprob for t in scored)] if work.has_prompt_logprobs else None,
            prompt_top_T=[(), *(t.top for t in scored)] if work.num_top_prompt else None,
            num_top_prompt=work.num_top_prompt,
            num_top=work.num_top,
        )


def sample_turn(
    engine: LocalEngine, turn: LaneTurn, *, max_positions: int, row_of: Callable[[SampleWork], int | None]
) -> None:
    """Sample for the turn's jobs, whose work is a SampleWork, and those that come meanwhile.

    row_of: the row of the decoder's adapter bank that a request reads; None: it must wait for another turn.
    It raises UserError for an adapter that cannot be read.
    """
    live: list[_Collected] = []
    later: list[Job] = []
    with engine.live_batch(max_positions) as batch:
        new = list(turn.jobs)
        while new or live:
            for job in itertools.filterfalse(lambda job: job.is_cancelled, new):  # its weights may be gone
                # behind one that waits nobody joins, or it might wait for ever
                try:
                    if later or (row := row_of(job.work)) is None:
                        later.append(job)
                    else:
                        live.append(_add(batch, job, row))
                except UserError as error:  # the others go on
                    job.fail(error)
            batch.step()
            batch.abort([each.live for each in live if each.job.is_cancelled])
            live = [each for each in live if not each.is_over]
            if turn.is_over(for_own_lane=bool(later)) and any(each.has_gone_on for each in live):
                break
            new = turn.new_jobs() if live else []
        batch.abort([each.live for each in live])
        if num := batch.generation.stats.unfused_tokens:
            _logger.info("%d tokens had truncated probabilities and were drawn outside the kernels", num)
    unfinished = [each.job for each in live if not each.is_over]
    turn.put_back(unfinished + later)
    for job in itertools.filterfalse(lambda job: job.future.done(), turn.jobs):
        job.fail(UserError("the request was cancelled"))


def _add(batch: LiveBatch, job: Job, row: int) -> _Collected:
    """Let the request join."""
    if job.progress is None:
        job.progress = _Collected(job)
    request: _Collected = job.progress
    request.begin(row)
    batch.add(request.live)
    return request
