"""Sources of the samples of a step."""
