"""TRL's tools and environment_factory as an environment of qerl: the policy's tool calls are parsed and run.

    reset      an object of the factory is reset with the row; its text is added to the last message
    step       each call of a turn runs a tool, whose result is a message of role tool; no calls end it
    score      get_reward of the object, and the reward functions that take `environments`, once at the end
    close      the object is free for another episode

As in TRL, an object is made once and reset for each episode: the process of the episodes calls the factory
when all of its objects are in use. What the trainer needs to know before that, it learns from an object in a
process of its own. `random` and NumPy are seeded before reset, alike for all samples of a prompt, whose
worlds must be the same. Functions that are not async may run an event loop of their own.
"""

import asyncio
import contextlib
import functools
import inspect
import json
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
from transformers.utils.chat_template_utils import get_json_schema

from qerl.errors import UserError, require
from qerl.serve.tools import ToolCallStream
from qerl.tasks.call_forms.form import CallForm
from qerl.tasks.call_forms.hermes import HERMES
from qerl.tasks.environment import COLUMN, by_row
from qerl.tasks.event_loop import InvalidReturn
from qerl.tasks.scoring import NOT_SUPPORTED, Failure, awaited, failure_of, name_of
from qerl.tasks.worker_pool import WorkerPool
from qerl.tasks.worker_process import WorkerLost
from qerl.trl.data import are_blocks, joined

Reward = Callable[..., Any]
_NOT_TOOLS = ("reset", "get_reward", "close")
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+>")
_MAKE_S = 120.0
_FEWER = (
    "lower per_device_train_batch_size * steps_per_generation, or set"
    " base=RunConfig(task=TaskConfig(environment=EnvironmentConfig(max_environments=...)))"
)


def parse_turn(text: str, names: set[str], form: CallForm = HERMES) -> dict[str, Any]:
    """Return the assistant's message, with tool_calls if the text has calls of these tools in this form."""
    stream = ToolCallStream(names, is_parallel=True, form=form)
    before, calls = stream.add(text)
    after, more = stream.end()
    functions = [{"name": call.name, "arguments": json.loads(call.arguments)} for call in [*calls, *more]]
    message: dict[str, Any] = {"role": "assistant", "content": before + after}
    if functions:
        message["tool_calls"] = [{"type": "function", "function": function} for function in functions]
    return message


def with_tool_calls(
    messages: Sequence[Mapping[str, str]], names: set[str], form: CallForm = HERMES
) -> list[dict[str, Any]]:
    """Return a sample's messages as TRL gives them to reward functions."""
    parsed, waiting = [], []
    for message in messages:
        if message["role"] == "assistant":
            parsed.append(parse_turn(message["content"], names, form))
            waiting = [call["function"]["name"] for call in parsed[-1].get("tool_calls", ())]
        else:
            name = {"name": waiting.pop(0)} if waiting and message["role"] == "tool" else {}
            parsed.append({**message, **name})
    return parsed


def result_text(name: str, result: Any) -> str:
    """Return what a tool or reset returned as a text: content blocks of texts are joined.

    InvalidReturn for images and other objects that have no text but their memory address."""
    if are_blocks(result):
        try:
            return joined(result)
        except UserError as error:
            raise InvalidReturn(NOT_SUPPORTED, f"{name} returned {error}") from None
    text = str(result)
    if not isinstance(result, str) and _ADDRESS.search(text):
        raise InvalidReturn(NOT_SUPPORTED, f"{name} returned {text[:80]}: only texts are supported")
    return text


