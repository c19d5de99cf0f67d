"""Evaluate a model or a run on named benchmarks, or on the held-out rows of its task.

Each benchmark has a file with a result for each problem (eval/benchmark.py), in eval/ of the run's folder,
or in runs/eval for a model. Problems whose results are in the file are not sampled again.
"""

import dataclasses
import re
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers import PreTrainedTokenizerBase

from qerl.config import EngineConfig, ModelConfig, NoiseConfig, RunConfig, SampleConfig, TaskConfig
from qerl.config.options import EvalOptions
from qerl.engine.local_engine import LocalEngine
from qerl.errors import UserError
from qerl.eval.benchmark import Benchmark, result_path, run_benchmark, settings_of
from qerl.learner import checkpoint
from qerl.models.checkpoint.source import locate
from qerl.models.device import resolve_device
from qerl.tasks import RewardPool, Task, VotePool, all_prompts
from qerl.tasks.majority_vote import voting_grader
from qerl.tasks.reward import REWARDS, format_failures
from qerl.tracking.progress import work
from qerl.tracking.provenance import environment, files_stamp
from qerl.training.calibrated import refuse_calibration
from qerl.training.engines.multi_turn import MultiTurnEngine, with_environment
from qerl.training.policy import (
    check_prompt_fits,
    fewer_prompts,
    load_tokenizer_and_limit,
    load_trained_sampler,
)
from qerl.training.rollouts.evaluation import EVALUATION_STEP
from qerl.training.rollouts.rollout import sampling_of
from qerl.types import GenerateRequest, Prompt, Sampling

_EMPTY = "-"  # cell of a figure that does not exist


def run_benchmarks(
    source: str,
    run: RunConfig | None,
    options: EvalOptions,
    named: dict[str, TaskConfig],
    file_tasks: dict[str, TaskConfig],
    console: Console,
) -> list[dict[str, Any]]:
    """Return a summary for each named benchmark and each file of the user, with the file of its results.

    `source` is a model, or the folder of the run with the config `run`. Without either, evaluate on the
    held-out rows of options.task."""
    if run is None:
        refuse_calibration(options.model)
    config = _sampling_config(run, options, is_own_task=not named)
    adapters = Path(source) / "checkpoints" if run is not None and options.with_adapter else None
    folder = options.out or (Path("runs/eval") if run is None else Path(source) / "eval")
    tasks = {name: _with_prompt(task, run and run.task, options) for name, task in named.items()} | file_tasks
    has_benchmarks = bool(tasks)
    tasks = tasks or {"task": options.task}
    results, notice = [], partial(console.print, markup=False, highlight=False)
    with ExitStack() as stack:
        votes = stack.enter_context(VotePool())
        by_grading = {_grading(task): task for task in tasks.values()}
        pools = {key: stack.enter_context(RewardPool(task)) for key, task in by_grading.items()}
        tokenizer, max_prompt_tokens = load_tokenizer_and_limit(config)
        check_prompt_fits(max_prompt_tokens, options.max_tokens, "max_tokens")
        benchmarks, sampling = {}, sampling_of(config)
        for name, task in tasks.items():
            prompts = _prompts(task, tokenizer, options, max_prompt_tokens, is_whole=has_benchmarks)
            for text in fewer_prompts(f"{name}: --num-prompts", options.num_prompts, prompts):
                notice(text)
            pools[_grading(task)].check(prompts[0])
            benchmarks[name] = _benchmark(
                name, task, prompts, pools[_grading(task)], votes, sampling, options
            )
        for text in sorted({text for pool in pools.values() for text in pool.notices}):
            notice(text)
        load_engine = cache(partial(_load, config, tokenizer, adapters, console))
        model_settings = {"model": source, **_model_settings(config.model, config.engine, adapters)}
        for name, benchmark in benchmarks.items():
            task, pool = tasks[name], pools[_grading(tasks[name])]
            settings = settings_of(benchmark, model_settings | _task_settings(task, pool))
            path = result_path(folder, settings)
            # the settings do not show changes of the user's own function
            continues = all(reward in REWARDS for reward in task.rewards)
            engine = partial(_engine, load_engine, pool, task, max_prompt_tokens)
            working = partial(work, console)
            summary = run_benchmark(benchmark, engine, path, settings, working, continues=continues)
            for text in format_failures(pool.take_failures()):
                notice(text)
            results.append({"set": name, "model": source, **summary, "file": str(path)})
    console.print(table(results))
    return results


def _load(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, adapters: Path | None, console: Console
) -> LocalEngine:
    notice = partial(console.print, markup=False, highlight=False)
    with work(console, config.model.loading) as report:
        return load_trained_sampler(config, tokenizer, adapters, notice, report)


