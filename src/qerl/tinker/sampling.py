"""Sample for all requests that wait for one adapter, in one batch."""

import dataclasses
import itertools
import secrets

from qerl.algo.seeds import mix
from qerl.engine.live_batch import LiveBatch, LiveRequest
from qerl.engine.local_engine import LocalEngine
from qerl.engine.sampling.prompt_logprobs import PromptLogprobs
from qerl.errors import UserError
from qerl.tinker.wire import SampledTokens, write_sample_result
from qerl.tinker.worker import Job
from qerl.types import Prompt, Sample, Sampling, TokenLogprob


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SampleWork:
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
        self._tokens = [list[TokenLogprob]() for _ in range(work.num_samples)]
        self._samples: list[Sample | None] = [None] * work.num_samples
        prompt = {"text": "", "tokens_T": work.tokens_T, "messages": None, "columns": {}}
        self.live = LiveRequest(
            prompt=Prompt(index=mix(seed), **prompt),
            num_samples=work.num_samples,
            sampling=work.sampling,
            on_token=self._on_token,
            on_failure=job.fail,
            stop_token_ids=work.stop_token_ids,
            num_top_logprobs=work.num_top,
            prompt_logprobs=self.prompt_logprobs,
        )

    @property
    def is_over(self) -> bool:
        return self.job.is_cancelled or self.job.future.done()

    def _on_token(self, index: int, token: TokenLogprob, ended: Sample | None) -> None:
        self._tokens[index].append(token)
        self._samples[index] = ended
        if all(sample is not None for sample in self._samples) and not self.job.future.done():
            self.job.future.set_result(self._result())

    def _result(self) -> bytes:
        work, sequences = self.job.work, []
        for tokens, sample in zip(self._tokens, self._samples, strict=True):
            assert sample is not None
            sequences.append(
                SampledTokens(
                    tokens_T=sample.tokens_T,
                    logprobs_T=sample.logprobs_T,
                    stop_reason=sample.finish,
                    top_T=[token.top for token in tokens] if work.num_top else None,
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


def sample_all(engine: LocalEngine, jobs: list[Job], *, max_positions: int) -> None:
    """Sample for the jobs, whose work is a SampleWork, with the weights that the decoder has now."""
    with engine.live_batch(max_positions) as batch:
        live = [each for each in (_Collected(job) for job in jobs) if _add(batch, each)]
        while live:
            batch.step()
            batch.abort([each.live for each in live if each.job.is_cancelled])
            live = [each for each in live if not each.is_over]
    for job in itertools.filterfalse(lambda job: job.future.done(), jobs):
        job.fail(UserError("the request was cancelled"))


def _add(batch: LiveBatch, request: _Collected) -> bool:
    if request.job.is_cancelled:
        return False
    try:
        batch.add(request.live)
    except UserError as error:
        request.job.fail(error)
        return False
    return True
