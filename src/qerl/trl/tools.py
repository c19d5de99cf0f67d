"""TRL's tools and environment_factory as an environment of qerl: the policy's tool calls are parsed and run.

    reset      the factory's object is reset with the row; a text that it returns is added to the last message
    step       each call of a turn runs a tool, whose result is a message of role tool; no calls end it
    score      get_reward of the object, and the reward functions that take `environments`, once at the end

`random` and NumPy are seeded before reset, alike for all samples of a prompt, whose worlds must be the same.
"""

import functools
import inspect
import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from transformers.utils.chat_template_utils import get_json_schema

from qerl.errors import UserError, require
from qerl.serve.tools import ToolCallStream
from qerl.tasks.scoring import awaited, name_of

Reward = Callable[..., Any]
_NOT_TOOLS = ("reset", "get_reward", "close")


def parse_turn(text: str, names: set[str]) -> dict[str, Any]:
    """Return the assistant's message, with tool_calls if the text has calls of these tools."""
    stream = ToolCallStream(names, is_parallel=True)
    before, calls = stream.add(text)
    after, more = stream.end()
    functions = [{"name": call.name, "arguments": json.loads(call.arguments)} for call in [*calls, *more]]
    message: dict[str, Any] = {"role": "assistant", "content": before + after}
    if functions:
        message["tool_calls"] = [{"type": "function", "function": function} for function in functions]
    return message


def with_tool_calls(messages: Sequence[Mapping[str, str]], names: set[str]) -> list[dict[str, Any]]:
    """Return a sample's messages as TRL gives them to reward functions."""
    parsed, waiting = [], []
    for message in messages:
        if message["role"] == "assistant":
            parsed.append(parse_turn(message["content"], names))
            waiting = [call["function"]["name"] for call in parsed[-1].get("tool_calls", ())]
        else:
            name = {"name": waiting.pop(0)} if waiting and message["role"] == "tool" else {}
            parsed.append({**message, **name})
    return parsed


class ToolEnvironment:
    """`make_environment` derives the class of a trainer, with the attributes below."""

    factory: ClassVar[Any] = None
    tools: ClassVar[tuple[Callable[..., Any], ...]] = ()
    rewards: ClassVar[tuple[tuple[Reward, float], ...]] = ()
    """Functions that take `environments`, and their weights."""
    extends_prompt: ClassVar[bool] = True

    async def reset(self, row: dict[str, Any], seed: int) -> str | None:
        random.seed(seed)
        np.random.seed(seed % 2**32)
        self._row, self._environment = row, self.factory() if self.factory else None
        self._tools = {name_of(tool): tool for tool in (*self.tools, *_methods(self._environment))}
        return None if self._environment is None else await awaited(self._environment.reset(**row))

    async def step(self, completion: str) -> tuple[list[dict[str, str]], None, bool]:
        calls = parse_turn(completion, {*self._tools}).get("tool_calls", [])
        results = [await self._call(**call["function"]) for call in calls]
        return [{"role": "tool", "content": result} for result in results], None, not calls

    async def _call(self, name: str, arguments: dict[str, Any]) -> str:
        try:
            return str(await awaited(self._tools[name](**arguments)))
        except Exception as error:  # the policy sees it
            return str({"error": str(error)})

    async def score(self, messages: list[dict[str, str]]) -> float | None:
        """Return the sum of the rewards; None if there are none."""
        values = []
        if get_reward := getattr(self._environment, "get_reward", None):
            values.append(await awaited(get_reward()))
        columns = {name: [value] for name, value in self._row.items() if name != "prompt"}
        columns |= {"prompts": [self._row["prompt"]], "environments": [self._environment]}
        columns["completions"] = [with_tool_calls(messages, {*self._tools})]
        for function, weight in self.rewards:
            (value,) = await awaited(function(**_accepted(function, columns)))
            values.append(None if value is None else weight * value)
        known = [float(value) for value in values if value is not None]
        return sum(known) if known else None


def _accepted(function: Reward, columns: dict[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    return columns if takes_all else {p.name: columns[p.name] for p in parameters if p.name in columns}


def _methods(environment: Any) -> list[Callable[..., Any]]:
    names = (name for name, _ in inspect.getmembers(type(environment), inspect.isfunction))
    tools = (name for name in names if not name.startswith("_") and name not in _NOT_TOOLS)
    return [] if environment is None else [getattr(environment, name) for name in tools]


def takes_environments(function: Reward) -> bool:
    return "environments" in inspect.signature(function).parameters


def make_environment(
    tools: Sequence[Callable[..., Any]], factory: Any, rewards: Sequence[tuple[Reward, float]]
) -> tuple[type[ToolEnvironment], list[dict[str, Any]]]:
    """Return the environment, and the schemas of its tools for the chat template."""
    require(
        not isinstance(factory, Mapping) or len(factory) == 1,
        "environment_factory: one environment is supported, not several by name: train on each alone",
    )
    factory = next(iter(factory.values())) if isinstance(factory, Mapping) else factory
    probe = None if factory is None else factory()
    require(
        probe is None or callable(getattr(probe, "reset", None)),
        "environment_factory: its object has no reset",
    )
    scores = bool(rewards) or hasattr(probe, "get_reward")
    attributes: dict[str, Any] = {"tools": tuple(tools), "rewards": tuple(rewards)}
    attributes["factory"] = None if factory is None else staticmethod(factory)
    if not scores:
        attributes["score"] = None
    name = "tools" if probe is None else type(probe).__name__
    try:
        schemas = [get_json_schema(tool) for tool in (*tools, *_methods(probe))]
    except Exception as error:  # of transformers: no type hints, or no docstring
        raise UserError(f"tools: {error}") from None
    return type(name, (ToolEnvironment,), attributes), schemas


def of_conversations(function: Reward, names: set[str]) -> Reward:
    """Return the function for completions that have their tool calls parsed."""

    @functools.wraps(function)
    def parsed(completions: list[Any], **columns: Any) -> Any:
        conversations = [with_tool_calls(c, names) if isinstance(c, list) else c for c in completions]
        return function(**_accepted(function, {"completions": conversations, **columns}))

    return parsed
