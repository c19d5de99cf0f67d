"""Parts that the studies share: the base run, the two tasks, and the metrics of a training run.

The tasks were chosen from 28 tasks of reasoning-gym, each tried with 64 prompts and 16 samples in NVFP4, as
ones that SmolLM2-135M-Instruct solves sometimes: sums of two numbers (pass@1 0.067, pass@16 0.34) and riddles
about relatives and friends, `aiw` (0.071, 0.53). Counting a letter in a word (0.113, 0.86) was refused: 92 %
of its answers are 1, and every arm learns to answer 1.
"""

import re

from qerl.config.recipes import demo_long
from studies.study import Claim, Curve, Fields, Metric, StudyTask, with_fields

BASE = with_fields(
    demo_long(),
    {
        "num_steps": 40,
        "noise.schedule": "none",
        "model.format": "nvfp4",
        "learn.warmup_ratio": 0.0,
        "learn.lr_scheduler_type": "constant",
        "checkpoint.every": 40,
        "checkpoint.keep": 1,
    },
)
"""16 prompts x 8 samples a step. The rate is constant, so that no reward is read at a rate near zero."""

ADD = StudyTask(name="add", fields={})
RIDDLES = StudyTask(
    name="riddles",
    fields={
        "task.gym": "aiw",
        "task.gym_options": (),
        "task.template": "{question} Answer with just the number.",
    },
)
TASKS = (ADD, RIDDLES)
AQN: Fields = {
    "noise.schedule": "exponential",
    "noise.sigma_start": 3e-2,
    "noise.sigma_end": 1.5e-3,
    "noise.unit": "relative",
    "noise.num_stages": 10,
}
"""The paper's schedule, relative to each norm: SmolLM2's norm weights are a third as large as the paper's."""

TRAINING_METRICS = (
    Metric(key="accuracy_after", title="Held-out accuracy", about="256 problems, temperature 1, after"),
    Metric(key="reward_mean", title="Mean reward", about="over all steps: how early it grew"),
    Metric(
        key="matched", title="Reward from equal first rewards", about="half of the steps, from one level on"
    ),
    Metric(key="reward_first", title="First reward", about="step 0, before any update"),
    Metric(key="reward_last", title="Last reward", about="last tenth of the steps"),
    Metric(key="reward_drop", title="Collapse", about="best tenth of the steps minus the last"),
    Metric(key="greedy_after", title="Held-out, greedy", about="after"),
    Metric(key="accuracy_before", title="Held-out accuracy before", about="temperature 1"),
    Metric(key="entropy_first", title="First entropy", about="step 0, nats a token"),
    Metric(key="entropy_last", title="Last entropy", about="last step, nats a token"),
)
TRAINING_CURVES = (
    Curve(x="step", y="reward", title="Reward", about="by step"),
    Curve(x="step", y="entropy", title="Entropy", about="by step, nats a token"),
)
ONE_MODEL = (
    "These results are from one model of 135 million parameters with short answers; at 7B they may differ in"
    " either direction. The model's bf16 weights come from a 4-bit GGUF (Q4_1)."
)
SHARED_SEED = (
    "The two tasks of a seed share the adapter's initial values and the random numbers of noise and sampling;"
    " the exact test treats them as independent. Intervals do not: they are over each seed's mean."
)

_CHOICE = re.compile(r"\[([^|\]]*)\|([^|\]]*)\]")


def claim(
    text: str,
    arm: str,
    against: str,
    metric: str,
    sign: int = 1,
    *,
    family: str = "",
    side_results: tuple[tuple[str, str], ...] = (),
    note: str = "",
    is_own: bool = False,
    is_headline: bool = False,
) -> Claim:
    """Return a claim; "a ends [above|below] b" has the claim's word and the one that is true if refuted."""
    return Claim(
        says=_CHOICE.sub(r"\1", text),
        reverse=_CHOICE.sub(r"\2", text),
        arm=arm,
        against=against,
        metric=metric,
        sign=sign,
        family=family,
        side_results=side_results,
        note=note,
        is_own=is_own,
        is_headline=is_headline,
    )
