"""Sampling engine: continuous batching over a paged KV cache, on the learner's own decoder."""

from qerl.engine.engine import Engine, TokenCallback
from qerl.engine.generation import Stats
from qerl.engine.live_batch import LiveBatch, LiveRequest

__all__ = ["Engine", "LiveBatch", "LiveRequest", "Stats", "TokenCallback"]
