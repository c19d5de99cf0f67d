"""Find what each token of a text adds to it: its bytes, and where they lie.

    byte-level BPE            "Ġf" -> 20 66; the four bytes of an emoji may be four tokens
    byte fallback             "<0xF0>" -> F0; a run of such pieces is text only as a whole, since the decoder
                              writes U+FFFD for each byte of a run that is not UTF-8
    leading space             a sentencepiece decoder strips it from the first token alone
    special tokens            no bytes; beyond the tokenizer's vocabulary neither

The bytes of all tokens, joined, are the text in UTF-8; bytes that are no UTF-8 stay as they are, and the text
has U+FFFD for them: tests/serve/test_token_text.py. A tokenizer of another kind is decoded token by token.
"""

import dataclasses
import itertools
import json
import re
from typing import Any

from transformers import PreTrainedTokenizerBase as Tokenizer

_INCOMPLETE = "\ufffd"
_BYTE_PIECE = re.compile("<0x([0-9A-Fa-f]{2})>")
# GPT-2's names of bytes: printable ones are themselves, the others follow U+0100.
_PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTE_OF = {chr(b): b for b in _PRINTABLE} | {chr(256 + i): byte for i, byte in enumerate(_OTHERS)}


@dataclasses.dataclass(frozen=True, slots=True)
class TokenText:
    data: bytes
    start: int
    """Index of the character in which the first byte lies."""
    end: int
    """Index after the character in which the last byte lies."""

    def before(self, num_chars: int) -> "TokenText":
        """Return what lies in the first num_chars characters."""
        data = self.data
        for _ in range(min(self.end, self.end - num_chars)):
            while data and data[-1] & 0xC0 == 0x80:
                data = data[:-1]
            data = data[:-1]
        return TokenText(data, min(self.start, num_chars), min(self.end, num_chars))

    def after(self, num_chars: int) -> "TokenText":
        """Return the same behind this many more characters."""
        return TokenText(self.data, self.start + num_chars, self.end + num_chars)


