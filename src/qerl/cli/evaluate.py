"""Evaluate a model or a run: pass@1, pass@k, majority vote and greedy accuracy."""

import dataclasses
import json
import sys
from functools import partial
from pathlib import Path

from qerl.cli.arguments import announce, expand, names_of, names_or_help, parse_options
from qerl.cli.help import Help
from qerl.cli.result import rounded
from qerl.config import ModelConfig, RunConfig, TaskConfig
from qerl.config.options import EvalOptions
from qerl.config.stored import read_run_config, with_start_day
from qerl.errors import UserError, require
from qerl.eval.catalog import BENCHMARKS, is_rows_file, parse_benchmarks
from qerl.models.checkpoint.model_place import check_place
from qerl.tasks.early_checks import check_task_files
from qerl.tasks.rows.known_sets import with_known_defaults
from qerl.tasks.rows.table import check_file

DESCRIPTION = f"""{__doc__}

MODEL_OR_RUN is a model (a folder, a .gguf file or a hub id) or the folder of a run.

BENCHMARK is one of {", ".join(BENCHMARKS)}; BENCHMARK=FILE reads the problems from a file.
A .jsonl, .json, .parquet or .csv FILE of your own is evaluated whole, with the run's task as default.

Without either, evaluate on the held-out rows of the run's own task."""
_OF_SPLITS = ("--task.split", "--task.held-out-split", "--task.num-held-out")
SHORT = {"--answer-column": "--task.answer-column", "--reward": "--task.rewards"}

HELP = Help(
    DESCRIPTION,
    {
        "--num-prompts": "problems, from the first; None: all",
        "--num-samples": "samples per problem; of a benchmark: 16",
        "--temperature": "of a benchmark: 0.6; greedy comes too",
        "--top-p": "of a benchmark: 0.95",
        "--max-tokens": "longest sample; of a benchmark: 4096",
        "--template TEXT": "the user message; braces name columns",
        "--answer-column NAME": "column of the right answer",
        "--reward NAME": "a built-in reward, or FILE.py:NAME",
        "--success-threshold X": "the reward from which a sample is correct",
        "--no-with-adapter": "evaluate a run's base model alone",
        "--out FOLDER": "default: eval in the run's folder",
        "--trust": "import the rewards of a run from elsewhere",
        "--seed": "seed of the samples",
        "--model.format FORMAT": "nvfp4, mxfp4, nf4, fp8, int8 or bf16",
        "--model.device DEVICE": "auto, cpu or cuda",
        "--model.backend BACKEND": "auto, qerl or transformers",
        "--task.system-prompt TEXT": "the system message",
    },
    SHORT,
)


def run(arguments: list[str]) -> None:
    usage = "eval MODEL_OR_RUN [BENCHMARK | FILE ...]"
    names, arguments = names_or_help(EvalOptions, arguments, usage, HELP)
    if not names:
        raise UserError("eval needs a model or the folder of a run: qerl eval MODEL_OR_RUN [BENCHMARK ...]")
    arguments = expand(arguments, SHORT)
    source, files = names[0], [name for name in names[1:] if is_rows_file(name)]
    benchmarks = parse_benchmarks(name for name in names[1:] if name not in files)
    set_options = names_of(arguments)
    task_options = [long for long in SHORT.values() if long in set_options]
    of_task = [option for option in set_options if option.startswith("--task.")]
    require(
        not (benchmarks and not files and of_task),
        f"eval: {' and '.join(of_task)} is for a file of your own; a named benchmark has its own",
    )
    of_split = [option for option in set_options if option in _OF_SPLITS]
    require(not (files and of_split), f"eval: {' and '.join(of_split)}: a FILE is evaluated whole")
    require(
        bool(names[1:]) or "--template" not in set_options,
        "eval: --template is for a benchmark or a FILE; for the run's own task give --task.template",
    )
    config = read_run_config(source)
    if config is not None:  # a folder from elsewhere must not lower this machine's guard
        code = dataclasses.replace(config.task.code, unsafe=False)
        config = dataclasses.replace(config, task=dataclasses.replace(config.task, code=code))
        config = with_start_day(config, Path(source))
    default = EvalOptions(model=ModelConfig(path=source)) if config is None else run_sampling(config)
    if benchmarks:
        default = paper_sampling(default)
    options = parse_options(EvalOptions, arguments, f"eval {source}", default, HELP)
    check_place(options.model.path)
    reads_own_task = bool(files) or not benchmarks
    require(
        config is not None or bool(names[1:] or of_task),
        f"eval {source} needs what to evaluate it on: one of {', '.join(BENCHMARKS)}, or a FILE of rows with"
        " --reward NAME; a run's folder has held-out rows of its own",
    )
    has_agent = config is not None and config.agent.function is not None
    require(
        not (has_agent and reads_own_task and "--task.rewards" not in task_options),
        f"eval: the rewards of {source} are its agent's, which eval does not run; the run's held-out figures"
        " are in its evaluations.json. Name a benchmark, or a FILE with --reward",
    )
    if config is not None and reads_own_task and not options.trust and "--task.rewards" not in task_options:
        from qerl.tracking.trust import check_started

        check_started(Path(source), config.task.rewards)
    sets = " ".join(names[1:]) or options.task.name
    announce(f"eval {source}: {sets}", sys.stderr)
    file_tasks = own_tasks(files, options)
    for task in [*benchmarks.values(), *file_tasks.values()]:
        check_file("", task.name)
    keeps_rewards = "--task.rewards" in task_options
    file_tasks = _checked(file_tasks, has_known=config is None, keeps_rewards=keeps_rewards)
    from rich.console import Console

    from qerl.eval.run import run_benchmarks

    for result in run_benchmarks(source, config, options, benchmarks, file_tasks, Console(stderr=True)):
        print(json.dumps(rounded(result)))


def _checked(tasks: dict[str, TaskConfig], *, has_known: bool, keeps_rewards: bool) -> dict[str, TaskConfig]:
    """Return the tasks, with the template and the reward of the data sets whose files they are if has_known.
    Raise UserError for a mistake in a file's columns or in a reward, before torch is imported."""
    if has_known:
        notice = partial(announce, file=sys.stderr)
        tasks = {
            name: with_known_defaults(task, notice, keeps_rewards=keeps_rewards)
            for name, task in tasks.items()
        }
    for task in tasks.values():
        check_task_files(task)
    return tasks


def own_tasks(files: list[str], options: EvalOptions) -> dict[str, TaskConfig]:
    """Return the task of each of the user's files, by its name without the ending."""
    template = options.template or options.task.template
    tasks = {
        Path(file).stem: dataclasses.replace(options.task, name=file, template=template, held_out_split=None)
        for file in files
    }
    require(len(tasks) == len(files), f"eval: two files have the same name: {' '.join(files)}")
    return tasks


def run_sampling(config: RunConfig) -> EvalOptions:
    """Return the run's own task and sampling; eval/run.py reads the other sampling fields from its config."""
    return EvalOptions(
        model=config.model,
        max_tokens=config.sample.max_tokens,
        temperature=config.sample.temperature,
        top_p=config.sample.top_p,
        success_threshold=config.evaluate.success_threshold,
        seed=config.seed,
        task=config.task,
    )


def paper_sampling(options: EvalOptions) -> EvalOptions:
    """Sample as QeRL's evaluation does (arXiv 2510.11696, section 4).

    The paper does not give the number of samples per problem."""
    return dataclasses.replace(
        options, temperature=0.6, top_p=0.95, max_tokens=4096, num_samples=16, success_threshold=None
    )
