"""What of a run Ray is asked for."""

import dataclasses

from qerl.errors import require


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RayConfig:
    address: str | None = None
    """Of a Ray cluster whose workers sample for the learner: HOST:PORT, auto, or local: one made here.
    None: the learner's own process samples."""

    num_samplers: int = 1
    """Workers that sample, each with a GPU of its own if the model is on one."""

    max_staleness: int = 0
    """Steps whose samples are drawn before they are learned from: so many versions they are old."""

    def __post_init__(self):
        require(self.num_samplers > 0, f"ray.num_samplers must be positive, got {self.num_samplers}")
        require(self.max_staleness >= 0, f"ray.max_staleness must not be negative, got {self.max_staleness}")
