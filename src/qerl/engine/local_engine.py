"""Base class of local engines: a Generation runs the live samples of prompts, which then become samples. The
engines differ in the caches and forward passes that they open for a call.
"""

import abc
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from qerl.engine.branch_batch import BranchBatch
from qerl.engine.generation import Generation, StoppingCriteria
from qerl.engine.live_batch import LiveBatch
from qerl.engine.sampling.detokenizer import Detokenizer
from qerl.engine.schedule.live_sample import LiveGroup, LiveSample
from qerl.engine.stats import Stats
from qerl.errors import UserError
from qerl.models.adapter_bank import AdapterBank
from qerl.models.peft.adapter import publish
from qerl.models.policy_model import PolicyModel
from qerl.types import (
    Conversation,
    GenerateRequest,
    Group,
    OnBurst,
    Prompt,
    Sample,
    Sampling,
    UnfinishedGroup,
    UnfinishedSample,
)

# Prompts of a LiveBatch that are prefilled between two bursts: a second of SmolLM2-135M on two cores.
_CPU_ADMITTED_TOKENS = 512

TokenCallback = Callable[[int, int, int, Sample | None], bool]
"""(the prompt's index in the call, sample index, newest token, the sample if the token ended it): called for
every token when the host reads it; True ends the sample."""


class NewGeneration(Protocol):
    """Makes the Generation of one call, on caches that are open."""

    def __call__(
        self,
        groups: list[LiveGroup],
        stopping: StoppingCriteria,
        max_admitted_tokens: int | None = None,
        kept_fraction: float = 0.0,
    ) -> Generation: ...


