"""Which samples a step begins and which it waits for."""

import dataclasses
from typing import Literal

from qerl.config.check import check_not_negative, check_positive
from qerl.config.conflicts import check_conflicts


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RolloutConfig:
    prompt_order: Literal["fifo", "longest_first"] = "fifo"
    """Order in which a step's prompts are sampled where not all samples run at once: fifo is the task's;
    longest_first begins with the prompts whose latest samples were longest."""

    partial: bool = False
    """Begin more prompts than a step needs and stop sampling when num_prompts groups are complete; the next
    step continues the others with its own policy (partial rollouts). Not with branching, dynamic sampling,
    environments, agents, a teacher or Ray."""

    extra_prompts: int = 8
    """partial: number of prompts that are sampled beyond num_prompts; at most num_prompts."""

    max_staleness: int = 2
    """partial: a step waits for the groups that were begun this many steps before it, the oldest allowed."""

    keep_kv_cache: bool = False
    """partial: keep the keys and values of unfinished samples in host memory, if it has room, so that the
    next step does not compute them again; it then attends to those of older weights. The step after each
    checkpoint.every steps computes them again. Not with engine.exact, nor on transformers' own code."""

    def __post_init__(self):
        check_not_negative(self, "extra_prompts", prefix="rollout.")
        check_positive(self, "max_staleness", prefix="rollout.")
        check_conflicts(self, "rollout")
