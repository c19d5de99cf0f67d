"""Sample one token from each row of logits, with its log-probability.

    p_V = softmax(logits_V / temperature) over the kept tokens
    token = the first v with p_0 + ... + p_v > u * (p_0 + ... + p_V-1)       u in [0, 1), one per token

top_k, top_p and min_p each keep a prefix of the tokens sorted by probability, so the shortest prefix wins and
all three together are one threshold on the logits; tokens that tie with the last kept one are kept too.
Inverse transform sampling in vocabulary order, first over sums of 256 tokens, then within one of these
chunks: [128, 49152] take 3 ms on two CPU cores; a cumulative sum alone takes 8 ms, a sort 400 ms. A row's
result depends on that row alone. B is the rows, C the chunks of 256 tokens.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from qerl.types import Sampling

_CHUNK_TOKENS = 256
_FIRST_CANDIDATES = 64  # enough for top_p in a peaked distribution
_BITS_OF_ONE = 0x3F800000  # of the float32 1.0
_MIN_TEMPERATURE = 1e-20  # logits divided by less may overflow


Search = Callable[[Tensor, float], Tensor]
"""Returns the logit at which the sum of the probabilities, largest first, reaches top_p: by_sorting, or
by_bisection where a step must not wait for the device."""


def sample_tokens(logits_BV: Tensor, sampling: Sampling, uniforms_B: Tensor) -> tuple[Tensor, Tensor]:
    """Return (tokens_B, logprobs_B); a row without finite probabilities gets a NaN logprob.

    Greedy (temperature 0) ignores uniforms and truncation; its logprob is that of temperature 1.
    """
    assert logits_BV.dtype == torch.float32 and uniforms_B.dtype == torch.float64
    if sampling.temperature == 0:
        return _greedy(logits_BV)
    return inverse_transform(_probabilities(logits_BV, sampling), uniforms_B)


def score_tokens(logits_BV: Tensor, sampling: Sampling, tokens_B: Tensor) -> Tensor:
    """Return logprobs_B of known tokens with the operations of `sample_tokens`; -inf for excluded tokens."""
    assert logits_BV.dtype == torch.float32 and sampling.temperature > 0
    return _probabilities(logits_BV, sampling).gather(1, tokens_B[:, None])[:, 0].log()


def _probabilities(logits_BV: Tensor, sampling: Sampling) -> Tensor:
    scaled_BV = logits_BV if sampling.temperature == 1 else logits_BV / finite_temperature(sampling)
    search = by_sorting if scaled_BV.device.type == "cpu" else by_bisection
    threshold_B1 = threshold(scaled_BV, sampling, search)
    if threshold_B1 is not None:
        scaled_BV = scaled_BV.masked_fill(scaled_BV < threshold_B1, -torch.inf)
    return scaled_BV.softmax(-1)


def finite_temperature(sampling: Sampling) -> float:
    """Return the temperature, or a larger one that is as good as none, if logits divided by it overflow."""
    return max(sampling.temperature, _MIN_TEMPERATURE) if sampling.temperature else 0.0


def _greedy(logits_BV: Tensor) -> tuple[Tensor, Tensor]:
    tokens_B = logits_BV.argmax(-1)
    return tokens_B, logits_BV.gather(1, tokens_B[:, None])[:, 0] - logits_BV.logsumexp(-1)


def inverse_transform(p_BV: Tensor, uniforms_B: Tensor) -> tuple[Tensor, Tensor]:
    """Return (tokens_B, logprobs_B): the token at which the cumulative sum of p exceeds u times the total."""
    chunks_BCV = _in_chunks(p_BV)
    ends_BC = chunks_BCV.sum(-1).double().cumsum(-1)
    target_B1 = uniforms_B[:, None] * ends_BC[:, -1:]
    chunk_B1 = _first_above(ends_BC, target_B1)
    before_B1 = torch.where(chunk_B1 > 0, ends_BC.gather(1, (chunk_B1 - 1).clamp(min=0)), 0.0)
    rows_B = torch.arange(len(p_BV), device=p_BV.device)
    inner_BV = chunks_BCV[rows_B, chunk_B1[:, 0]].double().cumsum(-1)
    tokens_B1 = chunk_B1 * _CHUNK_TOKENS + _first_above(inner_BV, target_B1 - before_B1)
    return tokens_B1[:, 0], chunks_BCV.flatten(1).gather(1, tokens_B1)[:, 0].log()


def _in_chunks(p_BV: Tensor) -> Tensor:
    """Return p padded with zeros, [B, C, 256]."""
    vocab_size = p_BV.shape[1]
    padded_BV = F.pad(p_BV, (0, -vocab_size % _CHUNK_TOKENS)) if vocab_size % _CHUNK_TOKENS else p_BV
    return padded_BV.view(len(p_BV), padded_BV.shape[1] // _CHUNK_TOKENS, _CHUNK_TOKENS)


def _first_above(cumulative_BV: Tensor, target_B1: Tensor) -> Tensor:
    """Return the first index whose cumulative sum exceeds the target; its own probability is then above zero.

    Rounding may lift the target to the row's sum or above; clamped just below, it finds the last such index.
    """
    total_B1 = cumulative_BV[:, -1:]
    target_B1 = torch.minimum(target_B1, torch.nextafter(total_B1, torch.zeros_like(total_B1)))
    index_B1 = torch.searchsorted(cumulative_BV, target_B1, right=True)
    return index_B1.clamp(max=cumulative_BV.shape[1] - 1)  # a row of NaNs has no such index


def threshold(scaled_BV: Tensor, sampling: Sampling, search: Search) -> Tensor | None:
    """Return the smallest scaled logit that is kept, [B, 1]; None keeps all."""
    bounds = []
    if sampling.top_k is not None and sampling.top_k < scaled_BV.shape[1]:
        bounds.append(scaled_BV.topk(sampling.top_k, dim=-1).values[:, -1:])
    if sampling.top_p is not None and sampling.top_p < 1:
        kept_BV = scaled_BV.masked_fill(scaled_BV < bounds[0], -torch.inf) if bounds else scaled_BV
        bounds.append(search(kept_BV, sampling.top_p))
    if sampling.min_p is not None:
        bounds.append(scaled_BV.amax(-1, keepdim=True) + math.log(sampling.min_p))
    return torch.stack(bounds).amax(0) if bounds else None


def by_bisection(scaled_BV: Tensor, top_p: float) -> Tensor:
    """Search without waiting for the device, so that a CUDA graph can hold it.

    Bits of numbers from 0 to 1, as integers, have the order of the numbers: 30 halvings find the largest
    probability p of the row such that those of p and above sum to top_p. Logits whose probabilities are equal
    in float32 tie.
    """
    p_BV = scaled_BV.softmax(-1)
    chunks_BCV = _in_chunks(p_BV)
    low_B1 = torch.zeros(len(p_BV), 1, dtype=torch.int32, device=p_BV.device)
    high_B1 = torch.full_like(low_B1, _BITS_OF_ONE + 1)
    for _ in range(_BITS_OF_ONE.bit_length()):
        middle_B1 = (low_B1 + high_B1) // 2
        kept_BCV = torch.where(chunks_BCV >= middle_B1.view(torch.float32)[:, :, None], chunks_BCV, 0.0)
        mass_B1 = kept_BCV.sum(-1).double().sum(-1, keepdim=True)  # a sum in float64 would copy all of it
        is_reached_B1 = mass_B1 >= top_p
        low_B1 = torch.where(is_reached_B1, middle_B1, low_B1)
        high_B1 = torch.where(is_reached_B1, high_B1, middle_B1)
    return scaled_BV.masked_fill(p_BV < low_B1.view(torch.float32), torch.inf).amin(-1, keepdim=True)


def by_sorting(scaled_BV: Tensor, top_p: float) -> Tensor:
    """Search among the largest logits, the faster way where a step may wait for the device.

    The number of candidates grows until every row reaches top_p; it does not change a row's threshold.
    """
    vocab_size = scaled_BV.shape[1]
    log_total_B1 = scaled_BV.logsumexp(-1, keepdim=True)
    threshold_B1 = torch.full_like(log_total_B1, -torch.inf)
    pending_B = torch.arange(len(scaled_BV), device=scaled_BV.device)
    num_candidates = _FIRST_CANDIDATES
    while len(pending_B):
        num_candidates = min(num_candidates, vocab_size)
        values_BV = scaled_BV[pending_B].topk(num_candidates, dim=-1).values
        mass_BV = (values_BV - log_total_B1[pending_B]).exp().double().cumsum(-1)
        is_done_B = mass_BV[:, -1] >= top_p
        index_B = torch.searchsorted(mass_BV, torch.full_like(mass_BV[:, :1], top_p)).clamp(
            max=num_candidates - 1
        )
        threshold_B1[pending_B[is_done_B]] = values_BV.gather(1, index_B)[is_done_B]
        pending_B = pending_B[~is_done_B] if num_candidates < vocab_size else pending_B[:0]
        num_candidates *= 8
    return threshold_B1
