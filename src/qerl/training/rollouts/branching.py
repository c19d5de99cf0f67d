"""Rollouts with branches of the samples that failed: DEEP-GRPO.

    every prompt's samples -> rewards -> a pivot in each that failed -> its branches -> rewards -> advantages

The branches of one pivot are a group: each is compared with its siblings, and only the tokens after the pivot
are learned from. The outcomes of earlier pivots (algo/pivot.py) steer the choice of the next ones and are
stored in checkpoints. The engine keeps the KV cache's memory for all of it, but for branches of conversations
with an environment and of agents' episodes, which begin with a turn, and in Ray workers (replayed_batch.py).
"""

import collections
from collections.abc import Sequence
from functools import partial
from statistics import fmean

from qerl.algo.pivot import WINDOW, Success, Try, chosen, fitted, odds
from qerl.algo.seeds import uniform
from qerl.config import RunConfig
from qerl.tracking import StepLog
from qerl.training.engines.replayed_batch import BranchingEngine
from qerl.training.rollouts.rollout import (
    Rewards,
    TrainPrompts,
    rollout_metrics,
    step_request,
    with_advantages,
)
from qerl.types import Group, Pivot, Sample

_PIVOT = 0x5049564F54  # keeps these random numbers apart from the tokens'


class BranchingRollouts:
    """Takes the place of GroupRollouts."""

    def __init__(
        self, config: RunConfig, engine: BranchingEngine, rewards: Rewards, train_prompts: TrainPrompts
    ):
        self._config, self._engine, self._rewards = config, engine, rewards
        self._train_prompts, self._deep = train_prompts, config.algo.deep
        self._tries: collections.deque[Try] = collections.deque(maxlen=WINDOW)

    def sample(self, step: int, log: StepLog) -> list[Group]:
        """Return the step's groups with advantages, followed by the groups of branches."""
        config, success = self._config, fitted(self._tries)
        prompts_P = self._train_prompts(step, config.num_prompts, 0)
        scored: list[tuple[Group, list[float | None]]] = []
        branched: list[tuple[Group, list[float | None], float]] = []
        for batch in self._engine.branch_batches(step_request(config, prompts_P, step)):
            with log.span("rollout"):
                groups_P = batch.sample()
            with log.span("reward"):
                group_rewards_P_G = self._rewards.attempt(groups_P)
            pivots = self._pivots(groups_P, group_rewards_P_G, success, step)
            with log.span("rollout"):
                branches_P = batch.branch(pivots, self._deep.num_branches)
            with log.span("reward"):
                branch_rewards_P_G = self._rewards.attempt(branches_P) if branches_P else []
            scored += zip(groups_P, group_rewards_P_G, strict=True)
            ratios = [_ratio(groups_P, pivot) for pivot in pivots]
            branched += zip(branches_P, branch_rewards_P_G, ratios, strict=True)
        place = {prompt.index: i for i, prompt in enumerate(prompts_P)}  # whatever batches there were
        scored.sort(key=lambda each: place[each[0].prompt.index])
        branched.sort(key=lambda each: place[each[0].prompt.index])
        # One batch, or all branches, may have no reward at all: the run goes on.
        self._rewards.check_some([rewards_G for _, rewards_G in scored])
        compared = partial(with_advantages, config.algo, config.sample)
        groups = compared([g for g, _ in scored], [rewards_G for _, rewards_G in scored])
        branches = compared([g for g, _, _ in branched], [rewards_G for _, rewards_G, _ in branched])
        tries = [
            Try(ratio, self._succeeded(each)) for (*_, ratio), each in zip(branched, branches, strict=True)
        ]
        log.add(**rollout_metrics(config.task, config.evaluate, groups, self._rewards.environments), rounds=1)
        log.add(**self._branch_metrics(branches, tries, success))
        self._tries += tries
        return groups + branches

    def _pivots(
        self, groups: list[Group], rewards_P_G: list[list[float | None]], success: Success | None, step: int
    ) -> list[Pivot]:
        """Return one pivot for every sample that failed and is longer than a segment. In a conversation a
        segment is a turn."""
        pivots = []
        for g, (group, rewards_G) in enumerate(zip(groups, rewards_P_G, strict=True)):
            for s, (sample, reward) in enumerate(zip(group.samples_G, rewards_G, strict=True)):
                if reward is None or reward > self._deep.failure_reward:
                    continue
                share = uniform(_PIVOT, self._config.seed, step, group.prompt.index, s)
                place = chosen(odds(_length(sample), success, self._deep, _turn_starts(sample)), share)
                if place is not None:
                    pivots.append(Pivot(group_index=g, sample_index=s, prefix_tokens=place))
        return pivots

    def _succeeded(self, branches: Group) -> bool:
        return any(s.reward is not None and s.reward > self._deep.failure_reward for s in branches.samples_G)

    def _branch_metrics(
        self, branches: list[Group], tries: list[Try], success: Success | None
    ) -> dict[str, float]:
        """sampled_tokens: of samples and branches. reused_tokens: before the pivots, computed only once."""
        stats, threshold = self._engine.stats, self._config.evaluate.success_threshold
        rewards = [s.reward for group in branches for s in group.samples_G if s.reward is not None]
        metrics: dict[str, float] = {
            "pivots": len(branches),
            "branches": sum(len(group.samples_G) for group in branches),
            "reused_tokens": stats.reused_tokens,
            "sampled_tokens": stats.num_tokens,
        }
        if rewards:
            if threshold is not None:
                metrics["branch_accuracy"] = fmean(reward >= threshold for reward in rewards)
            metrics["pivot_success"] = fmean(each.succeeded for each in tries)
            metrics["pivot_ratio"] = fmean(each.ratio for each in tries)
        if success is not None:
            metrics |= {"pivot_slope": success.slope, "pivot_base": success.base}
        return metrics

    def state(self) -> list[list[float]]:
        return [[each.ratio, float(each.succeeded)] for each in self._tries]

    def load(self, state: Sequence[Sequence[float]]) -> None:
        self._tries.clear()
        self._tries += [Try(ratio, bool(succeeded)) for ratio, succeeded in state]


def _ratio(groups: list[Group], pivot: Pivot) -> float:
    return pivot.prefix_tokens / _length(groups[pivot.group_index].samples_G[pivot.sample_index])


def _length(sample: Sample) -> int:
    """Return the number of tokens among which pivots are counted: in an agent's episode the sampled ones."""
    return len(sample.tokens_T if sample.episode is None else sample.logprobs_T)


def _turn_starts(sample: Sample) -> Sequence[int] | None:
    """Return where a branch may begin; None: after each segment."""
    if sample.episode is not None:
        return sample.episode.turn_starts
    return None if sample.messages is None else [span.stop for span in sample.environment_spans]
