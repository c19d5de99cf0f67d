"""The folder for what is fetched, compiled or measured once on a machine."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return $QERL_CACHE, by default ~/.cache/qerl. It need not exist."""
    return Path(os.environ.get("QERL_CACHE") or "~/.cache/qerl").expanduser()
