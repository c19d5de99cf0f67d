"""Sampling engine: continuous batching over a paged KV cache, on the learner's own decoder."""

from qerl.engine.engine import Engine
from qerl.engine.generation import Stats
from qerl.engine.live_batch import LiveBatch, LiveRequest
from qerl.engine.sampling_engine import SamplingEngine, TokenCallback

__all__ = ["Engine", "LiveBatch", "LiveRequest", "SamplingEngine", "Stats", "TokenCallback"]
