"""Partial rollouts: more prompts are begun than a step needs, and what is not finished goes on in the next.

    in work      num_prompts + extra_prompts groups: those that were carried, then new ones
    a step ends  when num_prompts groups are complete, and with them all begun max_staleness steps ago
    learned      the num_prompts complete groups that were begun first
    carried      the others, with their tokens, logprobs and versions; the next step's policy continues them

The n-th prompt of the run is the one that it would be without this, and so are its seed coordinates: only the
policies of its tokens differ, which importance weights correct token by token. No sample is thrown away, as
that would prefer short ones: near the run's end no more are begun than are still learned from. As
extra_prompts <= num_prompts, the groups that must be complete are never more than a step learns from.
"""

import base64
from statistics import fmean
from typing import Any, Protocol

from qerl.config import RunConfig
from qerl.tracking import StepLog
from qerl.training.overlap import OverlappedRewards, Rewards
from qerl.training.rollout import TrainPrompts, rollout_metrics, sampling_of, with_advantages
from qerl.types import BegunGroup, BegunSample, Group, OnBurst, Sampling


class ContinuingEngine(Protocol):
    """See SamplingEngine.continue_groups."""

    version: int

    def continue_groups(
        self,
        begun_P: list[BegunGroup],
        *,
        is_enough: Any,
        sampling: Sampling,
        seed: int,
        on_burst: OnBurst | None = None,
    ) -> list[tuple[BegunGroup, Group | None]]: ...


class PartialRollouts:
    def __init__(
        self, config: RunConfig, engine: ContinuingEngine, rewards: Rewards, train_prompts: TrainPrompts
    ):
        self._config, self._engine, self._rewards = config, engine, rewards
        self._train_prompts = train_prompts
        self._num_begun = 0
        self._carried: list[tuple[int, int, BegunGroup]] = []
        """(number of the prompt in the run, step that began it, group), the oldest first."""

    def sample(self, step: int, log: StepLog) -> list[Group]:
        """Return the step's groups with rewards and advantages."""
        config, resumed = self._config, self._carried
        begun = [*resumed, *self._begin(step)]
        must_end = [step - first >= config.rollout.max_staleness for _, first, _ in begun]

        def is_enough(complete_P: list[bool]) -> bool:
            has_due = all(is_complete for is_complete, must in zip(complete_P, must_end, strict=True) if must)
            return has_due and sum(complete_P) >= config.num_prompts

        # Whatever else ends, the first num_prompts are learned from if they are complete.
        P = config.num_prompts
        keys = [index if index < P else None for index in range(len(begun))]
        scores = OverlappedRewards(config, self._rewards)
        with log.span("rollout"):
            left = self._engine.continue_groups(
                [group for _, _, group in begun],
                is_enough=is_enough,
                sampling=sampling_of(config),
                seed=config.seed,
                on_burst=scores.on_burst(keys),
            )
        ends = [index for index, (_, group) in enumerate(left) if group is not None]
        learned = ends[:P]
        self._carried = [
            (number, first, after)
            for index, ((number, first, _), (after, _)) in enumerate(zip(begun, left, strict=True))
            if index not in learned
        ]
        keyed_P = [(index, group) for index in learned if (group := left[index][1]) is not None]
        groups_P = [group for _, group in keyed_P]
        with log.span("reward"):
            rewards_P_G = scores.rewards(keyed_P)
        groups_P = with_advantages(config, groups_P, rewards_P_G)
        log.add(**rollout_metrics(config, groups_P), rounds=1, **scores.metrics)
        log.add(**self._metrics(groups_P, resumed))
        return groups_P

    def _begin(self, step: int) -> list[tuple[int, int, BegunGroup]]:
        """Return new groups, up to the number in work, but no more than the run still learns from."""
        config, P = self._config, self._config.num_prompts
        in_work = min(P + config.rollout.extra_prompts, (config.num_steps - step) * P)
        numbers = range(self._num_begun, self._num_begun + max(in_work - len(self._carried), 0))
        self._num_begun = numbers.stop
        fresh = [BegunSample()] * config.num_generations
        return [(number, step, self._group(number, fresh)) for number in numbers]

    def _group(self, number: int, samples_G: list[BegunSample]) -> BegunGroup:
        """Return the run's prompt of this number, which would be learned from at seed_step otherwise."""
        seed_step, place = divmod(number, self._config.num_prompts)
        prompt = self._train_prompts(seed_step, self._config.num_prompts, 0)[place]
        return BegunGroup(prompt=prompt, seed_step=seed_step, samples_G=samples_G)

    def _metrics(self, learned: list[Group], resumed: list[tuple[int, int, BegunGroup]]) -> dict[str, float]:
        """Return what was carried and resumed, in unfinished samples, and the learned tokens' staleness: the
        versions since theirs, in the mean."""
        version = self._engine.version
        of_tokens = [
            version - each
            for group in learned
            for s in group.samples_G
            for each, count in s.versions or ((s.version, len(s.logprobs_T)),)
            for _ in range(count)
        ]
        return {
            "carried_samples": _num_unfinished(self._carried),
            "carried_tokens": sum(len(s.tokens_T) for _, _, g in self._carried for s in g.samples_G),
            "resumed_samples": _num_unfinished(resumed),
            "staleness": fmean(of_tokens),
        }

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint stores, as JSON values."""
        groups = [
            {"number": number, "first_step": first, "samples": [_stored(s) for s in group.samples_G]}
            for number, first, group in self._carried
        ]
        return {"num_begun": self._num_begun, "groups": groups}

    def load(self, state: dict[str, Any] | None, next_step: int) -> None:
        """Continue with this state; None: a checkpoint of a run that carried nothing."""
        if state is None:
            self._num_begun, self._carried = next_step * self._config.num_prompts, []
            return
        self._num_begun = state["num_begun"]
        self._carried = [
            (g["number"], g["first_step"], self._group(g["number"], [_read(s) for s in g["samples"]]))
            for g in state["groups"]
        ]


def _num_unfinished(groups: list[tuple[int, int, BegunGroup]]) -> int:
    return sum(s.finish is None for _, _, group in groups for s in group.samples_G)


def _stored(sample: BegunSample) -> dict[str, Any]:
    routes = None if sample.routes is None else base64.b64encode(sample.routes).decode()
    return {
        "tokens": list(sample.tokens_T),
        "logprobs": list(sample.logprobs_T),
        "versions": [list(pair) for pair in sample.versions],
        "finish": sample.finish,
        "routes": routes,
    }


def _read(data: dict[str, Any]) -> BegunSample:
    return BegunSample(
        tokens_T=data["tokens"],
        logprobs_T=data["logprobs"],
        versions=tuple((version, count) for version, count in data["versions"]),
        finish=data["finish"],
        routes=None if data["routes"] is None else base64.b64decode(data["routes"]),
    )
