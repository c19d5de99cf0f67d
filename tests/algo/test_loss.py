"""T tokens. The plainly written formula is the authority, in float64; differences of it give the gradient."""

import dataclasses
import math

import pytest
import torch

from qerl.algo.loss import LOSSES, clipped, constant, group_mean, sample_mean, token_mean
from qerl.algo.segment import Segments
from qerl.config import AlgoConfig, MaspoConfig, SapoConfig

LOW, HIGH = 0.2, 0.28
ALGO = AlgoConfig(epsilon=LOW, epsilon_high=HIGH)


def plain_loss(ratio: float, advantage: float) -> float:
    return -min(ratio * advantage, min(max(ratio, 1 - LOW), 1 + HIGH) * advantage)


def alone(num_samples: int) -> Segments:
    """Samples of one token each."""
    return Segments.of([1] * num_samples)


def asked(name, ratios_T, advantages_T, lengths_S, algo=ALGO, old=-1.0):
    """Losses, held shares and d sum(losses) / d logprobs, at these ratios to an old logprob."""
    old_T = torch.full((len(ratios_T),), old, dtype=torch.float64)
    logprob_T = (old_T + torch.tensor(ratios_T, dtype=torch.float64).log()).requires_grad_()
    spans, advantage_T = Segments.of(lengths_S), torch.tensor(advantages_T).double()
    loss_T, held_T = LOSSES[name].objective(logprob_T, old_T, advantage_T, spans, algo)
    (gradient_T,) = torch.autograd.grad(loss_T.sum(), logprob_T)
    return [pytest.approx(x_T.tolist(), rel=1e-6, abs=1e-9) for x_T in (loss_T, held_T, gradient_T)]


def at_ratio(ratio: float, advantage: float) -> tuple[float, bool, float]:
    """The loss, whether it was clipped, and d loss / d logprob, with the old logprob at -1."""
    logprob_T = torch.tensor([-1.0 + math.log(ratio)], dtype=torch.float64, requires_grad=True)
    old_T = torch.tensor([-1.0], dtype=torch.float64)
    loss_T, held_T = clipped(logprob_T, old_T, torch.tensor([advantage]).double(), alone(1), ALGO)
    (gradient_T,) = torch.autograd.grad(loss_T.sum(), logprob_T)
    return loss_T.item(), held_T.item(), gradient_T.item()


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
    loss_T, held_T = clipped(logprob_T, old_T, advantage_T, alone(4000), ALGO)
    (gradient_T,) = torch.autograd.grad(loss_T.sum(), logprob_T)

    ratios = (logprob_T - old_T).detach().exp().tolist()
    pairs = list(zip(ratios, advantage_T.tolist(), strict=True))
    is_dead = [(r > 1 + HIGH and a > 0) or (r < 1 - LOW and a < 0) for r, a in pairs]
    assert loss_T.tolist() == pytest.approx([plain_loss(r, a) for r, a in pairs], rel=1e-12)
    assert held_T.tolist() == is_dead
    expected = [0.0 if dead else -r * a for dead, (r, a) in zip(is_dead, pairs, strict=True)]
    assert gradient_T.tolist() == pytest.approx(expected, rel=1e-12)
    assert 500 < sum(is_dead) < 3500