class LocalEngine(abc.ABC):
    """The part of an engine that does not depend on how the model runs."""

    max_rows: int
    """Maximum number of samples decoded at once."""

    def __init__(
        self,
        model: PolicyModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        stop_token_ids: frozenset[int],
        max_num_batched_tokens: int,
    ):
        self.version = 0
        self.stats = Stats()
        """Stats of the latest call."""
        self._model, self.tokenizer, self.stop_token_ids = model, tokenizer, stop_token_ids
        self._max_num_batched_tokens, self._expected_positions = max_num_batched_tokens, 0

    @property
    def model(self) -> PolicyModel:
        """The model that it samples from."""
        return self._model

    @property
    def vocab_size(self) -> int:
        """Rows of the model's LM head, of which the tokenizer may know fewer."""
        return self._model.vocab_size

    @property
    def max_positions(self) -> int:
        """Longest prompt and sample together, in tokens."""
        return self._model.max_positions

    @property
    def notices(self) -> list[str]:
        """Messages for the user about limits of this engine."""
        return []

    def bank_obstacle(self, bank: AdapterBank) -> str | None:
        """Return why decode steps with adapters of this bank use PyTorch operations; None if kernels run
        them."""
        return "the engine has no kernels"

    def expect(self, num_positions: int) -> None:
        """Note the length of the run's longest prompt and sample together, in tokens. It affects time and
        memory only: a call with longer ones than those before drops recorded graphs."""
        self._expected_positions = min(num_positions, self.max_positions)

    def publish(self, version: int) -> None:
        """Sample from the learner's current weights from now on, under this version number."""
        publish(self._model)
        self.version = version

    def take_metrics(self) -> dict[str, float]:
        """Return no metrics: those of an engine are in `stats`."""
        return {}

    @abc.abstractmethod
    def open(
        self, groups: list[LiveGroup], sampling: Sampling | None
    ) -> contextlib.AbstractContextManager[NewGeneration]:
        """Open caches for these groups; without sampling parameters every group has its own."""

    def branch_batches(self, request: GenerateRequest) -> Iterator[BranchBatch]:
        raise UserError("this engine cannot branch samples: set algo.branching to none")

    def score(self, groups: list[Group], *, sampling: Sampling, by_requests: bool = False) -> Tensor:
        raise UserError("this engine has no exact mode: unset engine.exact")

    # Not inference_mode: the learner also uses tensors that the decoder caches during a call.
    @torch.no_grad()
    def generate(
        self,
        request: GenerateRequest,
        *,
        on_token: TokenCallback | None = None,
        on_burst: OnBurst | None = None,
        conversation: Conversation | None = None,
    ) -> list[Group]:
        """Return the samples of each prompt, in order. If on_token ends a turn, finish is "stop".

        on_burst: not with a conversation, whose samples go on after a turn.
        """
        assert request.num_samples > 0 and (on_burst is None or conversation is None)
        start_s = time.perf_counter()
        stopping, groups = self.stopping(request.sampling.stop), self._new_groups(request)
        if not groups:
            self.stats = Stats()
            return []
        with self.open(groups, request.sampling) as new_generation:
            open_s = time.perf_counter() - start_s
            callback = None if on_token is None else self._live_callback(on_token, stopping)
            criteria = dataclasses.replace(stopping, on_token=callback, conversation=conversation)
            generation = new_generation(groups, criteria)
            self.stats = generation.stats
            self.stats.open_s = open_s
            complete = _CompleteGroups(groups, lambda group: self._to_group(group, stopping), on_burst)
            generation.run(complete.notify)
        self.stats.generate_s = time.perf_counter() - start_s
        return [group for _, group in complete.all()]

    @torch.no_grad()
    def continue_groups(
        self,
        before_P: list[UnfinishedGroup],
        *,
        is_enough: Callable[[list[bool]], bool],
        sampling: Sampling,
        seed: int,
        on_burst: OnBurst | None = None,
        max_tokens_P_G: list[list[int]] | None = None,
        carries_cache: bool = False,
    ) -> list[tuple[UnfinishedGroup, Group | None]]:
        """Sample until all groups are complete or is_enough, called with a flag for each complete group,
        returns True. Return each group as it is then, and its samples if it is complete.

        Earlier tokens keep their logprobs. The current weights compute them again, unless the group brings a
        cache, as after carries_cache. on_burst: as in generate. max_tokens_P_G: as in GenerateRequest.
        """
        start_s, self.stats = time.perf_counter(), Stats()
        stopping = self.stopping(sampling.stop)
        groups = [self._resumed(i, each, sampling.max_tokens, seed) for i, each in enumerate(before_P)]
        _limit(groups, max_tokens_P_G)
        self._assign_noise_rows(groups)
        unfinished = [g for g in groups if not _is_complete(g)]

        def to_group(group: LiveGroup) -> Group:
            return self._whole_group(self._left(before_P[group.index], group), group, stopping)

        complete = _CompleteGroups(groups, to_group, on_burst)
        if unfinished:
            with self.open(unfinished, sampling) as new_generation:
                generation = new_generation(unfinished, stopping)
                self.stats = generation.stats
                generation.run(
                    lambda: complete.notify() or is_enough([_is_complete(group) for group in groups])
                )
                left = [g for g in unfinished if not _is_complete(g)]
                if carries_cache:
                    generation.carry(left)
                else:
                    _drop_carried(left)
                generation.abort(left)
            self.stats.generate_s = time.perf_counter() - start_s
        whole_by_index = dict(complete.all())
        after_P = [self._left(*pair) for pair in zip(before_P, groups, strict=True)]
        _drop_carried(groups)  # groups and samples form cycles of references, which are not freed at once
        return [(after, whole_by_index.get(index)) for index, after in enumerate(after_P)]

    def _left(self, before: UnfinishedGroup, group: LiveGroup) -> UnfinishedGroup:
        """Return the group as it is now; new tokens are of the present version."""
        samples_G = []
        for s, sample in zip(group.samples_G, before.samples_G, strict=True):
            num_new = len(s.logprobs_T) - len(sample.logprobs_T)
            versions = (*sample.versions, (self.version, num_new)) if num_new else sample.versions
            tokens = {"tokens_T": s.tokens_T, "logprobs_T": s.logprobs_T, "versions": versions}
            samples_G.append(UnfinishedSample(**tokens, finish=s.finish, routes=s.routes, cache=s.carried))
        return dataclasses.replace(before, samples_G=samples_G, cache=group.carried)

    def _resumed(self, index: int, before: UnfinishedGroup, max_tokens: int, seed: int) -> LiveGroup:
        coordinates = seed, before.seed_step
        group = self._new_group(index, before.prompt, len(before.samples_G), max_tokens, coordinates)
        group.carried = before.cache
        for s, sample in zip(group.samples_G, before.samples_G, strict=True):
            s.tokens_T, s.logprobs_T = list(sample.tokens_T), list(sample.logprobs_T)
            s.finish, s.routes, s.carried = sample.finish, sample.routes, sample.cache
        return group

    def _whole_group(self, after: UnfinishedGroup, group: LiveGroup, stopping: StoppingCriteria) -> Group:
        whole, samples_G = self._to_group(group, stopping), []
        for s, versions in zip(whole.samples_G, (sample.versions for sample in after.samples_G), strict=True):
            newest, _ = versions[-1]
            several = versions if len(versions) > 1 else ()
            samples_G.append(dataclasses.replace(s, version=newest, versions=several))
        return dataclasses.replace(whole, samples_G=samples_G)

    @contextlib.contextmanager
    def live_batch(self, max_positions: int, kept_fraction: float = 0.0) -> Iterator[LiveBatch]:
        """Yield a batch that requests join and leave (live_batch.py); the longest prompt and sample have
        max_positions together. Do not generate or learn meanwhile.

        kept_fraction: maximum share of the pages that are kept between an episode's requests.
        """
        prompt = Prompt(index=0, text="", tokens_T=[0], messages=None, columns={})
        longest, stopping = self._new_group(0, prompt, 1, max_positions - 1), self.stopping()
        with torch.no_grad(), self.open([longest] * self.max_rows, None) as new_generation:
            is_cpu = self._model.device.type == "cpu"
            max_admitted_tokens = _CPU_ADMITTED_TOKENS if is_cpu else self._max_num_batched_tokens
            yield LiveBatch(
                lambda callbacks: new_generation(
                    [],
                    dataclasses.replace(
                        stopping,
                        on_token=callbacks.on_token,
                        skips_on_token=callbacks.skips_on_token,
                        on_failure=callbacks.on_failure,
                    ),
                    max_admitted_tokens,
                    kept_fraction,
                ),
                self._new_group,
                self.stopping,
                self._to_sample,
                self._model.logits,
                max_positions=max_positions,
            )

    def stopping(self, stop: tuple[str, ...] = ()) -> StoppingCriteria:
        """Return what ends a sample: the engine's stop tokens, and these strings."""
        return StoppingCriteria(
            stop_token_ids=self.stop_token_ids, detokenizer=Detokenizer(self.tokenizer, stop)
        )

    def _new_groups(self, request: GenerateRequest) -> list[LiveGroup]:
        each = request.num_samples, request.sampling.max_tokens, (request.seed, request.step)
        groups = [self._new_group(i, prompt, *each) for i, prompt in enumerate(request.prompts_P)]
        _limit(groups, request.max_tokens_P_G)
        self._assign_noise_rows(groups)
        return groups

    def _new_group(
        self,
        index: int,
        prompt: Prompt,
        num_samples: int,
        max_tokens: int,
        coordinates: tuple[int, int] = (0, 0),
    ) -> LiveGroup:
        """Return a group of empty samples; coordinates: (seed, step)."""
        prompt_tokens, max_positions = len(prompt.tokens_T), self.max_positions
        if not 0 < prompt_tokens < max_positions:
            raise UserError(
                f"prompt {prompt.index} has {prompt_tokens} tokens;"
                f" the model allows 1 to {max_positions - 1} in its context of {max_positions}"
            )
        group = LiveGroup(
            index=index,
            prompt=prompt,
            coordinates=(*coordinates, prompt.index),
            prompt_tokens=prompt_tokens,
            max_tokens=min(max_tokens, max_positions - prompt_tokens),
        )
        group.samples_G = [LiveSample(group=group, sample_index=g) for g in range(num_samples)]
        return group

    def _assign_noise_rows(self, groups: list[LiveGroup]) -> None:
        members = [(group.prompt.index, range(len(group.samples_G))) for group in groups]
        for group, (row, rows_G) in zip(groups, self._model.noise_table.rows(members), strict=True):
            group.noise_row = row
            for sample, sample_row in zip(group.samples_G, rows_G, strict=True):
                sample.noise_row = sample_row

    def _to_group(self, group: LiveGroup, stopping: StoppingCriteria) -> Group:
        return Group(
            prompt=group.prompt,
            samples_G=[self._to_sample(s, stopping) for s in group.samples_G],
            prefix_tokens=0 if group.parent is None else group.num_parent_tokens + 1,
        )

    def _live_callback(
        self, on_token: TokenCallback, stopping: StoppingCriteria
    ) -> Callable[[LiveSample], bool]:
        def call(s: LiveSample) -> bool:
            ended = None if s.finish is None else self._to_sample(s, stopping)
            return on_token(s.group.index, s.sample_index, s.tokens_T[-1], ended)

        return call

    def _to_sample(self, s: LiveSample, stopping: StoppingCriteria | None) -> Sample:
        """stopping None: without its text."""
        assert s.finish is not None
        tokens_T = s.all_tokens_T
        return Sample(
            tokens_T=tokens_T,
            logprobs_T=s.all_logprobs_T,
            text="" if stopping is None else stopping.text(tokens_T),
            finish=s.finish,
            version=self.version,
            environment_spans=tuple(s.environment_spans),
            allowed=None if s.allowed_log is None else s.allowed_log.tokens(),
            routes=s.routes,
            sample_index=(s.group.parent or s).sample_index,
        )


