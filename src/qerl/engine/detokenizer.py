"""Turns sampled tokens into text, and finds the strings that end a sample.

A stop string of n bytes that the newest token completes lies within that token and the n before it, for each
holds a byte or more: only that tail is decoded at each step. A few more tokens make up for what decoding
does to the first ones: a space stripped, a character cut in two.
"""

from transformers import PreTrainedTokenizerBase

from qerl.errors import UserError

_MARGIN_TOKENS = 4  # a UTF-8 character has at most so many bytes


class Detokenizer:
    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: tuple[str, ...]):
        if "" in stop:
            raise UserError("sample.stop must not hold the empty string")
        self._tokenizer, self._stop = tokenizer, stop
        self._tail_tokens = max((len(s.encode()) for s in stop), default=0) + _MARGIN_TOKENS
        special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._special = special.union(tokenizer.all_special_ids)
        self._vocab_size = len(tokenizer)

    def of(self, tokens_T: list[int]) -> str:
        """The tokens' text without special tokens, cut before the first stop string."""
        text = self._decode(tokens_T)
        found = [place for s in self._stop if (place := text.find(s)) >= 0]
        return text[: min(found)] if found else text

    def has_stop(self, tokens_T: list[int]) -> bool:
        """Whether the newest token completed a stop string."""
        if not self._stop or not self._contains(self._decode(self._tail(tokens_T))):
            return False
        return self._contains(self._decode(tokens_T))

    def _contains(self, text: str) -> bool:
        return any(s in text for s in self._stop)

    def _tail(self, tokens_T: list[int]) -> list[int]:
        """The newest tokens that are text; a model's vocabulary may be larger than its tokenizer's."""
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
