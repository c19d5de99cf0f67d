"""Tasks: data set rows rendered as prompts, and rewards for their samples."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qerl.tasks.majority_vote import VotePool
    from qerl.tasks.reward import RewardPool
    from qerl.tasks.task import Task, all_prompts

__all__ = ["RewardPool", "Task", "VotePool", "all_prompts"]
_MODULES = {"RewardPool": "reward", "Task": "task", "VotePool": "majority_vote", "all_prompts": "task"}


def __getattr__(name: str) -> Any:
    """Import a name when it is first used: torch takes seconds, and rows are checked without it."""
    if name in _MODULES:
        return getattr(importlib.import_module(f"qerl.tasks.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'qerl.tasks' has no attribute {name!r}")
