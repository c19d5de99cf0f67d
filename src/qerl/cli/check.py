"""Check the machine, and what a run needs, before it starts."""

import contextlib
import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated

import tyro

from qerl.cli.arguments import announce, expand, fields_of, names_of, names_or_help, parse_options
from qerl.cli.help import Help
from qerl.cli.train import COMMON, SHORT, check_asked, read_recipe, with_rate
from qerl.config import RunConfig
from qerl.config.effects import without_unused
from qerl.config.recipes import plain
from qerl.errors import RunError, UserError

DESCRIPTION = f"""{__doc__}

  qerl check                         the machine: Python, devices, kernels, the sandbox of programs
  qerl check --model MODEL           and a model
  qerl check RECIPE [--FIELD VALUE]  and the model, rows and reward of that run
  qerl check --task FILE --reward FILE.py:FUNCTION --model MODEL

RECIPE and all options but --speed and --json are those of `qerl train`. Nothing is written. If a part that
the run needs is broken, the exit code is 1 and the last line says what to do."""
HELP = Help(
    DESCRIPTION,
    {
        "--speed": "also sample for about ten seconds",
        **{name: text for name, text in COMMON.items() if name != "--json"},
        "--json": "print one JSON object instead of lines",
    },
    SHORT,
)
_MACHINE = ["python", "device", "kernels", "sandbox"]
_MODEL = ["model", "tokenizer"]
_RUN = ["out", "loggers", "functions", *_MODEL, "rows", "reward"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CheckOptions:
    speed: bool = False
    """Also load the model and sample for about ten seconds."""

    json: bool = False
    """Print one JSON object instead of lines."""

    run: Annotated[RunConfig, tyro.conf.arg(name="")] = dataclasses.field(default_factory=plain)
    """The run, with the fields of `qerl train`."""


def run(arguments: list[str]) -> None:
    names, fields = names_or_help(CheckOptions, arguments, "check [RECIPE]", HELP)
    options = expand(fields, SHORT)
    set_options = names_of(options)
    parts, name, default = list(_MACHINE), "this machine", plain()
    if names or "--task.name" in set_options:
        name, default, options = read_recipe(arguments, "check")
        parts += _RUN
    elif "--model.path" in set_options:
        name = "this machine and a model"
        parts += _MODEL
    checked = parse_options(CheckOptions, options, f"check {name}", CheckOptions(run=default), HELP)
    used = without_unused(checked.run, default, fields_of(options))
    checked = dataclasses.replace(checked, run=used)
    if checked.speed and "model" not in parts:
        raise UserError("check --speed needs a recipe or --model MODEL")
    if name.startswith("--task") and Path(checked.run.task.name).exists():  # a missing file is a finding
        check_asked(checked.run, options, "check")
        checked = dataclasses.replace(checked, run=with_rate(checked.run, options)[0])
    announce(f"check {name}", sys.stderr if checked.json else sys.stdout)
    _check(checked, [*parts, *["speed"] * checked.speed])


def _check(options: CheckOptions, parts: list[str]) -> None:
    """Print the findings; raise RunError with the first one that is broken."""
    from qerl.training.preflight import Preflight  # imports torch and transformers, which takes seconds

    findings = []
    with contextlib.ExitStack() as pool:
        for each in Preflight(options.run, pool).findings(parts):
            findings.append(each)
            if not options.json:
                print(f"{each.status:8}{each.part:10}{each.text}", flush=True)
    broken = [each for each in findings if each.status == "broken"]
    if options.json:
        print(json.dumps({"ok": not broken, "findings": list(map(dataclasses.asdict, findings))}))
    if broken:
        more = f" (and {len(broken) - 1} more)" if len(broken) > 1 else ""
        raise RunError(f"check: {broken[0].part} is broken: {broken[0].text}{more}")
