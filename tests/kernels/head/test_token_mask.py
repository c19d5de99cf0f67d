"""Logprobs among the tokens that a grammar allowed equal the float64 definition, values and gradients."""

import pytest
import torch

from conftest import rms_error
from kernels.head.test_logprob import columns, gradient, operands
from qerl.kernels.head import logprob as op
from qerl.kernels.head.token_mask import TokenMask
from qerl.types import AllowedTokens

__all__ = ["columns"]
T, D, V = 7, 16, 50


def bits(*tokens):
    return sum(1 << token for token in tokens).to_bytes(-(-V // 8), "little")


@pytest.fixture
def case(device, rng):
    """(operands, the mask of two samples, the same as bool [T, V])."""
    hidden_TD, head_VD, targets_T = operands(T, D, V, device, rng)
    targets_T[1], targets_T[4], targets_T[6] = 3, 49, 8
    wide, forced = tuple(range(0, V, 3)), (49,)
    parts = [
        AllowedTokens((bits(*wide),), [None, 0, None]),
        AllowedTokens((bits(*forced), bits(*wide), bits(8, 9)), [None, 0, 1, 2]),
    ]
    targets_T[5] = 6
    allowed_TV = torch.ones(T, V, dtype=torch.bool, device=device)
    for row, tokens in ((1, wide), (4, forced), (5, wide), (6, (8, 9))):
        allowed_TV[row] = False
        allowed_TV[row, list(tokens)] = True
    return (hidden_TD, head_VD, targets_T), TokenMask.joined(parts, [3, 4], device), allowed_TV


@pytest.mark.parametrize("chunk_tokens", [2, 5, 7])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("softcap", [None, op.Softcap(4.0, 1.0)], ids=["plain", "capped"])
def test_logprob_entropy_and_gradient_are_of_the_choice_among_allowed_tokens(
    case, chunk_tokens, temperature, softcap, rng
):
    (hidden_TD, head_VD, targets_T), mask, allowed_TV = case
    logits_TV = hidden_TD.double() @ head_VD.double().T
    if softcap is not None:
        logits_TV = softcap.cap * (logits_TV / softcap.cap).tanh()
    logits_TV = (logits_TV / temperature).masked_fill(~allowed_TV, -torch.inf)
    truth_TV = logits_TV.log_softmax(-1)
    truth_T = truth_TV.gather(1, targets_T[:, None])[:, 0]
    entropy_T = -(truth_TV.exp() * truth_TV.clamp(min=-1e9)).sum(-1)
    got_T, got_entropy_T = op.chunked_logprob(
        hidden_TD,
        head_VD,
        targets_T,
        temperature=temperature,
        chunk_tokens=chunk_tokens,
        softcap=softcap,
        mask=mask,
    )
    assert rms_error(got_T, truth_T) < 1e-6 and rms_error(got_entropy_T, entropy_T) < 1e-6
    weights_T = torch.randn(T, generator=rng).to(hidden_TD.device)
    want, got = (gradient(each, weights_T, hidden_TD) for each in (truth_T, got_T))
    assert rms_error(got, want) < 1e-6


def test_a_token_without_a_choice_has_logprob_0_and_no_gradient(case):
    (hidden_TD, head_VD, targets_T), mask, _ = case
    got_T, entropy_T = op.chunked_logprob(
        hidden_TD, head_VD, targets_T, temperature=1.0, chunk_tokens=3, mask=mask
    )
    assert (got_T[4], entropy_T[4]) == (0.0, 0.0)
    grad_TD = gradient(got_T, torch.ones(T, device=hidden_TD.device), hidden_TD)
    assert not grad_TD[4].any() and grad_TD[3].any()


def test_reference_masks_as_the_definition_says(case):
    (hidden_TD, head_VD, targets_T), mask, allowed_TV = case
    truth = op.reference(hidden_TD, head_VD, targets_T, temperature=0.8, allowed_TV=allowed_TV)
    got = op.chunked_logprob(hidden_TD, head_VD, targets_T, temperature=0.8, chunk_tokens=4, mask=mask)
    assert rms_error(got[0], truth[0]) < 1e-6 and rms_error(got[1], truth[1]) < 1e-6


def test_samples_that_may_say_everything_have_no_mask(device):
    assert TokenMask.joined([None, AllowedTokens((), [None, None])], [3, 2], device) is None


@pytest.mark.gpu
def test_on_a_gpu_the_kernel_gives_left_out_tokens_no_probability(device, rng):
    """A real vocabulary in bfloat16: thousands of left-out logits beside each other."""
    if device.type != "cuda":
        pytest.skip("needs a CUDA device")
    num_tokens = 151_936
    hidden_TD, head_VD, targets_T = operands(20, 256, num_tokens, device, rng, torch.bfloat16)
    allowed_V = torch.zeros(num_tokens, dtype=torch.bool)
    allowed_V[torch.randperm(num_tokens, generator=rng)[:40]] = True
    targets_T[:] = allowed_V.nonzero()[7].to(device)
    packed = bytes(sum(int(b) << i for i, b in enumerate(row)) for row in allowed_V.view(-1, 8).tolist())
    mask = TokenMask.joined([AllowedTokens((packed,), [0] * 20)], [20], device)
    allowed_TV = allowed_V.to(device).expand(20, -1)
    truth = op.reference(hidden_TD, head_VD, targets_T, temperature=1.0, allowed_TV=allowed_TV)
    got = op.chunked_logprob(hidden_TD, head_VD, targets_T, temperature=1.0, chunk_tokens=8, mask=mask)
    logits_TV = (hidden_TD @ head_VD.T).float().masked_fill(~allowed_TV, -torch.inf)
    plain_T = logits_TV.log_softmax(-1).gather(1, targets_T[:, None])[:, 0]
    assert rms_error(got[0], truth[0]) <= 1.1 * rms_error(plain_T, truth[0])
    weights_T = torch.randn(20, generator=rng).to(device)
    grads = [gradient(both, weights_T, hidden_TD) for both in (truth[0], plain_T, got[0])]
    assert rms_error(grads[2], grads[0]) <= 1.1 * rms_error(grads[1], grads[0])
    assert got[1].isfinite().all()
