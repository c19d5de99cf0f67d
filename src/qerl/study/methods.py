"""Study `methods`: losses, corrections, advantages and exploration at one budget."""

from qerl.study.ground import AQN, BASE, ONE_MODEL, TASKS, TRAINING_CURVES, TRAINING_METRICS, claim
from qerl.study.study import Arm, Study, with_fields
from qerl.study.training import train_job

METHODS: tuple[Arm, ...] = (
    Arm(name="grpo", about="GRPO, truncated importance sampling"),
    Arm(name="dapo", about="DAPO's loss: a mean over tokens", fields={"algo.loss": "dapo"}),
    Arm(
        name="dr_grpo",
        about="Dr. GRPO: no division by length or deviation",
        fields={"algo.loss": "dr_grpo", "algo.advantage": "mean"},
    ),
    Arm(name="rloo", about="leave-one-out advantages", fields={"algo.advantage": "leave_one_out"}),
    Arm(
        name="dynamic",
        about="groups with unequal rewards only",
        fields={"algo.loss": "dapo", "algo.dynamic_sampling": True, "algo.max_rounds": 3},
    ),
    Arm(name="aqn", about="GRPO with AQN, the fixed schedule", fields=AQN),
)
"""Study `methods`: all are compared with the first. To add one, add its arm: a claim follows by itself."""


def methods() -> Study:
    first = METHODS[0].name
    return Study(
        name="methods",
        question="Which loss, correction, advantage or exploration does best at one budget?",
        base=with_fields(BASE, {"learn.learning_rate": 3e-4}),
        tasks=TASKS,
        arms=METHODS,
        baseline=first,
        measure=train_job,
        metrics=TRAINING_METRICS,
        curves=TRAINING_CURVES,
        claims=tuple(
            claim(f"{arm.name} ends above {first}", arm.name, first, "accuracy_after") for arm in METHODS[1:]
        ),
        remarks=(
            ONE_MODEL,
            "One learning rate for all arms, 3e-4; steps are equal, samples are not where an arm draws more.",
        ),
    )
