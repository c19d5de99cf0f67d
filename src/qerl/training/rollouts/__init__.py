"""Where the samples of a step come from."""
