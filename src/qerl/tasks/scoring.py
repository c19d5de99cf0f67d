"""Compute the values of reward functions in a worker process, and the reward of a sample.

    reward = sum over functions f of weight_f * value_f,   without the f that returned None;   None if all did

A function is called with lists that have one entry per sample of the call (reward_calls.py) and must return
such a list: a number, or None to abstain. Anything else that it does, except ending the process, becomes a
Failure with its cause.
"""

import asyncio
import dataclasses
import functools
import inspect
import math
import reprlib
import traceback
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from qerl.errors import UserError, quantity, redact

RESERVED = ("prompts", "completions", "completion_ids")
"""Arguments available to every function; a column of the same name does not replace them."""

MAX_REWARD = 1e30
"""Largest absolute value of a reward. Sums of many stay finite, also in fp32, which ends at 3.4e38."""
_INTERNAL = Path(__file__).parents[1], Path(asyncio.__file__).parent
"""Folders of the code between the worker and the user's function."""


Text = str | list[dict[str, str]]
"""A prompt or a completion: a string or a conversation."""


def reward_arguments(
    prompt: Text, completion: Text, completion_ids: list[int], columns: dict[str, Any]
) -> dict[str, list[Any]]:
    """Return the arguments of reward functions by name; each is a list of length one."""
    values = columns | dict(zip(RESERVED, (prompt, completion, completion_ids), strict=True))
    return {name: [value] for name, value in values.items()}


NOT_SUPPORTED = "not supported"
"""Cause of a failure that ends the run: the other samples would have it too."""


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """Failure("raised ValueError", "length: could not convert string to float: 'two'")"""

    cause: str
    """Kind of failure, by which failures are counted."""
    message: str


def check_reward_columns(
    columns: Collection[str], answer_column: str | None, missing: Iterable[tuple[str, list[str]]]
) -> None:
    """Raise UserError if the data lacks the answer column, or arguments of a function. columns: of the data,
    besides the prompt; missing: by function, the arguments that are no column."""
    there_are = f"there are: {', '.join(columns) or 'none besides the prompt'}"
    if answer_column is not None and answer_column not in columns:
        raise UserError(f"task.answer_column: no column {answer_column!r} ({there_are})")
    for name, arguments in missing:
        if arguments:
            needs = f"{name} needs {', '.join(arguments)}, but the data has no such column"
            raise UserError(f"task.rewards: {needs}; besides {', '.join(RESERVED)} {there_are}")


def name_of(function: object) -> str:
    return getattr(function, "__name__", type(function).__name__)


Scope = Literal["sample", "group", "batch"]
"""Samples that a reward function sees in one call: one, all of a prompt, or all of a step."""
_Function = TypeVar("_Function", bound=Callable[..., Any])


def group_reward(function: _Function) -> _Function:
    """Mark a reward function, which then gets all samples of a prompt in one call."""
    vars(function)["reward_scope"] = "group"
    return function


def batch_reward(function: _Function) -> _Function:
    """Mark a reward function, which then gets all samples of a step in one call: those of a prompt are
    neighbours. If it fails, it is called again for the samples of each prompt alone."""
    vars(function)["reward_scope"] = "batch"
    return function


def scope_of(function: Callable[..., Any], default: Scope) -> Scope:
    """Return the scope that a decorator gave the function, or else the default."""
    while isinstance(function, functools.partial) and not hasattr(function, "reward_scope"):
        function = function.func
    return getattr(function, "reward_scope", default)


Arguments = dict[str, list[Any]]
"""Arguments of reward functions by name, each with one entry per sample."""
Outcome = float | Failure | None
"""Reward of a sample; None if every function abstained."""
Parts = dict[int, float] | Failure
"""A sample's values by the index of their function, without those that abstained; or why it has none."""


class RewardCall(NamedTuple):
    """RewardCall((0, 2), {"prompts": ["1 + 2?"], "completions": ["3"], "completion_ids": [[51]]})"""

    functions: tuple[int, ...]
    """Indices of the functions to call."""
    arguments: Arguments


def score(functions: Sequence[Callable[..., Any]], call: RewardCall) -> list[Parts] | Failure:
    """Return the values of each sample of the call; a Failure if a function failed for all of them."""
    num = len(call.arguments["prompts"])
    parts_S: list[Parts] = [{} for _ in range(num)]
    for index in call.functions:
        values = _values(functions[index], call.arguments, num)
        if isinstance(values, Failure):
            return values
        parts_S = [_added(*each, index) for each in zip(parts_S, values, strict=True)]
        if all(isinstance(parts, Failure) for parts in parts_S):
            break
    return parts_S


