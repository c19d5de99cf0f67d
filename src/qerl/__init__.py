"""Reinforcement learning of quantized language models on the GPU you already have."""

from collections.abc import Callable, Sequence
from typing import Any

from qerl import config
from qerl.config import RunConfig, recipes
from qerl.errors import RunError, UserError

__all__ = ["RunConfig", "RunError", "UserError", "config", "recipes", "train"]


def train(config: RunConfig, *, rewards: Sequence[Callable[..., Any]] = ()) -> dict[str, Any]:
    """Run, or go on with what config.out holds, to the end; gives the held-out accuracies and the folder.

    `rewards` are functions in TRL's form, f(prompts, completions, **columns) -> list[float | None]; given,
    they take the place of config.task.rewards. The run's folder holds all else: metrics, samples, the report,
    the adapter. Ctrl-C and SIGTERM finish the step, save, and raise SystemExit; the same call then goes on.
    """
    from qerl.training.session import (
        train,  # torch and transformers take seconds that a mere import need not wait
    )

    return train(config, rewards=rewards)
