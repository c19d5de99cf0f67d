"""Build a tokenizer from a GGUF file's metadata: vocabulary, merges or scores, kinds of tokens, template.

    tokenizer.ggml.model gpt2     byte-level BPE: text is split as `tokenizer.ggml.pre` names it, then merged
    tokenizer.ggml.model llama    SentencePiece BPE: spaces are "\u2581", other characters fall back to bytes
    tokenizer.ggml.model gemma4   the same with the merges in the file

The splits below are from the tokenizer.json of the models they are named after; llama.cpp has the same
(llama-vocab.cpp). Other names are refused, because a wrong split silently gives tokens that the model was
never trained on. A SentencePiece file lists no merges: every cut of a token into two tokens is one, and the
token's score ranks it; Gemma's rank is the order of the file, as in transformers' reader.
"""

import dataclasses
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, processors
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split
from transformers import PreTrainedTokenizerFast

from qerl.errors import UserError
from qerl.models.checkpoint.gguf_file import GgufFile

_CONTROL, _USER_DEFINED = 3, 4
"""ggml's types of tokens: special tokens; text that is always one token."""
_SPECIAL_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_SPACE = "\u2581"
_MAX_PIECE_CHARS = 512  # SentencePiece's default limit is 16
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O_SPLIT = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDING}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDING}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN_SPLIT = _GPT4O_SPLIT.replace(_ENDING, "").replace(r"\p{N}{1,3}", r"\p{N}")


@dataclasses.dataclass(frozen=True, slots=True)
class BytePreTokenizer:
    """Pattern that splits text before bytes are merged."""

    split: str | None = None
    """None: as GPT-2."""
    digits_alone: bool = False
    ignores_merges: bool = False
    """Whole words of the vocabulary are taken though no merges make them."""
    adds_bos: bool = False
    """If the file does not say."""
    composes: bool = False
    """NFC first."""

    def build(self) -> PreTokenizer:
        if self.split is not None:
            split = Split(Regex(self.split), behavior="isolated")
            return Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])
        plain = ByteLevel(add_prefix_space=False)
        return Sequence([Digits(individual_digits=True), plain]) if self.digits_alone else plain


PRE_TOKENIZERS: dict[str, BytePreTokenizer] = {
    "smollm": BytePreTokenizer(digits_alone=True),
    "refact": BytePreTokenizer(digits_alone=True),  # Granite 3
    "gpt-2": BytePreTokenizer(),
    "default": BytePreTokenizer(),
    "olmo": BytePreTokenizer(),
    "llama-bpe": BytePreTokenizer(_LLAMA3_SPLIT, ignores_merges=True, adds_bos=True),
    "dbrx": BytePreTokenizer(_LLAMA3_SPLIT),  # Phi-4, OLMo 2
    "smaug-bpe": BytePreTokenizer(_LLAMA3_SPLIT),  # SmolLM3
    "glm4": BytePreTokenizer(_LLAMA3_SPLIT),
    "chatglm-bpe": BytePreTokenizer(_LLAMA3_SPLIT),
    "qwen2": BytePreTokenizer(_QWEN2_SPLIT, composes=True),
    "qwen35": BytePreTokenizer(_QWEN35_SPLIT, composes=True),
    "gpt-4o": BytePreTokenizer(_GPT4O_SPLIT),  # Phi-4-mini
    "tekken": BytePreTokenizer(_TEKKEN_SPLIT, ignores_merges=True, adds_bos=True),  # Mistral
}


def gguf_tokenizer(file: GgufFile) -> PreTrainedTokenizerFast:
    metadata = file.metadata
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama", "gemma4"):
        raise UserError(
            f"{file.path}: tokenizer {kind!r:.80} is not supported in GGUF; supported: gpt2 (byte-level BPE),"
            " llama and gemma4 (SentencePiece)"
        )
    tokens = _array(file, "tokens", str)
    build = _byte_level if kind == "gpt2" else _sentencepiece
    tokenizer, adds_bos = build(file, tokens)
    _add_whole_tokens(file, tokenizer, tokens)
    special_tokens = {
        name: tokens[index]
        for name, key in _SPECIAL_TOKENS.items()
        if (index := _token_id(file, key, len(tokens))) is not None
    }
    if metadata.get("tokenizer.ggml.add_bos_token", adds_bos) and "bos_token" in special_tokens:
        bos = special_tokens["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokens.index(bos))]
        )
    # transformers takes a copy, made by way of JSON: half of the time. This one has no other owner.
    vars(tokenizer)["__deepcopy__"] = lambda memo: tokenizer
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **special_tokens,
    )
    del vars(tokenizer)["__deepcopy__"]
    return fast


