"""Tasks: data set rows rendered as prompts, and rewards for their samples."""

from qerl.tasks.majority_vote import VotePool
from qerl.tasks.reward import RewardPool
from qerl.tasks.task import Task, all_prompts

__all__ = ["RewardPool", "Task", "VotePool", "all_prompts"]
