"""Text of an answer in which control tokens are visible to what parses it, and to nothing else.

A character of such a token is a lone surrogate, U+DC00 plus its place in ASCII, after which come DeepSeek's
two. Decoded text has none, so that nobody can write a control token as text; and each place of the text is
the same where the token is spelled.
"""

import dataclasses
from collections.abc import Iterable, Mapping

from qerl.serve.token_text import TokenBytes

_SURROGATE_OF = {code: 0xDC00 + place for place, code in enumerate([*range(128), ord("｜"), ord("▁")])}
_CODE_OF = {surrogate: code for code, surrogate in _SURROGATE_OF.items()}
_REMOVED = dict.fromkeys(_CODE_OF)


@dataclasses.dataclass(frozen=True, slots=True)
class Markers:
    """Control tokens that are visible: by their ids, their texts."""

    texts: Mapping[int, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, token_bytes: TokenBytes, texts: Iterable[str]) -> "Markers":
        """Return those of the texts that are special tokens; the others are in a decoded text anyway."""
        ids = token_bytes.special_ids
        return cls(
            {ids[text]: text for text in texts if text in ids and _SURROGATE_OF.keys() >= set(map(ord, text))}
        )

    def of_token(self, token: int) -> str:
        """Return the marked text of a token; empty if it has none."""
        return self.texts[token].translate(_SURROGATE_OF) if token in self.texts else ""

    def mark(self, text: str) -> str:
        """Return the text with its control tokens marked."""
        for each in self.texts.values():
            text = text.replace(each, each.translate(_SURROGATE_OF))
        return text


NO_MARKERS = Markers()


def spelled(marked: str) -> str:
    """Return the text with the control tokens as text, of the same length."""
    return marked if marked.isascii() else marked.translate(_CODE_OF)


def unmarked(marked: str) -> str:
    """Return the text without control tokens."""
    return marked if marked.isascii() else marked.translate(_REMOVED)
