"""A training run: the loop, its rollouts, and what surrounds it."""
