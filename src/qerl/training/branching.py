"""A step's samples, and branches of those that failed, drawn, scored and compared: DEEP-GRPO.

    every prompt's samples -> rewards -> a pivot in each that failed -> its branches -> rewards -> advantages

The branches of one pivot are a group: a branch is better or worse than its siblings, and what comes after the
pivot alone is learned from. The outcomes of the pivots tried so far (algo/pivot.py) steer the next step's,
and are kept in checkpoints. The memory of keys and values is the engine's during all of it.
"""

import collections
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from qerl.algo.pivot import WINDOW, Success, Try, chosen, fitted, odds
from qerl.algo.seeds import uniform
from qerl.config import RunConfig
from qerl.engine.engine import Engine
from qerl.training.loop import Parts, rollout_metrics, sampling_of, with_advantages
from qerl.types import Group, Pivot

_PIVOT = 0x5049564F54  # keeps these draws apart from the tokens'


class Branching:
    def __init__(self, engine: Engine, config: RunConfig):
        self._engine, self._deep = engine, config.algo.deep
        self._tries: collections.deque[Try] = collections.deque(maxlen=WINDOW)

    def draw(self, config: RunConfig, parts: Parts, step: int, log: Any) -> list[Group]:
        """In the place of loop.draw: the step's groups, and behind them those of the branches."""
        success = fitted(self._tries)
        sampled_P, rewards_P_G, branched_P, branch_rewards_P_G, ratios = [], [], [], [], []
        for lot in self._engine.lots(
            parts.task.train_prompts(step, config.num_prompts),
            num_samples=config.num_generations,
            sampling=sampling_of(config),
            seed=config.seed,
            step=step,
        ):
            with log.span("rollout"):
                drawn_P = lot.sample()
            with log.span("reward"):
                drawn_rewards_P_G = parts.rewards.attempt(drawn_P)
            pivots = self._pivots(drawn_P, drawn_rewards_P_G, success, config.seed, step)
            with log.span("rollout"):
                grown_P = lot.branch(pivots, self._deep.num_branches)
            with log.span("reward"):
                branch_rewards_P_G += parts.rewards.attempt(grown_P) if grown_P else []
            sampled_P, rewards_P_G = sampled_P + drawn_P, rewards_P_G + drawn_rewards_P_G
            branched_P += grown_P
            ratios += [_ratio(drawn_P, pivot) for pivot in pivots]
        parts.rewards.check_some(rewards_P_G)  # a lot, or all branches, may fail: the run goes on
        groups = with_advantages(config, sampled_P, rewards_P_G)
        branches = with_advantages(config, branched_P, branch_rewards_P_G)
        tries = [Try(*pair) for pair in zip(ratios, map(self._succeeded, branches), strict=True)]
        log.add(**rollout_metrics(config, groups), rounds=1)
        log.add(**self._measured(config, branches, tries, success))
        self._tries += tries
        return groups + branches

    def _pivots(
        self,
        groups: list[Group],
        rewards_P_G: list[list[float | None]],
        success: Success | None,
        seed: int,
        step: int,
    ) -> list[Pivot]:
        """One in every sample that failed and is longer than a segment."""
        found = []
        for g, (group, rewards_G) in enumerate(zip(groups, rewards_P_G, strict=True)):
            for s, (sample, reward) in enumerate(zip(group.samples_G, rewards_G, strict=True)):
                if reward is None or reward > self._deep.failure_reward:
                    continue
                share = uniform(_PIVOT, seed, step, group.prompt.index, s)
                place = chosen(odds(len(sample.tokens_T), success, self._deep), share)
                if place is not None:
                    found.append(Pivot(group_index=g, sample_index=s, prefix_tokens=place))
        return found

    def _succeeded(self, branches: Group) -> bool:
        return any(s.reward is not None and s.reward > self._deep.failure_reward for s in branches.samples_G)

    def _measured(
        self, config: RunConfig, branches: list[Group], tries: list[Try], success: Success | None
    ) -> dict[str, float]:
        """sampled_tokens: of samples and branches. reused_tokens: before the pivots, computed once only."""
        stats = self._engine.stats
        rewards = [s.reward for group in branches for s in group.samples_G if s.reward is not None]
        found: dict[str, float] = {
            "pivots": len(branches),
            "branches": sum(len(group.samples_G) for group in branches),
            "reused_tokens": stats.reused_tokens,
            "sampled_tokens": stats.num_tokens,
        }
        if rewards:
            found["branch_accuracy"] = fmean(
                reward >= config.evaluate.success_threshold for reward in rewards
            )
            found["pivot_success"] = fmean(each.succeeded for each in tries)
            found["pivot_ratio"] = fmean(each.ratio for each in tries)
        return found | ({} if success is None else {"pivot_slope": success.slope, "pivot_base": success.base})

    def state(self) -> list[list[float]]:
        """What a checkpoint keeps, as JSON."""
        return [[each.ratio, float(each.succeeded)] for each in self._tries]

    def load(self, state: Sequence[Sequence[float]]) -> None:
        self._tries.clear()
        self._tries += [Try(ratio, bool(succeeded)) for ratio, succeeded in state]


def _ratio(groups: list[Group], pivot: Pivot) -> float:
    return pivot.prefix_tokens / len(groups[pivot.group_index].samples_G[pivot.sample_index].tokens_T)
