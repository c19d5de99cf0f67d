import math

import pytest
import torch

from qerl.algo.seeds import uniform
from qerl.engine.sampling.token_sampling import by_bisection, by_sorting, sample_tokens
from qerl.types import Sampling

PROBABILITIES_V = [0.4, 0.0, 0.25, 0.2, 0.1, 0.05]
BELOW_ONE = math.nextafter(1.0, 0.0)


def logits_of(probabilities_V, num_rows=1):
    return torch.tensor([probabilities_V]).log().expand(num_rows, -1).contiguous()


def draws(logits_BV, uniforms, **settings):
    sampling = Sampling(max_tokens=1, **settings)
    tokens_B, logprobs_B = sample_tokens(logits_BV, sampling, torch.tensor(uniforms, dtype=torch.float64))
    return tokens_B.tolist(), logprobs_B.tolist()


def plain_truncation(logits_V, *, temperature=1.0, top_k=None, top_p=None, min_p=None):
    """The kept tokens' probabilities in float64, by sorting: the definition."""
    p_V = (logits_V.double() / temperature).softmax(0)
    order = p_V.argsort(descending=True).tolist()
    kept = order[:top_k]
    mass, total = 0.0, sum(p_V[v].item() for v in kept)
    if top_p is not None:
        for place, v in enumerate(kept):
            mass += p_V[v].item() / total
            if mass >= top_p:
                kept = kept[: place + 1]
                break
    kept = [v for v in kept if p_V[v] >= (min_p or 0) * p_V.max()]
    cut_V = torch.zeros_like(p_V)
    cut_V[kept] = p_V[kept]
    return cut_V / cut_V.sum()


def test_a_uniform_is_mapped_through_the_inverse_of_the_cumulative_sum():
    uniforms = [0.0, 0.39, 0.41, 0.64, 0.66, 0.84, 0.86, 0.94, 0.96, BELOW_ONE]
    tokens, logprobs = draws(logits_of(PROBABILITIES_V, 10), uniforms)
    assert tokens == [0, 0, 2, 2, 3, 3, 4, 4, 5, 5]
    assert logprobs == pytest.approx([math.log(PROBABILITIES_V[v]) for v in tokens], abs=1e-6)


@pytest.mark.parametrize("vocab_size", [700, 768])
def test_frequencies_match_the_distribution(vocab_size, rng):
    num_draws = 40_000
    logits_V = torch.randn(vocab_size, generator=rng) * 2
    uniforms = [uniform(0, 7, 3, g, 0) for g in range(num_draws)]
    counts_V = torch.zeros(vocab_size, dtype=torch.float64)
    for first in range(0, num_draws, 2000):
        part = uniforms[first : first + 2000]
        tokens, _ = draws(logits_V.expand(len(part), -1).contiguous(), part, temperature=1.3)
        counts_V += torch.bincount(torch.tensor(tokens), minlength=vocab_size)
    expected_V = (logits_V.double() / 1.3).softmax(0) * num_draws
    rare = expected_V < 5
    counts_V, expected_V = (torch.cat([x[~rare], x[rare].sum()[None]]) for x in (counts_V, expected_V))
    chi_square = ((counts_V - expected_V) ** 2 / expected_V).sum().item()
    freedom = len(counts_V) - 1
    assert abs(chi_square - freedom) < 3 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("u", [0.0, 5e-324, 2.0**-53, 0.5, 1 - 2.0**-24, BELOW_ONE])
@pytest.mark.parametrize("vocab_size", [1, 5, 256, 1000])
def test_a_token_without_probability_is_never_drawn(vocab_size, u, rng):
    logits_BV = torch.randn(300, vocab_size, generator=rng) * 30
    hidden_BV = torch.rand(300, vocab_size, generator=rng) < torch.rand(300, 1, generator=rng)
    hidden_BV[torch.arange(300), torch.randint(vocab_size, (300,), generator=rng)] = False
    logits_BV[hidden_BV] = -torch.inf
    tokens, logprobs = draws(logits_BV, [u] * 300)
    probabilities_BV = logits_BV.softmax(-1)
    assert all(probabilities_BV[row, v] > 0 for row, v in enumerate(tokens))
    assert all(math.isfinite(x) for x in logprobs)


def test_the_ends_of_the_unit_interval_give_the_first_and_the_last_token_with_probability():
    logits_BV = torch.full((2, 1000), -torch.inf)
    logits_BV[:, [13, 255, 256, 777]] = torch.tensor([0.1, 2.0, 1.0, -9.0])
    assert draws(logits_BV, [0.0, BELOW_ONE])[0] == [13, 777]


