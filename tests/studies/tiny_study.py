"""Two arms, two seeds, two steps, two rates."""

from pathlib import Path

from qerl.config import RunConfig
from studies.common import TRAINING_CURVES, TRAINING_METRICS, claim
from studies.study import Arm, Study, StudyTask, with_fields
from studies.training import train_job


def make(files: Path, template="{prompt}", num_steps=2) -> Study:
    fields = {
        "num_steps": num_steps,
        "num_prompts": 4,
        "num_generations": 4,
        "model.path": str(files),
        "model.dtype": "fp32",
        "adapter.rank": 4,
        "task.name": str(files / "sums.jsonl"),
        "task.template": template,
        "task.num_held_out": 8,
        "task.rewards": (f"{files / 'even.py'}:even",),
        "task.reward_workers": 1,
        "sample.max_tokens": 5,
        "noise.schedule": "none",
        "evaluate.num_prompts": 8,
        "evaluate.success_threshold": 1.0,
        "checkpoint.every": 1,
    }
    above = claim("NVFP4 ends [above|below] BF16", "nvfp4", "bf16", "accuracy_after")
    return Study(
        name="tiny",
        question="does the machinery run?",
        base=with_fields(RunConfig(), fields),
        tasks=(StudyTask(name="sums", fields={}),),
        arms=tuple(Arm(name=f, fields={"model.format": f}) for f in ("bf16", "nvfp4")),
        baseline="bf16",
        measure=train_job,
        metrics=TRAINING_METRICS,
        curves=TRAINING_CURVES,
        claims=(above,),
        seeds=(0, 1),
        rates=(0.001, 0.01),
        choice_seeds=(100,),
    )
