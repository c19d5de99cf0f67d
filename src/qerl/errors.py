"""The exceptions that the command line prints as one line, and helpers for their messages."""

import contextlib
import difflib
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
_MIN_SECRET = 6  # characters; shorter values are ordinary words
_SHAPES = (
    (re.compile(r"(://)[^/\s@]+@"), r"\1***@"),
    (re.compile(r"(\bBearer\s+)[^\s\"']+", re.IGNORECASE), r"\1***"),
    (re.compile(r"\b(hf_|sk-|ghp_|github_pat_|glpat-|xox[abp]-|AKIA)[\w-]{12,}"), r"\1***"),
)


class UserError(Exception):
    """A mistake of the user; exit code 2. Say what and where: `engine.kv_cache_gb must be positive, got -1`.

    Not a ValueError: tyro would catch it when a config is built and print it in a box.
    """

    def __init__(self, message: str):
        super().__init__(printable(message))


@contextlib.contextmanager
def naming(place: object, kind: type[UserError] = UserError) -> Iterator[None]:
    """Put the place before the message of an error of this kind; it becomes a UserError."""
    try:
        yield
    except kind as error:
        raise UserError(f"{place}: {error}") from error


class RunError(RuntimeError):
    """A failure of the run that the user's command did not cause, such as a full disk; exit code 1."""

    def __init__(self, message: str):
        super().__init__(printable(message))


class StoppedAtOnce(SystemExit):
    """A signal ended a run before it could save its present step."""


def printable(text: str) -> str:
    """Replace line breaks and control characters by spaces: a message may quote a file with any content."""
    return "".join(c if c.isprintable() else " " for c in text)


def quantity(number: int, noun: str) -> str:
    """Return "1 row" or "2,000 rows"."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def require(condition: bool, message: str) -> None:
    """Raise UserError with the message unless the condition holds."""
    if not condition:
        raise UserError(message)


def check_platform() -> None:
    """Raise UserError on native Windows, which lacks fork, resource limits and file locks."""
    if sys.platform == "win32":
        raise UserError("qerl needs Linux or macOS; on Windows install it in WSL 2 (docs/hardware.md)")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean a or b?" with the closest known names, or "" if none is close."""
    matches = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(matches)}?" if matches else ""


def did_you_mean_folder(path: Path) -> str:
    """Like did_you_mean, for a missing folder: name a sibling of a similar name or, if the parent is no
    folder, the folder of this name in a parent of a similar name."""
    wrong, rest = (path, ()) if path.parent.is_dir() else (path.parent, (path.name,))
    try:
        near = [each.name for each in wrong.parent.iterdir() if each.joinpath(*rest).is_dir()]
    except OSError:
        return ""
    matches = difflib.get_close_matches(wrong.name, near, n=1)
    return f"; did you mean {wrong.with_name(matches[0]).joinpath(*rest)}?" if matches else ""


def did_you_mean_file(path: Path) -> str:
    """Like did_you_mean, for a missing file: name a file beside it of a similar name."""
    try:
        near = [each.name for each in path.parent.iterdir() if each.is_file()]
    except OSError:
        return ""
    matches = difflib.get_close_matches(path.name, near, n=1)
    return f"; did you mean {path.with_name(matches[0])}?" if matches else ""


def redact(text: str) -> str:
    """Replace keys, tokens and passwords by ***: values of environment variables with such names, passwords
    in URLs, and strings with the form of a well-known service's token."""
    for name, value in os.environ.items():
        if _NAME.search(name) and len(value) >= _MIN_SECRET:
            text = text.replace(value, "***")
    for shape, replacement in _SHAPES:
        text = shape.sub(replacement, text)
    return text
