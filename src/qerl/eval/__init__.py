"""Named benchmarks: what `qerl eval` runs."""
