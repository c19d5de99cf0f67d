"""Losses of preferences: functions of what a policy and its reference give whole completions.

    c, r         log-ratio of a pair's chosen and rejected completion: the sum over its tokens of
                 policy logprob - reference logprob                |c|, |r|   its number of tokens
    d            f(c) - f(r), with f of f_divergence_type          S          the sigmoid, e = label_smoothing

    f            reverse_kl  u      forward_kl  1 - exp(-u)      js_divergence  log 2 + log S(u)
                 alpha_divergence   (exp((a - 1) u) - 1) / (a - 1)                      arXiv 2309.16240

    sigmoid      -log S(beta d)                                                         DPO, arXiv 2305.18290
    hinge        relu(1 - beta d)                                                       SLiC, arXiv 2305.10425
    ipo          (f(c) / |c| - f(r) / |r| - 1 / (2 beta))^2                              arXiv 2310.12036
    sigmoid_norm -log S(beta (f(c) / |c| - f(r) / |r|))
    robust       (-(1 - e) log S(beta d) + e log S(-beta d)) / (1 - 2 e)                 arXiv 2403.00409
    exo_pair     KL((S(beta d), S(-beta d)) || (1 - e, e))                               arXiv 2402.00856
    nca_pair     -log S(beta c) - log S(-beta c) / 2 - log S(-beta r) / 2                arXiv 2402.05369
    bco_pair     -log S(beta c) - log S(-beta r)                                         arXiv 2404.04656
    sppo_hard    (c - 1 / (2 beta))^2 + (r + 1 / (2 beta))^2                             arXiv 2405.00675
    aot          -(1 - e) log S(beta x) - e log S(-beta x), x = sorted policy differences - sorted reference
                 differences of the batch; aot_unpaired: x = sorted c - sorted r         arXiv 2406.05882
    apo_zero     1 - S(beta c) + S(beta r)         apo_down  S(beta c) + 1 - S(beta (c - r))  arXiv 2408.06266
    discopop     (1 - m) -log S(beta d) + m exp(-beta d), m = S(beta d / tau)            arXiv 2406.08414
    sft          -mean logprob of all chosen tokens of the batch

    kto          w (1 - S(beta (c - z))) of a desirable completion, w (1 - S(beta (z - r))) of an undesirable
                 one; z = max(0, mean log-ratio of completions of other prompts), a constant  arXiv 2402.01306
    apo_zero_unpaired   the same with w (1 - S(beta c)) and w S(beta r)

Each is a mean over the batch. These are the definitions of TRL 1.16; the tests compare with its code.
A loss depends on a completion's tokens through their sum alone, so its gradient is that of

    sum_i a_i * (sum of the logprobs of completion i),     a_i = d loss / d (that sum)

which is the policy gradient of the learner with advantages -a_i: `advantages`.
"""

import dataclasses
import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

from qerl.config import DpoConfig


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Completions:
    """Sums over the tokens of S completions, float64; of pairs P, each with the chosen one first, S = 2 P."""

    policy_S: Tensor
    reference_S: Tensor
    tokens_S: Tensor
    is_chosen_S: Tensor
    """The labels; of pairs true, false, true, false."""
    kl: float | None = None
    """KTO's z, at least 0; None where the loss has none."""

    @property
    def ratio_S(self) -> Tensor:
        return self.policy_S - self.reference_S


def preference_loss(completions: Completions, config: DpoConfig) -> Tensor:
    """Return the mean loss of the batch, differentiable in policy_S."""
    weights = config.loss_weights or (1.0,) * len(config.loss_type)
    if not config.is_paired:
        return weights[0] * _unpaired(completions, config).mean()
    pairs = _Pairs.of(completions, config)
    terms = [
        w * PAIR_LOSSES[name](pairs, config).mean() for name, w in zip(config.loss_type, weights, strict=True)
    ]
    return torch.stack(terms).sum()


