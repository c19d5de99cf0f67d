from qerl.learner.learner import Learner

__all__ = ["Learner"]
