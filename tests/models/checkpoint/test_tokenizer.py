import json

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

from models.checkpoints import TEMPLATE, byte_tokens, save_tiny, tiny, write_gguf
from qerl.errors import UserError
from qerl.models.checkpoint.source import BUILT_IN, locate
from qerl.models.checkpoint.tokenizer import load_tokenizer, stop_token_ids

TEXT = "hello Hello, it's 1234 + 5 = ?\n\n  two  spaces \u00e9\u4e2d\U0001f600\t"


def gguf_path(tmp_path, changes=None, **vocabulary):
    write_gguf(tmp_path / "tiny.gguf", tiny(num_hidden_layers=1), vocabulary=vocabulary, changes=changes)
    return str(tmp_path / "tiny.gguf")


def pieces(tokenizer, text):
    return tokenizer.convert_ids_to_tokens(tokenizer(text, add_special_tokens=False).input_ids)


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "default", "llama-bpe", "qwen2"])
def test_every_text_survives_the_round_trip(tmp_path, pre):
    tokenizer = load_tokenizer(gguf_path(tmp_path, pre=pre))
    tokens = tokenizer(TEXT, add_special_tokens=False).input_ids
    assert tokenizer.decode(tokens) == TEXT
    assert all(0 <= token < len(byte_tokens()) for token in tokens)


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("smollm", ["hel", "1", "2", "1", "2"]),  # digits alone
        ("gpt-2", ["hel", "1212"]),  # digits together
        ("qwen2", ["hel", "1", "2", "1", "2"]),
        ("llama-bpe", ["hel", "121", "2"]),  # digits in threes
    ],
)
def test_digits_are_split_as_the_pre_tokenizer_says(tmp_path, pre, expected):
    tokens = [*byte_tokens(), "12", "121", "1212"]
    merges = ["h e", "he l", "1 2", "12 1", "12 12", "121 2"]
    tokenizer = load_tokenizer(gguf_path(tmp_path, pre=pre, tokens=tokens, merges=merges))
    assert pieces(tokenizer, "hel1212") == expected


def test_only_llama_3_takes_whole_words_that_no_merge_reaches(tmp_path):
    tokens = [*byte_tokens(), "xyz"]
    assert pieces(load_tokenizer(gguf_path(tmp_path, pre="llama-bpe", tokens=tokens)), "xyz") == ["xyz"]
    assert pieces(load_tokenizer(gguf_path(tmp_path, pre="qwen2", tokens=tokens)), "xyz") == ["x", "y", "z"]


def test_control_tokens_encode_to_one_id_and_are_special(tmp_path):
    tokenizer = load_tokenizer(gguf_path(tmp_path))
    assert tokenizer("<|im_start|>hel<|im_end|>").input_ids == [0, len(byte_tokens()) - 1, 1]
    assert tokenizer.decode([0, len(byte_tokens()) - 1, 1], skip_special_tokens=True) == "hel"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1, None)


def test_tokens_that_are_no_eos_can_be_control_or_always_whole_too(tmp_path):
    tokens = [*byte_tokens(), "<|call|>", "<think>"]
    kinds = [3, 3] + [1] * (len(tokens) - 4) + [3, 4]
    tokenizer = load_tokenizer(gguf_path(tmp_path, tokens=tokens, kinds=kinds))
    ids = tokenizer("h<|call|><think>").input_ids
    assert ids[1:] == [len(tokens) - 2, len(tokens) - 1]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "h<think>"
    assert len(tokenizer) == len(tokens)


def test_only_qwen2_composes_characters_first(tmp_path):
    decomposed, composed = "e\u0301", "\u00e9"
    qwen2 = load_tokenizer(gguf_path(tmp_path, pre="qwen2"))
    assert qwen2(decomposed).input_ids == qwen2(composed).input_ids
    smollm = load_tokenizer(gguf_path(tmp_path, pre="smollm"))
    assert smollm(decomposed).input_ids != smollm(composed).input_ids


def test_the_chat_template_comes_along(tmp_path):
    tokenizer = load_tokenizer(gguf_path(tmp_path))
    assert tokenizer.chat_template == TEMPLATE
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "hel"}], tokenize=False)
    assert rendered == "<|im_start|>hel<|im_end|>"


def test_a_bos_is_added_where_the_model_has_one(tmp_path):
    assert load_tokenizer(gguf_path(tmp_path, pre="llama-bpe"))("h").input_ids[0] == 0
    assert load_tokenizer(gguf_path(tmp_path, pre="smollm"))("h").input_ids[0] != 0


