"""Find the agent that a config names."""

from collections.abc import Callable
from typing import Any

from qerl.config import RunConfig
from qerl.config.task import VERIFIERS, is_environment_name
from qerl.errors import UserError, require
from qerl.serve.agents.openenv import OpenEnvAgent
from qerl.serve.agents.verifiers import VerifiersAgent
from qerl.serve.agents.worker import agent_arguments, agent_fault
from qerl.tasks.env_packages import require_installed, require_package
from qerl.tasks.reward import imported


def _named(config: RunConfig) -> Callable[..., Any]:
    name = str(config.agent.function)
    if not is_environment_name(name):
        return imported(name, "agent.function")
    require(config.task.name == name, f"agent.function {name} plays its own tasks: set task.name {name}")
    require_package(name)
    kind = VerifiersAgent if name.startswith(VERIFIERS) else OpenEnvAgent
    return kind(config.task, config.agent.tool_timeout_s)


def find_agent(config: RunConfig, agent: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Return the agent's function; raise UserError if it cannot be imported or called, or if the packages
    that it needs are missing."""
    function = _named(config) if agent is None else agent
    if (fault := agent_fault(function)) is not None:
        raise UserError(f"agent.function: {fault}")
    if "client" in agent_arguments(function):
        require_installed("an agent", "openai")
    return function
