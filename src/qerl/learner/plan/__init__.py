"""Predict the GPU memory of a training step before a model is loaded: its parts, its peak, and what fits."""
