"""Find the agent that a config names."""

import dataclasses
from collections.abc import Callable
from typing import Any

from qerl.config import AgentConfig, RunConfig, TaskConfig
from qerl.config.task import OPENENV, VERIFIERS, is_environment_name
from qerl.errors import UserError, require
from qerl.serve.agents.openenv import OpenEnvAgent
from qerl.serve.agents.verifiers import VerifiersAgent
from qerl.serve.agents.worker import agent_arguments, agent_fault
from qerl.tasks.env_packages import require_installed, require_package
from qerl.tasks.reward import imported, with_absolute_path
from qerl.tasks.scoring import name_of


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """Return the config such that a Ray worker, which may run in another folder, finds the same agent."""
    name = config.agent.function
    if name is None:
        return config
    prefix = OPENENV if name.startswith(OPENENV) else ""
    absolute = prefix + with_absolute_path(name.removeprefix(prefix))
    task = dataclasses.replace(config.task, name=absolute) if config.task.name == name else config.task
    return dataclasses.replace(config, task=task, agent=dataclasses.replace(config.agent, function=absolute))


def _named(agent: AgentConfig, task: TaskConfig) -> Callable[..., Any]:
    name = str(agent.function)
    if not is_environment_name(name):
        return imported(name, "agent.function")
    require(task.name == name, f"agent.function {name} plays its own tasks: set task.name {name}")
    require_package(name)
    kind = VerifiersAgent if name.startswith(VERIFIERS) else OpenEnvAgent
    return kind(task, agent.tool_timeout_s)


def find_agent(config: RunConfig, agent: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Return the agent's function; raise UserError if it cannot be imported or called, if the packages
    that it needs are missing, or if it is to be branched and does not declare that it can."""
    function = _named(config.agent, config.task) if agent is None else agent
    if (fault := agent_fault(function)) is not None:
        raise UserError(f"agent.function: {fault}")
    if "client" in agent_arguments(function):
        require_installed("an agent", "openai")
    if config.algo.branching != "none" and not getattr(function, "deterministic", False):
        raise UserError(f"algo.branching deep plays an agent's episodes again: {_remedy(function)}")
    return function


def _remedy(function: Callable[..., Any]) -> str:
    """Say how the agent is declared to be deterministic."""
    if isinstance(function, VerifiersAgent):
        return "environments of verifiers cannot be; set algo.branching none"
    if isinstance(function, OpenEnvAgent):
        return (
            'set `"deterministic": true` in task.env_options if the same reset and actions always get the'
            " same observations"
        )
    return (
        f"set `{name_of(function)}.deterministic = True` if the same row, seed and answers of the model"
        " always lead to the same calls of it"
    )
