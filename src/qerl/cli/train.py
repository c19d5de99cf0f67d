"""Train a model with a recipe, or on your own data and reward."""

import dataclasses
import inspect
import textwrap
from collections.abc import Callable
from pathlib import Path

from qerl.cli.arguments import (
    announce_run,
    check_recipe,
    expand,
    fields_of,
    names_of,
    parse_options,
    split_names,
    task_label,
    wants_help,
)
from qerl.cli.help import Help
from qerl.cli.result import print_result, take_flag
from qerl.config import AdapterConfig, RunConfig
from qerl.config.effects import without_unused
from qerl.config.rates import rate_for
from qerl.config.recipes import METHODS, PAPER, RECIPES, plain
from qerl.config.task import is_environment_name
from qerl.errors import UserError, did_you_mean_folder, quantity, require
from qerl.tasks.rows.table import check_file

USAGE = """\
usage: qerl train RECIPE [OPTIONS]
       qerl train --task FILE --reward FILE.py:NAME --model MODEL [OPTIONS]
       qerl train --task FILE --agent FILE.py:NAME --model MODEL [OPTIONS]
       qerl train --env verifiers:NAME --model MODEL [OPTIONS]

Train a model with a recipe, or on your own data and reward.

recipes: {paper};
with one method each:
{methods}"""
_RECIPES = """\
recipes:
{paper}

recipes that run demo_long with one method each (docs/methods.md):
{methods}

short options:
  --model MODEL           same as --model.path
  --task FILE             same as --task.name
  --reward FILE.py:NAME   same as --task.rewards; several stand after one --reward
  --agent FILE.py:NAME    same as --agent.function: an agent that calls the model itself (docs/agent.md)
  --env PACKAGE:NAME      same as --task.name and --agent.function: an environment of verifiers or OpenEnv
  --ray ADDRESS           same as --ray.address
  --init-adapter FOLDER   continue from a PEFT adapter or a run's, with its rank, alpha and target modules
  --json                  print the result as one line of JSON

fields:"""
SHORT = {
    "--model": "--model.path",
    "--task": "--task.name",
    "--reward": "--task.rewards",
    "--agent": "--agent.function",
    "--ray": "--ray.address",
}
COMMON = {
    "--model MODEL": "folder, .gguf or hub id",
    "--task FILE": "file of rows, or a hub id",
    "--reward FILE.py:NAME": "function; or exact, numeric, math, code",
    "--agent FILE.py:NAME": "an agent that calls the model itself",
    "--env PACKAGE:NAME": "an environment of verifiers or OpenEnv",
    "--init-adapter FOLDER": "continue from an adapter or a run",
    "--out FOLDER": "the run; if it exists, it is resumed",
    "--num-steps": "steps: sample, then learn",
    "--num-prompts": "prompts per step",
    "--num-generations": "samples per prompt",
    "--sample.max-tokens": "longest sample, in tokens",
    "--sample.temperature": "divides the logits",
    "--learn.learning-rate": "own rows: by the model's size",
    "--learn.warmup-ratio": "share of the updates",
    "--adapter.rank": "rank of the LoRA adapter",
    "--model.format FORMAT": "nvfp4, mxfp4, nf4, fp8, int8 or bf16",
    "--noise.schedule NAME": "exploration by noise; none: off",
    "--algo.loss-type NAME": "grpo, dapo, dr_grpo, gspo, cispo, sapo",
    "--evaluate.num-prompts": "held-out problems; 0: none",
    "--evaluate.every": "steps between evaluations",
    "--checkpoint.every": "steps between checkpoints",
    "--seed": "seed of every random number",
    "--json": "print the result as one line of JSON",
}
"""Options that `--help` lists; all fields are in `--help-all`."""


def run(arguments: list[str]) -> None:
    if wants_help(arguments):
        parse_options(RunConfig, arguments, "train", plain(), train_help())
    as_json, arguments = take_flag(arguments, "--json")
    name, default, options = read_recipe(arguments, "train")
    config = parse_options(RunConfig, options, f"train {name}", default, train_help())
    config = without_unused(config, default, fields_of(options))
    assumed: list[str] = []
    if name.startswith("--task"):
        assumed = check_asked(config, options, "train")
        config, lines = with_rate(config, options)
        assumed += lines
    model, steps = f"{config.model.path} in {config.model.format}", quantity(config.num_steps, "step")
    reward = "" if config.agent.function else f", reward {' + '.join(config.task.rewards) or 'none'}"
    announce_run(f"train {name}: {model}{reward}, {steps}, {config.out}")
    for line in assumed:
        announce_run(line)
    check_early(config)
    if config.agent.function is None:
        from qerl.training.session import train
    else:
        from qerl.serve.agents import train_with_agent as train

    print_result(train(config), as_json=as_json)


def train_help() -> Help:
    """Return the help of `qerl train`; that of --help-all describes each recipe."""
    paper, methods = ", ".join(PAPER), textwrap.indent(textwrap.fill(", ".join(METHODS), 76), "  ")
    more = _RECIPES.format(paper=_list(PAPER), methods=_list(METHODS))
    return Help(USAGE.format(paper=paper, methods=methods), COMMON, SHORT, more)


