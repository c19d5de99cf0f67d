"""What is learned: rows made into prompts, and rewards for the samples of them."""

from qerl.tasks.reward import RewardPool
from qerl.tasks.task import Task, build_task

__all__ = ["RewardPool", "Task", "build_task"]
