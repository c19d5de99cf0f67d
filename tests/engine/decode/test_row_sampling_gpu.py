"""Requests on a Hopper GPU: the fused head draws those with a temperature alone, whatever runs beside."""

import pytest
import torch

from engine.decode.test_decode_kernels import NEVER, decoder_of, small_prompts
from engine.decode.test_decode_kernels import pytestmark as pytestmark
from engine.parts import drawn, engine_of
from qerl.engine.live_batch import LiveRequest
from qerl.types import Sampling

LENGTHS, MAX_TOKENS = (9, 31, 1, 16, 17, 40), 24
TEMPERATURES = (1.0, 0.7, 0.0, 1.5, 1.0, 0.3)


@pytest.fixture(scope="module", params=["bf16", "fp8", "nvfp4"])
def engine(request):
    return engine_of(decoder_of(head=request.param), stop_token_ids=NEVER)


class EvenTokens:
    """Only even tokens."""

    is_complete = False

    def accept(self, token):
        assert token % 2 == 0

    def allowed_V(self):
        return torch.arange(1024) % 2 == 0


def requests_of(**changes):
    return [
        {"prompt": prompt, "sampling": Sampling(max_tokens=MAX_TOKENS, temperature=temperature), **changes}
        for prompt, temperature in zip(small_prompts(*LENGTHS), TEMPERATURES, strict=True)
    ]


def sampled(engine, requests):
    """The samples of each request, and the batch's stats."""
    found = {}
    with engine.live_batch(128) as batch:
        for i, request in enumerate(requests):

            def on_token(index, token, ended, i=i):
                if ended is not None:
                    found[i, index] = ended

            batch.add(LiveRequest(on_token=on_token, **request))
        num_samples = sum(request.get("num_samples", 1) for request in requests)
        while len(found) < num_samples:
            batch.step()
        stats = batch.generation.stats
    assert stats.num_tokens == num_samples * MAX_TOKENS
    return found, stats


def assert_same(found, others):
    """Nine of ten samples have the same tokens: in other batches hidden states round elsewhere, which now and
    then turns a draw, and other random numbers would leave none alike."""
    alike = [key for key in found if found[key].tokens_T == others[key].tokens_T]
    assert len(alike) >= 0.9 * len(found) - 1
    for key in alike:
        pairs = torch.tensor([found[key].logprobs_T, others[key].logprobs_T])
        assert (pairs[0] - pairs[1]).abs().max() < 0.2


def truncated_and_constrained():
    """Requests that the fused head does not draw."""
    return [
        {"prompt": prompt, "sampling": Sampling(max_tokens=MAX_TOKENS, **how), **others}
        for prompt, how, others in zip(
            small_prompts(7, 22),
            ({"temperature": 0.9, "top_p": 0.8}, {"temperature": 1.0}),
            ({}, {"constraint": EvenTokens}),
            strict=True,
        )
    ]


def test_a_request_has_the_same_tokens_alone_and_beside_any_others(engine):
    requests = requests_of(num_samples=2)
    together, stats = sampled(engine, requests)
    assert stats.unfused_tokens == 0
    runner = engine._runners._runners[None, None]
    graphs = dict(runner._graphs)
    alone = {}
    for i, request in enumerate(requests):
        alone |= {(i, g): sample for (_, g), sample in sampled(engine, [request])[0].items()}
    assert_same(alone, together)
    backwards, _ = sampled(engine, requests[::-1])
    assert_same({(5 - i, g): sample for (i, g), sample in backwards.items()}, together)
    assert graphs and runner._graphs.items() >= graphs.items()
    beside, stats = sampled(engine, [*requests, *truncated_and_constrained()])
    assert stats.unfused_tokens >= 2 * MAX_TOKENS
    assert_same(together, beside)
    assert all(token % 2 == 0 for token in beside[7, 0].tokens_T)
    again, _ = sampled(engine, requests)
    assert_same(together, again)


def test_reports_change_no_token(engine):
    plain, _ = sampled(engine, requests_of())
    reported, stats = sampled(engine, requests_of(num_top_logprobs=3))
    assert stats.unfused_tokens == 0
    assert_same(plain, reported)


def test_requests_have_the_samples_of_generate_with_seed_0(engine):
    """A request's samples are a function of its prompt's index as in a rollout."""
    prompts_P, each = small_prompts(*LENGTHS), {"temperature": 0.7, "max_tokens": MAX_TOKENS}
    samples = drawn(engine, prompts_P, num_samples=2, seed=0, step=0, **each)
    how = Sampling(max_tokens=MAX_TOKENS, temperature=0.7)
    found, _ = sampled(engine, [{"prompt": p, "sampling": how, "num_samples": 2} for p in prompts_P])
    assert_same({divmod(k, 2): sample for k, sample in enumerate(samples)}, found)


def test_a_request_that_is_not_streamed_has_the_same_samples(engine):
    streamed, _ = sampled(engine, requests_of())
    found, _ = sampled(engine, requests_of(is_streamed=False))
    assert_same(streamed, found)


@pytest.mark.parametrize("is_shared", [True, False])
def test_samples_end_at_the_stop_tokens_of_their_requests(engine, is_shared):
    """As they would go on without them; on the device where all rows have the same, else on the host."""
    endless, _ = sampled(engine, requests_of(num_samples=2))
    stops = [frozenset(range(i % 2 * (not is_shared), 1024, 40)) for i in range(len(LENGTHS))]
    found = {}
    with engine.live_batch(128) as batch:
        for i, (request, ids) in enumerate(zip(requests_of(num_samples=2), stops, strict=True)):

            def on_token(index, token, ended, i=i):
                found[i, index] = ended

            how = {"stop_token_ids": ids, "is_streamed": False}
            batch.add(LiveRequest(on_token=on_token, **how, **request))
        while len(found) < 2 * len(LENGTHS):
            batch.step()
        assert batch.generation.num_used_pages == 0
    alike = 0
    for (i, index), sample in found.items():
        whole = endless[i, index].tokens_T
        ends = [t for t, token in enumerate(whole) if token in stops[i]]
        alike += sample.tokens_T == (whole[: ends[0] + 1] if ends else whole)
        assert not stops[i].intersection(sample.tokens_T[:-1])
    assert alike >= 0.9 * len(found) - 1
