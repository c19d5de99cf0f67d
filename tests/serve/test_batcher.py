"""Requests enter and leave the running batch, and each gets what it would get alone."""

import threading

import pytest

from qerl.errors import UserError
from qerl.serve.batcher import BusyError, CancelledRequestError, OverdueRequestError, PendingRequest
from qerl.types import GenerateRequest, Sampling
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
    batcher = parts.batcher_of(model)
    yield batcher
    batcher.close()


def answered(batcher, *jobs):
    """Submit the requests before the batcher starts, so that they wait together."""
    for job in jobs:
        batcher.submit(job)
    batcher.start()
    return [job.future.result(timeout=30) for job in jobs]


def held_until(condition):
    """(an event of the first token, an on_token that keeps the batcher there until the condition is true)."""
    started = threading.Event()

    def hold(*_):
        started.set()
        parts.wait_for(condition)

    return started, hold


def tokens_of(samples):
    return [sample.tokens_T for sample in samples]


def test_requests_share_a_batch_and_each_keeps_its_own_seed(model, batcher):
    asked = (
        ("one", 5, {}),
        ("two", 6, {"temperature": 0.5, "top_k": 40}),
        ("one", 7, {"top_p": 0.9}),
        ("one", 5, {"temperature": 0.0}),
    )

    def jobs():
        return [
            request_of(model, text, seed=seed, num_samples=2, sampling=Sampling(max_tokens=12, **changes))
            for text, seed, changes in asked
        ]

    alone = []
    for job in jobs():
        lone = parts.batcher_of(model)
        alone += answered(lone, job)
        lone.close()
    together = answered(batcher, *jobs())
    assert [tokens_of(samples) for samples in together] == [tokens_of(samples) for samples in alone]
    assert tokens_of(together[0]) != tokens_of(together[2])
    first, second = tokens_of(together[3])
    assert first == second  # greedy
    assert len({tuple(tokens_T) for samples in together[:3] for tokens_T in tokens_of(samples)}) == 6


def test_a_row_is_sampled_as_a_call_of_the_engine_samples_it(model, batcher):
    """The same seed, tokens and logprobs, for every way to sample."""
    changes = [{}, {"temperature": 0.6}, {"top_p": 0.8}, {"top_k": 5}, {"min_p": 0.1}, {"temperature": 0.0}]
    samplings = [Sampling(max_tokens=20, **each) for each in changes]
    jobs = [request_of(model, "one", seed=9, num_samples=2, sampling=each) for each in samplings]
    for sampling, samples in zip(samplings, answered(batcher, *jobs), strict=True):
        prompt = parts.prompt_of(model, "one", index=9)
        (group,) = model.engine.generate(
            GenerateRequest([prompt], num_samples=2, sampling=sampling, seed=0, step=0)
        )
        assert tokens_of(samples) == tokens_of(group.samples_G)
        for mine, truth in zip(samples, group.samples_G, strict=True):
            assert mine.logprobs_T == pytest.approx(truth.logprobs_T, abs=1e-5)
            assert mine.text == truth.text and mine.finish == truth.finish


def test_a_new_request_enters_at_the_next_burst(model, batcher):
    """A short answer asked for in the middle of a long one is complete long before it."""
    num_at_end, short = [], request_of(model, "b", seed=1, sampling=Sampling(max_tokens=3))
    short.future.add_done_callback(lambda _: num_at_end.append(len(long.tokens[0])))

    def watch(choice, token, ended):
        if len(long.tokens[0]) == 10:
            batcher.submit(short)

    long = request_of(model, "a", seed=1, sampling=Sampling(max_tokens=400), on_token=watch)
    answered(batcher, long)
    assert len(short.future.result(timeout=1)) == 1
    assert num_at_end[0] <= 14 < len(long.tokens[0])


