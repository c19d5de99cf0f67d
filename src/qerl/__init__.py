"""Train large language models with reinforcement learning on a single GPU, or on a CPU."""

import contextlib
import importlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from qerl.errors import RunError, UserError, check_platform

if TYPE_CHECKING:
    from qerl import config
    from qerl.api import Policy, PolicyLearner, load
    from qerl.config import RunConfig, recipes
    from qerl.tasks.scoring import batch_reward, group_reward
    from qerl.types import Group, Prompt, Sample, Sampling

__all__ = [
    "Group",
    "Policy",
    "PolicyLearner",
    "Prompt",
    "RunConfig",
    "RunError",
    "Sample",
    "Sampling",
    "UserError",
    "batch_reward",
    "config",
    "group_reward",
    "load",
    "recipes",
    "train",
]
_MODULES = {
    "qerl.config": ("config", "RunConfig"),
    "qerl.config.recipes": ("recipes",),
    "qerl.types": ("Group", "Prompt", "Sample", "Sampling"),
    "qerl.tasks.scoring": ("batch_reward", "group_reward"),
    "qerl.api": ("Policy", "PolicyLearner", "load"),
}


def _is_beside_busy_programs() -> bool:
    """Return True if other programs used the cores over the last minute, and do now. Those that have just
    ended, as `pip install` before a first run, still count in the load, but none of them runs."""
    if 4 * _loadavg()[0] <= (os.cpu_count() or 1):
        return False
    runnable = []
    for _ in range(5):  # the middle one: others run for a moment
        runnable.append(_loadavg()[1])
        time.sleep(0.001)
    return sorted(runnable)[2] > 1  # this program is one


def _loadavg() -> tuple[float, int]:
    """Return the load of the last minute, and how many tasks run or are ready to run."""
    with open("/proc/loadavg") as file:
        average, _, _, tasks, _ = file.read().split()  # 0.71 0.40 0.35 2/301 8412
    return float(average), int(tasks.partition("/")[0])


# elsewhere torch has another OpenMP
if sys.platform == "linux" and not os.environ.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}:
    with contextlib.suppress(OSError, ValueError):
        if _is_beside_busy_programs():
            # torch's threads are to wait for each other awake for microseconds, not milliseconds. A step on a
            # CPU then takes a tenth of the time; on idle cores it would take 10 % more. libgomp reads it
            # once, when torch is imported.
            os.environ["GOMP_SPINCOUNT"] = "1000"


def __getattr__(name: str) -> Any:
    """Import a name when it is first used: torch takes seconds, and __main__.py handles Ctrl-C before."""
    for path, names in _MODULES.items():
        if name in names:
            module = importlib.import_module(path)
            return module if path.endswith(f".{name}") else getattr(module, name)
    raise AttributeError(f"module 'qerl' has no attribute {name!r}")


def train(
    config: "RunConfig",
    *,
    rewards: Sequence[Callable[..., Any]] = (),
    agent: Callable[..., Any] | None = None,
) -> dict[str, Any]:
    """Train with this config, or resume the run in config.out; return held-out figures and the folder.

    `rewards` are functions in TRL's form, f(prompts, completions, **columns) -> list[float | None]; they
    replace config.task.rewards. `agent` replaces config.agent.function: it is called for every sample, talks
    to the model through an endpoint and returns the reward (docs/agent.md). The run's folder holds the rest:
    metrics, samples, report, adapter. Ctrl-C and SIGTERM finish the step, save it and raise SystemExit; the
    same call then resumes.
    """
    check_platform()
    if agent is not None or config.agent.function is not None:
        if rewards:
            raise UserError("train takes rewards or an agent, whose return value is the reward, not both")
        from qerl.serve.agents import train_with_agent

        return train_with_agent(config, agent)
    from qerl.training.session import train  # importing torch and transformers takes seconds

    return train(config, rewards=rewards)