def test_the_logprob_is_that_of_the_probability_really_drawn_from(rng):
    logits_BV = torch.randn(64, 1000, generator=rng) * 3
    uniforms = torch.rand(64, generator=rng, dtype=torch.float64).tolist()
    for settings in (
        {},
        {"temperature": 0.6},
        {"top_k": 7},
        {"top_p": 0.8, "temperature": 1.5},
        {"min_p": 0.2},
    ):
        tokens, logprobs = draws(logits_BV, uniforms, **settings)
        for row, (v, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
            p_V = plain_truncation(logits_BV[row], **settings)
            assert logprob == pytest.approx(p_V[v].log().item(), abs=2e-6)
            before, after = p_V[:v].sum().item(), p_V[: v + 1].sum().item()
            assert before - 1e-6 <= uniforms[row] <= after + 1e-6


@pytest.mark.parametrize(
    "settings",
    [
        {"top_k": 1},
        {"top_k": 5},
        {"top_p": 0.3},
        {"top_p": 0.999},
        {"min_p": 0.05},
        {"min_p": 1.0},
        {"top_k": 10, "top_p": 0.7},
        {"top_k": 50, "top_p": 0.95, "min_p": 0.1, "temperature": 2.0},
    ],
)
def test_truncation_keeps_what_the_definition_keeps(settings, rng):
    # Uniforms on a grid reach every token whose probability is above its spacing.
    logits_V = torch.randn(300, generator=rng) * 2
    uniforms = ((torch.arange(4000) + 0.5) / 4000).tolist()
    tokens, logprobs = draws(logits_V.expand(4000, -1).contiguous(), uniforms, **settings)
    p_V = plain_truncation(logits_V, **settings)
    kept = set(p_V.nonzero().flatten().tolist())
    assert set(tokens) <= kept
    assert {v for v in kept if p_V[v] > 1 / 4000} <= set(tokens)
    assert torch.tensor(logprobs).tolist() == pytest.approx([p_V[v].log().item() for v in tokens], abs=2e-6)


def test_top_p_over_a_flat_distribution_looks_past_its_first_candidates():
    logits_BV = torch.zeros(2, 5000)
    logits_BV[0] = torch.linspace(0, -0.01, 5000)
    logits_BV[1, 9] = 100.0
    (flat, peaked), (logprob, _) = draws(logits_BV, [BELOW_ONE, BELOW_ONE], top_p=0.5)
    assert abs(flat - 2494) < 15 and logprob == pytest.approx(-math.log(2494), abs=0.01)
    assert peaked == 9


def nucleus(logits_V, top_p):
    """The least logit of the fewest tokens, most likely first, that have top_p of the mass, in float64."""
    values, order = logits_V.double().softmax(0).sort(descending=True)
    mass = values.cumsum(0) / values.sum()
    return logits_V[order[int((mass < top_p).sum().clamp(max=len(order) - 1))]].item()


@pytest.mark.parametrize("top_p", [5e-324, 1e-6, 0.3, 0.95, 0.999])
@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 8.0, 200.0])
def test_both_searches_for_the_nucleus_end_at_its_last_token(top_p, spread, rng):
    logits_BV = torch.randn(16, 3000, generator=rng) * spread
    logits_BV[:, 7::3] = -torch.inf
    logits_BV[3, :] = -torch.inf
    logits_BV[3, 5] = -40.0
    for search in (by_sorting, by_bisection):
        limits_B1 = search(logits_BV, top_p)
        for row, (limit,) in enumerate(limits_B1.tolist()):
            p_V, exact = logits_BV[row].double().softmax(0), nucleus(logits_BV[row], top_p)
            kept, right = (p_V[logits_BV[row] >= x].sum().item() for x in (limit, exact))
            assert limit == exact or kept == pytest.approx(right, abs=2e-6)


def test_a_nucleus_that_rounding_keeps_out_of_reach_has_all_tokens(rng):
    logits_BV = torch.randn(8, 3000, generator=rng)
    for search in (by_sorting, by_bisection):
        p_BV = logits_BV.masked_fill(logits_BV < search(logits_BV, BELOW_ONE), -torch.inf).softmax(-1)
        assert (p_BV - logits_BV.softmax(-1)).abs().max() < 1e-6


def test_a_row_without_a_number_bounds_nothing():
    logits_BV = torch.zeros(2, 300)
    logits_BV[0, 7] = torch.nan
    for search in (by_sorting, by_bisection):
        assert not (logits_BV[:1] < search(logits_BV, 0.5)[:1]).any()


@pytest.mark.parametrize("settings", [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}, {"temperature": 0.0}])
def test_a_draw_never_waits_for_a_gpu(settings):
    """Tensors on meta have shapes only: what asks for a value fails."""
    logits_BV, uniforms_B = (
        torch.empty(4, 700, device="meta"),
        torch.empty(4, device="meta", dtype=torch.float64),
    )
    tokens_B, logprobs_B = sample_tokens(logits_BV, Sampling(max_tokens=1, **settings), uniforms_B)
    assert tokens_B.shape == logprobs_B.shape == (4,)


