"""Sampling engine: continuous batching over a paged KV cache, on the learner's own decoder."""

from qerl.engine.live_batch import LiveBatch, LiveRequest
from qerl.engine.local_engine import LocalEngine, TokenCallback
from qerl.engine.paged_engine import PagedEngine
from qerl.engine.stats import Stats

__all__ = ["LiveBatch", "LiveRequest", "LocalEngine", "PagedEngine", "Stats", "TokenCallback"]
