"""Dynamic sampling: sample more prompts until enough groups are informative.

A group with equal rewards has zero advantages; it costs a forward and a backward pass and dilutes the mean.
So prompts are sampled in rounds until num_prompts groups are informative (DAPO, arXiv 2503.14476, 3.2).

    groups_P = []
    while len(groups_P) < num_prompts and rounds are left:
        groups_P = fill(groups_P, sample(), num_prompts)
"""

from qerl.algo.advantage import is_informative
from qerl.types import Group


def fill(groups_P: list[Group], drawn_P: list[Group], num_prompts: int) -> list[Group]:
    """Return the groups followed by the informative ones of drawn_P, at most num_prompts.

    Groups are judged by `sample.reward` without length penalty: a group of correct samples stays
    uninformative however long they are.
    """
    informative_P = [
        group for group in drawn_P if is_informative([sample.reward for sample in group.samples_G])
    ]
    return (groups_P + informative_P)[:num_prompts]
