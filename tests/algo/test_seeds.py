import itertools

import torch

from qerl.algo.seeds import last_round, mix, rounds, uniform


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


def test_the_last_round_on_a_device_is_the_whole_on_the_host():
    for before in ((1, 2, 3, 4), (0, 0, 0, 0), (2**62, 9, 10**6, 31)):
        states = torch.tensor([rounds(*before, -5)] * 4)
        draws = last_round(states, torch.tensor([5, 6, 300, 100_000], dtype=torch.int32))
        assert draws.tolist() == [uniform(*before, n) for n in (0, 1, 295, 99_995)]
