"""How rewards become a loss: the advantage, the policy loss, the correction for who drew the samples."""

import dataclasses
from typing import Literal

from qerl.errors import require


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SapoConfig:
    """Read where algo.loss_type is sapo."""

    temperature_positive: float = 1.0
    """How fast the gate closes on tokens with a positive advantage."""

    temperature_negative: float = 1.05
    """And on those with a negative one, whose gradient raises every other token."""

    def __post_init__(self):
        for name in ("temperature_positive", "temperature_negative"):
            value = getattr(self, name)
            require(value > 0, f"algo.sapo.{name} must be positive, got {value}")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MaspoConfig:
    """Read where algo.loss_type is maspo."""

    width: float = 1.0
    """Width of the weight around ratio 1 for a token of probability 1, and its lower bound."""

    alpha: float = 0.3
    """Unlikely tokens may move farther: the width is divided by their old probability to this power."""

    beta_high: float = 0.03
    """The width's growth with a positive advantage."""

    beta_low: float = 0.03
    """The width's fall with a negative advantage."""

    def __post_init__(self):
        require(self.width > 0, f"algo.maspo.width must be positive, got {self.width}")
        for name in ("alpha", "beta_high", "beta_low"):
            value = getattr(self, name)
            require(value >= 0, f"algo.maspo.{name} must not be negative, got {value}")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DeepConfig:
    """Read where algo.branching is deep."""

    num_branches: int = 8
    """Samples that go on from each pivot; each failed sample has one pivot."""

    gamma: float = 2.0
    """A pivot's odds grow with the share of the sample that lies before it, to this power."""

    weight: float = 1.0
    """The branches' loss is multiplied by it and added to the samples'."""

    segment_tokens: int = 50
    """A pivot lies after a multiple of so many tokens."""

    failure_reward: float = 0.0
    """A sample with this reward or less has failed."""

    def __post_init__(self):
        for name, least in (("num_branches", 2), ("segment_tokens", 1), ("gamma", 0), ("weight", 0)):
            value = getattr(self, name)
            require(value >= least, f"algo.deep.{name} must be at least {least}, got {value}")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AlgoConfig:
    advantage: Literal["group", "mean", "leave_one_out", "beta"] = "group"
    """group: (r - mean) / std. mean: r - mean. leave_one_out: r - mean of the siblings. beta: r - mean over a
    Beta density fitted to all groups' means (BNPO), for rewards from 0 to 1."""

    loss_type: Literal["grpo", "dapo", "dr_grpo", "bnpo", "gspo", "gspo_token", "cispo", "sapo", "maspo"] = (
        "dapo"
    )
    """grpo averages within each sample first, dapo over all tokens, bnpo over each group's, dr_grpo divides
    by the constant max_tokens * samples. gspo and gspo_token take the ratio of whole samples. cispo clips a
    weight and no gradient, sapo and maspo weigh smoothly instead of clipping. docs/methods.md."""

    epsilon: float = 0.2
    """The importance ratio is clipped below at 1 - clip_low. For gspo about 3e-4."""

    epsilon_high: float = 0.28
    """The importance ratio is clipped above at 1 + clip_high. For gspo about 4e-4."""

    sapo: SapoConfig = SapoConfig()
    maspo: MaspoConfig = MaspoConfig()

    beta: float = 0.0
    """Weight of the KL (k3) to the reference policy, the model without its adapter; 0 skips its forward."""

    importance: Literal[
        "truncated", "truncated_sequence", "masked", "masked_sequence", "icepop", "ratio", "none"
    ] = "truncated"
    """What tokens are weighed by, with rho = learner before the update / sampler. truncated: min(rho, cap).
    masked: rho, 0 beyond cap. icepop: rho, 0 beyond cap or under floor. _sequence: rho is the product over
    the sample. ratio: PPO's ratio is learner / sampler itself. none: no correction."""

    importance_cap: float = 2.0
    """The largest weight."""

    importance_floor: float = 0.5
    """icepop: the smallest weight."""

    reject: tuple[Literal["geometric", "veto"], ...] = ()
    """Samples whose tokens get weight 0. geometric: the geometric mean of rho lies outside geometric_low to
    geometric_high. veto: a token's rho lies under veto_ratio."""

    geometric_low: float = 0.99
    """geometric: the smallest mean that is kept."""

    geometric_high: float = 1.01
    """geometric: the largest mean that is kept."""

    veto_ratio: float = 1e-4
    """veto: a token this much less likely for the learner than for the sampler rejects its sample."""

    branching: Literal["none", "deep"] = "none"
    """deep: samples that failed are branched where another try may succeed, and each branch is compared with
    its siblings (DEEP-GRPO)."""

    deep: DeepConfig = DeepConfig()

    dynamic_sampling: bool = False
    """Sample more prompts until num_prompts groups have unequal rewards."""

    max_rounds: int = 10
    """Most rounds of dynamic sampling in a step; then the step goes on with what it has."""

    overlong: Literal["keep", "mask", "shape"] = "keep"
    """Samples cut at max_tokens: kept as they are, left out of the loss, or penalised by length (DAPO)."""

    overlong_buffer: int = 64
    """shape: the penalty grows from 0 to -1 over the last overlong_buffer tokens before max_tokens."""

    def __post_init__(self):
        clips = "epsilon", "epsilon_high", "importance_cap", "importance_floor", "veto_ratio"
        for name in (*clips, "overlong_buffer"):
            value = getattr(self, name)
            require(value > 0, f"algo.{name} must be positive, got {value}")
        require(
            self.importance != "icepop" or self.importance_floor < self.importance_cap,
            f"algo.importance_floor must be under importance_cap ({self.importance_cap}),"
            f" got {self.importance_floor}",
        )
        require(
            0 < self.geometric_low < self.geometric_high,
            f"algo.geometric_low must be from 0 to geometric_high ({self.geometric_high}),"
            f" got {self.geometric_low}",
        )
        require(self.beta >= 0, f"algo.beta must not be negative, got {self.beta}")
        require(
            self.branching == "none" or not self.dynamic_sampling,
            "algo.dynamic_sampling drops the groups that algo.branching is for: set one of them",
        )
        require(
            self.advantage != "beta" or self.overlong != "shape",
            "algo.advantage beta takes rewards from 0 to 1, and algo.overlong shape takes up to 1 off them",
        )
        require(self.max_rounds >= 1, f"algo.max_rounds must be at least 1, got {self.max_rounds}")
