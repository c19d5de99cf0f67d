"""Parse the arguments of a command: names first, then the options of a dataclass."""

import contextlib
import difflib
import importlib.util
import io
import itertools
import os
import re
import sys
from collections.abc import Iterable
from typing import Any, TextIO, TypeVar

import tyro

from qerl.cli.foreign_options import foreign_hint
from qerl.cli.help import ALL, FLAGS, Help, help_text, options_of
from qerl.config.task import ROW_FILES
from qerl.errors import UserError, did_you_mean, redact, require

Options = TypeVar("Options")
_NO_NUMBER = r"Error parsing (--\S+): (?:invalid literal for (int)\b.*?|could not convert string to float):"
_NO_VALUE = r"Missing value for argument '(\S+)'\. Expected 1 values"
_MISSING = r"Missing from (.*?): (.*)"  # then each argument with its help
_NO_NUMBER_OR_NONE = r"Error parsing (--\S+): no type matching \{None\}\|(INT|FLOAT) .*? from \[(.*?)\]\..*"


def parse_options(
    kind: type[Options],
    arguments: list[str],
    command: str,
    default: Options | None = None,
    help: Help | str | None = None,
    program: str = "qerl",
) -> Options:
    """Return the options; print help and exit if --help or --help-all is among the arguments.
    Raise UserError with one line, made of what tyro says, for a mistake."""
    check_options(kind, arguments)
    prog = f"{program} {command}"
    if not {*FLAGS}.isdisjoint(arguments):
        help = help if isinstance(help, Help) else Help(help or "")
        print(help_text(kind, default, prog, help, shows_all=ALL in arguments))
        raise SystemExit(0)
    defaults: dict[str, Any] = {} if default is None else {"default": default}
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            options = tyro.cli(kind, **defaults, args=arguments, prog=prog, add_help=False)
    except SystemExit as stop:
        if stop.code == 2:
            text = _one_line(said.getvalue())
            if "invalid choice 'gguf'" in text:
                text += "; --as gguf-ready writes what llama.cpp's convert_hf_to_gguf.py reads"
            raise UserError(text) from None
        raise
    sys.stderr.write(said.getvalue())
    return options


def _one_line(box: str) -> str:
    """Return the message in one of tyro's boxes, without what stands below its first rule. A box in ASCII,
    for a terminal without UTF-8, has its title as text above a rule."""
    lines = [line.strip("\u2502 ") for line in box.splitlines() if not line.startswith(("\u256d", "\u2570"))]
    runs = itertools.groupby(lines, lambda line: bool(line) and not line.strip("\u2500-"))
    parts = [" ".join(filter(None, run)) for is_rule, run in runs if not is_rule]
    text = parts[: 1 if "\u256d" in box else 2][-1].rstrip(".")
    text = re.sub(_NO_NUMBER, lambda m: f"{m[1]} must be {'an integer' if m[2] else 'a number'}, got", text)
    text = re.sub(_NO_VALUE, r"\1 needs a value", text)
    kinds = {"INT": "an integer", "FLOAT": "a number"}
    text = re.sub(_NO_NUMBER_OR_NONE, lambda m: f"{m[1]} must be {kinds[m[2]]} or None, got {m[3]}", text)
    if missing := re.fullmatch(_MISSING, text):
        each = re.findall(r"(\S+) (.*?)\.? \(required\)", missing[2])
        needed = [f"{name} ({what[:1].lower()}{what[1:]})" for name, what in each]
        text = f"{missing[1].removeprefix('qerl ')} needs {' and '.join(needed)}"
    return text + "; --help lists the options"


