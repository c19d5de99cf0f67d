"""Takes keys, tokens and passwords out of text that is shown or kept."""

import os
import re

_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
_LEAST_SECRET = 6  # characters; shorter values are words
_SHAPES = (
    (re.compile(r"(://)[^/\s@]+@"), r"\1***@"),
    (re.compile(r"(\bBearer\s+)[^\s\"']+", re.IGNORECASE), r"\1***"),
    (re.compile(r"\b(hf_|sk-|ghp_|github_pat_|glpat-|xox[abp]-|AKIA)[\w-]{12,}"), r"\1***"),
)


def without_secrets(text: str) -> str:
    """The text without keys and passwords of the environment, such as are written into an address, and what
    has the shape of a well-known service's token."""
    for name, value in os.environ.items():
        if _NAME.search(name) and len(value) >= _LEAST_SECRET:
            text = text.replace(value, "***")
    for shape, instead in _SHAPES:
        text = shape.sub(instead, text)
    return text
