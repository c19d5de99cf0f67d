"""Built-in rewards within a group: the numbers of their formulas."""

import pytest

from qerl.config import TaskConfig
from qerl.tasks.group_rewards import GROUP_REWARDS
from qerl.tasks.scoring import scope_of


def values(name, *completions):
    function = GROUP_REWARDS[name](TaskConfig())
    assert scope_of(function, "sample") == "group"
    ids = [[1] * completion if isinstance(completion, int) else [1] for completion in completions]
    return function(completions=list(completions), completion_ids=ids, prompts=["?"] * len(ids))


@pytest.mark.parametrize(
    ("lengths", "length", "rank"),
    [
        ((10, 20, 30), [0, -0.5, -1], [0, -0.5, -1]),
        ((10, 12, 110), [0, -0.02, -1], [0, -0.5, -1]),
        ((5, 5, 9, 9), [0, 0, -1, -1], [-1 / 6, -1 / 6, -5 / 6, -5 / 6]),
        ((7, 7), [0, 0], [-0.5, -0.5]),
        ((7,), [0], [0]),
    ],
)
def test_longer_samples_of_a_group_are_penalized_by_length_and_by_rank(lengths, length, rank):
    assert values("length", *lengths) == pytest.approx(length)
    assert values("length_rank", *lengths) == pytest.approx(rank)


def test_diversity_is_the_mean_share_of_words_and_pairs_that_another_sample_lacks():
    same, apart = values("diversity", "a b", "A  b"), values("diversity", "a b", "c d")
    assert same == [0, 0] and apart == [1, 1]
    # {a, b, ab} and {a, c, ac} share one of five
    assert values("diversity", "a b", "a c", "x") == pytest.approx([(0.8 + 1) / 2, (0.8 + 1) / 2, 1])
    assert values("diversity", "alone") == [0] and values("diversity", "", "") == [0, 0]


def test_diversity_reads_the_last_message_of_a_conversation():
    turns = [[{"role": "assistant", "content": text}] for text in ("yes", "no")]
    assert values("diversity", *turns) == [1, 1]
