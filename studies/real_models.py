"""Measure a real model on GSM8K: train it, or take it as it is, then answer all test problems.

    greedy, sampled                1,319 problems, an answer each, greedy and at the run's temperature;
                                   its last number counts
    strict_greedy, strict_sampled  the same answers; only the number behind the last #### counts
    pass@8, maj@8                  8 answers to each of the first 256 problems, at the run's temperature
    merged_greedy, merged_sampled  the accuracies of what `qerl export --as nvfp4` writes of a calibrated run

Held-out sets of other data have NAME_greedy, NAME_pass@1 and NAME_pass@k of k answers at temperature 1.

The config names the model and GSM8K as the hub does. With `--files FOLDER` they are read from
FOLDER/gsm8k/{train,test}.jsonl and from the folder or GGUF file in FOLDER that has the model's name. Other
rows are parts of files in FOLDER (real_rows.py).
"""

import dataclasses
import re
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from qerl.algo.estimate import pass_at_powers
from qerl.config import RunConfig
from qerl.config.options import ExportOptions
from qerl.config.stored import with_stored_base
from qerl.engine.local_engine import LocalEngine
from qerl.errors import UserError, require
from qerl.eval.benchmark import majority_reward
from qerl.export import export
from qerl.learner.checkpoint import latest_adapter
from qerl.learner.distributed import Ranks
from qerl.models.device import resolve_device
from qerl.models.peft.adapter import load_adapter
from qerl.tasks import RewardPool, VotePool
from qerl.training.calibrated import with_calibrated_base
from qerl.training.policy import load_sampler, load_task
from qerl.training.rollouts.evaluation import (
    EVALUATION_STEP,
    greedy,
    is_correct,
    sample_and_score,
    sampled_tokens,
)
from qerl.training.rollouts.rollout import sampling_of
from qerl.types import GenerateRequest, Group
from studies.real_rows import write_rows
from studies.study import Job, with_fields
from studies.training import train_job

VOTED_PROBLEMS, VOTES = 256, 8
_RIGHT = 1.0  # reward of a right answer
_LOGGED = (
    *("eval_accuracy", "eval_greedy", "mean_tokens", "cut_fraction", "mismatch_abs"),
    *("rollout_s", "step_s", "memory_gb"),
)
_GSM8K = "gsm8k"
_STRICT = re.compile(r"####[ \t]*\$?(-?[0-9][0-9,]*(?:\.[0-9]+)?)")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HeldOut:
    """Problems to answer after training, beside GSM8K's."""

    name: str
    """Prefix of its figures."""
    rows: str
    """Name of its rows (real_rows.py)."""
    num_samples: int
    """Answers to each problem at temperature 1, a power of 2."""
    num_prompts: int | None = None
    """The first so many problems; None: all."""


def train_and_test(job: Job) -> dict[str, Any]:
    """Run or resume the job, then answer the test problems with what it learned.

    A calibrated run's adapter is also merged into 4 bits."""
    line, config, adapter = _trained(job)
    figures = test_figures(config, adapter)
    if config.model.calibrate != "none":
        figures |= _merged_figures(job, config)
    return {**line, "final": line["final"] | figures}


def _merged_figures(job: Job, config: RunConfig) -> dict[str, float]:
    """Return the accuracies of the exported model, whose folder is deleted again."""
    out = job.folder / "merged"
    shutil.rmtree(out, ignore_errors=True)  # of a killed run
    export(config, ExportOptions(run=job.folder, out=out, form="nvfp4"))
    merged = with_fields(config, {"model.path": str(out), "model.format": "nvfp4", "model.calibrate": "none"})
    figures = test_figures(merged, None, has_votes=False)
    shutil.rmtree(out)
    return {f"merged_{name}": figures[name] for name in ("greedy", "sampled")}


