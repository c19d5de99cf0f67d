"""The noise of the sampling policy: a fixed schedule, or a rule that steers sigma by what it does."""

import dataclasses
from typing import Literal

from qerl.errors import require


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ControlConfig:
    """Read where noise.schedule is adaptive or plappert."""

    measure: Literal["kl", "entropy"] = "kl"
    """What is steered, in nats a token. kl: k3 of KL(sampler || learner), less what the quiet steps showed of
    it. entropy: the sampling policy's."""

    target: float = 1e-2
    """Where the measure is to be."""

    gain: float = 0.2
    """adaptive: log sigma moves by gain times the log of target / measure, by gain at most in a step."""

    factor: float = 1.01
    """plappert: sigma is multiplied or divided by this in each step."""

    warmup_steps: int = 5
    """First steps, without noise: their mean KL is the floor of rounding and kernels."""

    sigma_min: float = 1e-4
    """Lower bound of sigma."""

    sigma_max: float = 1e-1
    """Upper bound of sigma."""

    def __post_init__(self):
        for name in ("target", "gain", "sigma_min"):
            value = getattr(self, name)
            require(value > 0, f"noise.control.{name} must be positive, got {value}")
        require(self.factor > 1, f"noise.control.factor must be over 1, got {self.factor}")
        require(
            self.warmup_steps >= 0,
            f"noise.control.warmup_steps must not be negative, got {self.warmup_steps}",
        )
        require(
            self.sigma_max >= self.sigma_min,
            f"noise.control.sigma_max must be at least sigma_min ({self.sigma_min}), got {self.sigma_max}",
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NoiseConfig:
    schedule: Literal[
        "exponential", "linear", "cosine", "logarithmic", "constant", "none", "adaptive", "plappert"
    ] = "exponential"
    """How sigma moves from sigma_start to sigma_end; none turns the noise off. adaptive and plappert start at
    sigma_start and steer it (noise.control)."""

    sigma_start: float = 1e-2
    """Standard deviation in the first noisy stage."""

    sigma_end: float = 5e-4
    """Standard deviation in the last stage."""

    num_stages: int = 10
    """Stages of equal length, as many as steps at most; the first has no noise but the quantization's own."""

    unit: Literal["absolute", "relative"] = "absolute"
    """absolute: sigma is in the norm weight's own units (the paper). relative: times each norm's RMS."""

    scope: Literal["step", "group", "sample"] = "step"
    """Who has a Z of its own: all samples of a step one (the paper), the samples of each prompt, or each
    sample of a group, from its second token on: its prompt is computed once for all, without noise."""

    noise_in: Literal["sampler", "both"] = "sampler"
    """sampler: only the sampling policy is noisy (the paper). both: the learner's forward too."""

    control: ControlConfig = ControlConfig()

    def __post_init__(self):
        require(self.num_stages >= 2, f"noise.num_stages must be at least 2, got {self.num_stages}")
        for name in ("sigma_start", "sigma_end"):
            value = getattr(self, name)
            require(value > 0, f"noise.{name} must be positive, got {value}")
        if self.is_steered:
            low, high = self.control.sigma_min, self.control.sigma_max
            require(
                low <= self.sigma_start <= high,
                f"noise.sigma_start must be in the control's bounds [{low}, {high}], got {self.sigma_start}",
            )
            require(
                self.control.measure != "kl" or self.noise_in == "sampler",
                "noise.control.measure kl needs noise.noise_in sampler: with noise in both there is no KL",
            )

    @property
    def is_steered(self) -> bool:
        """Whether sigma depends on what was measured."""
        return self.schedule in ("adaptive", "plappert")
