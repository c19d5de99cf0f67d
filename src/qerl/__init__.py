"""Train large language models with reinforcement learning on a single GPU, or on a CPU."""

from collections.abc import Callable, Sequence
from typing import Any

from qerl import config
from qerl.config import RunConfig, recipes
from qerl.errors import RunError, UserError, check_platform

__all__ = ["RunConfig", "RunError", "UserError", "config", "recipes", "train"]


def train(config: RunConfig, *, rewards: Sequence[Callable[..., Any]] = ()) -> dict[str, Any]:
    """Train with this config, or resume the run in config.out; return held-out figures and the folder.

    `rewards` are functions in TRL's form, f(prompts, completions, **columns) -> list[float | None]; they
    replace config.task.rewards. The run's folder holds the rest: metrics, samples, report, adapter. Ctrl-C
    and SIGTERM finish the step, save it and raise SystemExit; the same call then resumes.
    """
    check_platform()
    from qerl.training.session import train  # importing torch and transformers takes seconds

    return train(config, rewards=rewards)
