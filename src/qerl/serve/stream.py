"""Detokenize one sample incrementally, in pieces of text that never have to be taken back.

A piece waits while its last character may be incomplete, and while its end may be the start of a stop string.
Only the tokens since the piece before the last are decoded again: a tokenizer may strip a space from the
first token that it decodes, but from no later one. The pieces add up to the engine's text:
tests/serve/test_stream.py.
"""

from qerl.serve.loaded_model import LoadedModel
from qerl.types import Sample

_INCOMPLETE = "\ufffd"


class TextStream:
    def __init__(self, model: LoadedModel, stop: tuple[str, ...]):
        self._tokenizer, self._stop_tokens = model.engine.tokenizer, model.engine.stop_token_ids
        self._stop = stop
        self._tokens_T: list[int] = []
        self._context_start = self._num_decoded = 0  # decoding starts at the first, new text at the second
        self._pending = ""
        self._num_sent = 0

    def add(self, token: int, ended: Sample | None) -> str:
        """Return the text that this token completes; all that is left once the sample has ended."""
        if ended is not None:
            return ended.text[self._num_sent :]
        if token not in self._stop_tokens:
            self._tokens_T.append(token)
            self._pending += self._new_text()
        num_safe = self._num_safe()
        piece, self._pending = self._pending[:num_safe], self._pending[num_safe:]
        self._num_sent += len(piece)
        return piece

    def _new_text(self) -> str:
        """Return what the newest tokens add, once they end on a whole character."""
        text = self._decode(self._tokens_T[self._context_start :])
        if text.endswith(_INCOMPLETE):
            return ""
        context = self._decode(self._tokens_T[self._context_start : self._num_decoded])
        self._context_start, self._num_decoded = self._num_decoded, len(self._tokens_T)
        return text[len(context) :]

    def _num_safe(self) -> int:
        """Return how many pending characters precede any stop string or its possible start."""
        pending = self._pending
        whole = [start for stop in self._stop if (start := pending.find(stop)) >= 0]
        starts = [
            len(pending) - n for stop in self._stop for n in range(1, len(stop)) if pending.endswith(stop[:n])
        ]
        return min([*whole, *starts, len(pending)])

    def _decode(self, tokens_T: list[int]) -> str:
        text = self._tokenizer.decode(tokens_T, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text