def test_an_unknown_pre_tokenizer_is_refused_by_name(tmp_path):
    path = gguf_path(tmp_path, pre="viking")
    with pytest.raises(UserError, match="'viking' is not supported; supported: smollm, refact, gpt-2"):
        load_tokenizer(path)


def test_merges_that_do_not_fit_the_vocabulary_are_refused(tmp_path):
    path = gguf_path(tmp_path, merges=["h zz"])
    with pytest.raises(UserError, match="its merges do not fit its vocabulary"):
        load_tokenizer(path)


def test_a_token_id_outside_the_vocabulary_is_refused(tmp_path):
    path = gguf_path(tmp_path, eos=100_000)
    with pytest.raises(UserError, match="eos_token_id is 100000, the vocabulary has"):
        load_tokenizer(path)


def test_a_gguf_without_a_vocabulary_is_refused(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", tiny(num_hidden_layers=1))
    with pytest.raises(UserError, match="tokenizer None is not supported"):
        load_tokenizer(str(tmp_path / "tiny.gguf"))


def folder_with_tokenizer(folder):
    save_tiny(folder, num_hidden_layers=1)
    words = Tokenizer(BPE(vocab={"<e>": 0, "a": 1, "b": 2}, merges=[]))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<e>").save_pretrained(folder)
    return folder


def test_a_folder_s_tokenizer_is_loaded(tmp_path):
    tokenizer = load_tokenizer(str(folder_with_tokenizer(tmp_path)))
    assert tokenizer("ab").input_ids == [1, 2]


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3_moe", "mistral", "gemma3_text", "gpt_oss"])
@pytest.mark.parametrize("named", ["TokenizersBackend", "LlamaTokenizerFast", "Qwen2Tokenizer", None])
def test_a_tokenizer_s_class_is_the_one_that_the_model_type_selects(tmp_path, model_type, named):
    """Without the class of the config, where the tokenizer's is named."""
    folder = folder_with_tokenizer(tmp_path)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    file = folder / "tokenizer_config.json"
    settings = {k: v for k, v in json.loads(file.read_text()).items() if k != "tokenizer_class"}
    file.write_text(json.dumps(settings | ({"tokenizer_class": named} if named else {})))
    config = AutoConfig.for_model(model_type, name_or_path=str(folder))
    ours, theirs = load_tokenizer(str(folder)), AutoTokenizer.from_pretrained(str(folder), config=config)
    assert type(ours) is type(theirs)
    assert ours("ab").input_ids == theirs("ab").input_ids
    assert ours.get_vocab() == theirs.get_vocab()


def test_a_folder_without_a_tokenizer_is_told_so(tmp_path):
    save_tiny(tmp_path, num_hidden_layers=1)
    with pytest.raises(UserError, match=r"has no tokenizer: none of tokenizer\.json"):
        load_tokenizer(str(tmp_path))


def test_a_damaged_tokenizer_is_refused_in_one_line(tmp_path):
    folder = folder_with_tokenizer(tmp_path)
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(UserError, match="its tokenizer cannot be loaded") as caught:
        load_tokenizer(str(folder))
    assert "\n" not in str(caught.value)


def transformers_ends(folder):
    """The ids at which transformers' generation stops, by the code that loads a model for it."""
    model, at = tiny(num_hidden_layers=1), {"cache_dir": None, "force_download": False, "proxies": None}
    at |= {"local_files_only": True, "token": None, "revision": "main", "subfolder": ""}
    model.adjust_generation_fn(
        generation_config=None,
        from_auto_class=False,
        from_pipeline=None,
        pretrained_model_name_or_path=str(folder),
        trust_remote_code=False,
        **at,
    )
    ends = model.generation_config.eos_token_id
    return set(ends) if isinstance(ends, list) else {ends} - {None}


ENDS = {  # entries of generation_config.json and config.json; None: no file, or no entry
    "generation_config, one": ({"eos_token_id": 2}, None, {2}),
    "generation_config, a list": ({"eos_token_id": [2, 1]}, None, {1, 2}),
    "config, one, without the file": (None, {"eos_token_id": 3}, {3}),
    "config, a list, without the file": (None, {"eos_token_id": [3, 4]}, {3, 4}),
    "both, equal": ({"eos_token_id": [3]}, {"eos_token_id": 3}, {3}),
    "both, disagreeing": ({"eos_token_id": 5}, {"eos_token_id": [3, 4]}, {5}),
    "nested": (None, {"text_config": {"eos_token_id": [6, 7]}}, {6, 7}),
    "nested, and above": (None, {"eos_token_id": 3, "text_config": {"eos_token_id": [6, 7]}}, {3}),
    "nested in a decoder": (None, {"decoder": {"eos_token_id": 8}}, {8}),
    "nested, and null above": (None, {"eos_token_id": None, "text_config": {"eos_token_id": 9}}, {9}),
    "the tokenizer alone": (None, {}, set()),
    "null in both": ({"eos_token_id": None}, {"eos_token_id": None}, set()),
}


def folder_with_ends(folder, generation, config):
    folder_with_tokenizer(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    stored = json.loads((folder / "config.json").read_text())
    stored.pop("eos_token_id")
    (folder / "config.json").write_text(json.dumps(stored | (config or {})))
    tokenizer = load_tokenizer(str(folder))
    return tokenizer, stop_token_ids(tokenizer, locate(str(folder)))


@pytest.mark.parametrize(("generation", "config", "expected"), ENDS.values(), ids=ENDS)
def test_a_sample_stops_where_transformers_stops_and_at_the_tokenizers_eos(
    tmp_path, generation, config, expected
):
    tokenizer, ends = folder_with_ends(tmp_path, generation, config)
    assert transformers_ends(tmp_path) == expected
    assert ends == expected | {tokenizer.eos_token_id}


@pytest.mark.parametrize("generation", [{}, {"eos_token_id": None}, {"eos_token_id": []}, {"top_k": 5}])
@pytest.mark.parametrize("config", [{"eos_token_id": [3, 4]}, {"text_config": {"eos_token_id": [3, 4]}}])
def test_where_the_generation_config_names_no_end_that_of_the_config_is_taken(tmp_path, generation, config):
    tokenizer, ends = folder_with_ends(tmp_path, generation, config)
    assert ends == {tokenizer.eos_token_id, 3, 4}  # transformers would not stop at all


def test_an_end_in_the_config_that_is_no_token_id_is_one_line(tmp_path):
    with pytest.raises(UserError, match=r"/config\.json: eos_token_id must be a token id or a list of them"):
        folder_with_ends(tmp_path, None, {"text_config": {"eos_token_id": "</s>"}})


@pytest.mark.parametrize("key", ["eot_token_id", "eom_token_id"])
def test_a_gguf_stops_at_eos_and_at_the_ends_of_turns_and_messages(tmp_path, key):
    path = gguf_path(tmp_path, changes={f"tokenizer.ggml.{key}": 7})
    assert stop_token_ids(load_tokenizer(path), locate(path)) == {1, 7}


@pytest.mark.parametrize(
    ("texts", "kind", "num_ends"),
    [
        (["<|eot_id|>", "<|eom_id|>"], 3, 2),
        (["<end_of_turn>", "<|im_start|>user"], 3, 1),
        (["<|end|>"], 3, 1),
        (["<|return|>", "<|end|>"], 3, 1),  # gpt-oss: <|end|> ends a message within an answer
        (["<|eot_id|>"], 1, 0),  # plain text
    ],
)
def test_a_gguf_stops_at_control_tokens_that_are_known_to_end_a_turn(tmp_path, texts, kind, num_ends):
    tokens = [*byte_tokens(), *texts]
    kinds = [3, 3] + [1] * (len(tokens) - 2 - len(texts)) + [kind] * len(texts)
    path = gguf_path(tmp_path, tokens=tokens, kinds=kinds)
    ends = {1, *range(len(byte_tokens()), len(byte_tokens()) + num_ends)}
    assert stop_token_ids(load_tokenizer(path), locate(path)) == ends


def test_the_built_in_model_talks_as_its_makers_say():
    tokenizer = load_tokenizer(BUILT_IN)
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 12 + 3?"}], tokenize=False, add_generation_prompt=True
    )
    assert rendered == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is 12 + 3?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert pieces(tokenizer, "What is 12 + 3?") == [
        "What",
        "\u0120is",
        "\u0120",
        "1",
        "2",
        "\u0120+",
        "\u0120",
        "3",
        "?",
    ]
    assert tokenizer("<|im_start|>user\n<|im_end|>").input_ids == [1, 4093, 198, 2]
    assert tokenizer.decode(tokenizer(TEXT).input_ids) == TEXT
    assert stop_token_ids(tokenizer, locate(BUILT_IN)) == {2}
    assert tokenizer.eos_token == "<|im_end|>"
