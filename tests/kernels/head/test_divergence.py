"""Divergences over the teacher's tokens: values and gradients are those of float64 autograd."""

import pytest
import torch

from conftest import rms_error
from qerl.algo.distillation import MIN_LOGPROB, divergence_of
from qerl.config import DistilConfig
from qerl.kernels.head import divergence as op
from qerl.kernels.head.logprob import Softcap

LOSSES = {
    "forward_kl": DistilConfig(loss="forward_kl"),
    "reverse_kl": DistilConfig(loss="reverse_kl"),
    "jsd": DistilConfig(loss="jsd", jsd_beta=0.3),
}


def operands(T, D, V, K, rng):
    """Hidden states, a head, and a teacher that is another head of the same states."""
    hidden_TD = torch.randn(T, D, generator=rng)
    head_VD, other_VD = (torch.randn(V, D, generator=rng) / D**0.5 * 3 for _ in range(2))
    rows_T, targets_T = torch.arange(T), torch.randint(V, (T,), generator=rng)
    teacher = op.top_outcomes(
        hidden_TD, rows_T, targets_T, op.Head(other_VD, 1.0, None, 5), top_k=K, min_logprob=MIN_LOGPROB
    )
    return hidden_TD.requires_grad_(), head_VD, rows_T, targets_T, teacher


def eager(hidden_TD, head_VD, teacher, f, temperature):
    """Compute it as torch users write it, in fp32."""
    s_TV = (hidden_TD @ head_VD.T / temperature).log_softmax(-1)
    rest_T1 = s_TV.exp().scatter(1, teacher.ids_CK, 0.0).sum(-1, keepdim=True).log().clamp(min=MIN_LOGPROB)
    return f(torch.cat([s_TV.gather(1, teacher.ids_CK), rest_T1], 1), teacher.logprobs_CX)


@pytest.mark.parametrize(("T", "D", "V", "chunk_tokens", "K"), op.CASES)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_are_those_of_autograd_in_float64(
    T, D, V, chunk_tokens, K, loss, temperature, rng
):
    hidden_TD, head_VD, rows_T, targets_T, teacher = operands(T, D, V, K, rng)
    f, weights_T = divergence_of(LOSSES[loss]), torch.randn(T, generator=rng)
    truth_T = op.reference(
        hidden_TD,
        head_VD,
        teacher.ids_CK,
        teacher.logprobs_CX,
        f,
        temperature=temperature,
        min_logprob=MIN_LOGPROB,
    )
    head = op.Head(head_VD, temperature, None, chunk_tokens)
    got_T, logprob_T, entropy_T = op.chunked_divergence(
        hidden_TD, rows_T, targets_T, teacher.ids_CK, teacher.logprobs_CX, f, head, min_logprob=MIN_LOGPROB
    )
    (want,) = torch.autograd.grad(truth_T, hidden_TD, weights_T.double())
    (mine,) = torch.autograd.grad(got_T, hidden_TD, weights_T)
    plain_T = eager(hidden_TD, head_VD, teacher, f, temperature)
    (other,) = torch.autograd.grad(plain_T, hidden_TD, weights_T)
    assert rms_error(got_T, truth_T) <= max(3 * rms_error(plain_T, truth_T), 1e-6)
    # Over 30 seeds at most 4.5e-6, where torch's reaches 7.5e-4: it subtracts nearly equal terms where one
    # token has most of the probability.
    assert rms_error(mine, want) <= max(1.1 * rms_error(other, want), 5e-6)
    logprobs_TV = (hidden_TD.detach() @ head_VD.T / temperature).log_softmax(-1)
    torch.testing.assert_close(logprob_T, logprobs_TV.gather(1, targets_T[:, None]).squeeze(1))
    torch.testing.assert_close(entropy_T, -(logprobs_TV.exp() * logprobs_TV).sum(-1))


@pytest.mark.parametrize("loss", LOSSES)
def test_with_every_token_it_is_the_divergence_over_the_vocabulary(loss, rng):
    hidden_TD, head_VD, rows_T, targets_T, teacher = operands(6, 8, 20, 20, rng)
    s_TV = (hidden_TD.detach().double() @ head_VD.double().T).log_softmax(-1)
    t_TV = torch.zeros_like(s_TV).scatter(1, teacher.ids_CK, teacher.logprobs_CX[:, :-1].double())
    p, q = t_TV.exp(), s_TV.exp()
    m = {"forward_kl": q, "reverse_kl": p, "jsd": 0.3 * p + 0.7 * q}[loss]
    to_p, to_q = (p * (p / m).log()).sum(-1), (q * (q / m).log()).sum(-1)
    whole_T = {"forward_kl": to_p, "reverse_kl": to_q, "jsd": 0.3 * to_p + 0.7 * to_q}[loss]
    got_T, _, _ = op.chunked_divergence(
        hidden_TD,
        rows_T,
        targets_T,
        teacher.ids_CK,
        teacher.logprobs_CX,
        divergence_of(LOSSES[loss]),
        op.Head(head_VD, 1.0, None, 4),
        min_logprob=MIN_LOGPROB,
    )
    torch.testing.assert_close(got_T.double(), whole_T, rtol=1e-5, atol=1e-6)


def test_a_soft_cap_bends_the_gradient(rng):
    hidden_TD, head_VD, rows_T, targets_T, teacher = operands(5, 8, 24, 3, rng)
    f, cap = divergence_of(LOSSES["reverse_kl"]), 2.0
    capped_TV = cap * torch.tanh(hidden_TD.double() @ head_VD.double().T / cap)
    s_TV = capped_TV.log_softmax(-1)
    rest_T1 = s_TV.scatter(1, teacher.ids_CK, float("-inf")).logsumexp(-1, keepdim=True)
    truth_T = f(torch.cat([s_TV.gather(1, teacher.ids_CK), rest_T1], 1), teacher.logprobs_CX.double())
    got_T, _, _ = op.chunked_divergence(
        hidden_TD,
        rows_T,
        targets_T,
        teacher.ids_CK,
        teacher.logprobs_CX,
        f,
        op.Head(head_VD, 1.0, Softcap(cap, 1.0), 2),
        min_logprob=MIN_LOGPROB,
    )
    (want,) = torch.autograd.grad(truth_T.sum(), hidden_TD)
    (mine,) = torch.autograd.grad(got_T.sum(), hidden_TD)
    assert rms_error(mine, want) < 1e-5


def test_jsd_tends_to_both_divergences(rng):
    s_CX, t_CX = (torch.randn(4, 6, generator=rng).double().log_softmax(-1) for _ in range(2))
    near_0, near_1 = (divergence_of(DistilConfig(loss="jsd", jsd_beta=b)) for b in (1e-5, 1 - 1e-5))
    forward, reverse = (divergence_of(LOSSES[name])(s_CX, t_CX) for name in ("forward_kl", "reverse_kl"))
    torch.testing.assert_close(near_0(s_CX, t_CX) / 1e-5, forward, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(near_1(s_CX, t_CX) / 1e-5, reverse, rtol=1e-3, atol=1e-6)
