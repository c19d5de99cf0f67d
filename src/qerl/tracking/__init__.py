"""Record a run: its files, its loggers, the console, the HTML report and the live dashboard."""

from qerl.tracking.journal import Journal, NullJournal
from qerl.tracking.metric_text import TIMING_KEYS, is_timing
from qerl.tracking.step_log import StepLog

__all__ = ["TIMING_KEYS", "Journal", "NullJournal", "StepLog", "is_timing"]
