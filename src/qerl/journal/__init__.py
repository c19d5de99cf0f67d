"""The run's record: files that survive being killed, loggers, and what the console shows."""

from qerl.journal.journal import Journal, StepLog
from qerl.journal.metric import TIMING_KEYS, is_timing
from qerl.journal.silent import Silent

__all__ = ["TIMING_KEYS", "Journal", "Silent", "StepLog", "is_timing"]
