"""Sampling by Ray workers."""

import dataclasses

from qerl.errors import require


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RayConfig:
    address: str | None = None
    """Address of a Ray cluster whose workers sample: HOST:PORT, auto, or local to start one here. None: the
    learner's process samples."""

    num_samplers: int = 1
    """Number of workers, each with its own GPU if the model is on one."""

    max_staleness: int = 0
    """How many steps ahead workers sample, and so by how many versions their policy is older."""

    def __post_init__(self):
        require(self.num_samplers > 0, f"ray.num_samplers must be positive, got {self.num_samplers}")
        require(self.max_staleness >= 0, f"ray.max_staleness must not be negative, got {self.max_staleness}")
