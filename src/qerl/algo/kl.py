"""The KL divergence to a reference policy, estimated from the sampled tokens.

    k3_t = exp(x_t) - x_t - 1        x_t = reference_t - logprob_t

The gradient of its mean is not that of the divergence unless each k3_t is multiplied by the ratio
exp(logprob_t - old_t) to the policy that sampled (DeepSeek-V3.2, arXiv 2512.02556, equation 7): KL_RATIOS.

Never negative, and unbiased for KL(policy || reference) if the policy sampled the tokens.
Source: Schulman, "Approximating KL divergence", 2020; a loss term since arXiv 2402.03300, equation 4.
"""

from collections.abc import Callable

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # exp(20) = 5e8 is still finite when squared in fp32


def k3(logprob_T: Tensor, reference_T: Tensor) -> Tensor:
    """Return one estimate per token, differentiable in logprob_T; constant beyond a log ratio of 20."""
    log_ratio_T = (reference_T.detach() - logprob_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    # expm1: near zero, where most tokens are, exp(x) - 1 in fp32 would keep none of x^2 / 2.
    return torch.expm1(log_ratio_T) - log_ratio_T


def _one(logprob_T: Tensor, old_T: Tensor) -> Tensor:
    return torch.ones_like(old_T)


def _ratio(logprob_T: Tensor, old_T: Tensor) -> Tensor:
    return (logprob_T - old_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


KL_RATIOS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k3": _one, "k3_unbiased": _ratio}
"""By algo.kl_estimator: (logprob_T, old_T) -> the factor of each k3_t, differentiable in logprob_T."""
