"""Learns from samples: packing, updates, checkpoints."""

from qerl.learner.learner import Learner

__all__ = ["Learner"]