def train_and_answer(job: Job, sets: Sequence[HeldOut]) -> dict[str, Any]:
    """Run or resume the job, then answer the held-out sets with what it learned."""
    line, config, adapter = _trained(job)
    assert job.files is not None  # run_config
    return {**line, "final": line["final"] | answer_sets(config, adapter, sets, job.files)}


def _trained(job: Job) -> tuple[dict[str, Any], RunConfig, dict[str, Tensor]]:
    """Return the line of the trained job, its config with the base that it calibrated, and its adapter."""
    config = run_config(job)
    line = train_job(job, config, _LOGGED)
    line["final"]["peak_gb"] = max(point["memory_gb"] for point in line["curve"])
    if config.model.calibrate != "none":
        config = with_stored_base(config, job.folder)
    return line, config, latest_adapter(job.folder / "checkpoints")


def measure_before_training(job: Job) -> dict[str, Any]:
    """Answer the test problems with the model as it is, or as the job calibrates it."""
    config = run_config(job)
    config = dataclasses.replace(config, model=resolve_device(config.model))
    begin = time.perf_counter()
    config = with_calibrated_base(config, Ranks(0, 1), print)
    calibrate_s = time.perf_counter() - begin
    return {"final": test_figures(config, None) | {"calibrate_s": round(calibrate_s, 2)}, "curve": []}


def test_figures(
    config: RunConfig, adapter: dict[str, Tensor] | None, *, has_votes: bool = True
) -> dict[str, float]:
    """Return the figures above, with an adapter by PEFT's names; None: of the model as it is. has_votes: also
    pass@8 and maj@8."""
    config = for_tests(config)
    tokenizer, task = load_task(config)
    prompts, sampling = task.held_out(None), sampling_of(config)
    begin = time.perf_counter()
    with RewardPool(config.task) as pool, VotePool() as votes:
        engine = _loaded(config, tokenizer, adapter)
        loaded = time.perf_counter()
        request = GenerateRequest(
            prompts, num_samples=1, sampling=sampling, seed=config.seed, step=EVALUATION_STEP
        )
        figures = {"load_s": loaded - begin}
        for name, how in (("greedy", greedy(sampling)), ("sampled", sampling)):
            asked = dataclasses.replace(request, sampling=how)
            groups, rewards_P_G = sample_and_score(engine, pool.score, asked)
            figures |= _accuracies(name, groups, rewards_P_G)
            figures[f"tokens_{name}"] = fmean(n for group in groups for n in sampled_tokens(group))
        if has_votes:
            asked = dataclasses.replace(request.with_prompts(prompts[:VOTED_PROBLEMS]), num_samples=VOTES)
            figures |= _votes(*sample_and_score(engine, pool.score, asked), votes)
    figures["test_s"] = time.perf_counter() - loaded
    return {name: float(f"{value:.6g}") for name, value in figures.items()}


def answer_sets(
    config: RunConfig, adapter: dict[str, Tensor] | None, sets: Sequence[HeldOut], files: Path
) -> dict[str, float]:
    """Return the figures of the held-out sets; adapter as for test_figures."""
    config = with_fields(for_tests(config), {"sample.temperature": 1.0})
    sampling, figures, engine = sampling_of(config), dict[str, float](), None
    with RewardPool(config.task) as pool:
        for each in sets:
            rows = write_rows(each.rows, files, Path(config.out) / "rows")
            tokenizer, task = load_task(with_fields(config, {"task.held_out_split": str(rows)}))
            engine = engine or _loaded(config, tokenizer, adapter)
            request = GenerateRequest(
                task.held_out(each.num_prompts),
                num_samples=1,
                sampling=greedy(sampling),
                seed=config.seed,
                step=EVALUATION_STEP,
            )
            asked = dataclasses.replace(request, sampling=sampling, num_samples=each.num_samples)
            first, powers = (pass_at_powers(_correct(engine, pool, each)) for each in (request, asked))
            figures[f"{each.name}_greedy"] = first[1]
            figures |= {f"{each.name}_pass@{k}": powers[k] for k in {1, each.num_samples}}
    return {name: float(f"{value:.6g}") for name, value in figures.items()}


