import itertools
import math

import pytest

from qerl.algo.estimate import clustered_mean, majority_vote, pass_at_k, pass_at_powers


@pytest.mark.parametrize(
    ("num_samples", "num_correct", "k", "expected"),
    [
        (5, 2, 1, 2 / 5),
        (5, 2, 2, 7 / 10),  # 1 - C(3, 2) / C(5, 2) = 1 - 3 / 10
        (5, 2, 4, 1.0),  # three wrong ones cannot fill four places
        (4, 0, 4, 0.0),
        (4, 1, 4, 1.0),
        (256, 3, 16, 1 - 240 * 239 * 238 / (256 * 255 * 254)),
    ],
)
def test_pass_at_k_by_hand(num_samples, num_correct, k, expected):
    assert pass_at_k(num_samples, num_correct, k) == pytest.approx(expected, rel=1e-12, abs=1e-15)


def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample():
    correct_G = [True, False, True, False, False, False]
    for k in range(1, 7):
        subsets = list(itertools.combinations(correct_G, k))
        assert pass_at_k(6, 2, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), rel=1e-12)


def test_pass_at_powers_takes_the_groups_that_have_as_many_samples():
    # pass@1: (1/4 + 1/2 + 0) / 3; pass@2: 1 - 3/6, 1 - 0/1 and 0; pass@4: the first alone
    right_P_G = [[False, True, False, False], [True, False], [False, False]]
    assert pass_at_powers(right_P_G) == pytest.approx({1: 1 / 4, 2: 1 / 2, 4: 1.0}, rel=1e-12)
    assert pass_at_powers([[True] * 6]) == {1: 1.0, 2: 1.0, 4: 1.0}
    assert pass_at_powers([[], []]) == pass_at_powers([]) == {}


def test_the_error_counts_prompts_not_samples():
    # prompt means 1, 0, 1/2: mean 1/2, std 1/2, error 1 / (2 sqrt(3))
    mean, error = clustered_mean([[1.0, 1.0], [0.0, 0.0], [1.0, 0.0]])
    assert (mean, error) == (0.5, pytest.approx(0.5 / math.sqrt(3), rel=1e-12))


def test_repeating_the_samples_of_each_prompt_leaves_the_error_as_it_is():
    values = [[1.0, 0.0], [0.0, 0.0], [1.0, 1.0]]
    assert clustered_mean([values_G * 50 for values_G in values]) == pytest.approx(clustered_mean(values))


def test_prompts_count_the_same_however_many_samples_they_have():
    mean, _ = clustered_mean([[1.0], [0.0, 0.0, 0.0]])
    assert mean == 0.5


def test_one_prompt_has_no_error():
    assert clustered_mean([[1.0, 0.0]]) == (0.5, None)


def test_the_majority_wins_and_the_earliest_of_equals():
    assert majority_vote(["7", "12", "12"]) == "12"
    assert majority_vote(["7", "12", "12", "7"]) == "7"


def test_no_answer_does_not_vote():
    assert majority_vote([None, None, "3"]) == "3"
    assert majority_vote([None, None]) is None
    assert majority_vote([]) is None