def _byte_level(file: GgufFile, tokens: list[str]) -> tuple[Tokenizer, bool]:
    """Return the tokenizer, and whether it adds a bos if the file does not say."""
    name = file.metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        raise UserError(
            f"{file.path}: pre-tokenizer {name!r:.80} is not supported;"
            f" supported: {', '.join(PRE_TOKENIZERS)}"
        )
    pre = PRE_TOKENIZERS[name]
    tokenizer = _merging(file, tokens, _listed_merges(file), ignore_merges=pre.ignores_merges)
    if pre.composes:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre.build()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre.adds_bos


def _sentencepiece(file: GgufFile, tokens: list[str]) -> tuple[Tokenizer, bool]:
    is_gemma = str(file.metadata["general.architecture"]).startswith("gemma")
    if is_gemma:  # runs of spaces are stored as spaces
        tokens = [_SPACE * len(token) if not token.strip(" ") else token for token in tokens]
    scores = [-float(index) for index in range(len(tokens))] if is_gemma else _array(file, "scores", float)
    unknown = _token_id(file, "unknown", len(tokens))
    options = {} if unknown is None else {"unk_token": tokens[unknown], "fuse_unk": True}
    has_merges = file.metadata["tokenizer.ggml.model"] == "gemma4"
    merges = _listed_merges(file) if has_merges else _implied_merges(tokens, scores)
    tokenizer = _merging(file, tokens, merges, byte_fallback=True, **options)
    has_prefix = bool(file.metadata.get("tokenizer.ggml.add_space_prefix", not is_gemma))
    steps: list[Any] = [normalizers.Prepend(_SPACE)] * has_prefix
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    back: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(back + [decoders.Strip(" ", 1, 0)] * has_prefix)
    return tokenizer, True


def _listed_merges(file: GgufFile) -> list[tuple[str, ...]]:
    return [tuple(merge.split(" ")) for merge in _array(file, "merges", str)]


def _implied_merges(tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """Return every cut of a token into two tokens, those of the highest score first."""
    known = set(tokens)
    cuts = [
        (score, token[:at], token[at:])
        for token, score in zip(tokens, scores, strict=False)
        if len(token) <= _MAX_PIECE_CHARS
        for at in range(1, len(token))
        if token[:at] in known and token[at:] in known
    ]
    cuts.sort(key=lambda cut: (cut[0], len(cut[1]), len(cut[2])), reverse=True)
    return [(left, right) for _, left, right in cuts]


def _merging(file: GgufFile, tokens: list[str], merges: list[Any], **options: Any) -> Tokenizer:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    try:
        return Tokenizer(BPE(vocab=vocabulary, merges=merges, **options))
    except Exception as error:  # tokenizers raises nothing narrower
        raise UserError(f"{file.path}: its merges do not fit its vocabulary: {error}") from error


def _add_whole_tokens(file: GgufFile, tokenizer: Tokenizer, tokens: list[str]) -> None:
    """Add the tokens that are always one token, as special ones those that are control tokens."""
    kinds = list(zip(tokens, _array(file, "token_type", int), strict=False))
    for wanted, is_special in ((_USER_DEFINED, False), (_CONTROL, True)):
        added = [
            AddedToken(token, normalized=False, special=is_special)
            for token, kind in kinds
            if kind == wanted and tokenizer.token_to_id(token) is not None
        ]
        tokenizer.add_special_tokens(added) if is_special else tokenizer.add_tokens(added)


def control_tokens(file: GgufFile, texts: set[str]) -> set[int]:
    """Return the ids of the file's control tokens that have one of these texts."""
    pairs = zip(_array(file, "tokens", str), _array(file, "token_type", int), strict=False)
    return {i for i, (token, kind) in enumerate(pairs) if kind == _CONTROL and token in texts}


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
