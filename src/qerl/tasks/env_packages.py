"""Environments of verifiers and OpenEnv by name: their packages, and a row for each of their tasks.

    verifiers:NAME        a taskset of verifiers; its environment plays one task an episode
    openenv:URL           a server of OpenEnv; an episode is one reset and the steps after it
    openenv:MODULE:APP    its ASGI application, or FILE.py:APP: the server is started in a subprocess

The two packages need different versions of a third one, so each belongs into a Python environment of its own.
"""

import functools
import importlib
import importlib.util
import itertools
import json
from typing import Any

from qerl.config import TaskConfig
from qerl.config.task import OPENENV, VERIFIERS
from qerl.errors import UserError

ENDPOINT_PACKAGES = "starlette", "uvicorn"
"""Packages that the endpoint of an agent needs."""
_PIP = {VERIFIERS: "pip install 'qerl[verifiers]'", OPENENV: "pip install 'qerl[openenv]'"}


def require_package(name: str) -> None:
    """Raise UserError with the line that installs the environment's package if it is missing."""
    prefix = VERIFIERS if name.startswith(VERIFIERS) else OPENENV
    if importlib.util.find_spec(prefix[:-1]) is None:
        raise UserError(f"{name} needs {prefix[:-1]}: {_PIP[prefix]}")


def require_installed(who: str, *packages: str) -> None:
    """Raise UserError with the line that installs the packages that are missing."""
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        raise UserError(f"{who} needs {' and '.join(missing)}: pip install {' '.join(missing)}")


def environment_rows(config: TaskConfig) -> list[dict[str, Any]]:
    """Return {"prompt", "task"} for each of the first num_rows tasks; of OpenEnv {"prompt", "reset"}, whose
    arguments of reset are the options' "resets", or else a seed each."""
    require_package(config.name)
    if config.name.startswith(VERIFIERS):
        tasks = verifiers_tasks(config)
        texts = (task.data.prompt_text or task.data.name for task in tasks)
        rows = [{"prompt": text or f"{config.name} {i}", "task": i} for i, text in enumerate(texts)]
    else:
        resets = json.loads(config.env_options).get("resets")
        if resets is None:
            resets = [{"seed": seed} for seed in range(config.num_rows)]
        rows = [{"prompt": f"{config.name} {i}", "reset": reset} for i, reset in enumerate(resets)]
    if not rows:
        raise UserError(f"task.name {config.name}: the environment has no tasks")
    return rows


@functools.lru_cache(maxsize=1)
def verifiers_tasks(config: TaskConfig) -> list[Any]:
    """Return the first num_rows tasks of the environment's taskset."""
    environment = verifiers_environment(config)
    try:
        return list(itertools.islice(environment.taskset, config.num_rows))
    except Exception as error:  # code of the environment
        raise _refusal(config, error) from error


def verifiers_environment(config: TaskConfig, tool_timeout_s: float | None = None) -> Any:
    """Return a new environment object. Seats that the options leave open are played by verifiers' chat loop
    `null`, which has the task's tools and no shell, in a subprocess. tool_timeout_s: for harnesses whose
    options set no `tool_timeout`; None: that of verifiers."""
    vf = importlib.import_module("verifiers.v1")
    options = json.loads(config.env_options)
    taskset_id = config.name.removeprefix(VERIFIERS)
    options["taskset"] = {**options.get("taskset", {}), "id": taskset_id}
    try:
        kind = vf.env_config_type(taskset_id, options.get("id", ""))
        seats = [
            name for name, field in kind.model_fields.items() if isinstance(field.default, vf.AgentConfig)
        ]
        default_harness = vf.default_harness_id(taskset_id)
        harness = {"id": "null" if default_harness == "bash" else default_harness}
        limit = {} if tool_timeout_s is None else {"tool_timeout": tool_timeout_s}
        for seat in seats:
            seat_options = options.get(seat, {})
            chosen = {"harness": limit | seat_options.get("harness", harness)}
            options[seat] = {"runtime": {"type": "subprocess"}, **seat_options, **chosen}
        return vf.load_environment(vf.resolve_env_config(options))
    except Exception as error:  # code of the environment, and pydantic's errors about the options
        raise _refusal(config, error) from error


def _refusal(config: TaskConfig, error: Exception) -> UserError:
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:400]
    return UserError(f"task.name {config.name}, task.env_options {config.env_options}: {reason}")
