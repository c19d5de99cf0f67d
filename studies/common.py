"""What the studies share: the run that arms change, two tasks, and what is read from a training run.

Tasks that SmolLM2-135M-Instruct half knows, of 28 of reasoning-gym's that were tried with 64 prompts and 16
samples each in NVFP4: sums of two numbers (pass@1 0.067, pass@16 0.34) and riddles of kin and friends, `aiw`
(0.071, 0.53). Counting a letter in a word (0.113, 0.86) is none: 92 % of its answers are 1, and every arm
learns to say just that.
"""

from qerl.config.recipes import demo
from studies.study import Claim, Curve, Fields, Metric, StudyTask, with_fields

BASE = with_fields(
    demo(),
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
"""16 prompts x 8 samples a step; a constant rate, so that no arm's reward is read at a rate near zero."""

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
"""The paper's schedule; relative to each norm, since SmolLM2's norm weights are a third of its models'."""

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
    Metric(key="train_s", title="Seconds", about="in steps, other runs on the same GPU"),
)
TRAINING_CURVES = (
    Curve(x="step", y="reward", title="Reward", about="by step"),
    Curve(x="elapsed_s", y="reward", title="Reward", about="by second, other runs on the same GPU"),
    Curve(x="step", y="entropy", title="Entropy", about="by step, nats a token"),
)
ONE_MODEL = (
    "One model of 135 million parameters and short answers: what holds here need not hold at 7B, and what"
    " does not hold here may. Its bf16 weights are those of a 4-bit GGUF (Q4_1)."
)


def claim(says: str, arm: str, against: str, metric: str, sign: int = 1, family: str = "") -> Claim:
    return Claim(says=says, arm=arm, against=against, metric=metric, sign=sign, family=family)
