"""Distil a teacher into an adapter, on the student's own samples, with or without a reward."""

import dataclasses

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
from qerl.cli.train import COMMON, SHORT, check_early, take_init_adapter, take_option
from qerl.config import NoiseConfig, RunConfig
from qerl.config.distil import DistilConfig
from qerl.config.effects import without_unused
from qerl.config.recipes import RECIPES, plain
from qerl.errors import UserError

USAGE = f"""\
usage: qerl distil RECIPE --teacher TEACHER [OPTIONS]
       qerl distil --task FILE --teacher TEACHER [--reward FILE.py:NAME] [OPTIONS]

{__doc__}

TEACHER is one of
  a PEFT adapter or a run of the student's model, which shares its weights: runs/demo
  another model: a folder, a .gguf file or a hub id, in --distil.format
  an OpenAI-compatible endpoint that echoes logprobs, as qerl serve: http://127.0.0.1:8000/v1
    (its key, if it needs one, in the environment variable QERL_TEACHER_KEY)

The fields are those of `qerl train`; those of the teacher and the loss begin with --distil.
A reward, if there is one, is measured but not learned from."""
_SHORT = SHORT | {"--teacher": "--distil.teacher"}
_OF_REWARDS = ("--agent FILE.py:NAME", "--env PACKAGE:NAME", "--noise.schedule NAME", "--algo.loss-type NAME")
HELP = Help(
    USAGE,
    {
        "--teacher TEACHER": "an adapter, a model or a URL, as above",
        "--distil.loss NAME": "or forward_kl, reverse_kl, jsd",
        "--distil.format FORMAT": "format of the teacher's weights",
        **{name: text for name, text in COMMON.items() if name not in _OF_REWARDS},
    },
    _SHORT,
)


def run(arguments: list[str]) -> None:
    if wants_help(arguments):
        parse_options(RunConfig, arguments, "distil", plain(), HELP)
    as_json, arguments = take_flag(arguments, "--json")
    name, default, options = _read(arguments)
    config = parse_options(RunConfig, options, f"distil {name}", default, HELP)
    config = without_unused(config, default, fields_of(options))
    model = f"{config.model.path} in {config.model.format}"
    announce_run(f"distil {config.distil.teacher} into {model}, {config.out}")
    check_early(config)
    from qerl.training.session import train  # imports torch and transformers, which takes seconds

    print_result(train(config), as_json=as_json)


def _read(arguments: list[str]) -> tuple[str, RunConfig, list[str]]:
    """Return the recipe's name, its config as a distillation, and the options that change it."""
    adapter, arguments = take_init_adapter(arguments)
    arguments = expand(arguments, _SHORT)
    teacher, arguments = take_option(arguments, "--distil.teacher", "an adapter, a model or a URL")
    if teacher is None:
        raise UserError("distil needs --teacher: an adapter, a run, a model or the URL of an endpoint")
    names, options = split_names(arguments)
    set_options = names_of(options)
    if len(names) > 1 or (not names and "--task.name" not in set_options):
        raise UserError("distil needs a recipe or your own prompts: qerl distil RECIPE, or --task FILE")
    recipe = RECIPES[check_recipe(names[0], RECIPES, "distil")]() if names else plain()
    has_reward = bool(names) or "--task.rewards" in set_options
    config = dataclasses.replace(
        recipe,
        out="runs/distil",
        distil=DistilConfig(teacher=teacher),
        noise=NoiseConfig(schedule="none"),
        adapter=adapter or recipe.adapter,
        task=recipe.task if has_reward else dataclasses.replace(recipe.task, rewards=()),
    )
    return names[0] if names else task_label(options), config, options
