"""Tinker's losses of one sequence: a sum over its positions, so that gradients of any split add up.

    p_t = logprob of target t        q_t = inputs["logprobs"]        A_t = inputs["advantages"]
    r_t = exp(p_t - q_t)             c_t = clip(r_t, clip_low_threshold, clip_high_threshold)

    cross_entropy         -sum_t weights_t p_t                     weights 1 where they are not given
    importance_sampling   -sum_t r_t A_t
    ppo                   -sum_t min(r_t A_t, c_t A_t)             arXiv 1707.06347
    cispo                 -sum_t sg(c_t) p_t A_t                   arXiv 2506.13585
    dro                   -sum_t (p_t A_t - beta / 2 (p_t - q_t)^2)    arXiv 2405.19107

sg stops the gradient. These are the formulas of https://tinker-docs.thinkingmachines.ai/tinker/losses, which
neither average nor normalize. A loss that the client computes itself arrives as cross_entropy with weights
-d loss / d p_t. The gradients are compared with float64: tests/tinker_server/test_tinker_losses.py.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from qerl.errors import UserError, did_you_mean

Inputs = Mapping[str, Tensor]
LossConfig = Mapping[str, float]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TinkerLoss:
    objective: Callable[[Tensor, Inputs, LossConfig], Tensor]
    """(logprob_T, inputs, config) -> loss_T."""
    inputs: tuple[str, ...]
    """Arrays that a datum must have, besides target_tokens."""
    optional: tuple[str, ...] = ()
    defaults: LossConfig = dataclasses.field(default_factory=dict)
    """Entries of loss_fn_config."""


def _cross_entropy(logprob_T: Tensor, inputs: Inputs, config: LossConfig) -> Tensor:
    return -inputs["weights"] * logprob_T if "weights" in inputs else -logprob_T


def _importance_sampling(logprob_T: Tensor, inputs: Inputs, config: LossConfig) -> Tensor:
    return -_ratio(logprob_T, inputs) * inputs["advantages"]


def _ppo(logprob_T: Tensor, inputs: Inputs, config: LossConfig) -> Tensor:
    ratio_T, advantage_T = _ratio(logprob_T, inputs), inputs["advantages"]
    return -torch.minimum(ratio_T * advantage_T, _clip(ratio_T, config) * advantage_T)


def _cispo(logprob_T: Tensor, inputs: Inputs, config: LossConfig) -> Tensor:
    return -_clip(_ratio(logprob_T, inputs).detach(), config) * logprob_T * inputs["advantages"]


def _dro(logprob_T: Tensor, inputs: Inputs, config: LossConfig) -> Tensor:
    distance_T = (logprob_T - inputs["logprobs"]) ** 2
    return -(logprob_T * inputs["advantages"] - config["beta"] / 2 * distance_T)


def _ratio(logprob_T: Tensor, inputs: Inputs) -> Tensor:
    return (logprob_T - inputs["logprobs"]).exp()


def _clip(ratio_T: Tensor, config: LossConfig) -> Tensor:
    return ratio_T.clamp(config["clip_low_threshold"], config["clip_high_threshold"])


_POLICY = ("logprobs", "advantages")
LOSSES = {
    "cross_entropy": TinkerLoss(objective=_cross_entropy, inputs=(), optional=("weights",)),
    "importance_sampling": TinkerLoss(objective=_importance_sampling, inputs=_POLICY),
    "ppo": TinkerLoss(
        objective=_ppo,
        inputs=_POLICY,
        defaults={"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    ),
    "cispo": TinkerLoss(
        objective=_cispo,
        inputs=_POLICY,
        defaults={"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
    ),
    "dro": TinkerLoss(objective=_dro, inputs=_POLICY, defaults={"beta": 0.05}),
}


def loss_of(name: str, config: Mapping[str, float | str]) -> tuple[TinkerLoss, LossConfig]:
    """Return the loss and its whole config. Raise UserError for a loss or an entry that does not exist."""
    if name not in LOSSES:
        there_are = f"loss_fn must be one of {', '.join(LOSSES)}, got {name[:50]!r}"
        raise UserError(there_are + did_you_mean(name, LOSSES))
    loss = LOSSES[name]
    for key, value in config.items():
        if key not in loss.defaults:
            known = ", ".join(loss.defaults) or "none"
            raise UserError(f"loss_fn_config: {name} has no entry {key[:50]!r}; it has {known}")
        if not isinstance(value, float) or not math.isfinite(value) or value < 0:
            raise UserError(f"loss_fn_config: {key} must be a number from 0 on, got {value!r}"[:200])
    numbers = dict(loss.defaults) | {key: float(value) for key, value in config.items()}
    if numbers.get("clip_low_threshold", 0) > numbers.get("clip_high_threshold", 0):
        low, high = numbers["clip_low_threshold"], numbers["clip_high_threshold"]
        raise UserError(f"loss_fn_config: clip_low_threshold {low} is above clip_high_threshold {high}")
    return loss, numbers
