"""Dynamic sampling: which of the groups drawn so far a step learns from.

A group whose rewards are all equal has zero advantages; it costs a forward and a backward and dilutes the
mean. So prompts are drawn in rounds until num_prompts groups are informative (DAPO, arXiv 2503.14476, 3.2).

    kept_P = []
    while len(kept_P) < num_prompts and rounds are left:
        kept_P = fill(kept_P, draw(), num_prompts)
"""

from qerl.algo.advantage import is_informative
from qerl.types import Group


def fill(kept_P: list[Group], drawn_P: list[Group], num_prompts: int) -> list[Group]:
    """The kept groups and then the informative ones of those drawn, in their order, num_prompts at most.

    Judged by `sample.reward` as the task gave it, without a penalty for length: a group that is right
    throughout stays uninformative however long its samples are.
    """
    informative_P = [
        group for group in drawn_P if is_informative([sample.reward for sample in group.samples_G])
    ]
    return (kept_P + informative_P)[:num_prompts]
