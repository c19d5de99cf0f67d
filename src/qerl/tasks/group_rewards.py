"""Built-in rewards that compare the samples of a prompt.

    length         -(n - min) / (max - min)    n: a sample's tokens; min and max: those of its group
    length_rank    -r / (G - 1)                r: the number of shorter samples, ties in the middle
    diversity      mean over the others of 1 - |A & B| / |A | B|
                                               A, B: words, and pairs of neighbouring words, of two samples

The first two are in [-1, 0], the last in [0, 1]. They are meant beside a reward for what is right, with a
small weight. A sample that is alone, as a greedy one of an evaluation, has 0. One long sample makes the
length penalties of the others alike, not their ranks.
"""

import itertools
from statistics import fmean
from typing import Any

from qerl.config import TaskConfig
from qerl.tasks.graders import Reward, text_of
from qerl.tasks.scoring import group_reward


def length(config: TaskConfig) -> Reward:
    @group_reward
    def length(completion_ids: list[list[int]], **columns: list[Any]) -> list[float]:
        lengths_G = list(map(len, completion_ids))
        low, high = min(lengths_G), max(lengths_G)
        return [-(each - low) / (high - low) if high > low else 0.0 for each in lengths_G]

    return length


def length_rank(config: TaskConfig) -> Reward:
    @group_reward
    def length_rank(completion_ids: list[list[int]], **columns: list[Any]) -> list[float]:
        lengths_G = list(map(len, completion_ids))
        return [-_rank(each, lengths_G) / max(len(lengths_G) - 1, 1) for each in lengths_G]

    return length_rank


def _rank(value: int, values: list[int]) -> float:
    """Return how many values are lower, and half of how many others are equal."""
    return sum(each < value for each in values) + (values.count(value) - 1) / 2


def diversity(config: TaskConfig) -> Reward:
    @group_reward
    def diversity(completions: list[Any], **columns: list[Any]) -> list[float]:
        words_G = [_words(text_of(completion)) for completion in completions]
        return [
            fmean(_distance(words, other) for j, other in enumerate(words_G) if j != i)
            if len(words_G) > 1
            else 0.0
            for i, words in enumerate(words_G)
        ]

    return diversity


def _words(text: str) -> frozenset[tuple[str, ...]]:
    words = text.casefold().split()
    return frozenset([*((word,) for word in words), *itertools.pairwise(words)])


def _distance(first: frozenset[Any], second: frozenset[Any]) -> float:
    return 1 - len(first & second) / len(first | second) if first | second else 0.0


GROUP_REWARDS = {"length": length, "length_rank": length_rank, "diversity": diversity}
