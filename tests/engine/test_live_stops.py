"""Stop tokens of requests in a live batch, on the device where all rows share them, and on the host."""

import dataclasses

import pytest

from engine.parts import VOCABULARY, engine_of, prompts_of
from models.tiny import tiny
from qerl.engine.decode.runner import DecodeRunner
from qerl.engine.generation import StoppingCriteria
from qerl.engine.live_batch import LiveRequest
from qerl.types import Sampling

MAX_TOKENS, LENGTHS = 40, (9, 31, 4, 16, 7)
COMMON = frozenset(range(0, len(VOCABULARY), 12))
MIXES = {
    "shared": [COMMON] * 5,
    "of one": [COMMON, COMMON, COMMON | {7, 8}, COMMON, COMMON],
    "apart": [frozenset({1, 2}), COMMON, frozenset(), frozenset({3, 2**40, -1}), COMMON],
    "many": [frozenset(range(0, 61, 3))] * 5,
}


@pytest.fixture(scope="module")
def decoder():
    return tiny()


def sampled(decoder, stops, *, num_samples=2, join_late=True, **options):
    """The samples by (request, sample), and how many tokens each request was told of."""
    engine = engine_of(decoder, stop_token_ids=frozenset(), decode_steps_per_sync=4)
    found, told = {}, [0] * len(LENGTHS)
    with engine.live_batch(100) as batch:
        for i, (prompt, ids) in enumerate(zip(prompts_of(*LENGTHS), stops, strict=True)):

            def on_token(index, token, ended, i=i):
                told[i] += 1
                if ended is not None:
                    found[i, index] = ended

            how = {"stop_token_ids": ids, "num_samples": num_samples, **options}
            batch.add(
                LiveRequest(prompt=prompt, sampling=Sampling(max_tokens=MAX_TOKENS), on_token=on_token, **how)
            )
            if i == 2 and join_late:
                batch.step()
                batch.step()
        while len(found) < num_samples * len(LENGTHS):
            batch.step()
        assert batch.generation.num_used_pages == 0
    return found, told


@pytest.fixture(scope="module")
def endless(decoder):
    return sampled(decoder, [frozenset()] * 5)[0]


@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.parametrize("mix", MIXES)
def test_a_sample_ends_with_the_first_stop_token_of_its_request(mix, is_streamed, decoder, endless):
    found, told = sampled(decoder, MIXES[mix], is_streamed=is_streamed)
    for (i, index), sample in found.items():
        whole = endless[i, index]
        ends = [t for t, token in enumerate(whole.tokens_T) if token in MIXES[mix][i]]
        length = ends[0] + 1 if ends else MAX_TOKENS
        assert sample.tokens_T == whole.tokens_T[:length]
        assert sample.logprobs_T == pytest.approx(whole.logprobs_T[:length], abs=1e-4)
        assert sample.finish == ("stop" if ends else "length")
    assert any(sample.finish == "stop" for sample in found.values())
    lengths = [sum(len(found[i, index].tokens_T) for index in range(2)) for i in range(len(LENGTHS))]
    assert told == (lengths if is_streamed else [2] * len(LENGTHS))


def test_a_sample_that_nobody_reads_is_not_detokenized(decoder, monkeypatch):
    stops = [COMMON] * 5
    with_text, _ = sampled(decoder, stops)
    monkeypatch.setattr(StoppingCriteria, "text", lambda *_: pytest.fail("a text was made"))
    without, _ = sampled(decoder, stops, has_text=False)
    assert any(sample.text for sample in with_text.values())
    assert without == {key: dataclasses.replace(sample, text="") for key, sample in with_text.items()}


def test_the_batch_is_rebuilt_while_a_burst_runs_only_where_the_device_ends_samples(decoder, monkeypatch):
    calls, original = [], DecodeRunner.set_batch

    def set_batch(self, *arguments):
        calls.append(self.num_unread_bursts)
        original(self, *arguments)

    monkeypatch.setattr(DecodeRunner, "set_batch", set_batch)
    for stops, is_overlapped in (([COMMON] * 5, True), ([frozenset(), *[COMMON] * 4], False)):
        calls.clear()
        sampled(decoder, stops, join_late=False)
        assert len(calls) > 1 and any(calls) == is_overlapped
