"""Learning: packing, updates, checkpoints, the memory plan."""

from qerl.learner.learner import Learner

__all__ = ["Learner"]
