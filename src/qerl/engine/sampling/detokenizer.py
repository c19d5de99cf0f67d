"""Detokenize samples and detect stop strings.

A stop string of n bytes completed by the newest token lies within that token and the n before it, since each
token has at least one byte: only this tail is decoded at each step. A margin of tokens covers what decoding
changes at the start of a text: a stripped space, or a character split between tokens.

Special tokens are not in the text. A stop string with the text of one, such as `<|im_end|>`, is also looked
for in the text with special tokens.
"""

from transformers import PreTrainedTokenizerBase

from qerl.errors import UserError

_MARGIN_TOKENS = 4  # most bytes of a UTF-8 character


class Detokenizer:
    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: tuple[str, ...]):
        if "" in stop:
            raise UserError("sample.stop must not contain the empty string")
        self._tokenizer, self.stop = tokenizer, stop
        self._tail_tokens = max((len(s.encode()) for s in stop), default=0) + _MARGIN_TOKENS
        special = {i: str(token) for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._special = {*special, *tokenizer.all_special_ids}
        names = {*special.values(), *tokenizer.all_special_tokens}
        self._special_stop = tuple(s for s in stop if any(name in s for name in names))
        self._vocab_size = len(tokenizer)

    def decode(self, tokens_T: list[int]) -> str:
        """Return the text without special tokens, cut before the first stop string."""
        text = self._decode(tokens_T)
        text = text[: _first(self.stop, text)]
        return min(text, self._before_special_stop(tokens_T), key=len) if self._special_stop else text

    def _before_special_stop(self, tokens_T: list[int]) -> str:
        """Return the text before the first stop string that has special tokens; without one, the whole."""
        shown = self._decode(tokens_T, skip_special_tokens=False)
        start = _first(self._special_stop, shown)
        if start is None:
            return self._decode(tokens_T)
        for n in range(len(tokens_T), -1, -1):  # the stop string is at the end
            before = self._decode(tokens_T[:n], skip_special_tokens=False)
            if len(before) <= start and shown.startswith(before):
                return self._decode(tokens_T[:n]) + shown[len(before) : start]
        return ""

    def has_stop(self, tokens_T: list[int]) -> bool:
        """True if the newest token completed a stop string."""
        if self._special_stop and self._has_special_stop(tokens_T[-self._tail_tokens :]):
            return self._has_special_stop(tokens_T)
        if not self.stop or _first(self.stop, self._decode(self._tail(tokens_T))) is None:
            return False
        return _first(self.stop, self._decode(tokens_T)) is not None

    def _has_special_stop(self, tokens_T: list[int]) -> bool:
        return _first(self._special_stop, self._decode(tokens_T, skip_special_tokens=False)) is not None

    def _tail(self, tokens_T: list[int]) -> list[int]:
        """Return the newest tokens that are text; a model's vocabulary may be larger than its tokenizer's."""
        tail = []
        for token in reversed(tokens_T):
            if token < self._vocab_size and token not in self._special:
                tail.append(token)
            if len(tail) == self._tail_tokens:
                break
        return tail[::-1]

    def _decode(self, tokens_T: list[int], *, skip_special_tokens: bool = True) -> str:
        text = self._tokenizer.decode(
            tokens_T, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text


def _first(stop: tuple[str, ...], text: str) -> int | None:
    """Return where the first of the stop strings begins; None if the text has none."""
    return min((start for s in stop if (start := text.find(s)) >= 0), default=None)