class _CompleteGroups:
    """The complete groups of a call in the form that it returns, converted once."""

    def __init__(
        self, groups: list[LiveGroup], to_group: Callable[[LiveGroup], Group], on_burst: OnBurst | None
    ):
        self._incomplete, self._to_group, self._on_burst = list(groups), to_group, on_burst
        self._complete: dict[int, Group] = {}

    def notify(self) -> bool:
        """Call on_burst with the groups that are newly complete; return False: the generation goes on."""
        if self._on_burst is not None:
            self._on_burst(self._take())
        return False

    def all(self) -> list[tuple[int, Group]]:
        """Return the complete groups with their indices, in order."""
        self._take()
        return sorted(self._complete.items())

    def _take(self) -> list[tuple[int, Group]]:
        new = [(group.index, self._to_group(group)) for group in self._incomplete if _is_complete(group)]
        self._complete |= new
        self._incomplete = [group for group in self._incomplete if group.index not in self._complete]
        return new


def _limit(groups: list[LiveGroup], max_tokens_P_G: list[list[int]] | None) -> None:
    """Set each sample's own maximum length; None: all have their group's."""
    for group, max_tokens_G in zip(groups, max_tokens_P_G or (), strict=max_tokens_P_G is not None):
        for sample, max_tokens in zip(group.samples_G, max_tokens_G, strict=True):
            sample.max_tokens = sample.total_tokens = min(max_tokens, group.max_tokens)


def _drop_carried(groups: list[LiveGroup]) -> None:
    for group in groups:
        for holder in (group, *group.samples_G):
            holder.carried = None


def _is_complete(group: LiveGroup) -> bool:
    return all(s.finish is not None for s in group.samples_G)
