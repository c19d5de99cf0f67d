"""Learning from preferences: the loss over stored pairs, or over completions with a label."""

import dataclasses
from typing import Literal

from qerl.config.check import check_not_negative, check_positive
from qerl.errors import require

UNPAIRED = ("kto", "apo_zero_unpaired")
"""Losses of single completions with a label; the others are of pairs."""
OF_DIFFERENCE = ("sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop")
"""Losses of pairs that f_divergence_type changes."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DpoConfig:
    """`qerl dpo` sets it, the rows are those of `sft`; without a loss_type a run is not one of preferences.
    Names, meanings and defaults are those of TRL's DPOConfig and KTOConfig."""

    loss_type: tuple[
        Literal[
            "sigmoid",
            "hinge",
            "ipo",
            "exo_pair",
            "nca_pair",
            "robust",
            "bco_pair",
            "sppo_hard",
            "aot",
            "aot_unpaired",
            "apo_zero",
            "apo_down",
            "discopop",
            "sft",
            "sigmoid_norm",
            "kto",
            "apo_zero_unpaired",
        ],
        ...,
    ] = ()
    """sigmoid: DPO. kto and apo_zero_unpaired learn from completions with a label, the others from pairs.
    Several losses of pairs are added, with loss_weights. Formulas: algo/preference.py."""

    loss_weights: tuple[float, ...] = ()
    """Weight of each loss; none: 1."""

    beta: float = 0.1
    """Weight of the log-ratio to the reference: the smaller, the farther the policy may go from it."""

    label_smoothing: float = 0.0
    """Probability that a label is wrong, in robust, exo_pair, aot and aot_unpaired."""

    f_divergence_type: Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"] = "reverse_kl"
    """Divergence from the reference that stands in for the KL in losses of the difference."""

    f_alpha_divergence_coef: float = 0.5
    """Alpha of alpha_divergence."""

    discopop_tau: float = 0.05
    """Temperature of discopop's mixture."""

    desirable_weight: float = 1.0
    """Weight of completions with the label true in kto and apo_zero_unpaired."""

    undesirable_weight: float = 1.0
    """Weight of those with the label false."""

    order: Literal["random", "sequential"] = "random"
    """Order of the rows. random: drawn for each epoch, but for kto once, since its KL is that of completions
    of other rows of the batch. sequential: as they are stored."""

    def __post_init__(self):
        check_positive(self, "beta", "discopop_tau", prefix="dpo.")
        check_not_negative(self, "loss_weights", "desirable_weight", "undesirable_weight", prefix="dpo.")
        names, smoothing = self.loss_type, self.label_smoothing
        num_weights = len(self.loss_weights)
        require(
            num_weights in (0, len(names)),
            f"dpo.loss_weights must have a weight for each of {len(names)} losses, got {num_weights}",
        )
        unpaired = [name for name in names if name in UNPAIRED]
        is_alone = not unpaired or len(names) == 1
        require(is_alone, f"dpo.loss_type {', '.join(unpaired)} cannot be added to another loss")
        limit = 0.5 if "robust" in names else 1.0
        require(
            0 <= smoothing < limit,
            f"dpo.label_smoothing must be in [0, {limit:g}) with {', '.join(names)}, got {smoothing}",
        )
        has_smoothing = "exo_pair" not in names or smoothing > 0
        require(has_smoothing, "dpo.loss_type exo_pair needs dpo.label_smoothing above 0, such as 1e-3")
        others = [name for name in names if name not in (*OF_DIFFERENCE, "sft")]
        require(
            self.f_divergence_type == "reverse_kl" or not others,
            f"dpo.f_divergence_type {self.f_divergence_type} needs a loss of the difference"
            f" ({', '.join(OF_DIFFERENCE)}), got {', '.join(others)}",
        )

    @property
    def is_paired(self) -> bool:
        """True if the losses are of pairs."""
        return not set(self.loss_type) & set(UNPAIRED)

    @property
    def has_kl(self) -> bool:
        """True if the loss has KTO's estimate of the KL to the reference."""
        return "kto" in self.loss_type
