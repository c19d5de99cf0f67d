"""Partial rollouts: more prompts are begun than a step needs, and what is not finished goes on in the next.

    in work      num_prompts + extra_prompts groups: those that were carried, then new ones
    a step ends  when num_prompts groups are complete, and with them all begun max_staleness steps ago
    learned      the num_prompts complete groups that were begun first
    carried      the others, with their tokens, logprobs and versions; the next step's policy continues them

The n-th prompt of the run is the one that it would be without this, and so are its seed coordinates: only the
policies of its tokens differ, which importance weights correct token by token. No sample is thrown away, as
that would prefer short ones: near the run's end no more are begun than are still learned from. As
extra_prompts <= num_prompts, the groups that must be complete are never more than a step learns from.

With rollout.keep_kv_cache the engine's cache of unfinished samples is carried too, but not over a checkpoint:
a run that is continued from one computes them again, and so does the run itself.

Several ranks divide a step's prompts and the extra ones by place, each as above with its share: a rank
samples and carries its own, and waits for the others only where the step's groups are gathered. So which
groups a step learns from depends on the number of ranks, but not on how fast they are.
"""

import base64
import dataclasses
from operator import itemgetter
from statistics import fmean
from typing import Any, NamedTuple

from qerl.config import RunConfig
from qerl.engine.local_engine import LocalEngine
from qerl.errors import require
from qerl.learner.distributed import ALONE, Ranks
from qerl.tracking import StepLog
from qerl.training.engines.data_parallel import packed, unpacked
from qerl.training.rollouts.overlap import OverlappedRewards, Rewards
from qerl.training.rollouts.rollout import TrainPrompts, rollout_metrics, sampling_of, with_advantages
from qerl.types import Group, UnfinishedGroup, UnfinishedSample


class InWork(NamedTuple):
    """A group that is sampled: its prompt's number in the run, and the step that began it."""

    number: int
    first_step: int
    group: UnfinishedGroup


