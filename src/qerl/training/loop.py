"""The training loop: prompts -> samples -> rewards -> advantages -> update -> publish.

Everything else in this package is called from here.
"""

import dataclasses
from collections.abc import Callable

from qerl.aqn.aqn import AQN
from qerl.config import RunConfig
from qerl.errors import RunError
from qerl.learner.learner import Learner
from qerl.tracking import Journal, NullJournal, StepLog
from qerl.training.rollouts.rollout import Rollouts, drop_overlong
from qerl.types import RolloutEngine


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """The parts that a step works with."""

    rollouts: Rollouts
    engine: RolloutEngine
    learner: Learner
    aqn: AQN
    journal: Journal | NullJournal
    after_update: Callable[[int, StepLog], None]
    """(step, log): add what is measured beside the loop, such as held-out accuracy."""
    save: Callable[[int], bool]
    """(step): write a checkpoint if one is due; True if the run is to stop here."""


def run(config: RunConfig, parts: Parts, *, first_step: int) -> None:
    for step in range(first_step, config.num_steps):
        with parts.journal.step(step) as log:
            with parts.aqn.sampling(step) as sigma:
                groups = parts.rollouts.sample(step, log)
            log.samples(groups)
            with parts.aqn.learning(step), log.span("learn"):
                metrics = parts.learner.step(drop_overlong(config, groups))
            log.add(sigma=sigma, **metrics, **parts.aqn.observe(step, metrics))
            with log.span("publish"):
                parts.engine.publish(parts.learner.version)
            parts.after_update(step, log)
        check_mismatch(config, metrics)
        if parts.save(step):
            return


def check_mismatch(config: RunConfig, metrics: dict[str, float]) -> None:
    """Raise RunError if sampler and learner differ by more than max_mismatch; NaN exceeds every limit."""
    mismatch, limit = metrics.get("mismatch_abs", 0.0), config.max_mismatch
    if limit is not None and not mismatch <= limit:
        difference = f"sampler and learner differ by {mismatch:.3g} nats per token"
        raise RunError(f"{difference}, more than max_mismatch {limit}")
