"""Choose the problems of the study math_exploration: sample answers to MATH from its untrained model.

A line for each problem is added to studies/math_exploration/solved.jsonl (real_rows.py). Problems that have
one are not sampled again, so that a stopped selection continues. The order mixes the kinds of problems.
"""

import dataclasses
import json
import tempfile
from pathlib import Path

from qerl.algo.seeds import mix
from qerl.config.check import check_positive
from qerl.errors import require
from qerl.tasks import RewardPool
from qerl.training.policy import load_sampler, load_task
from qerl.training.rollouts.evaluation import EVALUATION_STEP, is_correct, sample_and_score
from qerl.training.rollouts.rollout import sampling_of
from qerl.types import GenerateRequest
from studies.catalog_real_more import math_exploration
from studies.real_models import for_tests, with_model
from studies.real_rows import NUM_SAMPLES, SOLVED, Row, read_rows
from studies.study import with_fields

_LEVELS = ("Level 3", "Level 4", "Level 5")
_SPLITS = ("train", "test")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SelectOptions:
    files: Path
    """Folder with the model and math/{train,test}.jsonl."""

    num_train: int = 1500
    """Problems to try of the training part."""

    num_test: int = 700
    """Problems to try of the test part."""

    chunk: int = 64
    """Problems whose lines are written at a time."""

    out: Path = SOLVED
    """File of the lines."""

    def __post_init__(self):
        check_positive(self, "num_train", "num_test", "chunk")


def select_problems(options: SelectOptions) -> None:
    """Sample answers to the problems that have no line yet, and write their lines."""
    config = with_model(for_tests(math_exploration().base), options.files)
    with tempfile.TemporaryDirectory() as folder, RewardPool(config.task) as pool:
        paths = {split: Path(folder) / f"{split}.jsonl" for split in _SPLITS}
        for split, num in zip(_SPLITS, (options.num_train, options.num_test), strict=True):
            rows = untried(options, split, num)
            paths[split].write_text("".join(json.dumps(row) + "\n" for row in rows))
        engine = None
        for split, path in paths.items():
            if not path.read_text():
                continue
            held_out = with_fields(config, {"task.name": str(path), "task.held_out_split": str(path)})
            tokenizer, task = load_task(held_out)
            engine = engine or load_sampler(config, tokenizer)[1]
            prompts = task.held_out(None)
            for start in range(0, len(prompts), options.chunk):
                request = GenerateRequest(
                    prompts[start : start + options.chunk],
                    num_samples=NUM_SAMPLES,
                    sampling=sampling_of(config),
                    seed=config.seed,
                    step=EVALUATION_STEP,
                )
                groups, rewards_P_G = sample_and_score(engine, pool.score, request)
                lines = [
                    {"split": split, "row": group.prompt.columns["row"], "solved": _num_right(rewards_G)}
                    for group, rewards_G in zip(groups, rewards_P_G, strict=True)
                ]
                _append(options.out, lines)
                print(f"{split}: {min(start + options.chunk, len(prompts))} of {len(prompts)}", flush=True)


def untried(options: SelectOptions, split: str, num: int) -> list[Row]:
    """Return the rows among the first num in mixed order that have no line, with their index."""
    path = options.files / "math" / f"{split}.jsonl"
    require(path.exists(), f"--files {options.files}: no {path}")
    tried = set()
    for entry in read_rows(options.out) if options.out.exists() else ():
        tried.add((entry["split"], entry["row"]))
    rows = [row | {"row": index} for index, row in enumerate(read_rows(path))]
    hard = sorted((row for row in rows if row["level"] in _LEVELS), key=lambda row: mix(row["row"]))
    return [row for row in hard[:num] if (split, row["row"]) not in tried]


def _num_right(rewards_G: list[float | None]) -> int:
    return sum(is_correct(reward, 1.0) for reward in rewards_G)


def _append(path: Path, lines: list[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
