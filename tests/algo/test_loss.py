"""T tokens. The plainly written formula is the authority, in float64; autograd of it gives the gradient."""

import math

import pytest
import torch

from qerl.algo.loss import LOSSES, clipped, constant, sample_mean, token_mean

LOW, HIGH = 0.2, 0.28


def plain_loss(ratio: float, advantage: float) -> float:
    return -min(ratio * advantage, min(max(ratio, 1 - LOW), 1 + HIGH) * advantage)


def at_ratio(ratio: float, advantage: float) -> tuple[float, bool, float]:
    """The loss, whether it was clipped, and d loss / d logprob, with the old logprob at -1."""
    logprob_T = torch.tensor([-1.0 + math.log(ratio)], dtype=torch.float64, requires_grad=True)
    old_T = torch.tensor([-1.0], dtype=torch.float64)
    loss_T, was_clipped_T = clipped(logprob_T, old_T, torch.tensor([advantage]).double(), LOW, HIGH)
    (gradient_T,) = torch.autograd.grad(loss_T.sum(), logprob_T)
    return loss_T.item(), was_clipped_T.item(), gradient_T.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "was_clipped", "gradient"),
    [
        (1.0, 2.0, -2.0, False, -2.0),
        (1.25, 2.0, -2.5, False, -2.5),  # inside clip_high, outside a symmetric clip
        (1.5, 2.0, -2.56, True, 0.0),
        (0.5, 2.0, -1.0, False, -1.0),  # it must rise back: no clip below for a good sample
        (1.0, -2.0, 2.0, False, 2.0),
        (0.75, -2.0, 1.6, True, 0.0),
        (1.5, -2.0, 3.0, False, 3.0),  # it must fall back: no clip above for a bad sample
        (1.5, 0.0, 0.0, False, 0.0),
    ],
)
def test_the_clip_by_hand(ratio, advantage, loss, was_clipped, gradient):
    assert at_ratio(ratio, advantage) == (
        pytest.approx(loss, abs=1e-12),
        was_clipped,
        pytest.approx(gradient, abs=1e-12),
    )


def test_value_and_gradient_are_those_of_the_plain_formula(rng):
    def draw(scale):
        return scale * torch.randn(4000, dtype=torch.float64, generator=rng)

    old_T, advantage_T = draw(2.0), draw(1.0)
    logprob_T = (old_T + draw(0.4)).requires_grad_()
    loss_T, was_clipped_T = clipped(logprob_T, old_T, advantage_T, LOW, HIGH)
    (gradient_T,) = torch.autograd.grad(loss_T.sum(), logprob_T)

    ratios = (logprob_T - old_T).detach().exp().tolist()
    pairs = list(zip(ratios, advantage_T.tolist(), strict=True))
    is_dead = [(r > 1 + HIGH and a > 0) or (r < 1 - LOW and a < 0) for r, a in pairs]
    assert loss_T.tolist() == pytest.approx([plain_loss(r, a) for r, a in pairs], rel=1e-12)
    assert was_clipped_T.tolist() == is_dead
    expected = [0.0 if dead else -r * a for dead, (r, a) in zip(is_dead, pairs, strict=True)]
    assert gradient_T.tolist() == pytest.approx(expected, rel=1e-12)
    assert 500 < sum(is_dead) < 3500


@pytest.mark.parametrize("log_ratio", [200.0, -200.0])
def test_a_wild_log_ratio_stays_finite(log_ratio):
    logprob_T = torch.tensor([log_ratio], requires_grad=True)
    loss_T, _ = clipped(logprob_T, torch.zeros(1), torch.tensor([-1.0]), LOW, HIGH)
    (gradient_T,) = torch.autograd.grad(loss_T.sum(), logprob_T)
    assert loss_T.isfinite().all() and gradient_T.isfinite().all()
    assert loss_T.item() == pytest.approx(math.exp(20.0) if log_ratio > 0 else 1 - LOW)


def test_sample_mean_by_hand():
    assert sample_mean([2, 0, 5], num_samples=4, max_tokens=100) == [1 / 8, 0.0, 1 / 20]


def test_token_mean_by_hand():
    assert token_mean([2, 0, 6], num_samples=4, max_tokens=100) == [1 / 8, 0.0, 1 / 8]


def test_token_mean_of_no_tokens_at_all_is_zero():
    assert token_mean([0, 0], num_samples=4, max_tokens=100) == [0.0, 0.0]


def test_constant_by_hand():
    assert constant([2, 0, 5], num_samples=4, max_tokens=100) == [1 / 400] * 3


def total(name: str, losses_S_T: list[list[float]]) -> float:
    lengths_S = [len(losses_T) for losses_T in losses_S_T]
    weights_S = LOSSES[name].weights(lengths_S, num_samples=len(lengths_S), max_tokens=10)
    return sum(weight * sum(losses_T) for weight, losses_T in zip(weights_S, losses_S_T, strict=True))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", ((1 + 3) / 2 + 5) / 2),
        ("dapo", (1 + 3 + 5) / 3),
        ("dr_grpo", (1 + 3 + 5) / (2 * 10)),
    ],
)
def test_each_named_loss_is_its_papers_sum(name, expected):
    assert LOSSES[name].name == name
    assert total(name, [[1.0, 3.0], [5.0]]) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_the_sum_over_micro_batches_is_the_whole_gradient(name, rng):
    lengths_S = [3, 7, 1, 5]
    loss, num_tokens = LOSSES[name], sum(lengths_S)
    old_T, advantage_T = torch.randn(2, num_tokens, dtype=torch.float64, generator=rng)
    start_T = old_T + 0.1 * torch.randn(num_tokens, dtype=torch.float64, generator=rng)
    weights_S = loss.weights(lengths_S, num_samples=4, max_tokens=8)
    weight_T = torch.tensor(weights_S).double().repeat_interleave(torch.tensor(lengths_S))

    def gradient(cuts):
        logprob_T = start_T.clone().requires_grad_()
        for begin, end in zip([0, *cuts], [*cuts, num_tokens], strict=True):
            part = slice(begin, end)
            loss_T, _ = loss.objective(logprob_T[part], old_T[part], advantage_T[part], LOW, HIGH)
            (weight_T[part] * loss_T).sum().backward()
        return logprob_T.grad

    assert torch.equal(gradient([]), gradient([3, 11]))
    assert gradient([]).abs().max() > 0
