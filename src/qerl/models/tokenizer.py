"""Load a model's tokenizer: with transformers from a folder, or built from a GGUF file's metadata.

A GGUF holds the vocabulary, the merges, the type of each token, a chat template, and the pre-tokenizer's
name. The name says how text is split before merging; the splits below are from the tokenizer.json of the
models they are named after. Other names are refused, because a wrong split silently gives tokens
that the model was never trained on.
"""

from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, processors
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from qerl.errors import UserError
from qerl.models.gguf_file import GgufFile
from qerl.models.model_folder import read_json
from qerl.models.safetensors_file import check_size
from qerl.models.source import ModelSource, locate

_CONTROL, _USER_DEFINED = 3, 4  # ggml's token types: special tokens; text that is always one token
_SPECIAL_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_MAX_TOKEN_ID = (1 << 31) - 1
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_TOKENIZER_FILES = (
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt"),
    *("chat_template.jinja", "chat_template.json", "generation_config.json"),
)
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


def _split_then_bytes(pattern: str) -> PreTokenizer:
    return Sequence(
        [Split(Regex(pattern), behavior="isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]
    )


_PRE_TOKENIZERS: dict[str, Callable[[], PreTokenizer]] = {
    "smollm": lambda: Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]),
    "gpt-2": lambda: ByteLevel(add_prefix_space=False),
    "default": lambda: ByteLevel(add_prefix_space=False),
    "llama-bpe": lambda: _split_then_bytes(_LLAMA3_SPLIT),
    "qwen2": lambda: _split_then_bytes(_QWEN2_SPLIT),
}


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    source = locate(path)
    if source.is_gguf:
        return _from_gguf(GgufFile(source.path))
    if not any((source.path / name).is_file() for name in _VOCABULARIES):
        raise UserError(f"{source.path}: has no tokenizer: none of {', '.join(_VOCABULARIES)} is there")
    for name in (*_VOCABULARIES, *_TOKENIZER_FILES):
        check_size(source.path / name)
    config = _tokenizer_config(read_json(source.path / "config.json"), str(source.path))
    try:
        return AutoTokenizer.from_pretrained(str(source.path), config=config, trust_remote_code=False)
    except Exception as error:  # damaged files raise many unrelated types
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise UserError(f"{source.path}: its tokenizer cannot be loaded: {reason}") from error


def _tokenizer_config(config: dict[str, Any], path: str) -> PretrainedConfig:
    """Return what transformers selects a tokenizer's class by. Of the whole config it would make a table with
    num_labels entries and one with num_hidden_layers."""
    texts = {
        key: text for key in ("model_type", "tokenizer_class") if isinstance(text := config.get(key), str)
    }
    model_type = texts.pop("model_type", "")
    named: dict[str, Any] = {**texts, "name_or_path": path}
    if model_type in CONFIG_MAPPING:
        return AutoConfig.for_model(model_type, **named)
    return PretrainedConfig(**named)


def stop_token_ids(tokenizer: PreTrainedTokenizerBase, source: ModelSource) -> frozenset[int]:
    """Return the tokens that end a sample: the tokenizer's eos and those of generation_config.json."""
    found: list[Any] = [tokenizer.eos_token_id]
    file, key, listed = source.path, "tokenizer.ggml.eot_token_id", None
    if source.is_gguf:
        listed = GgufFile(file).metadata.get(key)
    elif (source.path / "generation_config.json").is_file():
        file, key = source.path / "generation_config.json", "eos_token_id"
        listed = read_json(file).get(key)
    found += listed if isinstance(listed, list) else [listed]
    for token in found:
        is_id = isinstance(token, int) and not isinstance(token, bool) and 0 <= token <= _MAX_TOKEN_ID
        if token is not None and not is_id:
            raise UserError(f"{file}: {key} must be a token id or a list of them, got {repr(token)[:80]}")
    return frozenset(token for token in found if token is not None)


def _from_gguf(file: GgufFile) -> PreTrainedTokenizerFast:
    metadata = file.metadata
    kind, split = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2":
        raise UserError(
            f"{file.path}: tokenizer {kind!r} is not supported in GGUF; supported: gpt2 (byte-level BPE)"
        )
    if not isinstance(split, str) or split not in _PRE_TOKENIZERS:
        raise UserError(
            f"{file.path}: pre-tokenizer {split!r} is not supported; supported: {', '.join(_PRE_TOKENIZERS)}"
        )
    tokens = _array(file, "tokens", str)
    tokenizer = _bpe(file, tokens, split)
    special_tokens = {
        name: tokens[index]
        for name, key in _SPECIAL_TOKENS.items()
        if (index := _token_id(file, key, len(tokens))) is not None
    }
    if metadata.get("tokenizer.ggml.add_bos_token", split == "llama-bpe") and "bos_token" in special_tokens:
        bos = special_tokens["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos} $B",
            special_tokens=[(bos, tokens.index(bos))],
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **special_tokens,
    )


def _bpe(file: GgufFile, tokens: list[str], split: str) -> Tokenizer:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in _array(file, "merges", str)]
    try:
        # Llama 3's vocabulary has whole words that no merges produce.
        tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges, ignore_merges=split == "llama-bpe"))
    except Exception as error:  # tokenizers raises nothing narrower
        raise UserError(f"{file.path}: its merges do not fit its vocabulary: {error}") from error
    if split == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[split]()
    tokenizer.decoder = decoders.ByteLevel()
    kinds = list(zip(tokens, _array(file, "token_type", int), strict=False))
    whole = [
        AddedToken(token, normalized=False, special=False) for token, kind in kinds if kind == _USER_DEFINED
    ]
    control = [AddedToken(token, normalized=False, special=True) for token, kind in kinds if kind == _CONTROL]
    tokenizer.add_tokens(whole)
    tokenizer.add_special_tokens(control)
    return tokenizer


def _array(file: GgufFile, key: str, item_type: type) -> list[Any]:
    values = file.metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(values, list) or not all(isinstance(value, item_type) for value in values):
        raise UserError(f"{file.path}: has no list tokenizer.ggml.{key}, which its tokenizer needs")
    return values


def _token_id(file: GgufFile, key: str, num_tokens: int) -> int | None:
    index = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
    if index is not None and not (isinstance(index, int) and 0 <= index < num_tokens):
        raise UserError(
            f"{file.path}: tokenizer.ggml.{key}_token_id is {index}, the vocabulary has {num_tokens}"
        )
    return index
