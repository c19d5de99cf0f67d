"""The pieces of a stream add up to the text; none is ever taken back."""

import pytest

from qerl.engine.sampling.detokenizer import Detokenizer
from qerl.serve.stream import TextStream
from qerl.types import Sample
from serve import parts


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return parts.load_tiny(tmp_path_factory.mktemp("model"))


def streamed(model, tokens_T, stop=()):
    """(the pieces as tokens come, one by one; the whole text by the engine's own reading)."""
    stream, text = TextStream(model, stop), Detokenizer(model.engine.tokenizer, stop)
    whole = text.decode([token for token in tokens_T if token not in model.engine.stop_token_ids])
    sample = Sample(tokens_T=tokens_T, logprobs_T=[0.0], text=whole, finish="stop", version=0)
    ended = [None] * (len(tokens_T) - 1) + [sample]
    return [stream.add(token, end) for token, end in zip(tokens_T, ended, strict=True)], whole


def test_a_character_of_several_bytes_comes_whole(model):
    tokens_T = model.engine.tokenizer("a\u00e9\u4e2d b")["input_ids"]
    assert len(tokens_T) == 8
    pieces, _ = streamed(model, tokens_T)
    assert pieces == ["a", "", "\u00e9", "", "", "\u4e2d", " ", "b"]


def test_bytes_that_are_no_text_come_as_the_whole_text_has_them(model, rng):
    import torch

    for _ in range(20):
        tokens_T = torch.randint(0, 258, (60,), generator=rng).tolist()
        pieces, whole = streamed(model, tokens_T)
        assert "".join(pieces) == whole and sum(map(bool, pieces)) > 5


def test_what_may_begin_a_stop_string_waits_until_it_does_not(model):
    tokens_T = model.engine.tokenizer("one END, two END")["input_ids"]
    pieces, whole = streamed(model, tokens_T, stop=(" END.", "EN,"))
    assert (pieces[3:8], whole) == (["", "", "", "", " END,"], "one END, two END")
    assert "".join(pieces) == whole
    pieces, whole = streamed(model, tokens_T[:7], stop=("END",))
    assert "".join(pieces) == whole == "one "
    assert pieces[4:] == ["", "", ""]


def test_the_token_that_ends_a_sample_is_no_text(model):
    for stop_token in model.engine.stop_token_ids:
        pieces, _ = streamed(model, [*model.engine.tokenizer("ab")["input_ids"], stop_token])
        assert pieces == ["a", "b", ""]
