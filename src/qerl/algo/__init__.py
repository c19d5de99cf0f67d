"""Advantages, losses, off-policy correction, dynamic sampling, seeds: pure functions."""
