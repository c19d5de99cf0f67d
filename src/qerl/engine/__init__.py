"""Sampling engine: continuous batching over a paged KV cache, on the learner's own decoder."""

from qerl.engine.engine import Engine, TokenCallback
from qerl.engine.generation import Stats

__all__ = ["Engine", "Stats", "TokenCallback"]