def test_a_cancelled_request_leaves_the_batch_at_the_next_burst(model, batcher):
    """Its row and its pages are free again, and the request beside it goes on."""

    def watch(choice, token, ended):
        if len(gone.tokens.get(0, ())) == 3:
            batcher.cancel(gone)

    gone = request_of(model, "a", num_samples=2, sampling=Sampling(max_tokens=300), on_token=watch)
    stays = request_of(model, "b", seed=1, sampling=Sampling(max_tokens=40))
    batcher.submit(gone)
    (sample,) = answered(batcher, stays)[0]
    with pytest.raises(CancelledRequestError):
        gone.future.result(timeout=30)
    assert len(gone.tokens[0]) == 3
    parts.wait_for(lambda: batcher.batch.generation.num_used_pages == 0)
    assert batcher.batch.generation.stats.num_tokens <= 2 * 4 + len(sample.tokens_T)


def test_a_request_that_waits_for_room_is_cancelled_too(model):
    few = parts.batcher_of(model)
    long = request_of(model, "a", num_samples=200, sampling=Sampling(max_tokens=60))
    waits = request_of(model, "b")

    def watch(choice, token, ended):
        if len(long.tokens[0]) == 2 and choice == 0:
            few.submit(waits)
        if len(long.tokens[0]) > 4:
            few.cancel(waits)

    long.on_token = watch
    answered(few, long)
    with pytest.raises(CancelledRequestError):
        waits.future.result(timeout=30)
    assert not waits.tokens
    few.close()


def test_a_failed_request_does_not_end_the_batcher(model, batcher):
    batcher.submit(broken := request_of(model, "a" * 2000))
    batcher.start()
    with pytest.raises(UserError, match="2000 tokens"):
        broken.future.result(timeout=30)
    batcher.submit(fine := request_of(model, "a"))
    assert len(fine.future.result(timeout=30)) == 1


def test_a_failed_batch_fails_its_requests_and_the_next_ones_get_another(model, batcher, monkeypatch, caplog):
    def fail(self):
        raise RuntimeError("the device is gone")

    with monkeypatch.context() as broken:
        broken.setattr("qerl.engine.generation.Generation.step", fail)
        batcher.submit(lost := request_of(model, "a"))
        batcher.start()
        with pytest.raises(RuntimeError, match="the device is gone"):
            lost.future.result(timeout=30)
    batcher.submit(fine := request_of(model, "a"))
    assert len(fine.future.result(timeout=30)) == 1
    assert "the device is gone" in caplog.text


def test_a_full_queue_rejects_requests_and_closing_rejects_those_that_wait(model):
    batcher = parts.batcher_of(model, max_waiting=2)
    jobs = [request_of(model, "a"), request_of(model, "b")]
    for job in jobs:
        batcher.submit(job)
    with pytest.raises(BusyError, match="2 requests"):
        batcher.submit(request_of(model, "c"))
    batcher._is_closed = True
    batcher.start()
    batcher.close()
    for job in jobs:
        with pytest.raises(BusyError):
            job.future.result(timeout=30)
    with pytest.raises(BusyError):
        batcher.submit(request_of(model, "d"))


def test_a_client_that_leaves_the_queue_makes_room_at_once(model):
    """Also while the engine is busy: here it has not even been started."""
    batcher = parts.batcher_of(model, max_waiting=2)
    gone, stays, next_one = (request_of(model, text) for text in "abc")
    batcher.submit(gone)
    batcher.submit(stays)
    batcher.cancel(gone)
    assert batcher.num_waiting == 1
    with pytest.raises(CancelledRequestError):
        gone.future.result(timeout=0)
    batcher.submit(next_one)
    batcher.start()
    assert all(len(each.future.result(timeout=30)) == 1 for each in (stays, next_one))
    batcher.close()


def test_a_client_that_leaves_before_its_first_token_makes_room_at_once(model):
    """Its request waits in the batch, whose step has not ended."""
    few = parts.batcher_of(model, max_waiting=1)
    long = request_of(model, "a", num_samples=200, sampling=Sampling(max_tokens=60))
    waits, next_one, num_waiting = request_of(model, "b"), request_of(model, "c"), []

    def watch(choice, token, ended):
        num = len(long.tokens[0]) if choice == 0 else 0
        if num == 2:
            few.submit(waits)
        elif num == 4:
            few.cancel(waits)
            num_waiting.append(few.num_waiting)
            few.submit(next_one)

    long.on_token = watch
    answered(few, long)
    assert num_waiting == [0] and len(next_one.future.result(timeout=30)) == 1
    few.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_no_request_waits_for_a_thread_that_has_died(model, monkeypatch):
    batcher = parts.batcher_of(model)

    def die(self):
        raise SystemExit

    monkeypatch.setattr("qerl.engine.generation.Generation.step", die)
    batcher.submit(lost := request_of(model, "a"))
    batcher.start()
    with pytest.raises(CancelledRequestError, match="thread has ended"):
        lost.future.result(timeout=30)
    parts.wait_for(lambda: batcher.has_died)
    with pytest.raises(BusyError, match="must be started again"):
        batcher.submit(request_of(model, "b"))
    batcher.close()  # pytest has then seen how the thread ended


