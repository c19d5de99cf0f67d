"""What is learned: rows made into prompts, and rewards for the samples of them."""

from qerl.tasks.majority_vote import Votes
from qerl.tasks.reward import RewardPool
from qerl.tasks.task import Task, build_task, every_prompt

__all__ = ["RewardPool", "Task", "Votes", "build_task", "every_prompt"]
