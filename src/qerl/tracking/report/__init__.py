"""A run, or several beside each other, as one HTML page that needs nothing else."""

from qerl.tracking.report.page import write_report

__all__ = ["write_report"]