def split_names(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Return the arguments before the first option, and the rest."""
    names = list(itertools.takewhile(lambda argument: not argument.startswith("-"), arguments))
    return names, arguments[len(names) :]


def wants_help(arguments: list[str]) -> bool:
    """True if the command has no argument before --help or --help-all."""
    return arguments[:1] in [[flag] for flag in FLAGS]


def names_or_help(
    kind: type, arguments: list[str], usage: str, help: Help | str | None
) -> tuple[list[str], list[str]]:
    """Return the arguments before the first option, and the rest; print help and exit if it comes first."""
    if wants_help(arguments):
        parse_options(kind, arguments, usage, help=help)
    return split_names(arguments)


def announce(text: str, file: TextIO) -> None:
    """Print the first line of a command at once: the imports and files that follow take seconds."""
    print(redact(text), file=file, flush=True)


def announce_run(text: str) -> None:
    """Print the first line of a run at once, on the first rank of a torchrun."""
    if is_first_rank():
        announce(text, sys.stdout)


def is_first_rank() -> bool:
    """True but in a torchrun's other ranks."""
    return os.environ.get("RANK", "0") == "0"


def expand(arguments: Iterable[str], short: dict[str, str]) -> list[str]:
    """Return the arguments with long options in place of short ones: --task=FILE -> --task.name=FILE.
    The last value of a repeated option counts; both spellings and a second --reward raise UserError."""
    parts = [argument.partition("=") for argument in arguments]
    names = [name for name, _, _ in parts]
    for name, long in short.items():
        require(not {name, long} <= set(names), f"{name} and {long} are the same option: give one of them")
    require(names.count("--reward") < 2, "--reward is given twice: name all after one, as --reward A B")
    return [short.get(name, name) + equals + value for name, equals, value in parts]


def check_server_packages(command: str) -> None:
    """Raise UserError if what a server needs is not installed."""
    if missing := [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]:
        raise UserError(f"{command} needs {' and '.join(missing)}: pip install {' '.join(missing)}")


def names_of(options: Iterable[str]) -> list[str]:
    """Return the names of the options that are set: ["--task.name"]."""
    names = (option.partition("=")[0].replace("_", "-") for option in options if option.startswith("--"))
    return list(dict.fromkeys(names))


def fields_of(options: Iterable[str]) -> list[str]:
    """Return the fields that the options set: ["task.name"]."""
    return [name.removeprefix("--").replace("-", "_") for name in names_of(options)]


def check_known(name: str, known: Iterable[str], kind: str) -> str:
    """Return the name; raise UserError with the nearest known names if it is unknown."""
    names = list(known)
    if name not in names:
        hint = did_you_mean(name, names) or f"; choose from {', '.join(names)}"
        raise UserError(f"unknown {kind} {name}{hint}")
    return name


def check_recipe(name: str, known: Iterable[str], command: str) -> str:
    """Return the name; raise UserError if it is no recipe. For a file of rows the error names --task."""
    if name not in known and name.endswith(ROW_FILES):
        raise UserError(f"{name} is a file, not a recipe; to use its rows: qerl {command} --task {name}")
    return check_known(name, known, "recipe")


def task_label(options: list[str]) -> str:
    """Return "--task FILE" with the file that the options name."""
    for option, following in zip(options, [*options[1:], ""], strict=True):
        name, equals, value = option.partition("=")
        if name == "--task.name":
            return f"--task {value if equals else following}"
    return "--task FILE"


def check_options(kind: type, arguments: Iterable[str]) -> None:
    """Raise UserError with the nearest options for one that the dataclass does not have."""
    known = {f"--{option.name}" for option in options_of(kind)} | {"--help", ALL}
    for argument in arguments:
        option = argument.partition("=")[0].replace("_", "-")
        if option.startswith("--") and " " not in option and not option.startswith("--tyro-"):
            section, _, last = option.rpartition(".")
            last = last.removeprefix("no-")
            positive = f"{section}.{last}" if section else option.replace("--no-", "--", 1)
            if option not in known and positive not in known:
                nearest = nearest_options(option, sorted(known))
                hint = foreign_hint(option, known) or (
                    f"; did you mean {' or '.join(nearest)}?" if nearest else "; --help lists them"
                )
                raise UserError(f"unknown option {option}{hint}")


def nearest_options(option: str, known: list[str]) -> list[str]:
    """Return up to three options: --learn.lr -> --learn.learning-rate, whose initials are lr."""
    section, _, last = option.removeprefix("--").rpartition(".")

    def end(name: str) -> str:
        return name.removeprefix("--").rpartition(".")[2]

    def has_initials(name: str) -> bool:
        return last == "".join(word[0] for word in end(name).split("-") if word)

    def is_short_for(name: str) -> bool:
        return has_initials(name) or last in end(name).split("-") or end(name).startswith(last)

    short = sorted(filter(is_short_for, known), key=lambda name: (not has_initials(name), len(name)))
    in_section = [name for name in short if section and name.startswith(f"--{section}.")]
    return (in_section or short or difflib.get_close_matches(option, known, n=3, cutoff=0.6))[:3]
