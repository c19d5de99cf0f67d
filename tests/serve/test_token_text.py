"""The bytes of an answer's tokens, joined, are its text; each lies where it is said to, streamed or not."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from qerl.engine.sampling.detokenizer import Detokenizer
from qerl.serve.stream import TokenStream, place_prompt, place_tokens
from qerl.serve.token_text import TokenBytes
from qerl.types import Sample, TokenLogprob

END, MARK = "<|end|>", "<|mark|>"
TEXT = "a b caf\u00e9 \u4e2d\u6587 \U0001f600\U0001f468\u200d\U0001f469 def  END"


def byte_level() -> Tokenizer:
    """256 bytes and some merges within and across characters."""
    names = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {name: i for i, name in enumerate(names)}
    merges = []
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    for pair in (split("\U0001f600")[0][0][:2], split("\u00e9 ")[0][0][1:], "de", "EN", split(" a")[0][0]):
        vocab[pair] = len(vocab)
        merges.append((pair[0], pair[1]))
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def fallback_vocabulary():
    pieces = [
        "<unk>",
        *(f"<0x{b:02X}>" for b in range(256)),
        "\u2581",
        *"abcdefEND",
        "\u2581a",
        "\u2581d",
        "\u00e9",
    ]
    return {piece: i for i, piece in enumerate(pieces)}


def sentencepiece() -> Tokenizer:
    """As Llama 2: the decoder replaces, falls back, joins and strips one space."""
    merges = [("\u2581", "a"), ("\u2581", "d")]
    tokenizer = Tokenizer(models.BPE(fallback_vocabulary(), merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    replace, strip = decoders.Replace("\u2581", " "), decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence([replace, decoders.ByteFallback(), decoders.Fuse(), strip])
    return tokenizer


def gemma() -> Tokenizer:
    """Byte fallback whose decoder strips nothing."""
    tokenizer = sentencepiece()
    replace = decoders.Replace("\u2581", " ")
    tokenizer.decoder = decoders.Sequence([replace, decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def metaspace() -> Tokenizer:
    tokenizer = sentencepiece()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return tokenizer


def word_piece() -> Tokenizer:
    """A decoder of which only the text is known."""
    words = ["[UNK]", "a", "##b", "caf\u00e9", "##\u4e2d", "END", "d", "##ef"]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return tokenizer


KINDS = {each.__name__: each for each in (byte_level, sentencepiece, gemma, metaspace, word_piece)}


def load(kind: str):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=KINDS[kind](), eos_token=END)
    tokenizer.add_special_tokens({"additional_special_tokens": [MARK]})
    tokenizer.add_tokens([AddedToken("<call>", special=False), AddedToken(" \u00e9x", special=False)])
    engine = SimpleNamespace(tokenizer=tokenizer, stop_token_ids=frozenset({tokenizer.eos_token_id}))
    return SimpleNamespace(engine=engine, token_bytes=TokenBytes(tokenizer))


MODELS = {kind: load(kind) for kind in KINDS}


def sampled(model, tokens_T, stop):
    """The tokens up to the stop token or string, and the sample, as the engine has them."""
    detokenizer, ended = Detokenizer(model.engine.tokenizer, stop), "length"
    for n in range(1, len(tokens_T) + 1):
        if tokens_T[n - 1] in model.engine.stop_token_ids or detokenizer.has_stop(tokens_T[:n]):
            tokens_T, ended = tokens_T[:n], "stop"
            break
    is_end = tokens_T[-1] in model.engine.stop_token_ids
    text = detokenizer.decode(tokens_T[:-1] if is_end else tokens_T)
    sample = Sample(tokens_T=tokens_T, logprobs_T=[0.0], text=text, finish=ended, version=0)
    return [TokenLogprob(token, -1.0) for token in tokens_T], sample


def is_text_of(data: bytes, text: str) -> bool:
    """The decoders of byte fallback write U+FFFD for each byte of a run that is not UTF-8."""
    if "\ufffd" not in text:
        return data == text.encode()
    if data.decode("utf-8", "replace") == text:
        return True
    position, encoded = 0, data
    for char in text:
        number = 1 if char == "\ufffd" else len(char.encode())
        piece, position = encoded[position : position + number], position + number
        if char != "\ufffd" and piece != char.encode():
            return False
    return position == len(data)


def check(kind, tokens_T, stop):
    model = MODELS[kind]
    tokens, sample = sampled(model, tokens_T, stop)
    stream, pieces, came = TokenStream(model, stop, keeps_end=False), [], []
    for number, token in enumerate(tokens, 1):
        piece, placed = stream.add(token, sample if number == len(tokens) else None)
        pieces.append(piece)
        came += placed
        num_sent = len("".join(pieces))
        assert all(each.place.end <= num_sent for each in placed)  # no token before its text
    assert "".join(pieces) == sample.text
    assert came == place_tokens(model, stop, tokens, sample, keeps_end=False)
    assert is_text_of(b"".join(each.place.data for each in came), sample.text)
    num_bytes, encoded = 0, sample.text.encode()
    for each in came:
        if "\ufffd" not in sample.text and each.place.data:
            assert each.place.start == len(encoded[:num_bytes].decode("utf-8", "ignore"))
        num_bytes += len(each.place.data)
    starts = [each.place.start for each in came]
    assert starts == sorted(starts)
    assert not came or came[-1].sampled.token not in model.engine.stop_token_ids
    kept = place_tokens(model, stop, tokens, sample, keeps_end=True)
    assert [each.sampled.token for each in kept] == sample.tokens_T
    assert b"".join(each.place.data for each in kept) == b"".join(each.place.data for each in came)


STOPS = st.lists(
    st.sampled_from(["END", "\u00e9", " d", "e", "\U0001f600", "\u6587 ", f"a{MARK}"]), max_size=2
)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), stop=STOPS)
@settings(max_examples=150, deadline=None)
def test_the_bytes_of_random_tokens_are_their_text(kind, data, stop):
    num_tokens = len(MODELS[kind].engine.tokenizer)
    tokens = st.lists(st.integers(0, num_tokens + 2), min_size=1, max_size=24)
    check(kind, data.draw(tokens), tuple(stop))


@pytest.mark.parametrize("kind", KINDS)
@given(
    words=st.lists(
        st.sampled_from([*TEXT.split(" "), " ", "\n", MARK, END, "<call>", " \u00e9x"]), min_size=1
    ),
    num_cut=st.integers(0, 4),
    stop=STOPS,
)
@settings(max_examples=150, deadline=None)
def test_the_bytes_of_texts_that_end_anywhere_are_their_text(kind, words, num_cut, stop):
    tokens_T = MODELS[kind].engine.tokenizer(" ".join(words), add_special_tokens=False)["input_ids"]
    if tokens_T := tokens_T[: len(tokens_T) - num_cut]:
        check(kind, tokens_T, tuple(stop))


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "gemma", "metaspace"])
def test_each_token_of_an_emoji_has_its_own_bytes(kind):
    model = MODELS[kind]
    tokens_T = model.engine.tokenizer("a \U0001f600b", add_special_tokens=False)["input_ids"]
    tokens, sample = sampled(model, tokens_T, ())
    placed = place_tokens(model, (), tokens, sample, keeps_end=False)
    start = sample.text.index("\U0001f600")
    parts = [each.place.data for each in placed if each.place.start == start and each.place.data]
    assert len(parts) == (3 if kind == "byte_level" else 4) and b"".join(parts) == "\U0001f600".encode()
    assert placed[-1].place.data == b"b" and placed[-1].place.start == start + 1
    assert model.token_bytes.name(0, b"\xf0\x9f", prefix="bytes:") == "bytes:\\xf0\\x9f"


def test_a_word_keeps_its_space_after_a_special_token():
    model = MODELS["sentencepiece"]
    ids = model.engine.tokenizer.convert_tokens_to_ids(["\u2581a", MARK, "\u2581d", "\u2581a"])
    stream, (tokens, sample) = TokenStream(model, (), keeps_end=False), sampled(model, ids, ())
    pieces = [stream.add(each, None)[0] for each in tokens]
    assert sample.text == "a d a" and pieces == ["a", "", " d", " a"]


@pytest.mark.parametrize(("first", "start"), [("\u2581a", 0), ("b", 1)])
def test_a_likely_token_has_no_space_where_a_text_begins(first, start):
    model = MODELS["sentencepiece"]
    (token,) = model.engine.tokenizer.convert_tokens_to_ids(["\u2581d"])
    assert model.token_bytes.data_at(token, start) == (b"d" if start == 0 else b" d")
    assert model.token_bytes.data_at(model.engine.tokenizer.eos_token_id, start) == b""


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "gemma"])
def test_the_tokens_of_a_prompt_lie_in_its_text(kind):
    model, text = MODELS[kind], f"a{MARK}caf\u00e9 \U0001f600 d"
    tokens_T = model.engine.tokenizer(text, add_special_tokens=False)["input_ids"]
    added_T = [model.engine.tokenizer.eos_token_id, *tokens_T]
    text = str(model.engine.tokenizer.decode(tokens_T))
    logprobs = [TokenLogprob(token, -1.0) for token in tokens_T]
    placed = place_prompt(model.token_bytes, added_T, logprobs, text)
    assert [each.sampled.token for each in placed] == added_T and placed[0].place.start == 0
    assert placed[-1].place.start == len(text) - (1 if kind == "byte_level" else 2)
    marks = [each for each in placed if each.sampled.token == added_T[2]]
    assert marks[0].place.start == text.index(MARK)