def table(results: list[dict[str, Any]]) -> Table:
    """Return a row per benchmark: accuracies in percent, mean rewards as they are; errors are standard errors
    over problems. A column that is empty in all rows is left out."""
    powers = sorted(
        {int(key[5:]) for each in results for key in each if re.fullmatch(r"pass@\d+", key)} - {1}
    )
    accuracies = {f"@{k}": f"pass@{k}" for k in powers} | {"majority": "majority", "greedy": "greedy"}
    columns = {
        "samples": [f"{each['num_prompts']} x {each['num_samples']}" for each in results],
        "pass@1": [_percent(each.get("pass@1"), each.get("pass@1_error")) for each in results],
        **{heading: [_percent(each.get(key)) for each in results] for heading, key in accuracies.items()},
    }
    if any(map(_adds_reward, results)):
        columns["reward"] = [_mean(each["reward"]) for each in results]
        columns["greedy reward"] = [_mean(each["greedy_reward"]) for each in results]
    columns["tokens"] = [f"{each['mean_tokens']:.0f}" for each in results]
    columns["cut"] = [_percent(each["cut_fraction"]) for each in results]
    columns = {heading: cells for heading, cells in columns.items() if set(cells) != {_EMPTY}}
    shown = Table(box=None, pad_edge=False)
    shown.add_column("benchmark", no_wrap=True)
    for heading in columns:
        shown.add_column(heading, justify="right", no_wrap=True)
    for each, *cells in zip(results, *columns.values(), strict=True):
        shown.add_row(each["set"], *cells)
    return shown


def _adds_reward(result: dict[str, Any]) -> bool:
    """True if the mean reward is not the accuracy, which it is for rewards of 0 and 1 that never fail."""
    return "pass@1" not in result or (
        not result["num_failed_rewards"] and result["reward"] != result["pass@1"]
    )


def _percent(share: float | None, error: float | None = None) -> str:
    if share is None:
        return _EMPTY
    return f"{100 * share:.1f}" + ("" if error is None else f" +- {100 * error:.1f}")


def _mean(reward: float | None) -> str:
    return _EMPTY if reward is None else f"{reward:.3f}"


def _grading(task: TaskConfig) -> tuple[Any, ...]:
    """Return what a reward pool depends on: benchmarks that are graded alike share their processes."""
    return task.rewards, task.reward_weights, task.answer_column, task.environment


def _task_settings(task: TaskConfig, pool: RewardPool) -> dict[str, Any]:
    """Return the data and the fields that rewards depend on, where they differ from the default."""
    fields, default = dataclasses.asdict(task), dataclasses.asdict(TaskConfig())
    names = ("reward_weights", "reward_timeout_s", "code")
    settings = {name: fields[name] for name in names if fields[name] != default[name]}
    if pool.environment is not None:
        settings["environment"] = fields["environment"]
    return {"data": task.name, "rewards": list(task.rewards), **settings}


def _engine(
    load_engine: Callable[[], LocalEngine], pool: RewardPool, task: TaskConfig, max_prompt_tokens: int
) -> LocalEngine | MultiTurnEngine:
    return with_environment(load_engine(), pool, task.environment, max_prompt_tokens)


def _sampling_config(run: RunConfig | None, options: EvalOptions, *, is_own_task: bool) -> RunConfig:
    """Return the config to sample with; fields of a run that concern learning need not suit these lengths.

    On its own task, a run keeps top_k, min_p and its stop strings. Exact mode does not support top_p."""
    base = run or RunConfig()
    sample = dataclasses.replace(
        base.sample if is_own_task else SampleConfig(),
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
    )
    engine = dataclasses.replace(base.engine, exact=base.engine.exact and options.top_p is None)
    return RunConfig(
        model=resolve_device(options.model),
        adapter=base.adapter,
        task=options.task,
        sample=sample,
        engine=engine,
        noise=NoiseConfig(schedule="none"),
        seed=options.seed,
    )


def _with_prompt(task: TaskConfig, trained: TaskConfig | None, options: EvalOptions) -> TaskConfig:
    """Return the benchmark's task with the user's template and the system prompt of the run's, if any."""
    template, system_prompt = options.template or task.template, (trained or task).system_prompt
    return dataclasses.replace(task, template=template, system_prompt=system_prompt)


def _prompts(
    task: TaskConfig,
    tokenizer: PreTrainedTokenizerBase,
    options: EvalOptions,
    max_prompt_tokens: int,
    *,
    is_whole: bool,
) -> list[Prompt]:
    """Return all rows of a benchmark, or the held-out rows of a task."""
    num = options.num_prompts
    if is_whole:
        return all_prompts(task, tokenizer, num=num, max_prompt_tokens=max_prompt_tokens)
    built = Task(task, tokenizer, seed=options.seed, max_prompt_tokens=max_prompt_tokens)
    if not (prompts := built.held_out(num)):
        raise UserError(f"{task.name} has no held-out rows to evaluate on: set task.num_held_out")
    return prompts


def _benchmark(
    name: str,
    task: TaskConfig,
    prompts: list[Prompt],
    pool: RewardPool,
    votes: VotePool,
    sampling: Sampling,
    options: EvalOptions,
) -> Benchmark:
    grader = voting_grader(task.rewards)
    return Benchmark(
        name=name,
        request=GenerateRequest(
            prompts,
            num_samples=options.num_samples,
            sampling=sampling,
            seed=options.seed,
            step=EVALUATION_STEP,
        ),
        answer_column=task.answer_column,
        score=pool.score,
        count_votes=partial(votes.count, grader) if grader else None,
        success_threshold=pool.success_threshold(options.success_threshold),
    )


def _model_settings(model: ModelConfig, engine: EngineConfig, adapters: Path | None) -> dict[str, Any]:
    """Return the weights, formats, code and device that samples depend on."""
    newest = None if adapters is None else checkpoint.find_latest(adapters)[0]
    return {
        "weights": files_stamp(locate(model.path).path),
        "checkpoint": None if newest is None else files_stamp(newest),
        **dataclasses.asdict(model),
        "kv": engine.kv_cache_dtype,
        **environment(model.device),
    }
