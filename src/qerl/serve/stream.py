"""The text of one answer while its tokens come, in pieces that are never taken back.

A piece waits while its last character may be incomplete, and while its end may begin a stop string. Only the
tokens since the piece before the last are decoded again: a tokenizer may strip a space from the first of
what it decodes, and from nothing after it. All pieces together are the engine's text:
tests/serve/test_stream.py.
"""

from qerl.serve.loaded_model import LoadedModel
from qerl.types import Sample

_INCOMPLETE = "\ufffd"


class TextStream:
    def __init__(self, opened: LoadedModel, stop: tuple[str, ...]):
        self._tokenizer, self._stop_tokens, self._stop = opened.tokenizer, opened.stop_tokens, stop
        self._tokens_T: list[int] = []
        self._start = self._read = 0  # decoded from; the text of those before _read has been taken
        self._held = ""
        self._num_sent = 0

    def more(self, token: int, ended: Sample | None) -> str:
        """What is sure of the text with this token; all of it once the sample has ended."""
        if ended is not None:
            return ended.text[self._num_sent :]
        if token not in self._stop_tokens:
            self._tokens_T.append(token)
            self._held += self._new()
        piece = self._held[: self._sure()]
        self._held = self._held[len(piece) :]
        self._num_sent += len(piece)
        return piece

    def _new(self) -> str:
        """What the newest tokens add, once they end on a whole character."""
        text = self._decode(self._tokens_T[self._start :])
        if text.endswith(_INCOMPLETE):
            return ""
        known = self._decode(self._tokens_T[self._start : self._read])
        self._start, self._read = self._read, len(self._tokens_T)
        return text[len(known) :]

    def _sure(self) -> int:
        """How much of what is held no stop string can still reach."""
        whole = [place for stop in self._stop if (place := self._held.find(stop)) >= 0]
        begun = [
            len(self._held) - n
            for stop in self._stop
            for n in range(1, len(stop))
            if self._held.endswith(stop[:n])
        ]
        return min([*whole, *begun, len(self._held)])

    def _decode(self, tokens_T: list[int]) -> str:
        text = self._tokenizer.decode(tokens_T, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text
