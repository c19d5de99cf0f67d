"""Tokenizers of GGUF files against those that transformers builds from the same files."""

import copy

import pytest
from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from transformers import AutoTokenizer, GemmaTokenizer

from models.checkpoints import TEMPLATE, add_vocabulary, byte_tokens
from models.gguf_rows import ROWS, model_of, write_row
from qerl.errors import UserError
from qerl.models.checkpoint.gguf_file import GgufFile
from qerl.models.checkpoint.gguf_tokenizer import PRE_TOKENIZERS, _implied_merges, gguf_tokenizer

SPACE = "\u2581"
PIECES = [SPACE, *"helowrd", f"{SPACE}h", "he", "el", "ll", "lo", "hell", "hello", f"{SPACE}hello", SPACE * 2]
PIECES += ["wor", "ld", "or", "wo", f"{SPACE}wo", f"{SPACE}wor", f"{SPACE}world", "world", "rld"]
CONTROL = ["<unk>", "<s>", "</s>", "<pad>", "<bos>", "<eos>", "<mask>"]
TOKENS = [*CONTROL, *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES, "<|user|>", "<think>"]
KINDS = [2, *[3] * (len(CONTROL) - 1), *[6] * 256, *[1] * len(PIECES), 3, 4]
TEXTS = ["hello", "hello world", "hello  world", "world hello\nhello", "\u00e9\u4e2d\U0001f600 hell", "lo he"]
MIXED = ["<|user|>hello<think> world</s>", "hello<|user|>"]


def sentencepiece(writer, **flags):
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(TOKENS)
    scores = [-1000.0] * len(TOKENS)
    for rank, index in enumerate(sorted(range(len(TOKENS)), key=lambda index: TOKENS[index][::-1])):
        scores[index] = -float(rank)
    writer.add_token_scores(scores)
    writer.add_token_types(KINDS)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for key, value in flags.items():
        writer.add_bool(f"tokenizer.ggml.{key}", value)


def tokenizers_of(tmp_path, name, vocabulary=sentencepiece):
    """Ours and that of transformers."""
    file = tmp_path / "tiny.gguf"
    write_row(file, ROWS[name], model_of(ROWS[name]), vocabulary=vocabulary)
    return gguf_tokenizer(GgufFile(file)), AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)


def test_a_copy_of_a_tokenizer_is_a_tokenizer_of_its_own(tmp_path):
    tokenizer, _ = tokenizers_of(tmp_path, "llama")
    other = copy.deepcopy(tokenizer)
    other.add_tokens(["hello world"])
    assert len(other) == len(tokenizer) + 1
    assert len(tokenizer("hello world").input_ids) > len(other("hello world").input_ids)


@pytest.mark.parametrize("name", ["llama", "phi3", "gemma2", "gemma3"])
def test_sentencepiece_tokens_are_those_of_transformers(tmp_path, name):
    ours, theirs = tokenizers_of(tmp_path, name)
    # LlamaTokenizer adds no space before what follows a special token or begins with one.
    texts = TEXTS if name == "llama" else [*TEXTS, *MIXED, " hello", "   hello", ""]
    for text in texts:
        expected = theirs(text).input_ids
        assert ours(text).input_ids == expected, text
        assert ours.decode(expected) == theirs.decode(expected), text
    assert ours.chat_template == TEMPLATE
    assert (ours.bos_token_id, ours.eos_token_id, ours.unk_token_id) == (1, 2, 0)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_every_text_survives_the_round_trip(tmp_path, name):
    tokenizer, _ = tokenizers_of(tmp_path, name)
    for text in [*TEXTS, " hello", "  a\tb\r\n"]:
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text


def test_flags_of_the_file_decide_on_bos_and_on_the_space_before_the_text(tmp_path):
    def vocabulary(writer):
        sentencepiece(writer, add_bos_token=False, add_space_prefix=False)

    tokenizer, _ = tokenizers_of(tmp_path, "llama", vocabulary)
    assert tokenizer.convert_ids_to_tokens(tokenizer("hello").input_ids) == ["hello"]
    default, _ = tokenizers_of(tmp_path, "llama")
    pieces = default.convert_ids_to_tokens(default("hello").input_ids)
    assert pieces[0] == "<s>" and "".join(pieces[1:]) == f"{SPACE}hello"


