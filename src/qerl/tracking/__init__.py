"""Record a run: its files, its loggers, the console, the HTML report and the live dashboard."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qerl.tracking.journal import Journal, NullJournal
    from qerl.tracking.metric_text import TIMING_KEYS, is_timing
    from qerl.tracking.step_log import StepLog

__all__ = ["TIMING_KEYS", "Journal", "NullJournal", "StepLog", "is_timing"]
_MODULES = {"Journal": "journal", "NullJournal": "journal", "StepLog": "step_log"}
_MODULES |= {"TIMING_KEYS": "metric_text", "is_timing": "metric_text"}


def __getattr__(name: str) -> Any:
    """Import a name when it is first used: the journal imports torch, which takes seconds."""
    if name in _MODULES:
        return getattr(importlib.import_module(f"qerl.tracking.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'qerl.tracking' has no attribute {name!r}")
