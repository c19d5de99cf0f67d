"""The run's record: files that survive being killed, loggers, and what the console shows."""

from qerl.tracking.journal import Journal, StepLog
from qerl.tracking.metric_text import TIMING_KEYS, is_timing
from qerl.tracking.null_logger import NullJournal

__all__ = ["TIMING_KEYS", "Journal", "NullJournal", "StepLog", "is_timing"]
