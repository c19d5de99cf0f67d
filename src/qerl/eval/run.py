"""How well a model or a run's policy does on named sets, or on its own held-out rows: a table and files.

A set's file has a result for each problem (eval/benchmark.py). It lies in the run's folder under eval/, for a model in
runs/eval. What it holds already is not done again.
"""

import dataclasses
import hashlib
import re
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers import PreTrainedTokenizerBase

from qerl.config import NoiseConfig, RunConfig, SampleConfig, TaskConfig
from qerl.config.options import EvalOptions
from qerl.engine.engine import Engine
from qerl.errors import UserError
from qerl.eval.benchmark import Benchmark, result_path, run_benchmark, settings_of
from qerl.learner import checkpoint
from qerl.models.device import resolve_device
from qerl.models.source import locate
from qerl.tasks import RewardPool, Votes, build_task, every_prompt
from qerl.tasks.majority_vote import voting_grader
from qerl.tasks.reward import REWARDS, format_failures
from qerl.tracking.provenance import environment
from qerl.training.multi_turn import MultiTurnEngine, with_environment
from qerl.training.policy import check_prompt_fits, load_tokenizer_and_limit, load_trained_sampler
from qerl.training.rollout import sampling_of
from qerl.types import Prompt


def run_benchmarks(
    source: str, run: RunConfig | None, options: EvalOptions, sets: dict[str, TaskConfig], console: Console
) -> list[dict[str, Any]]:
    """A summary for each set, with the file of its results; no sets: one for options.task's held-out rows.

    `source` is a model, or the folder of the run that `run` is the config of."""
    config = _config(run, options, is_own=not sets)
    adapters = Path(source) / "checkpoints" if run is not None and options.with_adapter else None
    folder = options.out or (Path("runs/eval") if run is None else Path(source) / "eval")
    tasks = {name: _asked(task, run, options) for name, task in sets.items()} or {"task": options.task}
    with ExitStack() as stack:
        votes = stack.enter_context(Votes())
        graded = {_grading(task): task for task in tasks.values()}
        pools = {key: stack.enter_context(RewardPool(task)) for key, task in graded.items()}
        tokenizer, room = load_tokenizer_and_limit(config)
        check_prompt_fits(room, options.max_tokens, "max_tokens")
        exams = {}
        for name, task in tasks.items():
            prompts = _prompts(task, tokenizer, config, options.num_prompts, room, is_whole=bool(sets))
            pool = pools[_grading(task)]
            pool.check(prompts[0])
            exams[name] = _exam(name, task, prompts, pool, votes, config, options)
        engine = cache(partial(load_trained_sampler, config, tokenizer, adapters))
        facts = {"model": source, **_facts(config, adapters)}
        results = []
        for name, exam in exams.items():
            task = tasks[name]
            asked = {"data": task.name, "rewards": list(task.rewards), **_graded_by(task)}
            if pools[_grading(task)].has_environment:
                asked["environment"] = dataclasses.asdict(task.environment)
            settings = settings_of(exam, {**facts, **asked})
            path = result_path(folder, settings)
            if not all(reward in REWARDS for reward in task.rewards):
                path.unlink(missing_ok=True)  # the user's function may have changed, which no setting shows
            sampler = partial(_sampler, engine, pools[_grading(task)], task, room)
            say = partial(console.print, markup=False, highlight=False)
            summary = run_benchmark(exam, sampler, path, settings, say)
            for text in format_failures(pools[_grading(task)].take_failures()):
                say(text)
            results.append({"set": name, "model": source, **summary, "file": str(path)})
    console.print(table(results))
    return results