class PartialRollouts:
    def __init__(
        self,
        config: RunConfig,
        engine: LocalEngine,
        rewards: Rewards,
        train_prompts: TrainPrompts,
        ranks: Ranks = ALONE,
    ):
        self._config, self._engine, self._rewards = config, engine, rewards
        self._train_prompts, self._ranks = train_prompts, ranks
        self._carried: list[InWork] = []
        """Those of all ranks, by number."""

    def sample(self, step: int, log: StepLog) -> list[Group]:
        config, resumed = self._config, self._carried
        in_work = sorted([*resumed, *self._begin(step)], key=lambda each: each.number)
        share = [each for each in in_work if self._rank_of(each.number) == self._ranks.index]
        scores = OverlappedRewards(config.task, config.model, self._rewards)
        with log.span("rollout"):
            learned, carried = self._sample_share(share, step, scores)
            counts = self._ranks.gather(self._cache_metrics(carried))
            learned, carried = self._gather(in_work, learned, carried)
        self._carried = carried
        groups_P = [group for _, group in learned]
        with log.span("reward"):
            rewards_P_G = scores.rewards(learned)
        groups_P = with_advantages(config.algo, config.sample, groups_P, rewards_P_G)
        metrics = rollout_metrics(config.task, config.evaluate, groups_P, self._rewards.environments)
        log.add(**metrics, rounds=1, **scores.metrics)
        log.add(**self._metrics(groups_P, resumed))
        log.add(**{name: sum(each[name] for each in counts) for name in counts[0]})
        return groups_P

    def _sample_share(
        self, share: list[InWork], step: int, scores: OverlappedRewards
    ) -> tuple[list[tuple[int, Group]], list[InWork]]:
        """Sample until this rank's share is complete; return its groups by number, and what is carried."""
        config = self._config
        num_groups = len(self._ranks.share(list(range(config.num_prompts))))
        must_end = [step - each.first_step >= config.rollout.max_staleness for each in share]

        def is_enough(complete_P: list[bool]) -> bool:
            has_due = all(is_complete for is_complete, must in zip(complete_P, must_end, strict=True) if must)
            return has_due and sum(complete_P) >= num_groups

        left = self._engine.continue_groups(
            [each.group for each in share],
            is_enough=is_enough,
            sampling=sampling_of(config),
            seed=config.seed,
            carries_cache=config.rollout.keep_kv_cache and (step + 1) % config.checkpoint.every > 0,
            # Whatever else ends, the first are learned from if they are complete.
            on_burst=scores.on_burst([e.number if i < num_groups else None for i, e in enumerate(share)]),
        )
        learned, carried = [], []
        for each, (after, group) in zip(share, left, strict=True):
            if group is not None and len(learned) < num_groups:
                learned.append((each.number, group))
            else:
                carried.append(each._replace(group=after))
        return learned, carried

    def _gather(
        self, in_work: list[InWork], learned: list[tuple[int, Group]], carried: list[InWork]
    ) -> tuple[list[tuple[int, Group]], list[InWork]]:
        """Return those of all ranks, by number."""
        if self._ranks.count == 1:
            return learned, carried
        by_number = {each.number: each for each in in_work}
        ended = [(number, [packed(s) for s in group.samples_G]) for number, group in learned]
        stored = [(n, [packed(s) for s in group.without_cache().samples_G]) for n, _, group in carried]
        learned = []  # the caches of what this rank carries stay here
        for index, (rank_learned, rank_carried) in enumerate(self._ranks.gather((ended, stored))):
            for number, samples_G in rank_learned:
                prompt = by_number[number].group.prompt
                learned.append((number, Group(prompt=prompt, samples_G=[unpacked(s) for s in samples_G])))
            if index == self._ranks.index:
                continue
            for number, samples_G in rank_carried:
                each = by_number[number]
                group = dataclasses.replace(each.group, samples_G=[unpacked(s) for s in samples_G])
                carried.append(each._replace(group=group))
        return sorted(learned, key=itemgetter(0)), sorted(carried, key=itemgetter(0))

    def _begin(self, step: int) -> list[InWork]:
        """Return new groups of all ranks, up to the number in work, but no more than the run still learns
        from. A rank has learned from its share of each earlier step, and begun that and what it carries."""
        config, new = self._config, []
        all_places = list(range(config.num_prompts))
        for index in range(self._ranks.count):
            rank = Ranks(index, self._ranks.count)
            places, extra = rank.share(all_places), rank.share(all_places[: config.rollout.extra_prompts])
            num_carried = sum(self._rank_of(each.number) == index for each in self._carried)
            num_in_work = min(len(places) + len(extra), (config.num_steps - step) * len(places))
            first = step * len(places) + num_carried
            for k in range(first, first + num_in_work - num_carried):
                number = k // len(places) * config.num_prompts + places[k % len(places)]
                fresh = [UnfinishedSample()] * config.num_generations
                new.append(InWork(number, step, self._group(number, fresh)))
        return new

    def _rank_of(self, number: int) -> int:
        """Return the rank that samples the run's prompt of this number."""
        return number % self._config.num_prompts % self._ranks.count

    def _group(self, number: int, samples_G: list[UnfinishedSample]) -> UnfinishedGroup:
        """Return the run's prompt of this number, which would be learned from at seed_step otherwise."""
        seed_step, place = divmod(number, self._config.num_prompts)
        prompt = self._train_prompts(seed_step, self._config.num_prompts, 0)[place]
        return UnfinishedGroup(prompt=prompt, seed_step=seed_step, samples_G=samples_G)

    def _metrics(self, learned: list[Group], resumed: list[InWork]) -> dict[str, float]:
        """Return the step's own tokens, what was carried and resumed, in unfinished samples, and the learned
        tokens' staleness: the versions since theirs, and the share of tokens of earlier versions."""
        version = self._engine.version
        of_tokens = [
            version - each
            for group in learned
            for s in group.samples_G
            for each, count in s.versions or ((s.version, len(s.logprobs_T)),)
            for _ in range(count)
        ]
        carried_tokens = _num_tokens(self._carried)
        return {
            "sampled_tokens": len(of_tokens) + carried_tokens - _num_tokens(resumed),
            "carried_samples": _num_unfinished(self._carried),
            "carried_tokens": carried_tokens,
            "carried_complete_groups": sum(each.group.is_complete for each in self._carried),
            "resumed_samples": _num_unfinished(resumed),
            "staleness": fmean(of_tokens),
            "staleness_max": max(of_tokens),
            "stale_fraction": fmean(age > 0 for age in of_tokens),
        }

    def _cache_metrics(self, carried: list[InWork]) -> dict[str, float]:
        """Return this rank's part of the metrics of what is computed again and what is kept."""
        stats = self._engine.stats
        metrics: dict[str, float] = {"prefill_tokens": stats.prefill_tokens}
        if self._config.rollout.keep_kv_cache:
            num_bytes = sum(each.group.cache_bytes for each in carried)
            metrics |= {"reused_tokens": stats.reused_tokens, "carried_gb": num_bytes / 1e9}
        return metrics

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint stores, as JSON values: on every rank what all ranks carry."""
        groups = [
            {"number": number, "first_step": first, "samples": [_stored(s) for s in group.samples_G]}
            for number, first, group in self._carried
        ]
        return {"num_ranks": self._ranks.count, "groups": groups}

    def load(self, state: dict[str, Any]) -> None:
        """Raise UserError if groups are carried and the number of ranks, which divide them, is another."""
        saved_by, count = state["num_ranks"], self._ranks.count
        require(
            not state["groups"] or saved_by == count,
            f"this run carries unfinished samples of {saved_by} ranks (rollout.partial): continue it with"
            f" {saved_by}, not {count}",
        )
        self._carried = [
            InWork(g["number"], g["first_step"], self._group(g["number"], [_read(s) for s in g["samples"]]))
            for g in state["groups"]
        ]


def _num_tokens(groups: list[InWork]) -> int:
    return sum(len(s.tokens_T) for each in groups for s in each.group.samples_G)


def _num_unfinished(groups: list[InWork]) -> int:
    return sum(s.finish is None for each in groups for s in each.group.samples_G)


def _stored(sample: UnfinishedSample) -> dict[str, Any]:
    routes = None if sample.routes is None else base64.b64encode(sample.routes).decode()
    return {
        "tokens": list(sample.tokens_T),
        "logprobs": list(sample.logprobs_T),
        "versions": [list(pair) for pair in sample.versions],
        "finish": sample.finish,
        "routes": routes,
    }


def _read(data: dict[str, Any]) -> UnfinishedSample:
    return UnfinishedSample(
        tokens_T=data["tokens"],
        logprobs_T=data["logprobs"],
        versions=tuple((version, count) for version, count in data["versions"]),
        finish=data["finish"],
        routes=None if data["routes"] is None else base64.b64decode(data["routes"]),
    )