@pytest.mark.parametrize("log_ratio", [200.0, -200.0])
def test_a_wild_log_ratio_stays_finite(log_ratio):
    logprob_T = torch.tensor([log_ratio], requires_grad=True)
    loss_T, _ = clipped(logprob_T, torch.zeros(1), torch.tensor([-1.0]), alone(1), ALGO)
    assert loss_T.item() == pytest.approx(math.exp(20.0) if log_ratio > 0 else 1 - LOW)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("log_ratio", [200.0, -200.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_no_loss_nor_gradient_leaves_the_numbers(name, log_ratio, advantage):
    logprob_T = torch.tensor([log_ratio], requires_grad=True)
    loss_T, held_T = LOSSES[name].objective(
        logprob_T, torch.zeros(1), torch.tensor([advantage]), alone(1), ALGO
    )
    (gradient_T,) = torch.autograd.grad(loss_T.sum(), logprob_T)
    assert loss_T.isfinite().all() and gradient_T.isfinite().all()
    assert 0 <= held_T.item() <= 1


def test_the_ratio_of_a_whole_sample_by_hand():
    # s = sqrt(1.21 * 1) = 1.1, and 0.5 for the other sample; d s / d logprob = s / 2, two tokens each
    ratios_T, advantages_T, lengths_S = [1.21, 1.0, 0.5], [2.0, 2.0, -1.0], [2, 1]
    loss, held, gradient = asked("gspo", ratios_T, advantages_T, lengths_S)
    assert (loss, held, gradient) == ([-2.2, -2.2, 0.8], [0, 0, 1], [-2.2, -2.2, 0])
    narrow = dataclasses.replace(ALGO, epsilon_high=0.05)
    loss, held, gradient = asked("gspo", ratios_T, advantages_T, lengths_S, narrow)
    assert (loss, held, gradient) == ([-2.1, -2.1, 0.8], [1, 1, 1], [0, 0, 0])


def test_gspo_shares_the_gradient_among_a_samples_tokens_and_gspo_token_does_not():
    # s = 1.1: -1.1 * (2 + 4) / 2 for each, or -1.1 * 2 and -1.1 * 4
    same, _, shared = asked("gspo", [1.21, 1.0], [2.0, 4.0], [2])
    also, _, own = asked("gspo_token", [1.21, 1.0], [2.0, 4.0], [2])
    assert (same, also) == ([-2.2, -4.4], [-2.2, -4.4])
    assert (shared, own) == ([-3.3, -3.3], [-2.2, -4.4])


def test_cispo_by_hand():
    # weights 1.28, 0.8 and 1 on logprobs -1 + log(ratio): the gradient is minus weight times advantage
    loss, held, gradient = asked("cispo", [1.5, 0.5, 1.0], [2.0, -2.0, 1.0], [2, 1])
    assert [-2.56 * (-1 + math.log(1.5)), 1.6 * (-1 + math.log(0.5)), 1.0] == loss
    assert (held, gradient) == ([1 - 1.28 / 1.5, 0, 0], [-2.56, 1.6, -1.0])


def test_sapo_by_hand():
    # sigmoid(0) = 1/2; sigmoid(1) = 0.7310586; sigmoid(1.5 * -0.5) = 0.3208213, with 4 / 1.5
    algo = dataclasses.replace(ALGO, sapo=SapoConfig(temperature_positive=1.0, temperature_negative=1.5))
    loss, held, gradient = asked("sapo", [1.0, 2.0, 0.5], [2.0, 1.0, -2.0], [2, 1], algo)
    assert loss == [-4.0, -2.9242343, 1.7110469]
    # 4 sigmoid (1 - sigmoid) = 1, 0.7864477, 0.8715799: times minus ratio times advantage
    assert (held, gradient) == ([0, 0.2135523, 0.1284201], [-2.0, -1.5728955, 0.8715799])


def test_maspo_by_hand():
    # old probability 1/4, alpha 1/2: width 2; times 1 + 1/2 for A = 1, over 1 + 1/2 for A = -1
    algo = dataclasses.replace(ALGO, maspo=MaspoConfig(width=1, alpha=0.5, beta_high=0.5, beta_low=0.5))
    ratios_T, advantages_T = [2.5, 0.5, 0.5, 2.5], [1.0, -1.0, 1.0, -1.0]
    loss, held, gradient = asked("maspo", ratios_T, advantages_T, [4], algo, old=math.log(0.25))
    high, low = math.exp(-(1.5**2) / 18), math.exp(-(0.5**2) / (2 * 16 / 9))
    expected = [-2.5 * high, 0.5 * low, -0.5, 2.5]  # the last two come back to 1: nothing holds them
    assert (expected, [1 - high, 1 - low, 0, 0], expected) == (loss, held, gradient)


def test_maspos_width_has_bounds():
    # probability exp(-40) to the power -1 is capped at 10, and the advantage's factor at 0.1
    algo = dataclasses.replace(ALGO, maspo=MaspoConfig(width=1, alpha=1.0, beta_high=0.5, beta_low=100.0))
    loss, _, _ = asked("maspo", [3.0, 0.5], [2.0, -2.0], [2], algo, old=-40.0)
    assert [-6 * math.exp(-4 / (2 * 20**2)), 1 * math.exp(-0.25 / 2)] == loss


def plain_sample(name, logprobs_T, held_T, olds_T, advantage, algo):
    """The sum of one sample's losses; what a formula stops the gradient of is taken at held_T."""
    total, n = 0.0, len(logprobs_T)
    for logprob, held, old in zip(logprobs_T, held_T, olds_T, strict=True):
        ratio, still = math.exp(logprob - old), math.exp(held - old)
        if name == "gspo":
            ratio = math.exp(sum(x - o for x, o in zip(logprobs_T, olds_T, strict=True)) / n)
        elif name == "gspo_token":
            s = math.exp(sum(x - o for x, o in zip(held_T, olds_T, strict=True)) / n)
            ratio = s * ratio / still
        if name == "nll":
            total -= advantage * logprob
        elif name == "cispo":
            total -= min(max(still, 1 - LOW), 1 + HIGH) * advantage * logprob
        elif name == "sapo":
            tau = algo.sapo.temperature_positive if advantage > 0 else algo.sapo.temperature_negative
            total -= 4 / tau / (1 + math.exp(-tau * (ratio - 1))) * advantage
        elif name == "maspo":
            width = min(max(algo.maspo.width / math.exp(old) ** algo.maspo.alpha, algo.maspo.width), 10)
            up, down = 1 + algo.maspo.beta_high * advantage, 1 / (1 - algo.maspo.beta_low * advantage)
            width *= min(max(up if advantage > 0 else down, 0.1), 10)
            weight = math.exp(-((still - 1) ** 2) / (2 * width**2)) if (still - 1) * advantage > 0 else 1
            total -= weight * ratio * advantage
        else:
            total += plain_loss(ratio, advantage)
    return total


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_has_its_formulas_value_and_gradient(name, rng):
    lengths_S = [3, 1, 7, 4, 2] * 8
    num_tokens, eps = sum(lengths_S), 1e-6

    def draw(count, scale):
        return scale * torch.randn(count, dtype=torch.float64, generator=rng)

    old_T = -draw(num_tokens, 2.0).abs()
    logprob_T = (old_T + draw(num_tokens, 0.3)).requires_grad_()
    advantage_S = draw(len(lengths_S), 1.0)
    spans = Segments.of(lengths_S)
    loss_T, _ = LOSSES[name].objective(logprob_T, old_T, spans.per_token(advantage_S), spans, ALGO)
    (gradient_T,) = torch.autograd.grad(loss_T.sum(), logprob_T)

    start = 0
    for length, advantage in zip(lengths_S, advantage_S.tolist(), strict=True):
        part = slice(start, start + length)
        at, olds = logprob_T[part].tolist(), old_T[part].tolist()
        value = plain_sample(name, at, at, olds, advantage, ALGO)
        assert loss_T[part].sum().item() == pytest.approx(value, rel=1e-12)
        for i in range(length):
            moved = [[x + d * (i == j) for j, x in enumerate(at)] for d in (eps, -eps)]
            up, down = (plain_sample(name, m, at, olds, advantage, ALGO) for m in moved)
            assert gradient_T[start + i].item() == pytest.approx((up - down) / (2 * eps), abs=1e-8)
        start += length
    assert gradient_T.abs().max() > 0.1


def test_sample_mean_by_hand():
    assert sample_mean([[2, 0], [5]], num_samples=4, max_tokens=100) == [[1 / 8, 0.0], [1 / 20]]


def test_token_mean_by_hand():
    assert token_mean([[2], [0, 6]], num_samples=4, max_tokens=100) == [[1 / 8], [0.0, 1 / 8]]


def test_token_mean_of_no_tokens_at_all_is_zero():
    assert token_mean([[0], [0]], num_samples=4, max_tokens=100) == [[0.0], [0.0]]


def test_group_mean_by_hand():
    # two groups of 8 and 5 tokens, and one of which no sample is left, which counts all the same
    expected = [[1 / 24, 0.0, 1 / 24], [1 / 15], []]
    assert group_mean([[2, 0, 6], [5], []], num_samples=9, max_tokens=100) == expected


def test_constant_by_hand():
    assert constant([[2, 0], [5]], num_samples=4, max_tokens=100) == [[1 / 400] * 2, [1 / 400]]


def total(name: str, losses_P_G_T: list[list[list[float]]]) -> float:
    lengths_P_G = [[len(losses_T) for losses_T in losses_G_T] for losses_G_T in losses_P_G_T]
    num_samples = sum(map(len, lengths_P_G))
    weights_P_G = LOSSES[name].weights(lengths_P_G, num_samples=num_samples, max_tokens=10)
    pairs = [zip(*pair, strict=True) for pair in zip(weights_P_G, losses_P_G_T, strict=True)]
    return sum(weight * sum(losses_T) for group in pairs for weight, losses_T in group)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *((name, ((1 + 3) / 2 + 5 + 7) / 3) for name in ("grpo", "gspo", "gspo_token", "sapo")),
        *((name, (1 + 3 + 5 + 7) / 4) for name in ("dapo", "cispo", "maspo", "nll")),
        ("dr_grpo", (1 + 3 + 5 + 7) / (3 * 10)),
        ("bnpo", ((1 + 3 + 5) / 3 + 7) / 2),
    ],
)
def test_each_named_loss_is_its_papers_sum(name, expected):
    assert total(name, [[[1.0, 3.0], [5.0]], [[7.0]]]) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_the_sum_over_micro_batches_is_the_whole_gradient(name, rng):
    lengths_S = [3, 7, 1, 5]
    loss, num_tokens = LOSSES[name], sum(lengths_S)
    old_T, advantage_T = torch.randn(2, num_tokens, dtype=torch.float64, generator=rng)
    start_T = old_T + 0.1 * torch.randn(num_tokens, dtype=torch.float64, generator=rng)
    (weights_S,) = loss.weights([lengths_S], num_samples=4, max_tokens=8)
    weight_T = torch.tensor(weights_S).double().repeat_interleave(torch.tensor(lengths_S))

    def gradient(batches):
        logprob_T, begin = start_T.clone().requires_grad_(), 0
        for lengths in batches:
            part = slice(begin, begin := begin + sum(lengths))
            spans = Segments.of(lengths)
            loss_T, _ = loss.objective(logprob_T[part], old_T[part], advantage_T[part], spans, ALGO)
            (weight_T[part] * loss_T).sum().backward()
        return logprob_T.grad

    whole, parts = gradient([lengths_S]), gradient([[3], [7, 1], [5]])
    assert torch.allclose(whole, parts, rtol=1e-12, atol=0)
    assert whole.abs().max() > 0
