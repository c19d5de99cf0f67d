"""The same training job by qerl and by others: `python -m benchmarks peer`."""
