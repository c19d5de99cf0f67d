"""What is learned: rows made into prompts, and rewards for the samples of them."""

from qerl.tasks.reward import RewardPool
from qerl.tasks.task import Task, build_task, every_prompt
from qerl.tasks.vote import Votes

__all__ = ["RewardPool", "Task", "Votes", "build_task", "every_prompt"]
