"""The reward `judge`: a model rates samples, each alone or compared; behind an endpoint, or the run's own."""
