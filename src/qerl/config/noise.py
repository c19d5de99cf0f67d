"""Adaptive Quantization Noise: a fixed schedule of sigma, or a rule that controls it by its effect."""

import dataclasses
from typing import Literal

from qerl.config.check import check_not_negative, check_positive
from qerl.config.conflicts import check_conflicts
from qerl.errors import require


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ControlConfig:
    """Settings of noise.schedule adaptive and plappert."""

    measure: Literal["kl", "entropy"] = "kl"
    """The controlled quantity, in nats per token. kl: k3 of KL(sampler || learner), minus its mean over the
    warm-up steps. entropy: the entropy of the sampling policy."""

    target: float = 1e-2
    """Target of the measure."""

    gain: float = 0.2
    """adaptive: log sigma moves by gain * log(target / measure), by at most gain per step."""

    factor: float = 1.01
    """plappert: sigma is multiplied or divided by this in each step."""

    warmup_steps: int = 5
    """Number of first steps without noise. Their mean KL is what rounding and kernels cause."""

    sigma_min: float = 1e-4
    """Lower bound of sigma."""

    sigma_max: float = 1e-1
    """Upper bound of sigma."""

    def __post_init__(self):
        check_positive(self, "target", "gain", "sigma_min", prefix="noise.control.")
        check_not_negative(self, "warmup_steps", prefix="noise.control.")
        require(self.factor > 1, f"noise.control.factor must be greater than 1, got {self.factor}")
        require(
            self.sigma_max >= self.sigma_min,
            f"noise.control.sigma_max must be at least sigma_min ({self.sigma_min}), got {self.sigma_max}",
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NoiseConfig:
    schedule: Literal[
        "exponential", "linear", "cosine", "logarithmic", "constant", "none", "adaptive", "plappert"
    ] = "exponential"
    """Path of sigma from sigma_start to sigma_end; none turns noise off. adaptive and plappert start at
    sigma_start and control sigma (noise.control)."""

    sigma_start: float = 1e-2
    """Standard deviation in the first noisy stage."""

    sigma_end: float = 5e-4
    """Standard deviation in the last stage."""

    num_stages: int = 10
    """Number of stages of equal length, at most one per step; the first has no noise but the quantization's
    own."""

    unit: Literal["absolute", "relative"] = "absolute"
    """absolute: sigma is in the unit of the norm weights (the paper). relative: sigma is a fraction of each
    norm's RMS."""

    scope: Literal["step", "group", "sample"] = "step"
    """Granularity of the noise Z. step: one Z for all samples of a step, as in the paper's Algorithm 1; its
    text has a new Z in each forward pass. group: one for the samples of each prompt. sample: one for each
    sample, from its second token on; the prompt is computed once for all samples, without noise."""

    noise_in: Literal["sampler", "both"] = "sampler"
    """sampler: only the sampling policy has noise (the paper). both: the learner's forward pass too."""

    router: bool = True
    """Mixtures of experts: true: the router reads the norm with its noise, so noise changes which experts are
    chosen. false: the router reads the norm without noise."""

    control: ControlConfig = ControlConfig()

    def __post_init__(self):
        require(self.num_stages >= 2, f"noise.num_stages must be at least 2, got {self.num_stages}")
        check_positive(self, "sigma_start", "sigma_end", prefix="noise.")
        if self.is_controlled:
            low, high = self.control.sigma_min, self.control.sigma_max
            require(
                low <= self.sigma_start <= high,
                f"noise.sigma_start must be within noise.control's bounds [{low}, {high}],"
                f" got {self.sigma_start}",
            )
        check_conflicts(self, "noise")

    @property
    def is_controlled(self) -> bool:
        """True if sigma depends on measurements."""
        return self.schedule in ("adaptive", "plappert")