def rows_of_one_nucleus(sampling, num_rows, rng):
    """Logits whose nucleus does not hang on how a device rounds its sums: one more token is 4e-4 of a row."""
    rows = []
    while len(rows) < num_rows:
        logits_V = torch.randn(5000, generator=rng) * 3
        kept_V = logits_V.double().topk(sampling.top_k or len(logits_V)).values / sampling.temperature
        if len({nucleus(kept_V, sampling.top_p + by) for by in (-1e-5, 1e-5)}) == 1:
            rows.append(logits_V)
    return torch.stack(rows)


@pytest.mark.gpu
@pytest.mark.parametrize("settings", [{"top_p": 0.9}, {"top_k": 40, "top_p": 0.95, "temperature": 0.6}])
def test_a_cuda_graph_draws_what_the_cpu_draws(settings, rng):
    sampling = Sampling(max_tokens=1, **settings)
    rows = [rows_of_one_nucleus(sampling, 64, rng) for _ in range(2)]
    uniforms_B = torch.rand(64, generator=rng, dtype=torch.float64)
    logits_BV, numbers_B = rows[0].cuda(), uniforms_B.cuda()
    sample_tokens(logits_BV, sampling, numbers_B)  # before the recording, as the engine does
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens_B, logprobs_B = sample_tokens(logits_BV, sampling, numbers_B)
    for each in rows:
        logits_BV.copy_(each)
        graph.replay()
        right_B, right_logprobs_B = sample_tokens(each, sampling, uniforms_B)
        same_B = tokens_B.cpu() == right_B
        assert same_B.sum() >= 62  # softmax rounds in another order
        assert torch.allclose(logprobs_B.cpu()[same_B], right_logprobs_B[same_B], atol=2e-6)


def test_settings_that_keep_everything_change_nothing(rng):
    logits_BV = torch.randn(16, 400, generator=rng)
    uniforms = torch.rand(16, generator=rng, dtype=torch.float64).tolist()
    assert draws(logits_BV, uniforms, top_k=400, top_p=1.0) == draws(logits_BV, uniforms)


def test_tokens_that_tie_with_the_last_kept_one_are_kept():
    tokens, logprobs = draws(torch.zeros(3, 4), [0.1, 0.6, 0.9], top_k=2)
    assert tokens == [0, 2, 3] and logprobs == pytest.approx([math.log(0.25)] * 3)


def test_greedy_takes_the_most_likely_token_with_its_logprob_at_temperature_one():
    tokens, logprobs = draws(logits_of(PROBABILITIES_V), [0.99], temperature=0.0, top_k=3)
    assert tokens == [0] and logprobs == pytest.approx([math.log(0.4)], abs=1e-6)


@pytest.mark.parametrize("settings", [{}, {"top_p": 0.9, "top_k": 40}, {"temperature": 0.0}])
def test_a_row_depends_on_nothing_else_in_the_batch(settings, rng):
    logits_BV = torch.randn(33, 1500, generator=rng) * 4
    uniforms = torch.rand(33, generator=rng, dtype=torch.float64).tolist()
    together = draws(logits_BV, uniforms, **settings)
    alone = [draws(logits_BV[b : b + 1], uniforms[b : b + 1], **settings) for b in range(33)]
    assert together == ([t[0] for t, _ in alone], [x[0] for _, x in alone])


@pytest.mark.parametrize("settings", [{}, {"top_p": 0.9}, {"top_k": 3, "min_p": 0.1}, {"temperature": 0.0}])
def test_logits_that_are_not_finite_give_no_finite_logprob_and_harm_no_other_row(settings):
    logits_BV = torch.zeros(4, 300)
    logits_BV[0, 7] = torch.nan
    logits_BV[1] = -torch.inf
    logits_BV[2, 7] = torch.inf
    logits_BV[3, 9] = 50.0
    tokens, logprobs = draws(logits_BV, [0.5] * 4, **settings)
    assert not any(math.isfinite(x) for x in logprobs[:3])
    assert tokens[3] == 9 and logprobs[3] == pytest.approx(0, abs=1e-6)


def test_logits_are_left_as_they_were(rng):
    logits_BV = torch.randn(3, 300, generator=rng)
    before = logits_BV.clone()
    for settings in ({}, {"temperature": 0.5, "top_k": 4}, {"temperature": 0.0}):
        draws(logits_BV, [0.2] * 3, **settings)
        assert torch.equal(logits_BV, before)
