import itertools

from qerl.seeds import mix, uniform


def test_seeds_are_pinned():
    """A change here changes every sample and every noise of every run: checkpoints would no longer go on."""
    assert [mix(0), mix(1, 2), mix(2, 1)] == [
        3980143261097177850,
        2892235559830842608,
        6372112706751807763,
    ]


def test_neighbouring_coordinates_share_nothing():
    places = itertools.product((0, 1), range(8), range(8), range(8))
    draws = [uniform(*place) for place in places]
    assert len(set(draws)) == len(draws)
    assert all(0 <= u < 1 for u in draws)
    assert abs(sum(draws) / len(draws) - 0.5) < 0.03  # 1,024 draws: standard error 0.009


def test_a_tuple_is_not_its_prefix():
    assert mix(1, 0) != mix(1)