def test_runs_of_spaces_of_a_gemma_are_found(tmp_path):
    spaced = [" " * len(token) if token.strip(SPACE) == "" and len(token) > 1 else token for token in TOKENS]

    def vocabulary(writer):
        sentencepiece(writer)
        writer.kv_data[0].pop("tokenizer.ggml.tokens")
        writer.add_token_list(spaced)

    ours, theirs = tokenizers_of(tmp_path, "gemma3", vocabulary)
    assert ours("hello   world").input_ids == theirs("hello   world").input_ids
    assert SPACE * 2 in ours.convert_ids_to_tokens(ours("lo   lo").input_ids)


def test_the_merges_of_a_gemma_4_are_those_of_the_file(tmp_path):
    """As Gemma4Model.set_vocab writes them; the order of the file's merges is not that of its tokens."""
    merges = [
        cut for cut in _implied_merges(TOKENS, [float(-len(t)) for t in TOKENS]) if "".join(cut) != "wor"
    ]

    def vocabulary(writer):
        sentencepiece(writer, add_bos_token=True, add_space_prefix=False)
        writer.kv_data[0].pop("tokenizer.ggml.model")
        writer.add_tokenizer_model("gemma4")
        writer.add_token_merges([" ".join(cut) for cut in merges])

    file = tmp_path / "tiny.gguf"
    write_row(file, ROWS["gemma4"], model_of(ROWS["gemma4"]), vocabulary=vocabulary)
    ours = gguf_tokenizer(GgufFile(file))
    ids = {token: index for index, token in enumerate(TOKENS)}
    theirs = GemmaTokenizer(vocab=ids, merges=merges, bos_token="<s>", eos_token="</s>")
    theirs.add_special_tokens({"additional_special_tokens": ["<|user|>"]})
    theirs.add_tokens(["<think>"])
    for text in [*TEXTS, *MIXED, " hello", "   hello", "world wor"]:
        expected = theirs(text, add_special_tokens=False).input_ids
        assert ours(text).input_ids == [1, *expected], text
        assert ours.decode(expected) == theirs.decode(expected), text
    assert ids["wor"] not in ours("wor").input_ids


CODE = "It's 12345 x_1 = f(a,b);\n\n\tdef F\u00e9e(self):\r\n  return 'HTMLParser'"
CODE += "  # \u4e2d\u6587\u0301 we'LL//\n   \U0001f600!? "


@pytest.mark.parametrize("name", ["llama-bpe", "dbrx", "smaug-bpe", "qwen2", "qwen35", "gpt-4o", "tekken"])
def test_text_is_split_as_transformers_splits_it(name):
    reader = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    split = Split(Regex(reader.GGUF_PRE_TOKENIZER_SPLITS[name]), behavior="isolated")
    theirs = Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])
    ours = PRE_TOKENIZERS[name].build()
    assert ours.pre_tokenize_str(CODE) == theirs.pre_tokenize_str(CODE)


@pytest.mark.parametrize(("name", "like"), [("glm4", "llama-bpe"), ("refact", "smollm"), ("olmo", "gpt-2")])
def test_other_names_are_split_as_llama_cpp_says(name, like):
    ours, expected = PRE_TOKENIZERS[name].build(), PRE_TOKENIZERS[like].build()
    assert ours.pre_tokenize_str(CODE) == expected.pre_tokenize_str(CODE)
    assert not PRE_TOKENIZERS[name].adds_bos


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_every_byte_level_text_survives_the_round_trip(tmp_path, name):
    file = tmp_path / "tiny.gguf"
    row = ROWS["qwen3"]
    write_row(file, row, model_of(row), vocabulary=lambda writer: add_vocabulary(writer, pre=name))
    tokenizer = gguf_tokenizer(GgufFile(file))
    tokens = tokenizer(CODE, add_special_tokens=False).input_ids
    assert tokenizer.decode(tokens) == CODE and max(tokens) < len(byte_tokens())
    assert (tokenizer(CODE).input_ids[0] == 0) == (name in ("llama-bpe", "tekken"))


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("scores", None, "has no list tokenizer.ggml.scores"),
        ("token_type", None, "has no list tokenizer.ggml.token_type"),
        ("tokens", None, "has no list tokenizer.ggml.tokens"),
        ("model", "t5", "tokenizer 't5' is not supported in GGUF; supported: gpt2"),
        ("unknown_token_id", 100_000, "unknown_token_id is 100000, the vocabulary has"),
    ],
)
def test_a_vocabulary_that_lacks_a_part_is_refused(tmp_path, key, value, says):
    file = tmp_path / "tiny.gguf"
    write_row(file, ROWS["llama"], model_of(ROWS["llama"]), vocabulary=sentencepiece)
    opened = GgufFile(file)
    opened.metadata[f"tokenizer.ggml.{key}"] = value
    with pytest.raises(UserError, match=says):
        gguf_tokenizer(opened)
