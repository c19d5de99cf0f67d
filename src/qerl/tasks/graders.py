"""Built-in rewards: compare a sample's text with the answer column.

    exact     the text is the answer, except for surrounding whitespace
    numeric   the last number in the text equals the last number in the answer: 1,234.50 = 1234.5, 1/2 = 0.5
    math      the final answer is mathematically equal (math_equal.py): (x-1)(x+1) = x^2-1
    tags      <think>...</think><answer>...</answer>, each once, in this order, and nothing outside
    gym       the score of the reasoning-gym task for the text inside <answer></answer>, or for all
    code      the sample's Python passes the tests in the answer column (code/)

Each returns 1 or 0; gym and code also values between. They have the form of TRL's reward functions, as a
user's do. A row without a usable answer is an error, because every sample of it would be wrong.
"""

import functools
import re
from collections import deque
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from qerl.config import TaskConfig
from qerl.errors import UserError
from qerl.tasks.answer import between, final_answers, gold_answer
from qerl.tasks.code import code
from qerl.tasks.math_equal import is_equal
from qerl.tasks.rows.table import gym_dataset

Reward = Callable[..., Any]
"""f(prompts, completions, completion_ids, **columns) -> list[float | None], or a coroutine of it."""

_UNSIGNED = r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,3}\b)?"
# A sign right after a digit, letter or bracket is an operator: in 10-3 the last number is 3.
_NUMBER = re.compile(rf"(?:(?<![\w)\]}}])[-+])?{_UNSIGNED}(?:\s*/\s*{_UNSIGNED})?")
_MAX_NUMBER_CHARACTERS = 1000  # Python refuses to convert from 4,300 digits on


def _compare(name: str, is_right: Callable[[str, Any], bool], config: TaskConfig) -> Reward:
    """Return the reward of this name: 1 if is_right(text, answer), else 0."""

    def reward(completions: list[Any], **columns: list[Any]) -> list[float]:
        pairs = zip(completions, columns[config.answer_column], strict=True)
        return [float(is_right(text_of(completion), answer)) for completion, answer in pairs]

    reward.__name__ = name
    return reward


def _is_exact(text: str, answer: Any) -> bool:
    if answer is None:
        raise ValueError("the row has no answer")
    return text.strip() == str(answer).strip()


def gold_number(answer: Any) -> Fraction:
    number = last_number(str(answer))
    if number is None:
        raise ValueError(f"the answer {answer!r} contains no number")
    return number


def last_number(text: str) -> Fraction | None:
    """Return the last number in the text; a fraction a/b is one number."""
    matches = deque(_NUMBER.finditer(text.replace("\N{MINUS SIGN}", "-")), maxlen=1)
    if not matches or len(matches[0][0]) > _MAX_NUMBER_CHARACTERS:
        return None
    over, _, under = matches[0][0].replace(",", "").partition("/")
    divisor = Fraction(under.strip() or 1)
    return Fraction(over.strip()) / divisor if divisor else None


def _is_math_equal(text: str, answer: Any) -> bool:
    gold = "" if answer is None else gold_answer(str(answer))
    if not gold:
        raise ValueError(f"the row has no answer: {answer!r}")
    return any(is_equal(gold, answer) for answer in final_answers(text))


def tags(config: TaskConfig) -> Reward:
    def tags(completions: list[Any], **columns: list[Any]) -> list[float]:
        return [float(_is_tagged(text_of(completion))) for completion in completions]

    return tags


def _is_tagged(text: str) -> bool:
    is_once = all(text.count(tag) == 1 for tag in ("<think>", "</think>", "<answer>", "</answer>"))
    thought, _, answer = (part.strip() for part in text.partition("</think>"))
    return is_once and thought.startswith("<think>") and answer[:8] + answer[-9:] == "<answer></answer>"


def gym(config: TaskConfig) -> Reward:
    if config.name != "reasoning-gym":
        raise UserError(f"task.rewards: gym needs task.name reasoning-gym, task.name is {config.name}")
    dataset = gym_dataset(config)

    def gym(completions: list[Any], **columns: list[Any]) -> list[float]:
        names = ("question", "answer", "metadata")
        rows = zip(completions, *(columns[name] for name in names), strict=True)
        entries = ((_answered(text_of(c)), dict(zip(names, row, strict=True))) for c, *row in rows)
        return [dataset.score_answer(text, entry=entry) for text, entry in entries]

    return gym


def _answered(text: str) -> str:
    tagged = deque(between(text, "<answer>", "</answer>"), maxlen=1)
    return (tagged[0] if tagged else text).strip()


def text_of(completion: str | list[dict[str, str]]) -> str:
    """Return the completion's text; of a conversation, the last assistant message."""
    if isinstance(completion, str):
        return completion
    return next((m["content"] for m in reversed(completion) if m["role"] == "assistant"), "")


NEED_ANSWER = ("exact", "numeric", "math", "code", "calls")
"""Rewards that read task.answer_column."""

_COMPARISONS: dict[str, Callable[[str, Any], bool]] = {
    "exact": _is_exact,
    "numeric": lambda text, answer: last_number(text) == gold_number(answer),
    "math": _is_math_equal,
}
BUILT_IN: dict[str, Callable[[TaskConfig], Reward]] = {
    **{name: functools.partial(_compare, name, is_right) for name, is_right in _COMPARISONS.items()},
    **{"tags": tags, "gym": gym, "code": code},
}
