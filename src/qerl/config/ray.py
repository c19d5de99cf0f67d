"""Sampling by Ray workers."""

import dataclasses

from qerl.config.check import check_not_negative, check_positive


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
        check_positive(self, "num_samplers", prefix="ray.")
        check_not_negative(self, "max_staleness", prefix="ray.")