def table(results: list[dict[str, Any]]) -> Table:
    """A row for each set, in percent; the error is that of pass@1, over problems."""
    powers = sorted(
        {int(key[5:]) for each in results for key in each if re.fullmatch(r"pass@\d+", key)} - {1}
    )
    shown = Table(box=None, pad_edge=False)
    headings = ("samples", "pass@1", *(f"@{k}" for k in powers), "majority", "greedy", "tokens", "cut")
    shown.add_column("set", no_wrap=True)
    for heading in headings:
        shown.add_column(heading, justify="right", no_wrap=True)
    for each in results:
        error = "" if each["pass@1_error"] is None else f" +- {100 * each['pass@1_error']:.1f}"
        values = [_percent(each.get(key)) for key in (*(f"pass@{k}" for k in powers), "majority", "greedy")]
        lengths = [f"{each['mean_tokens']:.0f}", _percent(each["cut_fraction"])]
        counts = f"{each['num_prompts']} x {each['num_samples']}"
        shown.add_row(each["set"], counts, _percent(each["pass@1"]) + error, *values, *lengths)
    return shown


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"


def _grading(task: TaskConfig) -> tuple[Any, ...]:
    """What a pool depends on: sets that are graded alike share their processes."""
    return task.rewards, task.reward_weights, task.answer_column, task.environment


def _graded_by(task: TaskConfig) -> dict[str, Any]:
    """What rewards depend on besides, where it is not the default."""
    given, default = dataclasses.asdict(task), dataclasses.asdict(TaskConfig())
    names = ("reward_weights", "reward_timeout_s", "code")
    return {name: given[name] for name in names if given[name] != default[name]}


def _sampler(
    engine: Callable[[], Engine], pool: RewardPool, task: TaskConfig, room: int
) -> Engine | MultiTurnEngine:
    return with_environment(engine(), pool, task.environment, room)


def _config(run: RunConfig | None, options: EvalOptions, *, is_own: bool) -> RunConfig:
    """What draws samples, and of the run no more: how it learned need not go with these lengths. On its own
    rows it keeps its other cuts and its stop strings; exact mode, which is for learning, takes no cuts."""
    base = run or RunConfig()
    sample = dataclasses.replace(
        base.sample if is_own else SampleConfig(),
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


def _asked(task: TaskConfig, run: RunConfig | None, options: EvalOptions) -> TaskConfig:
    """The set's task with the user's template, if any, and the system message that the run learned with."""
    system = run.task.system_prompt if run is not None else task.system_prompt
    return dataclasses.replace(task, template=options.template or task.template, system_prompt=system)


def _prompts(
    task: TaskConfig,
    tokenizer: PreTrainedTokenizerBase,
    config: RunConfig,
    num: int | None,
    room: int,
    *,
    is_whole: bool,
) -> list[Prompt]:
    """All rows of a set; of a task only those that are held out."""
    if is_whole:
        return every_prompt(task, tokenizer, num=num, max_prompt_tokens=room)
    prompts = build_task(task, tokenizer, seed=config.seed, max_prompt_tokens=room).held_out(num)
    if not prompts:
        raise UserError(f"task.num_held_out is {task.num_held_out}: {task.name} holds out no problems to try")
    return prompts


def _exam(
    name: str,
    task: TaskConfig,
    prompts: list[Prompt],
    pool: RewardPool,
    votes: Votes,
    config: RunConfig,
    options: EvalOptions,
) -> Benchmark:
    grader = voting_grader(task.rewards)
    return Benchmark(
        name=name,
        prompts=prompts,
        answer_column=task.answer_column,
        rewards=pool,
        ballot=partial(votes.count, grader) if grader else None,
        num_samples=options.num_samples,
        sampling=sampling_of(config),
        seed=options.seed,
        success_threshold=options.success_threshold,
    )


def _facts(config: RunConfig, adapters: Path | None) -> dict[str, Any]:
    """What the samples depend on beside the exam: weights, formats, code and device."""
    newest = None if adapters is None else checkpoint.find_latest(adapters)[0]
    return {
        "weights": _stamp(locate(config.model.path).path),
        "checkpoint": None if newest is None else _stamp(newest),
        **dataclasses.asdict(config.model),
        "kv": config.engine.kv_cache_dtype,
        **environment(config.model.device),
    }


def _stamp(path: Path) -> str:
    """The files' sizes and times: other weights at the same place are other ones."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    stats = [(file.name, (stat := file.stat()).st_size, stat.st_mtime_ns) for file in files if file.is_file()]
    return hashlib.sha256(repr(stats).encode()).hexdigest()[:16]