def test_counts_go_on_over_a_failed_batch(model, batcher, monkeypatch):
    def fail(self):
        raise UserError("no")

    (first,) = answered(batcher, request_of(model, "abc"))
    batcher.batch.generation.stats.unfused_tokens = 5  # as where kernels draw others
    num_tokens, num_prompt = batcher.num_generated_tokens, batcher.num_prompt_tokens
    assert num_tokens >= len(first[0].tokens_T) and num_prompt == 3
    parts.wait_for(lambda: batcher.kv_pages[0] == 0)
    assert batcher.kv_pages[1] > 0
    with monkeypatch.context() as broken:
        broken.setattr("qerl.engine.generation.Generation.step", fail)
        batcher.submit(lost := request_of(model, "ab"))
        with pytest.raises(UserError):
            lost.future.result(timeout=30)
    parts.wait_for(lambda: batcher.batch is None)
    assert batcher.num_generated_tokens == num_tokens and batcher.num_prompt_tokens == num_prompt + 2
    assert batcher.num_unfused_tokens == 5


def test_closing_stops_the_running_call(model):
    batcher = parts.batcher_of(model)
    started, hold = held_until(lambda: batcher._is_closed)
    job = request_of(model, "a", sampling=Sampling(max_tokens=900), on_token=hold)
    batcher.submit(job)
    batcher.start()
    assert started.wait(30)
    batcher.close()
    with pytest.raises(CancelledRequestError):
        job.future.result(timeout=1)
    assert len(job.tokens[0]) < 900


def test_prompts_enter_a_batch_a_few_tokens_at_a_time(model, batcher, monkeypatch):
    """So that the first of many prompts does not wait for the last."""
    monkeypatch.setattr("qerl.engine.local_engine._CPU_ADMITTED_TOKENS", 10)
    first, last = (request_of(model, text, sampling=Sampling(max_tokens=40)) for text in ("a" * 20, "b"))
    num_before = []

    def watch(choice, token, ended):
        num_before.append(len(first.tokens[0]))

    last.on_token = watch
    answered(batcher, first, last)
    assert 1 < num_before[0] < 5


def test_a_pause_gives_the_engine_back_and_ends_what_runs(model, batcher):
    batcher.start()
    started, hold = held_until(lambda: batcher._is_paused)
    long = request_of(model, "one", sampling=Sampling(max_tokens=900, temperature=2.0), on_token=hold)
    batcher.submit(long)
    assert started.wait(30)
    batcher.pause()
    assert batcher.batch is None
    with pytest.raises(CancelledRequestError):
        long.future.result(timeout=30)
    with pytest.raises(BusyError, match="engine is paused"):
        batcher.submit(request_of(model, "two"))
    prompt = parts.prompt_of(model, "two")
    model.engine.generate(GenerateRequest([prompt], num_samples=1, sampling=SAMPLING, seed=0, step=0))
    batcher.resume()
    after = request_of(model, "two")
    batcher.submit(after)
    assert after.future.result(timeout=30)[0].tokens_T


def test_a_request_that_is_not_complete_in_its_time_fails_alone(model, batcher):
    late = request_of(model, "one", sampling=Sampling(max_tokens=900, temperature=2.0))
    late.timeout_s = 0.05
    beside = request_of(model, "two")
    for job in (late, beside):
        batcher.submit(job)
    batcher.start()
    with pytest.raises(OverdueRequestError, match=r"not complete after 0.05 s"):
        late.future.result(timeout=30)
    assert beside.future.result(timeout=30)[0].tokens_T
