from qerl.algo.dynamic_sampling import fill
from qerl.types import Group, Prompt, Sample


def group(index: int, *rewards_G: float | None) -> Group:
    prompt = Prompt(index=index, text="", tokens_T=[1], messages=None, columns={})
    samples_G = [
        Sample(tokens_T=[2], logprobs_T=[0.0], text="", finish="stop", version=0, reward=reward)
        for reward in rewards_G
    ]
    return Group(prompt=prompt, samples_G=samples_G)


DRAWN = [group(0, 1, 1), group(1, 0, 1), group(2, 0, 0), group(3, 1, 0), group(4, None, 1), group(5, 0, 1)]


def indices(groups: list[Group]) -> list[int]:
    return [g.prompt.index for g in groups]


def test_only_groups_with_unequal_rewards_are_kept_in_their_order():
    assert indices(fill([], DRAWN, 10)) == [1, 3, 5]


def test_it_stops_at_num_prompts():
    assert indices(fill([], DRAWN, 2)) == [1, 3]


def test_earlier_rounds_come_first():
    first = fill([], DRAWN[:2], 3)
    assert indices(fill(first, DRAWN[2:], 3)) == [1, 3, 5]
    assert indices(first) == [1]


def test_a_round_without_informative_groups_adds_nothing():
    assert indices(fill([DRAWN[1]], [DRAWN[0], DRAWN[2]], 3)) == [1]
