"""The reward of one sample, as a worker computes it.

    reward = sum over functions f of weight_f * value_f,   without the f that gave None;   None if all did

A function is called with lists of length one and must give such a list: a number, or None to abstain.
Whatever else it does, short of ending the process, becomes a Failure with its cause.
"""

import asyncio
import dataclasses
import inspect
import math
import traceback
from collections.abc import Awaitable, Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from qerl.errors import redact

RESERVED = ("prompts", "completions", "completion_ids")
"""What every function may ask for; a column of such a name cannot take its place."""

_BETWEEN = (
    Path(__file__).parents[1],
    Path(asyncio.__file__).parent,
)  # frames between the worker and the user's


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """Call(prompt="1 + 1 =", completion=" 2", completion_ids=[17], columns={"answer": "2"})"""

    prompt: str | list[dict[str, str]]
    completion: str | list[dict[str, str]]
    completion_ids: list[int]
    columns: dict[str, Any]

    @property
    def arguments(self) -> dict[str, list[Any]]:
        """What a function may ask for, by name."""
        values = self.columns | dict(
            zip(RESERVED, (self.prompt, self.completion, self.completion_ids), strict=True)
        )
        return {name: [value] for name, value in values.items()}


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """Failure("raised ValueError", "length: could not convert string to float: 'two'")"""

    cause: str
    """The same for failures of one kind; they are counted by it."""
    message: str


def name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


def score(functions: list[Callable[..., Any]], weights: list[float], call: Call) -> float | Failure | None:
    parts = []
    for function, weight in zip(functions, weights, strict=True):
        value = _value(function, call)
        if isinstance(value, Failure):
            return value
        if value is not None:
            parts.append(weight * value)
    if not parts:
        return None
    total = sum(parts)  # rounded once, below: 0.7 + 0.2 + 0.1 reaches evaluate.success_threshold 1
    return finite_number("the weighted sum", math.fsum(parts) if math.isfinite(total) else total)


def _value(function: Callable[..., Any], call: Call) -> float | Failure | None:
    try:
        result = function(**_accepted(function, call.arguments))
        if inspect.isawaitable(result):
            result = asyncio.run(_awaited(result))
        return _checked(name_of(function), result)
    except BaseException as error:  # SystemExit too: it is the sample's failure, not the worker's end
        return failure_of(name_of(function), error)


def failure_of(name: str, error: BaseException) -> Failure:
    """That the user's code of this name raised it."""
    reason = redact(" ".join("".join(traceback.format_exception_only(error)).split()))
    return Failure(f"raised {type(error).__name__}", f"{name}: {reason[:300]}{_place(error)}")


def _place(error: BaseException) -> str:
    """Where the user's file was, " (reward.py:12)"; empty where the error is of the call itself."""
    places = [
        (Path(frame.f_code.co_filename), line) for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    others = [place for place in places if not any(map(place[0].is_relative_to, _BETWEEN))]
    lines = [line for path, line in others if path == others[0][0]]
    return f" ({others[0][0].name}:{lines[-1]})" if lines else ""


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result


def _accepted(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """All arguments for a function that takes **kwargs, else those that it names."""
    parameters = _parameters(function)
    if parameters is None or any(p.kind is p.VAR_KEYWORD for p in parameters):
        return arguments
    return {p.name: arguments[p.name] for p in parameters if p.name in arguments}


def missing(function: Callable[..., Any], arguments: Collection[str]) -> list[str]:
    """What a function cannot be called without and is not among the arguments."""
    named = [p for p in _parameters(function) or () if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return [p.name for p in named if p.default is p.empty and p.name not in arguments]


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """None for a function written in C that does not say."""
    try:
        return list(inspect.signature(function).parameters.values())
    except ValueError:
        return None


def _checked(name: str, result: Any) -> float | Failure | None:
    """The one value in what a function gave."""
    if isinstance(result, str | dict) or not isinstance(result, Iterable):
        return Failure("wrong length", f"{name} gave a {type(result).__name__}, not a list of one number")
    values = list(result)
    if len(values) != 1:
        return Failure("wrong length", f"{name} gave {len(values)} values for 1 sample")
    if values[0] is None:
        return None
    return finite_number(name, values[0])


def finite_number(name: str, value: Any) -> float | Failure:
    try:
        number = None if isinstance(value, str) else float(value)
    except (TypeError, ValueError, RuntimeError):
        number = None
    if number is None:
        return Failure("not a number", f"{name} gave a {type(value).__name__}")
    return number if math.isfinite(number) else Failure("not finite", f"{name} gave {number}")
