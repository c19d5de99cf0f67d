"""Load a model's tokenizer: with transformers from a folder, or from a GGUF file (gguf_tokenizer.py)."""

import json
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from qerl.errors import UserError
from qerl.models.checkpoint.gguf_file import GgufFile
from qerl.models.checkpoint.gguf_tokenizer import control_tokens, gguf_tokenizer
from qerl.models.checkpoint.model_folder import read_json
from qerl.models.checkpoint.safetensors_file import check_size
from qerl.models.checkpoint.source import ModelSource, locate

_MAX_TOKEN_ID = (1 << 31) - 1
_TEXT_CONFIGS = "decoder", "generator", "text_config"  # in which GenerationConfig.from_model_config looks
_GGUF_ENDS = "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"
_TURN_ENDS = {"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<end_of_turn>", "<turn|>", "<|end|>", "<|return|>"}
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_TOKENIZER_FILES = (
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt"),
    *("chat_template.jinja", "chat_template.json", "generation_config.json"),
)


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    source = locate(path)
    if source.is_gguf:
        return gguf_tokenizer(GgufFile(source.path))
    if not any((source.path / name).is_file() for name in _VOCABULARIES):
        raise UserError(f"{source.path}: has no tokenizer: none of {', '.join(_VOCABULARIES)} is there")
    for name in (*_VOCABULARIES, *_TOKENIZER_FILES):
        check_size(source.path / name)
    config = _tokenizer_config(read_json(source.path / "config.json"), source.path)
    try:
        return AutoTokenizer.from_pretrained(str(source.path), config=config, trust_remote_code=False)
    except Exception as error:  # damaged files raise many unrelated types
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise UserError(f"{source.path}: its tokenizer cannot be loaded: {reason}") from error


def check_tokens(tokenizer: PreTrainedTokenizerBase, vocab_size: int, path: Path) -> None:
    """Raise UserError unless the model has an embedding for each token that a text may become. Added tokens
    may lie beyond: some models have one that no prompt contains."""
    text_T = list(tokenizer.encode("a"))
    if not text_T:
        raise UserError(f"{path}: its tokenizer makes no token of a text")
    vocabulary, added = tokenizer.get_vocab(), tokenizer.added_tokens_decoder
    last = max([*text_T, *(index for index in vocabulary.values() if index not in added)])
    if last >= vocab_size:
        theirs = f"the model's vocabulary has {vocab_size}"
        raise UserError(f"{path}: its tokenizer has the token {last}, {theirs}: it belongs to another model")


def _tokenizer_config(config: dict[str, Any], path: Path) -> PretrainedConfig:
    """Return what transformers selects a tokenizer's class by. Of the whole config it would make a table with
    num_labels entries and one with num_hidden_layers."""
    model_type, tokenizer_class = config.get("model_type"), config.get("tokenizer_class")
    named: dict[str, Any] = {"name_or_path": str(path)}
    if isinstance(tokenizer_class, str):
        named["tokenizer_class"] = tokenizer_class
    if isinstance(model_type, str) and model_type in CONFIG_MAPPING:
        if not _names_class(path / "tokenizer_config.json"):
            return AutoConfig.for_model(model_type, **named)
        named["model_type"] = model_type
    return PretrainedConfig(**named)


def _names_class(path: Path) -> bool:
    """True if the file names the tokenizer's class and no code of its own. Then the config's class does not
    matter, and is not imported: many import transformers' modelling code, a third of a program's start."""
    try:
        settings = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    is_named = isinstance(settings, dict) and isinstance(settings.get("tokenizer_class"), str)
    return is_named and "auto_map" not in settings


def stop_token_ids(tokenizer: PreTrainedTokenizerBase, source: ModelSource) -> frozenset[int]:
    """Return the tokens that end a sample: the tokenizer's eos, and those at which transformers' generation
    stops: of generation_config.json or, if it names none, of config.json. Of a GGUF: its eos, eot and eom,
    and the control tokens that llama.cpp knows as ends of a turn by their text."""
    eos: Any = tokenizer.eos_token_id
    ids = set() if eos is None else {eos}
    if source.is_gguf:
        file = GgufFile(source.path)
        for key in _GGUF_ENDS:
            ids |= _token_ids(source.path, key, file.metadata.get(key))
        # <|end|> ends a message within an answer where there is <|return|>: gpt-oss
        has_return = control_tokens(file, {"<|return|>"})
        return frozenset(ids | control_tokens(file, _TURN_ENDS - {"<|end|>"} if has_return else _TURN_ENDS))
    for name, sections in (("generation_config.json", ()), ("config.json", _TEXT_CONFIGS)):
        file = source.path / name
        config = read_json(file) if file.is_file() else {}
        nested = next((config[section] for section in sections if config.get(section)), None)
        for each in (config, nested if isinstance(nested, dict) else {}):
            if named := _token_ids(file, "eos_token_id", each.get("eos_token_id")):
                return frozenset(ids | named)
    return frozenset(ids)


def _token_ids(file: Path, key: str, listed: Any) -> set[int]:
    """Return the ids of an entry; raise UserError for what is none."""
    tokens = listed if isinstance(listed, list) else [listed]
    for token in tokens:
        is_id = isinstance(token, int) and not isinstance(token, bool) and 0 <= token <= _MAX_TOKEN_ID
        if token is not None and not is_id:
            raise UserError(f"{file}: {key} must be a token id or a list of them, got {repr(token)[:80]}")
    return {token for token in tokens if token is not None}
