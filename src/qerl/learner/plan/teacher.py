"""The parts of the GPU memory that a teacher in the learner's process takes
(training/rollouts/teacher.py)."""

import dataclasses
import functools

from qerl.config import AdapterConfig, RunConfig
from qerl.learner.checkpoint import adapter_folder
from qerl.learner.plan.shapes import read_architecture
from qerl.models.architecture import Architecture
from qerl.models.peft.peft_reader import adapter_config


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedTeacher:
    """The properties of a teacher that determine its memory."""

    architecture: Architecture
    format: str | None
    """Format of its own weights; None if it shares the student's."""
    adapter: AdapterConfig | None
    """The adapter that the student's base wears for it."""


def planned_teacher(a: Architecture, config: RunConfig) -> PlannedTeacher | None:
    """Return the teacher of a run whose student has this architecture; None without one in this process."""
    distil = config.distil
    if not distil.is_on or distil.is_endpoint:
        return None
    found = _adapter_of(distil.teacher)
    if found is not None:
        return PlannedTeacher(a, None, found)
    format = distil.format or config.model.format
    if config.adapter.kind == "lora" and (distil.teacher, format) == (config.model.path, config.model.format):
        return PlannedTeacher(a, None, None)
    return PlannedTeacher(_architecture_of(distil.teacher), format, None)


@functools.cache
def _adapter_of(teacher: str) -> AdapterConfig | None:
    folder = adapter_folder(teacher)
    return None if folder is None else adapter_config(str(folder))


@functools.cache
def _architecture_of(teacher: str) -> Architecture:
    return read_architecture(teacher)