def _correct(engine: LocalEngine, pool: RewardPool, request: GenerateRequest) -> list[list[bool]]:
    _, rewards_P_G = sample_and_score(engine, pool.score, request)
    return [[is_correct(reward, _RIGHT) for reward in rewards_G] for rewards_G in rewards_P_G]


def for_tests(config: RunConfig) -> RunConfig:
    """Return the config that answers all held-out problems, without noise."""
    config = with_fields(config, {"noise.schedule": "none", "task.num_held_out": 10**6})
    return dataclasses.replace(config, model=resolve_device(config.model))


def _loaded(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, adapter: dict[str, Tensor] | None
) -> LocalEngine:
    decoder, engine = load_sampler(config, tokenizer)
    if adapter is not None:
        load_adapter(decoder, adapter)
    return engine


def _accuracies(name: str, groups: list[Group], rewards_P_G: list[list[float | None]]) -> dict[str, float]:
    return {
        name: fmean(is_correct(rewards_G[0], _RIGHT) for rewards_G in rewards_P_G),
        f"strict_{name}": fmean(
            strict(group.samples_G[0].text, group.prompt.columns["answer"]) for group in groups
        ),
    }


def _votes(groups: list[Group], rewards_P_G: list[list[float | None]], pool: VotePool) -> dict[str, float]:
    counted = pool.count("numeric", [[sample.text for sample in group.samples_G] for group in groups])
    chosen = map(majority_reward, counted, rewards_P_G)
    correct = [[is_correct(reward, _RIGHT) for reward in rewards_G] for rewards_G in rewards_P_G]
    return {
        f"pass@{VOTES}": pass_at_powers(correct)[VOTES],
        f"maj@{VOTES}": fmean(is_correct(reward, _RIGHT) for reward in chosen),
    }


def strict(text: str, answer: str) -> bool:
    """Return True if the number behind the last #### is that of the answer."""
    said, right = _STRICT.findall(text), _STRICT.findall(answer) or [answer]
    return bool(said) and _number(said[-1]) == _number(right[-1])


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def run_config(job: Job) -> RunConfig:
    """Return the job's config with the places of its files."""
    if job.files is None:
        require(job.config.task.name == _GSM8K, f"study {job.study} needs --files with its data sets")
        return job.config
    return with_local_files(job.config, job.files)


def with_local_files(config: RunConfig, folder: Path) -> RunConfig:
    """Return the config with the model and the rows read from files in the folder; parts of files are written
    to the run's own folder."""
    config = with_model(config, folder)
    task = config.task
    if task.name == _GSM8K:
        rows = [folder / _GSM8K / f"{split}.jsonl" for split in ("train", "test")]
        _check_exist(folder, rows)
    else:
        assert task.held_out_split is not None
        rows = [write_rows(n, folder, Path(config.out) / "rows") for n in (task.name, task.held_out_split)]
    return with_fields(config, {"task.name": str(rows[0]), "task.held_out_split": str(rows[1])})


def with_model(config: RunConfig, folder: Path) -> RunConfig:
    """Return the config with the model read from a folder or GGUF file of its name in the folder."""
    return with_fields(config, {"model.path": str(local_model(config.model.path, folder))})


def local_model(name: str, folder: Path) -> Path:
    """Return the model's folder or GGUF file in the folder; raise UserError if there is none."""
    name = name.rpartition("/")[2]
    places = [folder / name, folder / f"{name}.gguf", folder / f"{name.lower()}.gguf"]
    model = next((place for place in places if place.exists()), places[0])
    _check_exist(folder, [model])
    return model


def _check_exist(folder: Path, paths: Sequence[Path]) -> None:
    if missing := [str(path) for path in paths if not path.exists()]:
        raise UserError(f"--files {folder}: no {', no '.join(missing)}")
