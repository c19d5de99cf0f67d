"""Write the help of a command: its common options on one screen, or all of them.

An option's text is the string below its field, wrapped once, at the terminal's width.
"""

import ast
import dataclasses
import functools
import inspect
import re
import shutil
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import tyro

ALL = "--help-all"
FLAGS = ("-h", "--help", ALL)
_FEW = 12
"""A command with no more options shows all of them on its one screen."""
_MAX_NAME = 29
_REQUIRED = dataclasses.MISSING


@dataclasses.dataclass(frozen=True, slots=True)
class Help:
    """The contents of a command's help: --help shows the text and the common options."""

    text: str = ""
    """The command's purpose; a text that begins with "usage: " stands in place of the usage line."""

    common: dict[str, str] = dataclasses.field(default_factory=dict)
    """By option with what follows it, "--out FOLDER": its text, "" for the field's own. Empty: the options
    without a section."""

    short: dict[str, str] = dataclasses.field(default_factory=dict)
    """The fields of short options: {"--model": "--model.path"}."""

    more: str = ""
    """Lines before the options that only --help-all shows."""


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    name: str
    """learn.learning-rate; of a positional argument its placeholder, RUN."""

    value: str
    """Placeholder of the value: FLOAT; empty for a flag."""

    default: Any
    """dataclasses.MISSING if it must be given."""

    owner: type
    """The dataclass that has the field."""

    field: str
    """The field's name."""

    is_positional: bool = False

    @property
    def text(self) -> str:
        """The string below the field, on one line."""
        texts = (_texts_of(each).get(self.field) for each in self.owner.__mro__)
        return next((text for text in texts if text is not None), "")


def options_of(kind: type, default: Any = None, prefix: str = "") -> Iterator[Option]:
    """Yield the options of a dataclass, those of nested ones included, named as tyro names them.

    default: an instance with the default values; None: those of the class."""
    hints = get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        hint, extras = _split(hints[field.name])
        if tyro.conf.Suppress in extras:
            continue
        renamed = [getattr(each, "name", None) for each in extras]
        name = next((each for each in renamed if each is not None), field.name)
        name = prefix + name.replace("_", "-")
        value = getattr(default, field.name) if default is not None else _default_of(field)
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            nested = None if value is _REQUIRED else value
            yield from options_of(hint, nested, f"{name}." if name else "")
            continue
        is_positional = tyro.conf.Positional in extras
        if is_positional:
            name = next((m for each in extras if (m := getattr(each, "metavar", None))), name.upper())
        metavar = "" if is_positional else _value_of(hint)
        yield Option(name, metavar, value, kind, field.name, is_positional)


def help_text(kind: type, default: Any, usage: str, help: Help, *, shows_all: bool) -> str:
    """Return the help of a command with the options of this dataclass, for the terminal's width.

    usage: "qerl export", without arguments."""
    width = min(shutil.get_terminal_size().columns, 120)
    options = list(options_of(kind, default))
    places = "".join(f" {each.name}" for each in options if each.is_positional)
    head = help.text
    if not head.startswith("usage: "):
        head = f"usage: {usage}{places} [OPTIONS]\n\n{head}"
    lines = [head.strip(), ""]
    if shows_all or len(options) <= _FEW:
        more = [help.more.strip("\n"), ""] if shows_all and help.more else []
        return "\n".join([*lines, *more, *_all_lines(options, width)])
    common = help.common or {f"--{each.name}": "" for each in options if "." not in each.name}
    by_name = {f"--{each.name}": each for each in options}
    for label, text in common.items():
        name = label.partition(" ")[0]
        lines.append(_common_line(label, text, by_name.get(help.short.get(name, name)), width))
    return "\n".join([*lines, "", f"{ALL} lists all {len(options)} options."])


def _common_line(label: str, text: str, option: Option | None, width: int) -> str:
    """Return an option's one line: name, the first sentence of its text or its choices, default."""
    default = ""
    if option is not None:
        value = option.value.removeprefix("None|")
        if choices := re.search(r"\{(.*)\}", value):
            value = value.replace(choices[0], "NAME")
            text = text or choices[1].replace(",", ", ")
        label = label if " " in label else f"{label} {value}".rstrip()
        text = text or option.text.partition(". ")[0].partition("; ")[0].rstrip(".")
        default = _default_text(option.default, long=False)
    head = f"  {label:{_MAX_NAME - 2}} "
    room = max(width - len(head) - len(default), 8)
    return f"{head}{textwrap.shorten(text, room, placeholder=' ...')}{default}"


def _all_lines(options: list[Option], width: int) -> Iterator[str]:
    """Yield the lines of all options, a heading before each section."""
    section = None
    for option in options:
        here = option.name.rpartition(".")[0] if not option.is_positional else ""
        if section is not None and here != section:
            yield ""
            yield f"{here}:" if here else "others:"
        section = here
        name = option.name if option.is_positional else f"--{option.name} {option.value}".rstrip()
        if isinstance(option.default, bool):
            head, _, last = option.name.rpartition(".")
            name += f", --{head}{'.' if head else ''}no-{last}"
        yield f"  {name}"
        text = option.text + _default_text(option.default, long=True)
        yield textwrap.fill(text, width, initial_indent=" " * 6, subsequent_indent=" " * 6)


def _default_text(default: Any, *, long: bool) -> str:
    """Return " (default: 16)" or " (16)"; "" for an option that is off or empty where the text is short."""
    if default is _REQUIRED:
        return " (required)"
    if isinstance(default, tuple):
        shown = " ".join(map(str, _flat(default))) or "none"
    else:
        shown = repr(default) if default == "" else str(default)
    if long:
        return f" (default: {shown})"
    return "" if default is None or default is False or default in ((), "") else f" ({shown})"


def _flat(values: Any) -> Iterator[Any]:
    for each in values:
        if isinstance(each, tuple):
            yield from _flat(each)
        else:
            yield each


def _value_of(hint: Any) -> str:
    """Return the placeholder of an option's value: INT, {bf16,fp32}, None|FLOAT, [STR ...]; "" for a flag."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return "{" + ",".join(map(str, inner)) + "}"
    if origin in (Union, types.UnionType):
        return "|".join(
            ["None"] * (type(None) in inner)
            + [_value_of(each) for each in inner if each not in (type(None), bool)]
        )
    if origin is tuple:
        parts = [_value_of(each) for each in inner if each is not ...]
        return f"[{' '.join(parts)} ...]" if ... in inner else " ".join(parts)
    return {bool: "", int: "INT", float: "FLOAT", str: "STR", Path: "PATH"}[hint]


def _split(hint: Any) -> tuple[Any, list[Any]]:
    """Return a type and what Annotated says about it."""
    if get_origin(hint) is not Annotated:
        return hint, []
    inner, *extras = get_args(hint)
    return inner, extras


def _default_of(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


@functools.cache
def _texts_of(owner: type) -> dict[str, str]:
    """Return the string below each field in the source of a dataclass, on one line."""
    if not dataclasses.is_dataclass(owner):
        return {}
    body = next(iter(ast.parse(textwrap.dedent(inspect.getsource(owner))).body))
    assert isinstance(body, ast.ClassDef)
    texts = {}
    for here, below in zip(body.body, body.body[1:], strict=False):
        if isinstance(here, ast.AnnAssign) and isinstance(here.target, ast.Name):
            match below:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    texts[here.target.id] = " ".join(text.split())
    return texts