class TokenBytes:
    """The bytes of the tokens of a vocabulary."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        special = {i: str(token) for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.special_ids = {text: i for i, text in special.items()}
        self._special, self._size = {*special, *tokenizer.all_special_ids}, len(tokenizer)
        decoders = _decoders(tokenizer)
        kinds = {each["type"] for each in decoders}
        self._is_byte_level, self._has_fallback = "ByteLevel" in kinds, "ByteFallback" in kinds
        self._replaced = {each["replacement"]: " " for each in decoders if each["type"] == "Metaspace"}
        for each in decoders:
            if each["type"] == "Replace" and "String" in each["pattern"]:
                self._replaced[each["pattern"]["String"]] = each["content"]

    def is_special(self, token: int) -> bool:
        return token in self._special

    def is_known(self, token: int) -> bool:
        """A model's vocabulary may be larger than its tokenizer's."""
        return token < self._size

    def is_byte(self, token: int) -> bool:
        """True if the token is a piece <0xNN> of byte fallback."""
        return self._has_fallback and _BYTE_PIECE.fullmatch(self._piece(token)) is not None

    def data_of(self, token: int) -> bytes:
        """Return a token's bytes after other text."""
        piece = self._piece(token)
        if self._is_byte_level:
            values = [_BYTE_OF.get(char) for char in piece]
            return piece.encode() if None in values else bytes(value for value in values if value is not None)
        if self._has_fallback and (match := _BYTE_PIECE.fullmatch(piece)):
            return bytes([int(match[1], 16)])
        if not self._replaced:
            return self.decode([token]).encode()
        for old, new in self._replaced.items():
            piece = piece.replace(old, new)
        return piece.encode()

    def data_at(self, token: int, start: int) -> bytes:
        """Return the bytes of a token that would stand at this character of an answer."""
        if self.is_special(token) or not self.is_known(token):
            return b""
        data = self.data_of(token)
        is_stripped = start == 0 and data.startswith(b" ") and not self.decode([token]).startswith(" ")
        return data[1:] if is_stripped else data

    def decode(self, tokens_T: list[int], *, skip_special_tokens: bool = True) -> str:
        text = self.tokenizer.decode(
            tokens_T, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text

    def name(self, token: int, data: bytes, *, prefix: str = "") -> str:
        """Return the text of a token; of a part of a character its bytes, as OpenAI: \\xf0\\x9f."""
        try:
            return data.decode() if data else self.decode([token], skip_special_tokens=False)
        except UnicodeDecodeError:
            return prefix + "".join(f"\\x{byte:02x}" for byte in data)

    def _piece(self, token: int) -> str:
        return str(self.tokenizer.convert_ids_to_tokens(token))


class TokenReader:
    """Decode tokens one by one; each new text follows the last and is never taken back.

    Only the tokens since the text before the last are decoded again: a tokenizer may strip a space from the
    first token that it decodes, but from no later one.
    """

    def __init__(self, token_bytes: TokenBytes, *, skip_special_tokens: bool = True):
        self._bytes, self._skips_special = token_bytes, skip_special_tokens
        self._tokens_T: list[int] = []
        self._context_start = self._num_decoded = 0  # decoding starts at the first, new text at the second
        self._open: list[bytes] = []  # of the tokens whose text is not whole
        self._is_in_run = False  # of pieces of byte fallback
        self._num_chars = 0
        self.places_T: list[TokenText] = []
        """Places of the tokens whose text is known."""

    def add(self, token: int) -> str:
        """Return the text that this token completes."""
        is_skipped = self._skips_special and self._bytes.is_special(token)
        if is_skipped or not self._bytes.is_known(token):
            return self.add_empty()
        is_byte, text = self._bytes.is_byte(token), ""
        if self._is_in_run and not is_byte:
            text = self.close()
        self._is_in_run = is_byte
        self._tokens_T.append(token)
        self._open.append(self._bytes.data_of(token))
        return text if is_byte else text + self._new_text(is_whole=False)

    def add_empty(self) -> str:
        """Add a token that is no text."""
        self._open.append(b"")
        if not any(self._open):
            self._place("")
        return ""

    def close(self) -> str:
        """Return the text of the tokens that wait for more."""
        return self._new_text(is_whole=True)

    def _new_text(self, *, is_whole: bool) -> str:
        text = self._decode(self._tokens_T[self._context_start :])
        if text.endswith(_INCOMPLETE) and not is_whole:
            return ""
        context = self._decode(self._tokens_T[self._context_start : self._num_decoded])
        new = text[len(context) :]
        self._context_start, self._num_decoded = self._num_decoded, len(self._tokens_T)
        self._place(new)
        return new

    def _place(self, text: str) -> None:
        """Add the open tokens to places_T."""
        data_T = _split(self._open, text)
        ends = list(itertools.accumulate(map(len, data_T)))
        char_of = [self._num_chars + c for c in _chars(b"".join(data_T), text)]
        self._num_chars += len(text)
        for data, end in zip(data_T, ends, strict=True):
            begin = end - len(data)
            start = char_of[begin] if begin < len(char_of) else self._num_chars
            self.places_T.append(TokenText(data, start, char_of[end - 1] + 1 if data else start))
        self._open.clear()

    def _decode(self, tokens_T: list[int]) -> str:
        return self._bytes.decode(tokens_T, skip_special_tokens=self._skips_special)


def _decoders(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Return the settings of the parts of a fast tokenizer's decoder."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    if decoder is None:
        return []
    settings = json.loads(decoder.__getstate__())
    return settings["decoders"] if settings["type"] == "Sequence" else [settings]


def _split(data_T: list[bytes], text: str) -> list[bytes]:
    """Return the bytes of each token of a text, by what they are after other text."""
    joined, encoded = b"".join(data_T), text.encode()
    if joined.endswith(encoded):  # a space may have been stripped
        num_stripped, kept_T = len(joined) - len(encoded), []
        for data in data_T:
            kept_T.append(data[num_stripped:])
            num_stripped -= min(num_stripped, len(data))
        return kept_T
    if text in (joined.decode("utf-8", "replace"), _INCOMPLETE * len(joined)):
        return list(data_T)
    last = max((i for i, data in enumerate(data_T) if data), default=len(data_T) - 1)
    return [encoded if i == last else b"" for i in range(len(data_T))]


def _chars(data: bytes, text: str) -> list[int]:
    """Return the index of the character in which each byte lies."""
    if len(data) == len(text):
        return list(range(len(data)))
    char_of, num_chars = list[int](), 0
    while len(char_of) < len(data):
        rest, invalid = data[len(char_of) :], 0
        try:
            valid = rest.decode()
        except UnicodeDecodeError as error:
            valid, invalid = rest[: error.start].decode(), error.end - error.start
        for char in valid:
            char_of += [num_chars] * len(char.encode())
            num_chars += 1
        char_of += [num_chars] * invalid
        num_chars += invalid > 0
    return char_of
