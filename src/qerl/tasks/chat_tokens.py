"""Tokenize chats so that no text of a message becomes a control token.

    messages --quoted--> messages with marks --chat template--> text with marks --encoded--> tokens

A tokenizer reads `<|im_end|>` as the end of a turn, also in a message. So the texts of control tokens in
messages are replaced by marks before the chat template is rendered. The control tokens of the rendered text
are then the template's own. A copy of the tokenizer that has other names for them encodes the text, in which
the messages' ones are ordinary text again. A chat without such texts has no marks and is encoded as it is.

Control tokens are special tokens, and added ones of the form `<|name|>`; `<think>` and `<tool_call>`, which
answers contain, mostly are none. Prompts that are plain texts do not come here: they are read as written.
"""

import functools
import json
import re
import secrets
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from tokenizers import Tokenizer

from qerl.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase  # takes seconds to import

Value = TypeVar("Value")


def _random_mark() -> str:
    """Return a private-use text that no message can contain but by chance."""
    return "".join(chr(0xE000 + secrets.randbelow(6400)) for _ in range(6))


_OPEN, _CLOSE, _NAME = _random_mark(), _random_mark(), _random_mark()
_MARKED = re.compile(f"{_OPEN}([\U00010000-\U0010ffff]*){_CLOSE}")  # marks are in plane 0
_ROLE_MARK = re.compile(r"<[|\uff5c].*[|\uff5c]>", re.DOTALL)
_SHIFT = 0xF0000  # marks hide characters in the private-use plane 15


class ControlTokens:
    """The control tokens of one tokenizer."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase"):
        self.are_allowed = False
        """True: their texts in messages are read as control tokens."""
        self._backend: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
        added = tokenizer.added_tokens_decoder.values()
        control = {
            str(each): each.normalized for each in added if each.special or _ROLE_MARK.fullmatch(str(each))
        }
        texts = {*control, *tokenizer.all_special_tokens} - {""}
        # The longest first, as tokenizers choose.
        ordered = sorted(texts, key=lambda text: (-len(text), text))
        self._pattern = re.compile("|".join(map(re.escape, ordered)) or r"(?!)")
        self._names = {text: f"{_NAME}{chr(_SHIFT + place)}" for place, text in enumerate(ordered)}
        self._normalizer = self._backend.normalizer if self._backend and any(control.values()) else None

    def quote(self, text: str) -> str:
        """Return the text with marks in place of control tokens."""
        if self.are_allowed:
            return text
        marked = self._pattern.sub(lambda match: _mark(match[0]), text)
        if marked == text and self._normalizer and self._pattern.search(self._normalizer.normalize_str(text)):
            marked += _mark("")  # tokenizers look for some tokens after they have normalized a text
        return marked

    def encode(self, marked: str, *, with_special_tokens: bool) -> list[int]:
        if self._backend is None:
            raise UserError(
                f"a message contains {_texts(marked)[0]!r}, a control token, which this tokenizer cannot read"
                " as text: leave it out, or set task.allow_special_tokens"
            )
        text = unquoted(self._pattern.sub(lambda match: self._names[match[0]], marked))
        return self._renamed.encode(text, add_special_tokens=with_special_tokens).ids

    @functools.cached_property
    def _renamed(self) -> Tokenizer:
        """Return a copy of the tokenizer in which the control tokens have other names."""
        assert self._backend is not None
        state, names = json.loads(self._backend.to_str()), self._names
        state |= {"truncation": None, "padding": None}
        for token in state["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
        model = state["model"]
        vocabulary = model["vocab"]
        if isinstance(vocabulary, dict):
            model["vocab"] = {names.get(piece, piece): index for piece, index in vocabulary.items()}
        else:  # unigram
            model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocabulary]
        if "unk_token" in model:
            model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
        if "merges" in model:
            pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
            model["merges"] = [[a, b] for a, b in pairs if names.keys().isdisjoint((a, b, a + b))]
        renamed = Tokenizer.from_str(json.dumps(state))
        for text, name in names.items():
            assert renamed.token_to_id(name) == self._backend.token_to_id(text), text
        return renamed


_CONTROL: "weakref.WeakKeyDictionary[PreTrainedTokenizerBase, ControlTokens]" = weakref.WeakKeyDictionary()


def control_tokens(tokenizer: "PreTrainedTokenizerBase") -> ControlTokens:
    known = _CONTROL.get(tokenizer)
    if known is None:
        known = _CONTROL[tokenizer] = ControlTokens(tokenizer)
    return known


def allow_special_tokens(tokenizer: "PreTrainedTokenizerBase", is_allowed: bool) -> None:
    """Read the texts of control tokens in messages as control tokens, or as text."""
    control_tokens(tokenizer).are_allowed = is_allowed


def quoted(tokenizer: "PreTrainedTokenizerBase", value: Value) -> Value:
    """Return messages, or other JSON values for a chat template, with marks in place of control tokens."""
    return _mapped(control_tokens(tokenizer), value)


def encoded(
    tokenizer: "PreTrainedTokenizerBase", marked: str, *, with_special_tokens: bool = False
) -> list[int]:
    """Return the tokens of a text with marks. with_special_tokens: with those that begin any text."""
    if _OPEN not in marked:
        return list(tokenizer(marked, add_special_tokens=with_special_tokens)["input_ids"])
    return control_tokens(tokenizer).encode(marked, with_special_tokens=with_special_tokens)


def unquoted(marked: str) -> str:
    """Return the text without marks."""
    return _MARKED.sub(lambda match: _shifted(match[1], -_SHIFT), marked)


def _mapped(control: ControlTokens, value: Any) -> Any:
    if isinstance(value, str):
        return control.quote(value)
    if isinstance(value, Mapping):
        return {_mapped(control, name): _mapped(control, each) for name, each in value.items()}
    return [_mapped(control, each) for each in value] if isinstance(value, list | tuple) else value


def _mark(text: str) -> str:
    return f"{_OPEN}{_shifted(text, _SHIFT)}{_CLOSE}"


def _texts(marked: str) -> list[str]:
    return [_shifted(text, -_SHIFT) for text in _MARKED.findall(marked)]


def _shifted(text: str, by: int) -> str:
    """Return the characters of the plane 0 in plane 15, or back."""
    return "".join(chr(ord(c) + by) if (ord(c) >> 16) == (0 if by > 0 else 15) else c for c in text)
