"""Settings of a row of `qerl bench rollout`."""

import dataclasses

from qerl.cli.bench.schedule import Lengths


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RolloutCase:
    """Settings of a row."""

    shape: str
    provider: str
    lora_rank: int
    num_samples: int
    rows: int
    group_size: int
    prompt_tokens: int
    lengths: str
    median_tokens: int
    sigma: float
    max_tokens: int
    seed: int
    kv: str
    head: str
    kernels: str
    """As engine.kernels; the row has what the engine chose."""

    @property
    def lengths_S(self) -> list[int]:
        return Lengths(
            kind=self.lengths,
            median_tokens=self.median_tokens,
            sigma=self.sigma,
            max_tokens=self.max_tokens,
            seed=self.seed,
        ).of(self.num_samples)
