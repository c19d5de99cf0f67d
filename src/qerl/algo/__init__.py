"""Advantages, losses, importance weights, the noise schedule: pure functions."""
