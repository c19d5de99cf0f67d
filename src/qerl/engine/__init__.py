"""Sampling engine: continuous batching over a paged KV cache, on the learner's own decoder."""

from qerl.engine.engine import Engine
from qerl.engine.live_batch import LiveBatch, LiveRequest
from qerl.engine.sampling_engine import SamplingEngine, TokenCallback
from qerl.engine.stats import Stats

__all__ = ["Engine", "LiveBatch", "LiveRequest", "SamplingEngine", "Stats", "TokenCallback"]