def advantages(completions: Completions, config: DpoConfig) -> tuple[float, list[float]]:
    """Return the loss, and -d loss / d policy_S: the advantage of each completion's tokens, whose logprobs
    are to be summed."""
    policy_S = completions.policy_S.detach().requires_grad_()
    loss = preference_loss(dataclasses.replace(completions, policy_S=policy_S), config)
    (gradient_S,) = torch.autograd.grad(loss, policy_S)
    return loss.item(), (-gradient_S).tolist()


def preference_metrics(completions: Completions, config: DpoConfig) -> dict[str, float]:
    """Return TRL's metrics of the batch. A reward is beta times a completion's log-ratio; the accuracy is the
    share of pairs whose chosen completion has the higher one, which single completions do not have."""
    metrics, policy_S, reward_S = {}, completions.policy_S, config.beta * completions.ratio_S
    if (chosen_S := completions.is_chosen_S).any():
        metrics["rewards/chosen"] = reward_S[chosen_S].mean().item()
        metrics["logps/chosen"] = policy_S[chosen_S].mean().item()
    if (rejected_S := ~chosen_S).any():
        metrics["rewards/rejected"] = reward_S[rejected_S].mean().item()
        metrics["logps/rejected"] = policy_S[rejected_S].mean().item()
    if config.is_paired:
        metrics["rewards/accuracies"] = (reward_S[0::2] > reward_S[1::2]).double().mean().item()
    if completions.kl is not None:
        metrics["kl"] = completions.kl
    return with_margin(metrics)


def with_margin(metrics: dict[str, float]) -> dict[str, float]:
    """Return the metrics and, where both kinds of completions have a reward, its difference."""
    if not {"rewards/chosen", "rewards/rejected"} <= metrics.keys():
        return metrics
    return metrics | {"rewards/margins": metrics["rewards/chosen"] - metrics["rewards/rejected"]}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Pairs:
    """Values of P pairs; `score` is f of a log-ratio."""

    whole: Completions
    ratio_c: Tensor
    ratio_r: Tensor
    score_c: Tensor
    score_r: Tensor

    @classmethod
    def of(cls, completions: Completions, config: DpoConfig) -> "_Pairs":
        ratio_S = completions.ratio_S
        score_S = DIVERGENCES[config.f_divergence_type](ratio_S, config.f_alpha_divergence_coef)
        (ratio_c, ratio_r), (score_c, score_r) = _split(ratio_S), _split(score_S)
        return cls(whole=completions, ratio_c=ratio_c, ratio_r=ratio_r, score_c=score_c, score_r=score_r)

    @property
    def difference(self) -> Tensor:
        return self.score_c - self.score_r

    @property
    def mean_difference(self) -> Tensor:
        """The difference of the scores per token."""
        tokens_c, tokens_r = _split(self.whole.tokens_S)
        return self.score_c / tokens_c - self.score_r / tokens_r


