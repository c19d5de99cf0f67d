"""Follow a run from outside, step by step, and ask it to save or to stop."""

import dataclasses
from typing import Protocol


@dataclasses.dataclass(frozen=True, slots=True)
class ObserverRequest:
    save: bool = False
    stop: bool = False
    """Save and end the run, which then counts as complete."""


class Observer(Protocol):
    @property
    def reads_checkpoints(self) -> bool:
        """True if `finished` must not be called before the checkpoint is on the disk."""
        return False

    def begin(self, first_step: int) -> None:
        """Called once the model is loaded and a checkpoint resumed."""

    def after_step(self, step: int, metrics: dict[str, float]) -> ObserverRequest:
        """metrics: those of the step so far, without durations."""
        return ObserverRequest()

    def finished(self, step: int, is_saved: bool) -> None:
        """Called after each step and the copy of the state for a checkpoint that may follow it."""


class NullObserver(Observer):
    """Asks for nothing."""
