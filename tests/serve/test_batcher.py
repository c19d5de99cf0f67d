"""Equal requests share one engine call, and each gets what it would get alone."""

import threading

import pytest

from qerl.errors import UserError
from qerl.serve.batcher import Batcher, BusyError, CancelledRequestError, PendingRequest
from qerl.types import Sampling
from serve import parts

SAMPLING = Sampling(max_tokens=12)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return parts.load_tiny(tmp_path_factory.mktemp("model"))


def request_of(model, text, *, seed=0, num_samples=1, sampling=SAMPLING, on_token=None):
    prompts_P = [parts.prompt_of(model, text, index=seed)]
    return PendingRequest(prompts_P=prompts_P, num_samples=num_samples, sampling=sampling, on_token=on_token)


@pytest.fixture
def batcher(model):
    batcher = Batcher(model.engine, max_waiting=6)
    yield batcher
    batcher.close()


def answered(batcher, *jobs):
    """Submit the requests before the batcher starts, so that they wait together."""
    for job in jobs:
        batcher.submit(job)
    batcher.start()
    return [job.future.result(timeout=30) for job in jobs]


def tokens_of(samples):
    return [sample.tokens_T for sample in samples]


def test_alike_requests_are_one_call_and_each_keeps_its_own_seed(model, batcher):
    alone = []
    for text, seed in (("one", 5), ("two", 6), ("one", 7)):
        lone = Batcher(model.engine, max_waiting=1)
        alone += answered(lone, request_of(model, text, seed=seed, num_samples=2))
        lone.close()
    together = answered(
        batcher,
        *(request_of(model, t, seed=s, num_samples=2) for t, s in (("one", 5), ("two", 6), ("one", 7))),
    )
    assert batcher.num_calls == 1
    assert [tokens_of(samples) for samples in together] == [tokens_of(samples) for samples in alone]
    assert tokens_of(together[0]) != tokens_of(together[2])
    assert len({tuple(tokens_T) for samples in together for tokens_T in tokens_of(samples)}) == 6


def test_other_samplings_and_other_counts_are_other_calls(model, batcher):
    jobs = [
        request_of(model, "a"),
        request_of(model, "a", sampling=Sampling(max_tokens=12, temperature=0.5)),
        request_of(model, "a", num_samples=2),
        request_of(model, "b"),
    ]
    assert [len(samples) for samples in answered(batcher, *jobs)] == [1, 1, 2, 1]
    assert batcher.num_calls == 3


def test_a_short_answer_does_not_wait_for_the_long_one_beside_it(model, batcher):
    lone = Batcher(model.engine, max_waiting=1)
    ((alone,),) = answered(lone, request_of(model, "b", seed=1))
    lone.close()
    sampling = Sampling(max_tokens=400, stop=(next(c for c in alone.text if c != "\ufffd"),))
    short, long = (request_of(model, text, seed=1, sampling=sampling) for text in ("b", "a"))
    long_was_done = []
    short.future.add_done_callback(lambda _: long_was_done.append(long.future.done()))
    answered(batcher, long, short)
    assert batcher.num_calls == 1 and long_was_done == [False]
    assert len(short.samples[0].tokens_T) <= 12 < len(long.samples[0].tokens_T)


def test_a_cancelled_request_is_not_sampled_any_further(model, batcher):
    num_seen = 0

    def watch(choice, token, ended):
        nonlocal num_seen
        num_seen += 1
        gone.is_cancelled = num_seen == 3

    sampling = Sampling(max_tokens=300)
    gone = request_of(model, "a", sampling=sampling, on_token=watch)
    batcher.submit(gone)
    batcher.start()
    with pytest.raises(CancelledRequestError):
        gone.future.result(timeout=30)
    assert num_seen == 3 and model.engine.stats.num_tokens == 3


def test_a_failed_request_does_not_end_the_batcher(model, batcher):
    batcher.submit(broken := request_of(model, "a" * 2000))
    batcher.start()
    with pytest.raises(UserError, match="2000 tokens"):
        broken.future.result(timeout=30)
    batcher.submit(fine := request_of(model, "a"))
    assert len(fine.future.result(timeout=30)) == 1


def test_a_full_queue_rejects_requests_and_closing_rejects_those_that_wait(model):
    batcher = Batcher(model.engine, max_waiting=2, batch_wait_s=0.5)
    jobs = [request_of(model, "a"), request_of(model, "b")]
    for job in jobs:
        batcher.submit(job)
    with pytest.raises(BusyError, match="2 requests"):
        batcher.submit(request_of(model, "c"))
    batcher.start()
    batcher.close()
    for job in jobs:
        with pytest.raises(BusyError):
            job.future.result(timeout=30)
    with pytest.raises(BusyError):
        batcher.submit(request_of(model, "d"))


def test_closing_stops_the_running_call(model):
    batcher = Batcher(model.engine, max_waiting=2)
    started = threading.Event()
    job = request_of(model, "a", sampling=Sampling(max_tokens=900), on_token=lambda *_: started.set())
    batcher.submit(job)
    batcher.start()
    assert started.wait(30)
    batcher.close()
    with pytest.raises(CancelledRequestError):
        job.future.result(timeout=1)
    assert model.engine.stats.num_tokens < 900
