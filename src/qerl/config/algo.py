"""From rewards to a loss: advantage, policy loss, off-policy correction."""

import dataclasses
from typing import Literal

from qerl.config.check import check_not_negative, check_positive
from qerl.config.conflicts import check_conflicts
from qerl.errors import require


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SapoConfig:
    """Settings of algo.loss_type sapo."""

    temperature_positive: float = 1.0
    """Steepness of the gate for tokens with a positive advantage."""

    temperature_negative: float = 1.05
    """Steepness of the gate for tokens with a negative advantage, whose gradient raises every other token."""

    def __post_init__(self):
        check_positive(self, "temperature_positive", "temperature_negative", prefix="algo.sapo.")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MaspoConfig:
    """Settings of algo.loss_type maspo."""

    width: float = 1.0
    """Width of the weight around ratio 1 for a token of probability 1, and its lower bound."""

    alpha: float = 0.3
    """Unlikely tokens may move farther: the width is divided by their old probability to this power."""

    beta_high: float = 0.03
    """Growth of the width with a positive advantage."""

    beta_low: float = 0.03
    """Shrinkage of the width with a negative advantage."""

    def __post_init__(self):
        check_positive(self, "width", prefix="algo.maspo.")
        check_not_negative(self, "alpha", "beta_high", "beta_low", prefix="algo.maspo.")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DeepConfig:
    """Settings of algo.branching deep."""

    num_branches: int = 8
    """Number of branches from each pivot; each failed sample has one pivot."""

    gamma: float = 2.0
    """A pivot's odds grow with the share of the sample before it, to this power."""

    weight: float = 1.0
    """The branches' loss is multiplied by this and added to the samples' loss."""

    segment_tokens: int = 50
    """Pivots lie at multiples of this many tokens."""

    failure_reward: float = 0.0
    """A sample with this reward or less has failed."""

    def __post_init__(self):
        for name, minimum in (("num_branches", 2), ("segment_tokens", 1), ("gamma", 0), ("weight", 0)):
            value = getattr(self, name)
            require(value >= minimum, f"algo.deep.{name} must be at least {minimum}, got {value}")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AlgoConfig:
    advantage: Literal["group", "batch", "mean", "leave_one_out", "beta"] = "group"
    """group: (r - mean) / std. batch: the same with the std of all groups' rewards. mean: r - mean.
    leave_one_out: r - mean of the other samples. beta: r - mean, over a Beta density fitted to all groups'
    means (BNPO), for rewards in [0, 1]."""

    loss_type: Literal[
        "grpo", "dapo", "dr_grpo", "bnpo", "gspo", "gspo_token", "cispo", "sapo", "maspo", "nll"
    ] = "dapo"
    """grpo averages within each sample first, dapo over all tokens, bnpo over each group's tokens; dr_grpo
    divides by the constant max_tokens * samples. gspo and gspo_token use sequence-level ratios. cispo clips
    the weight instead of the gradient; sapo and maspo weight smoothly instead of clipping. nll
    has no ratio at all: REINFORCE, and the loss of `qerl sft`. docs/methods.md."""

    epsilon: float = 0.2
    """Lower clip range: the ratio is clipped at 1 - epsilon. About 3e-4 for gspo."""

    epsilon_high: float = 0.28
    """Upper clip range: the ratio is clipped at 1 + epsilon_high. About 4e-4 for gspo."""

    sapo: SapoConfig = SapoConfig()
    maspo: MaspoConfig = MaspoConfig()

    beta: float = 0.0
    """Weight of the KL penalty (k3) to the reference policy, the model without adapter; 0 skips its forward
    pass."""

    kl_estimator: Literal["k3", "k3_unbiased"] = "k3"
    """k3_unbiased: k3 times the ratio, whose gradient is the reverse KL's (DeepSeek-V3.2)."""

    importance: Literal[
        "truncated", "truncated_sequence", "masked", "masked_sequence", "icepop", "ratio", "none"
    ] = "truncated"
    """Correction for the sampler, with rho = learner before the update / sampler. truncated: min(rho, cap).
    masked: rho, 0 above cap. icepop: rho, 0 above cap or below floor. _sequence: rho is the product over the
    sample. ratio: PPO's ratio is learner / sampler itself. none: no correction."""

    importance_cap: float = 2.0
    """Largest weight."""

    importance_floor: float = 0.5
    """icepop: smallest weight."""

    reject: tuple[Literal["geometric", "veto"], ...] = ()
    """Samples whose tokens get weight 0. geometric: the geometric mean of rho is outside geometric_low to
    geometric_high. veto: some token's rho is below veto_ratio."""

    geometric_low: float = 0.99
    """geometric: smallest mean that is kept."""

    geometric_high: float = 1.01
    """geometric: largest mean that is kept."""

    veto_ratio: float = 1e-4
    """veto: a token this much less likely under the learner than under the sampler rejects its sample."""

    router_replay: bool = True
    """Mixtures of experts: true: the learner sends each token to the experts that the sampler sent it to, and
    computes only their weights (R3). false: the learner's own router chooses the experts."""

    branching: Literal["none", "deep"] = "none"
    """deep: failed samples are branched where another attempt may succeed, and each branch is compared with
    its siblings (DEEP-GRPO)."""

    deep: DeepConfig = DeepConfig()

    dynamic_sampling: bool = False
    """Sample more prompts until num_prompts groups have unequal rewards."""

    max_rounds: int = 10
    """Maximum number of rounds of dynamic sampling; the step then continues with the groups it has."""

    overlong: Literal["keep", "mask", "shape"] = "keep"
    """Samples truncated at max_tokens: kept, left out of the loss (mask), or penalized by length (shape,
    DAPO)."""

    overlong_buffer: int = 64
    """shape: the penalty falls from 0 to -1 over the last overlong_buffer tokens before max_tokens."""

    def __post_init__(self):
        check_positive(self, "epsilon", "epsilon_high", "overlong_buffer", prefix="algo.")
        check_positive(self, "importance_cap", "importance_floor", "veto_ratio", prefix="algo.")
        check_not_negative(self, "beta", prefix="algo.")
        require(
            self.importance != "icepop" or self.importance_floor < self.importance_cap,
            f"algo.importance_floor must be less than importance_cap ({self.importance_cap}),"
            f" got {self.importance_floor}",
        )
        require(
            0 < self.geometric_low < self.geometric_high,
            f"algo.geometric_low must be between 0 and geometric_high ({self.geometric_high}),"
            f" got {self.geometric_low}",
        )
        check_conflicts(self, "algo")
        require(self.max_rounds >= 1, f"algo.max_rounds must be at least 1, got {self.max_rounds}")
