"""Parse the arguments of a command: names first, then the options of a dataclass."""

import itertools
from collections.abc import Iterable
from typing import TypeVar

import tyro

from qerl.errors import UserError, did_you_mean

Options = TypeVar("Options")


def parse_options(
    kind: type[Options],
    arguments: list[str],
    command: str,
    default: Options | None = None,
    description: str | None = None,
) -> Options:
    """Return the options; print help, with the description, and exit if --help is among the arguments."""
    prog = f"qerl {command}"
    if default is None:
        return tyro.cli(kind, args=arguments, prog=prog, description=description)
    return tyro.cli(kind, default=default, args=arguments, prog=prog, description=description)


def split_names(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Return the arguments before the first option, and the rest."""
    names = list(itertools.takewhile(lambda argument: not argument.startswith("-"), arguments))
    return names, arguments[len(names) :]


def wants_help(arguments: list[str]) -> bool:
    """True if help is asked for before any name is given."""
    return arguments[:1] in (["-h"], ["--help"])


def check_known(name: str, known: Iterable[str], kind: str) -> str:
    """Return the name; raise UserError with the nearest known names if it is unknown."""
    names = list(known)
    if name not in names:
        raise UserError(
            f"unknown {kind} {name}" + (did_you_mean(name, names) or f"; choose from {', '.join(names)}")
        )
    return name