def total(parts: Parts, weights: Sequence[float]) -> Outcome:
    """Return a sample's reward, the weighted sum of its values."""
    if isinstance(parts, Failure):
        return parts
    if not parts:
        return None
    values = [weights[index] * value for index, value in parts.items()]
    # sum only detects overflow; fsum rounds once: 0.7 + 0.2 + 0.1 reaches a success_threshold of 1.
    return finite_number("the weighted sum", math.fsum(values) if math.isfinite(sum(values)) else sum(values))


def _added(parts: Parts, value: float | Failure | None, index: int) -> Parts:
    if isinstance(parts, Failure) or value is None:
        return parts
    return value if isinstance(value, Failure) else parts | {index: value}


def _values(
    function: Callable[..., Any], arguments: Arguments, num: int
) -> list[float | Failure | None] | Failure:
    try:
        result = function(**_accepted_arguments(function, arguments))
        if inspect.isawaitable(result):
            result = asyncio.run(awaited(result))
        return _checked(name_of(function), result, num)
    except BaseException as error:  # SystemExit too: it fails the samples and must not end the worker
        return failure_of(name_of(function), error)


def failure_of(name: str, error: BaseException) -> Failure:
    """Return the Failure for an error raised by the code of this name; the cause has the error's type."""
    if isinstance(error.__cause__, StopIteration):  # a coroutine raised it, which Python says otherwise
        error = error.__cause__
    kind, text = type(error).__name__, "".join(traceback.format_exception_only(error)).strip()
    first, _, said = text.partition(": ")
    reason = redact(" ".join((said if first.rpartition(".")[2] == kind else text).split()))
    return Failure(f"raised {kind}", f"{name}: {reason[:300]}".removesuffix(": ") + _place(error))


def _place(error: BaseException) -> str:
    """Return " (reward.py:12)", the line of the user's file; empty if the call itself failed."""
    frames = traceback.walk_tb(error.__traceback__)
    places = [(Path(frame.f_code.co_filename), line) for frame, line in frames]
    users = [place for place in places if not any(map(place[0].is_relative_to, _INTERNAL))]
    lines = [line for path, line in users if path == users[0][0]]
    return f" ({users[0][0].name}:{lines[-1]})" if lines else ""


async def awaited(result: Any) -> Any:
    """Return what a function returned, which may be async or not."""
    return await result if inspect.isawaitable(result) else result


def _accepted_arguments(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments for a function with **kwargs, else those that it names."""
    parameters = _parameters(function)
    if parameters is None or any(p.kind is p.VAR_KEYWORD for p in parameters):
        return arguments
    return {p.name: arguments[p.name] for p in parameters if p.name in arguments}


def missing_arguments(function: Callable[..., Any], arguments: Collection[str]) -> list[str]:
    """Return the function's required parameters that are not among the arguments."""
    named = [p for p in _parameters(function) or () if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return [p.name for p in named if p.default is p.empty and p.name not in arguments]


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """Return None for a function written in C without a signature."""
    try:
        return list(inspect.signature(function).parameters.values())
    except ValueError:
        return None


def _checked(name: str, result: Any, num: int) -> list[float | Failure | None] | Failure:
    """Return the values that a function returned, one for each sample."""
    if isinstance(result, str | dict) or not isinstance(result, Iterable):
        needed = f"a list of {'one number' if num == 1 else f'{num} numbers'}"
        return Failure("wrong length", f"{name} returned a {type(result).__name__}, not {needed}")
    values = list(result)
    if len(values) != num:
        counts = f"{len(values)} values for {quantity(num, 'sample')}"
        return Failure("wrong length", f"{name} returned {counts}")
    return [
        each if each is None or isinstance(each, Failure) else finite_number(name, each) for each in values
    ]


def finite_number(name: str, value: Any) -> float | Failure:
    """Return the value as a float, or the Failure of one that is no number that a run can add up."""
    try:
        number = None if isinstance(value, str | bytes | bytearray) else float(value)
    except OverflowError:
        return Failure("too large", f"{name} returned a number over {MAX_REWARD:g}")
    except (TypeError, ValueError, RuntimeError):
        number = None
    if number is None:
        shown = f": {redact(reprlib.repr(value))}" if type(value) is str else ""
        return Failure("not a number", f"{name} returned a {type(value).__name__}{shown}")
    if not math.isfinite(number):
        return Failure("not finite", f"{name} returned {number}")
    if abs(number) > MAX_REWARD:
        return Failure("too large", f"{name} returned {number:g}, the limit is {MAX_REWARD:g}")
    return number