@contextlib.contextmanager
def _without_loop() -> Iterator[None]:
    """Let code that is not async run an event loop of its own."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    asyncio.tasks._leave_task(loop, task)
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(loop)
        asyncio.tasks._enter_task(loop, task)


async def _called(function: Callable[..., Any], **arguments: Any) -> Any:
    with _without_loop():
        result = function(**arguments)
    return await awaited(result)


class ToolEnvironment:
    """`make_environment` derives the class of a trainer, with the attributes below."""

    factory: ClassVar[Any] = None
    idle: ClassVar[list[Any]] = []
    """Objects of the factory that no episode uses."""
    num_made: ClassVar[int] = 0
    tools: ClassVar[tuple[Callable[..., Any], ...]] = ()
    rewards: ClassVar[tuple[tuple[Reward, float], ...]] = ()
    """Functions that take `environments`, and their weights."""
    extends_prompt: ClassVar[bool] = True
    hidden: ClassVar[tuple[str, ...]] = ()
    """Columns that reset does not get."""
    call_form: ClassVar[CallForm] = HERMES
    """Form of the tool calls in the policy's turns."""

    async def reset(self, row: dict[str, Any], seed: int) -> str | None:
        random.seed(seed)
        np.random.seed(seed % 2**32)
        self._row, self._environment = row, self._take()
        self._tools = {name_of(tool): tool for tool in (*self.tools, *_methods(self._environment))}
        if self._environment is None:
            return None
        columns = {name: value for name, value in row.items() if name not in self.hidden}
        opening = await _called(self._environment.reset, **columns)
        return None if opening is None else result_text("reset", opening)

    def _take(self) -> Any:
        kind = type(self)
        if kind.factory is None or kind.idle:
            return kind.idle.pop(0) if kind.idle else None
        try:
            with _without_loop():
                made = kind.factory()
        except StopIteration:
            message = f"has no more than {kind.num_made} environments, and one more is needed"
            raise InvalidReturn(NOT_SUPPORTED, f"environment_factory {message}: {_FEWER}") from None
        kind.num_made += 1
        return made

    async def close(self) -> None:
        if (environment := getattr(self, "_environment", None)) is not None:
            self._environment = None
            type(self).idle.append(environment)

    async def step(self, completion: str) -> tuple[list[dict[str, str]], None, bool]:
        calls = parse_turn(completion, {*self._tools}, self.call_form).get("tool_calls", [])
        results = [await self._call(**call["function"]) for call in calls]
        return [{"role": "tool", "content": result} for result in results], None, not calls

    async def _call(self, name: str, arguments: dict[str, Any]) -> str:
        try:
            return result_text(f"the tool {name}", await _called(self._tools[name], **arguments))
        except InvalidReturn:
            raise
        except Exception as error:  # the policy sees it
            return str({"error": str(error)})

    async def score(self, messages: list[dict[str, str]]) -> float | None:
        """Return the sum of the rewards; None if there are none."""
        values = []
        if get_reward := getattr(self._environment, "get_reward", None):
            values.append(await _called(get_reward))
        columns = {name: [value] for name, value in self._row.items() if name != "prompt"}
        columns |= {"prompts": [self._row["prompt"]], "environments": [self._environment]}
        columns["completions"] = [with_tool_calls(messages, {*self._tools}, self.call_form)]
        for function, weight in self.rewards:
            (value,) = await _called(function, **_accepted(function, columns))
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


def make_environments(
    tools: Sequence[Callable[..., Any]], factories: Mapping[str, Any], rewards: Sequence[tuple[Reward, float]]
) -> tuple[type[Any], dict[str, list[dict[str, Any]]]]:
    """Return an environment that is the one that a row names, and by name the schemas of the tools."""
    require(bool(factories), "environment_factory has no environment: give factories by name, or one alone")
    made = {name: make_environment(tools, factory, rewards) for name, factory in factories.items()}
    for kind, _ in made.values():
        kind.hidden = (COLUMN, "tools")
    kinds = {name: (kind, 1.0) for name, (kind, _) in made.items()}
    return by_row(kinds), {name: schemas for name, (_, schemas) in made.items()}


def make_environment(
    tools: Sequence[Callable[..., Any]], factory: Any, rewards: Sequence[tuple[Reward, float]]
) -> tuple[type[ToolEnvironment], list[dict[str, Any]]]:
    """Return the environment, and the schemas of its tools for the chat template."""
    facts = _Facts("tools", True, False, []) if factory is None else _facts_of(factory)
    require(facts.has_reset, "environment_factory: its object has no reset")
    scores = bool(rewards) or facts.has_reward
    attributes: dict[str, Any] = {"tools": tuple(tools), "rewards": tuple(rewards), "idle": []}
    attributes["factory"] = None if factory is None else staticmethod(factory)
    if not scores:
        attributes["score"] = None
    return type(facts.name, (ToolEnvironment,), attributes), [*_schemas(tools), *facts.schemas]


class _Facts(NamedTuple):
    """Facts of the factory's objects that a trainer needs before the run."""

    name: str
    has_reset: bool
    has_reward: bool
    schemas: list[dict[str, Any]]


def _schemas(tools: Sequence[Callable[..., Any]]) -> list[dict[str, Any]]:
    try:
        return [get_json_schema(tool) for tool in tools]
    except Exception as error:  # of transformers: no type hints, or no docstring
        raise UserError(f"tools: {error}") from None


def _facts_of(factory: Callable[[], Any]) -> _Facts:
    """Make an object in a process that ends: the run's own are made in the process of the episodes."""

    def look(_: None) -> _Facts | Failure | str:
        try:
            made = factory()
            return _Facts(
                type(made).__name__,
                callable(getattr(made, "reset", None)),
                hasattr(made, "get_reward"),
                _schemas(_methods(made)),
            )
        except UserError as error:
            return str(error)
        except Exception as error:
            return failure_of("environment_factory", error)

    pool = WorkerPool(look, num_workers=1)
    try:
        (facts,) = pool.run([None], deadline_s=_MAKE_S)
    finally:
        pool.stop()
    if isinstance(facts, str):
        raise UserError(facts)
    if isinstance(facts, Failure | WorkerLost):
        raise UserError(f"environment_factory: no environment was made: {facts.cause}: {facts.message}")
    return facts


def of_conversations(function: Reward, names: set[str], form: CallForm = HERMES) -> Reward:
    """Return the function for completions that have their tool calls parsed."""

    @functools.wraps(function)
    def parsed(completions: list[Any], **columns: Any) -> Any:
        conversations = [with_tool_calls(c, names, form) if isinstance(c, list) else c for c in completions]
        return function(**_accepted(function, {"completions": conversations, **columns}))

    return parsed
