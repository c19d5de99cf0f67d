"""The sampling head, log-probabilities and divergences over the vocabulary."""
