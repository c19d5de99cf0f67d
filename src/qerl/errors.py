"""The two exceptions that the command line prints in one line, and what their texts go through."""

import difflib
import os
import re
from collections.abc import Iterable

_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
_LEAST_SECRET = 6  # characters; shorter values are words
_SHAPES = (
    (re.compile(r"(://)[^/\s@]+@"), r"\1***@"),
    (re.compile(r"(\bBearer\s+)[^\s\"']+", re.IGNORECASE), r"\1***"),
    (re.compile(r"\b(hf_|sk-|ghp_|github_pat_|glpat-|xox[abp]-|AKIA)[\w-]{12,}"), r"\1***"),
)


class UserError(Exception):
    """The user's to mend; exit code 2. Says what and where: `engine.kv_cache_gb must be positive, got -1`.

    No ValueError: tyro would catch it where a config is made, and draw a box around it.
    """

    def __init__(self, message: str):
        super().__init__(printable(message))


class RunError(RuntimeError):
    """The run cannot go on through no mistake in the command, such as a full disk; exit code 1."""

    def __init__(self, message: str):
        super().__init__(printable(message))


def printable(text: str) -> str:
    """One line, and nothing in it that a terminal obeys: a message may quote a file that holds anything."""
    return "".join(c if c.isprintable() else " " for c in text)


def require(holds: bool, message: str) -> None:
    """The user's mistake, in the message's words, unless it holds."""
    if not holds:
        raise UserError(message)


def near(name: str, known: Iterable[str]) -> str:
    """`; did you mean a or b?`, or nothing where nothing is near."""
    matches = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(matches)}?" if matches else ""


def redact(text: str) -> str:
    """Return the text with *** for every key, token and password: values of environment variables that are
    named like one, passwords in addresses, and strings shaped like a well-known service's token."""
    for name, value in os.environ.items():
        if _NAME.search(name) and len(value) >= _LEAST_SECRET:
            text = text.replace(value, "***")
    for shape, instead in _SHAPES:
        text = shape.sub(instead, text)
    return text
