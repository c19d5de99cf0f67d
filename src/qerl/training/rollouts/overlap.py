"""Rewards of finished groups while others are still sampled.

    engine     samples ------------------------------ tail ----|
    workers        group 3 --- group 0 --- group 5 -- ...      |-- what is left --|

The engine's process hands groups to the reward workers and takes their outcomes between two bursts of decode
steps, so a job may wait for its turn as long as a burst takes. Rewards, failures and their order are those of
scoring after sampling (tests/training/rollouts/test_overlap.py).
"""

from collections.abc import Sequence

from qerl.config import ModelConfig, TaskConfig
from qerl.tasks import RewardPool
from qerl.training.engines.data_parallel import DataParallelRewards
from qerl.types import Group, OnBurst

Rewards = RewardPool | DataParallelRewards


class OverlappedRewards:
    """The rewards of one call of an engine."""

    def __init__(self, task: TaskConfig, model: ModelConfig, rewards: Rewards):
        self._rewards = rewards
        self._scoring = rewards.begin() if overlaps(task, model) else None

    def on_burst(self, keys: Sequence[int | None]) -> OnBurst | None:
        """Return what the engine calls after each burst, None without overlap. keys: of each group of the
        call, for `rewards`; None: it is not scored before."""
        scoring = self._scoring
        if scoring is None:
            return None

        def begin(ended: list[tuple[int, Group]]) -> None:
            for index, group in ended:
                if (key := keys[index]) is not None:
                    scoring.add(key, group)
            scoring.poll()

        return begin

    @property
    def metrics(self) -> dict[str, float]:
        """Return the seconds of sampling in which a reward was running; nothing without overlap."""
        return {} if self._scoring is None else {"reward_overlap_s": self._scoring.busy_s}

    def rewards(self, keyed_P: list[tuple[int, Group]]) -> list[list[float | None]]:
        """Return the reward of each sample of each group, once all are known; raise UserError if no sample
        has one."""
        if self._scoring is None:
            return self._rewards.score([group for _, group in keyed_P])
        rewards_P_G = self._scoring.rewards(keyed_P)
        self._rewards.check_some(rewards_P_G)
        return rewards_P_G


def overlaps(task: TaskConfig, model: ModelConfig) -> bool:
    """True if rewards run while the engine samples."""
    waits_only = set(task.rewards) == {"judge"}
    is_free = model.device == "cuda" or waits_only  # of the CPU's cores
    return {"always": True, "never": False, "auto": is_free}[task.reward_overlap]