def _split(values_S: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values of the chosen and of the rejected completions."""
    return values_S[0::2], values_S[1::2]


def _alpha(u_S: Tensor, alpha: float) -> Tensor:
    if abs(alpha - 1.0) < 1e-6:
        return u_S
    return (((alpha - 1.0) * u_S).clamp(max=80.0).exp() - 1.0) / (alpha - 1.0)


DIVERGENCES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "reverse_kl": lambda u_S, alpha: u_S,
    "forward_kl": lambda u_S, alpha: 1.0 - (-u_S).exp(),
    "js_divergence": lambda u_S, alpha: math.log(2.0) + logsigmoid(u_S),
    "alpha_divergence": _alpha,
}


def _sigmoid(pairs: _Pairs, config: DpoConfig) -> Tensor:
    return -logsigmoid(config.beta * pairs.difference)


def _hinge(pairs: _Pairs, config: DpoConfig) -> Tensor:
    return relu(1.0 - config.beta * pairs.difference)


def _ipo(pairs: _Pairs, config: DpoConfig) -> Tensor:
    return (pairs.mean_difference - 0.5 / config.beta).square()


def _sigmoid_norm(pairs: _Pairs, config: DpoConfig) -> Tensor:
    return -logsigmoid(config.beta * pairs.mean_difference)


def _robust(pairs: _Pairs, config: DpoConfig) -> Tensor:
    x, e = config.beta * pairs.difference, config.label_smoothing
    return (e * logsigmoid(-x) - (1.0 - e) * logsigmoid(x)) / (1.0 - 2.0 * e)


def _exo_pair(pairs: _Pairs, config: DpoConfig) -> Tensor:
    x, e = config.beta * pairs.difference, config.label_smoothing
    right = x.sigmoid() * (logsigmoid(x) - math.log1p(-e))
    return right + (-x).sigmoid() * (logsigmoid(-x) - math.log(e))


def _nca_pair(pairs: _Pairs, config: DpoConfig) -> Tensor:
    c, r = config.beta * pairs.ratio_c, config.beta * pairs.ratio_r
    return -logsigmoid(c) - 0.5 * logsigmoid(-c) - 0.5 * logsigmoid(-r)


def _bco_pair(pairs: _Pairs, config: DpoConfig) -> Tensor:
    return -logsigmoid(config.beta * pairs.ratio_c) - logsigmoid(-config.beta * pairs.ratio_r)


def _sppo_hard(pairs: _Pairs, config: DpoConfig) -> Tensor:
    return (pairs.ratio_c - 0.5 / config.beta).square() + (pairs.ratio_r + 0.5 / config.beta).square()


def _aot(pairs: _Pairs, config: DpoConfig) -> Tensor:
    policy_c, policy_r = _split(pairs.whole.policy_S)
    reference_c, reference_r = _split(pairs.whole.reference_S)
    return _smoothed((policy_c - policy_r).sort().values - (reference_c - reference_r).sort().values, config)


def _aot_unpaired(pairs: _Pairs, config: DpoConfig) -> Tensor:
    return _smoothed(pairs.ratio_c.sort().values - pairs.ratio_r.sort().values, config)


def _smoothed(difference: Tensor, config: DpoConfig) -> Tensor:
    x, e = config.beta * difference, config.label_smoothing
    return -(1.0 - e) * logsigmoid(x) - e * logsigmoid(-x)


def _apo_zero(pairs: _Pairs, config: DpoConfig) -> Tensor:
    return 1.0 - (config.beta * pairs.ratio_c).sigmoid() + (config.beta * pairs.ratio_r).sigmoid()


def _apo_down(pairs: _Pairs, config: DpoConfig) -> Tensor:
    difference = config.beta * (pairs.ratio_c - pairs.ratio_r)
    return (config.beta * pairs.ratio_c).sigmoid() + 1.0 - difference.sigmoid()


def _discopop(pairs: _Pairs, config: DpoConfig) -> Tensor:
    x = config.beta * pairs.difference
    share = (x / config.discopop_tau).sigmoid()
    return -logsigmoid(x) * (1.0 - share) + (-x).exp() * share


def _sft(pairs: _Pairs, config: DpoConfig) -> Tensor:
    chosen, tokens = _split(pairs.whole.policy_S)[0], _split(pairs.whole.tokens_S)[0]
    return -chosen.sum() / tokens.sum()


PAIR_LOSSES: dict[str, Callable[[_Pairs, DpoConfig], Tensor]] = {
    "sigmoid": _sigmoid,
    "hinge": _hinge,
    "ipo": _ipo,
    "exo_pair": _exo_pair,
    "nca_pair": _nca_pair,
    "robust": _robust,
    "bco_pair": _bco_pair,
    "sppo_hard": _sppo_hard,
    "aot": _aot,
    "aot_unpaired": _aot_unpaired,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
    "discopop": _discopop,
    "sft": _sft,
    "sigmoid_norm": _sigmoid_norm,
}


def _unpaired(completions: Completions, config: DpoConfig) -> Tensor:
    shift = 0.0 if completions.kl is None else completions.kl
    reward_S = config.beta * (completions.ratio_S - shift)
    loss_S = torch.where(completions.is_chosen_S, 1.0 - reward_S.sigmoid(), 1.0 - (-reward_S).sigmoid())
    return torch.where(completions.is_chosen_S, config.desirable_weight, config.undesirable_weight) * loss_S
