"""The gain from guesses agrees with one computed by hand."""

import pytest

from benchmarks.guesses import Text, gain_of, guess, step_ms_by_rows, verifications


def guessed(text_T, sources, most):
    return guess(Text(text_T), len(text_T), [(Text(each), len(each)) for each in sources], most)


def test_the_longest_suffix_of_the_latest_source_is_continued():
    assert guessed([7, 1, 2, 3], [[1, 2, 3, 4, 5], [9, 2, 3, 8]], 2) == [4, 5]
    assert guessed([7, 2, 3], [[1, 2, 3, 4, 5], [9, 2, 3, 8]], 4) == [8]
    assert guessed([7, 6, 3], [[1, 2, 3, 4, 5]], 4) == []


def test_a_text_is_known_only_as_far_as_it_is_sampled():
    source = Text([1, 2, 3, 4, 1, 2, 5, 6])
    own = Text([9, 1, 2, 8, 8])
    assert [guess(own, 3, [(source, known)], 3) for known in (8, 7, 6, 3, 2)] == [
        [5, 6],
        [5],
        [3, 4, 1],
        [3],
        [],
    ]
    assert guess(Text([1, 2, 7, 1, 2, 4]), 5, [(source, 8)], 2) == [7, 1]  # its own text is the latest


def test_a_repeated_sample_is_accepted_and_another_is_not():
    # without a suffix of two tokens nothing is guessed; then all but the last token are
    assert list(verifications([1, 2], [[1, 2, 3, 4, 5, 6]], [[3, 4, 5, 6]], 2)) == [(2, 2), (1, 0)]
    assert list(verifications([1, 2], [[1, 2, 7, 8]], [[3, 4]], 2)) == [(2, 0), (0, 0)]


def test_siblings_help_as_far_as_they_are_sampled():
    assert next(verifications([1, 2], [], [[1, 2, 5], [1, 2, 6]], 1)) == (0, 0)


def test_the_gain_is_what_wider_steps_cost():
    assert gain_of({8: 2.0, 32: 3.0, 64: 5.0}, 8, 3) == pytest.approx(2 / 3)
    assert gain_of({8: 2.0, 32: 3.0, 64: 5.0}, 4, 1) == 1
    assert set(step_ms_by_rows()) >= {8, 32, 64, 128, 256}