def check_asked(config: RunConfig, options: list[str], command: str) -> list[str]:
    """Return a line for what is assumed of a run on one's own rows; raise UserError without a reward."""
    check_file("task.name", config.task.name)
    set_options = names_of(options)
    require(
        not {"--task.rewards", "--agent.function"}.isdisjoint(set_options),
        f"{command} --task {config.task.name} needs a reward: --reward FILE.py:FUNCTION, or one that compares"
        f" with the column {config.task.answer_column}: --reward exact, numeric, math or code"
        " (qerl sft imitates rows without a reward)",
    )
    if "--model.path" in set_options:
        return []
    return [f"assumed: the built-in model {config.model.path}; --model MODEL takes another one"]


def with_rate(config: RunConfig, options: list[str]) -> tuple[RunConfig, list[str]]:
    """Return the config with the learning rate for the model's size unless the options have one, and a line
    about it."""
    if "--learn.learning-rate" in names_of(options) or (rate_and_size := rate_for(config)) is None:
        return config, []
    rate, size = rate_and_size
    learn = dataclasses.replace(config.learn, learning_rate=rate)
    line = f"assumed: learn.learning_rate {rate:g}, as LoRA of {size}; --learn.learning-rate sets another one"
    return dataclasses.replace(config, learn=learn), [line]


def check_early(config: RunConfig) -> None:
    """Raise UserError for a mistake in files, columns or the model's place, before torch is imported, which
    takes seconds."""
    from qerl.models.checkpoint.model_place import check_place
    from qerl.tasks.early_checks import check_agent_file, check_sft_files, check_task_files

    is_rewarded, agent = config.agent.function is None, config.agent.function
    if config.sft.data:
        check_sft_files(config.sft, config.dpo)
    else:
        check_task_files(config.task, is_rewarded=is_rewarded)
    if agent is not None and not is_environment_name(agent):
        check_agent_file(agent)
    if not (Path(config.out) / "run.json").exists():
        check_place(config.model.path)  # a run that exists is complete or keeps its own base
    announce_run("importing torch and transformers")


def take_init_adapter(arguments: list[str]) -> tuple[AdapterConfig | None, list[str]]:
    """Return the config of --init-adapter's adapter, None without the option, and the other arguments."""
    folder, arguments = take_option(arguments, "--init-adapter", "the folder of a PEFT adapter or of a run")
    if folder is None:
        return None, arguments
    require(
        Path(folder).expanduser().exists(),
        f"--init-adapter {folder}: no such folder{did_you_mean_folder(Path(folder))}",
    )
    from qerl.learner.checkpoint import adapter_folder
    from qerl.models.peft.peft_reader import adapter_config

    return adapter_config(str(adapter_folder(folder) or folder)), arguments


def read_recipe(arguments: list[str], command: str) -> tuple[str, RunConfig, list[str]]:
    """Return the recipe's name, its config, and the options that change it, of a command that takes a run."""
    adapter, arguments = take_init_adapter(arguments)
    arguments = _take_env(expand(arguments, SHORT))
    name, recipe, options = _recipe(arguments, command)
    default = recipe()
    if adapter is not None:
        default = dataclasses.replace(default, adapter=adapter)
    return name, default, options


def _take_env(arguments: list[str]) -> list[str]:
    """Return the arguments with the two options that --env stands for."""
    name, arguments = take_option(arguments, "--env", "verifiers:NAME or openenv:PLACE")
    if name is None:
        return arguments
    if not is_environment_name(name):
        raise UserError(f"--env {name}: an environment is verifiers:NAME or openenv:PLACE")
    return [*arguments, f"--task.name={name}", f"--agent.function={name}"]


def _recipe(arguments: list[str], command: str) -> tuple[str, Callable[[], RunConfig], list[str]]:
    """Return the recipe's name, the recipe and the options."""
    names, options = split_names(arguments)
    has_task = any(argument.partition("=")[0] == "--task.name" for argument in options)
    if not names and has_task:
        return task_label(options), plain, options
    if len(names) > 1:
        raise UserError(f"{command} takes one recipe, got {' '.join(names)}; an option begins with --")
    if not names:
        raise UserError(
            f"{command} needs a recipe or your own data: qerl {command} RECIPE, or qerl {command} --task FILE"
            f" --reward FILE.py:FUNCTION; recipes: {', '.join(RECIPES)}"
        )
    return names[0], RECIPES[check_recipe(names[0], RECIPES, command)], options


def take_option(arguments: list[str], option: str, what: str) -> tuple[str | None, list[str]]:
    """Return the option's value, None if it is absent, and the other arguments. what: describes the value."""
    rest, value = [], None
    remaining = iter(arguments)
    for argument in remaining:
        name, equals, text = argument.partition("=")
        if name != option:
            rest.append(argument)
            continue
        value = text if equals else next(remaining, "")
        if not value or value.startswith("-"):
            raise UserError(f"{option} needs a value: {what}")
    return value, rest


def _list(recipes: dict[str, Callable[[], RunConfig]]) -> str:
    """Return a line for each recipe: its name and its docstring."""
    width = max(map(len, recipes)) + 2
    return "\n".join(f"  {name:{width}}{inspect.cleandoc(f.__doc__ or '')}" for name, f in recipes.items())
