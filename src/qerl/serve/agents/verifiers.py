"""An agent that plays an environment of `verifiers` (0.4), with the environment's own rewards and rubric.

Each episode has an environment object of its own: its tools, its interception server and its clients end with
it. The harness that verifiers starts calls the endpoint, so what the policy says is recorded.
"""

import importlib
import os
import shutil
import sys
from typing import Any

from qerl.config import TaskConfig
from qerl.errors import RunError
from qerl.tasks.env_packages import verifiers_environment, verifiers_tasks


class VerifiersAgent:
    def __init__(self, config: TaskConfig, tool_timeout_s: float | None = None):
        """tool_timeout_s: longest call of an MCP tool; None: that of verifiers."""
        self.__name__ = config.name
        self._config, self._tasks = config, verifiers_tasks(config)
        self._tool_timeout_s = tool_timeout_s

    async def __call__(
        self, base_url: str, api_key: str, model: str, row: dict[str, Any]
    ) -> dict[str, float]:
        vf = importlib.import_module("verifiers.v1")
        put_uv_on_path()
        variable = f"QERL_{base_url.split('/')[-2]}_API_KEY"  # verifiers passes no API_KEY on to programs
        os.environ[variable] = api_key
        try:
            client = vf.EvalClientConfig(base_url=base_url, api_key_var=variable)
            context = vf.ModelContext(model=model, client=client, sampling=vf.SamplingConfig())
            environment = verifiers_environment(self._config, self._tool_timeout_s)
            async with environment.serving():
                episode = await environment.run_episode(self._tasks[row["task"]], context)
        finally:
            del os.environ[variable]
        return outcome(episode, base_url)


def put_uv_on_path() -> None:
    """Make the uv that was installed beside this interpreter findable: verifiers runs programs by uv, and
    downloads one otherwise. It is not on the PATH where the Python environment is not activated."""
    folder = os.path.dirname(sys.executable)
    if shutil.which("uv") is None and shutil.which("uv", path=folder) is not None:
        os.environ["PATH"] = os.pathsep.join(filter(None, (os.environ.get("PATH"), folder)))


def outcome(episode: Any, base_url: str) -> dict[str, float]:
    """Return the mean reward of the seats that are trained, and their metrics and single rewards."""
    errors = [*episode.errors, *(each.last_error for each in episode.traces if each.last_error is not None)]
    if not episode.ok:
        reason = f"{errors[0].type}: {errors[0].message}" if errors else "it has no result"
        raise RunError(f"the environment failed: {reason}")
    trained = [trace for trace in episode.traces if trace.agent.trainable]
    for trace in episode.traces:
        if not trace.agent.trainable and trace.agent.config.client.base_url == base_url:
            raise RunError(
                f"the seat {trace.agent.name} is not trained: give it a model and a client of its own in"
                " task.env_options"
            )
    if not trained:
        raise RunError("the environment ran no seat that is trained")
    metrics = [
        {**{name: each.value for name, each in trace.rewards.items()}, **trace.metrics} for trace in trained
    ]
    names = dict.fromkeys(name for values in metrics for name in values)
    means = {name: _mean([values[name] for values in metrics if name in values]) for name in names}
    return {**means, "reward": _mean([trace.reward for trace in trained])}


def _mean(values: list[float]) -> float:
    return sum(map(float, values)) / len(values)
