"""Models that run with the code of transformers."""
