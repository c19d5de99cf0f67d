import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from engine.parts import EOS, VOCABULARY, tokenizer, tokens_of
from qerl.engine.sampling.detokenizer import Detokenizer
from qerl.errors import UserError

ACUTE = tokens_of("\u00c3", "\u00a9")


def first_stop(text, tokens_T):
    """After how many tokens the stop string is seen, when asked after each."""
    return next((n for n in range(1, len(tokens_T) + 1) if text.has_stop(tokens_T[:n])), None)


def test_text_leaves_special_tokens_out():
    assert Detokenizer(tokenizer(), ()).decode(tokens_of("a", "<pad>", "\u0120", "cde", "<eos>")) == "a cde"


@pytest.mark.parametrize(
    "stop, tokens, seen_after",
    [
        ("b", ["a", "b", "c"], 2),
        ("bc", ["a", "b", "c", "d"], 3),
        ("xab.", ["a", "x", "ab", ".", "d"], 4),  # over three tokens
        ("d", ["a", "cde", "x"], 2),  # inside a token
        ("bc", ["ab", "cde", "x"], 2),  # over parts of two
        ("\n", ["a", "\u010a"], 2),
        ("a b", ["a", "\u0120", "b"], 3),
        ("bc", ["a", "b", "d", "c"], None),
        ("abcdefghij", [*"xxxxxxxxxxabcdefghijk"], 20),
        ("ab", ["a", "<pad>", "<pad>", "<pad>", "<pad>", "<pad>", "<pad>", "<pad>", "<pad>", "b"], 10),
    ],
)
def test_a_stop_string_is_seen_with_the_token_that_completes_it(stop, tokens, seen_after):
    assert first_stop(Detokenizer(tokenizer(), (stop,)), tokens_of(*tokens)) == seen_after


def test_a_stop_string_with_a_character_of_two_tokens_is_seen_when_it_is_whole():
    text = Detokenizer(tokenizer(), ("x\u00e9",))
    assert first_stop(text, tokens_of("a", "x") + ACUTE) == 4
    assert first_stop(text, ACUTE * 7 + tokens_of("x") + ACUTE) == 17


def test_a_space_that_decoding_strips_from_a_texts_start_is_seen_within_it():
    core = Tokenizer(models.WordLevel({"x": 0, "\u2581": 1, "b": 2, "<unk>": 3}, unk_token="<unk>"))
    core.decoder = decoders.Metaspace()
    text = Detokenizer(PreTrainedTokenizerFast(tokenizer_object=core), (" b",))
    assert text.decode([1, 2]) == "b"
    assert first_stop(text, [0, 1, 2]) == 3


def test_text_is_cut_before_the_first_of_the_stop_strings():
    text = Detokenizer(tokenizer(), ("cd", "bc"))
    assert text.decode(tokens_of("a", "b", "cde", "f")) == "a"
    assert text.decode(tokens_of("a", "b", "x")) == "abx"


@pytest.mark.parametrize(
    ("stop", "tokens", "seen_after", "text"),
    [
        ("<pad>", ["a", "<pad>", "b"], 2, "a"),
        ("<eos>", ["ab", "c", "<pad>", "<eos>"], 4, "abc"),
        ("<pad>", ["<pad>"], 1, ""),
        ("c<pad>", ["ab", "<pad>", "c", "<pad>", "a"], 4, "ab"),
        ("de<pad>", ["a", "cde", "<pad>"], 3, "ac"),  # from the inside of a token
        ("<pad>b", ["a", "<pad>", "c", "<pad>", "b", "x"], 5, "ac"),
        ("<pad><eos>", ["a", "<pad>", "<eos>"], 3, "a"),
        ("<pad>x", ["a", "<pad>", "b"], None, "ab"),
        ("pad", ["a", "<pad>", "b"], None, "ab"),  # a part of a special token's name is none
        ("<pad>", ["a", "\u00c3", "\u00a9", "<pad>"], 4, "a\u00e9"),
    ],
)
def test_a_stop_string_with_a_special_token_is_seen_and_cut_off(stop, tokens, seen_after, text):
    detokenizer, tokens_T = Detokenizer(tokenizer(), (stop, "zz")), tokens_of(*tokens)
    assert first_stop(detokenizer, tokens_T) == seen_after
    assert detokenizer.decode(tokens_T[:seen_after]) == text


def test_tokens_beyond_the_tokenizer_are_no_text():
    padded = len(VOCABULARY) + 3  # a model's table is often larger than its tokenizer's
    text = Detokenizer(tokenizer(), ("ab",))
    tokens_T = [*tokens_of("a"), *[padded] * 9, *tokens_of("b")]
    assert first_stop(text, tokens_T) == 11 and text.decode(tokens_T) == ""


def test_only_a_short_tail_is_decoded_at_each_step():
    class Counting(type(tokenizer())):
        num_decoded = 0

        def decode(self, token_ids, **settings):
            Counting.num_decoded += len(token_ids)
            return super().decode(token_ids, **settings)

    text = Detokenizer(Counting(tokenizer_object=tokenizer().backend_tokenizer), ("xyz",))
    tokens_T = tokens_of(*"ab" * 200)
    assert first_stop(text, tokens_T) is None
    assert Counting.num_decoded <= 400 * (3 + 4)


def test_an_empty_stop_string_is_the_users_mistake():
    with pytest.raises(UserError, match=r"sample\.stop must not contain the empty string"):
        Detokenizer(tokenizer(), ("a", ""))


def test_the_stop_token_alone_is_no_text():
    assert Detokenizer(tokenizer(), ("a",)).decode([EOS]) == "" and not Detokenizer(
        tokenizer(), ("a",)
    ).has_stop([EOS])
