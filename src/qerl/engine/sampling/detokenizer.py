"""Detokenize samples and detect stop strings.

A stop string of n bytes completed by the newest token lies within that token and the n before it, since each
token has at least one byte: only this tail is decoded at each step. A margin of tokens covers what decoding
changes at the start of a text: a stripped space, or a character split between tokens.
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
        special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._special = special.union(tokenizer.all_special_ids)
        self._vocab_size = len(tokenizer)

    def decode(self, tokens_T: list[int]) -> str:
        """Return the text without special tokens, cut before the first stop string."""
        text = self._decode(tokens_T)
        starts = [start for s in self.stop if (start := text.find(s)) >= 0]
        return text[: min(starts)] if starts else text

    def has_stop(self, tokens_T: list[int]) -> bool:
        """True if the newest token completed a stop string."""
        if not self.stop or not self._contains_stop(self._decode(self._tail(tokens_T))):
            return False
        return self._contains_stop(self._decode(tokens_T))

    def _contains_stop(self, text: str) -> bool:
        return any(s in text for s in self.stop)

    def _tail(self, tokens_T: list[int]) -> list[int]:
        """Return the newest tokens that are text; a model's vocabulary may be larger than its tokenizer's."""
        tail = []
        for token in reversed(tokens_T):
            if token < self._vocab_size and token not in self._special:
                tail.append(token)
            if len(tail) == self._tail_tokens:
                break
        return tail[::-1]

    def _decode(self, tokens_T: list[int]) -> str:
        text = self._tokenizer.decode(tokens_T, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text
