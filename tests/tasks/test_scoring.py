import asyncio
import re

import numpy as np
import pytest
import torch

from qerl.tasks.scoring import (
    Failure,
    RewardCall,
    missing_arguments,
    reward_arguments,
    total,
)
from qerl.tasks.scoring import score as values_of

PLAIN = reward_arguments("What is 1 + 2?", "It is 3", [73, 116], {"answer": "3", "level": 2})
TALK = reward_arguments(
    [{"role": "user", "content": "What is 1 + 2?"}],
    [{"role": "assistant", "content": "<think>1 + 2</think><answer>3</answer>"}],
    [60, 116],
    {"answer": "3"},
)


def score(functions, weights, arguments):
    """The reward of the one sample of these arguments."""
    values = values_of(functions, RewardCall(tuple(range(len(functions))), arguments))
    return values if isinstance(values, Failure) else total(*values, weights)


def scored(function, call=PLAIN):
    return score([function], [1.0], call)


def cause(function, call=PLAIN):
    outcome = scored(function, call)
    assert isinstance(outcome, Failure)
    return outcome.cause


def test_a_reward_by_length_of_tokens():
    def shorter_is_better(completion_ids, **kwargs):
        return [-0.5 * len(ids) for ids in completion_ids]

    assert scored(shorter_is_better) == -1.0


def test_a_reward_for_a_format_in_a_conversation():
    def has_format(completions, **kwargs):
        pattern = re.compile(r"<think>.*?</think><answer>.*?</answer>")
        return [1.0 if pattern.fullmatch(messages[0]["content"]) else 0.0 for messages in completions]

    assert scored(has_format, TALK) == 1.0


def test_a_reward_that_reads_a_column():
    def is_right(completions, answer, **kwargs):
        return [float(text.endswith(gold)) for text, gold in zip(completions, answer, strict=True)]

    assert scored(is_right) == 1.0


def test_a_reward_of_prompts_and_completions_as_lists_of_one():
    def sees(prompts, completions, level):
        assert (prompts, completions, level) == (["What is 1 + 2?"], ["It is 3"], [2])
        return [1]

    assert scored(sees) == 1.0


def test_a_function_without_kwargs_gets_only_what_it_names():
    assert scored(lambda completions: [len(completions)]) == 1.0
    assert scored(lambda level=(7,), other=(9,): [level[0] * 10 + other[0]]) == 29.0


def test_a_function_with_kwargs_gets_everything():
    def counts(**kwargs):
        return [float(sorted(kwargs) == ["answer", "completion_ids", "completions", "level", "prompts"])]

    assert scored(counts) == 1.0


def test_a_column_cannot_take_the_place_of_the_completions():
    call = reward_arguments("p", "right", [1], {"completions": "wrong"})
    assert scored(lambda completions: [float(completions == ["right"])], call) == 1.0


def test_a_callable_object_and_a_bound_method_are_functions_too():
    class Judge:
        def __call__(self, completions):
            return self.judge(completions)

        def judge(self, completions):
            return [2.0]

    assert scored(Judge()) == scored(Judge().judge) == 2.0


def test_an_async_function_is_awaited():
    async def slowly(completions, **kwargs):
        await asyncio.sleep(0.001)
        return [0.25 for _ in completions]

    assert scored(slowly) == 0.25
    assert scored(lambda completions: slowly(completions)) == 0.25


@pytest.mark.parametrize(
    ("result", "reward"),
    [
        ([1], 1.0),
        ([True], 1.0),
        ((0.5,), 0.5),
        (np.array([0.5]), 0.5),
        ([np.float32(0.5)], 0.5),
        (torch.tensor([0.5]), 0.5),
        ([torch.tensor(0.5)], 0.5),
        ([None], None),
        ((x for x in [0.5]), 0.5),
    ],
)
def test_what_counts_as_one_number(result, reward):
    assert scored(lambda completions: result) == reward


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        ([], "wrong length"),
        ([1.0, 1.0], "wrong length"),
        (1.0, "wrong length"),
        (None, "wrong length"),
        ("1", "wrong length"),
        ({"reward": 1.0}, "wrong length"),
        (["1.0"], "not a number"),
        ([1 + 0j], "not a number"),
        ([[1.0]], "not a number"),
        ([float("nan")], "not finite"),
        ([float("-inf")], "not finite"),
        ([torch.tensor([1.0, 2.0])], "not a number"),
    ],
)
def test_anything_else_is_a_failure_with_its_cause(result, expected):
    assert cause(lambda completions: result) == expected


class Odd(Exception):
    pass


@pytest.mark.parametrize(
    ("error", "cause", "said"),
    [
        (ValueError("first\nsecond: third"), "raised ValueError", "breaks: first second: third"),
        (Odd("Odd: twice"), "raised Odd", "breaks: Odd: twice"),
        (KeyError("answer"), "raised KeyError", "breaks: 'answer'"),
        (AssertionError(), "raised AssertionError", "breaks"),
    ],
)
def test_what_a_function_raises_is_a_failure_in_one_line_that_names_its_type_once(error, cause, said):
    def breaks(completions):
        raise error

    place = f"test_scoring.py:{breaks.__code__.co_firstlineno + 1}"
    assert scored(breaks) == Failure(cause, f"{said} ({place})")


def test_leaving_the_process_by_exception_and_unprintable_exceptions_are_failures():
    class Unprintable(Exception):
        def __str__(self):
            raise RuntimeError

    def leaves(completions):
        raise SystemExit(1)

    def breaks(completions):
        raise Unprintable

    assert cause(leaves) == "raised SystemExit"
    assert cause(breaks) == "raised Unprintable"


def test_rewards_are_summed_by_weight():
    functions = [lambda completions: [1.0], lambda completions: [0.5]]
    assert score(functions, [1.0, -3.0], PLAIN) == -0.5


def test_the_sum_is_rounded_once_and_finite():
    def one(**kwargs):
        return [1.0]

    assert score([one] * 3, [0.7, 0.2, 0.1], PLAIN) == 1.0 > 0.7 + 0.2 + 0.1
    too_large = score([one] * 2, [1.5e308, 1.5e308], PLAIN)
    assert too_large == Failure("not finite", "the weighted sum returned inf")


def test_a_function_that_abstains_leaves_the_others_sum():
    functions = [lambda completions: [None], lambda completions: [0.5]]
    assert score(functions, [10.0, 2.0], PLAIN) == 1.0
    assert score(functions[:1] * 2, [1.0, 1.0], PLAIN) is None


def test_a_function_that_fails_costs_the_sample_whatever_the_others_say():
    functions = [lambda completions: [1.0], lambda completions: [], lambda completions: [1.0]]
    assert isinstance(score(functions, [1.0] * 3, PLAIN), Failure)


def test_missing_names_what_a_function_cannot_do_without():
    def asks(completions, solution, *, level, extra=1, **kwargs):
        return [1.0]

    assert missing_arguments(asks, {"completions", "answer"}) == ["solution", "level"]
    assert missing_arguments(asks, {"completions", "solution", "level"}) == []
    assert missing_arguments(print, set()) == []
