"""Detokenize one sample incrementally, in pieces of text that never have to be taken back.

A piece waits while its last character may be incomplete, and while its end may be the start of a stop string.
A token waits until all of its text is sent. The pieces add up to the engine's text, and the tokens to those
of a whole answer: tests/serve/test_stream.py, tests/serve/test_token_text.py.
"""

import dataclasses

from qerl.serve.loaded_model import LoadedModel
from qerl.serve.marked_text import NO_MARKERS, Markers
from qerl.serve.token_text import TokenBytes, TokenReader, TokenText
from qerl.serve.tools import num_shared
from qerl.types import Sample, TokenLogprob


@dataclasses.dataclass(frozen=True, slots=True)
class PlacedToken:
    sampled: TokenLogprob
    place: TokenText


class TextStream:
    def __init__(self, model: LoadedModel, stop: tuple[str, ...]):
        self._stop_tokens, self._stop = model.engine.stop_token_ids, stop
        self._reader = TokenReader(model.token_bytes)
        self._pending = ""
        self._num_sent = self._num_placed = 0

    def add(self, token: int, ended: Sample | None) -> str:
        """Return the text that this token completes; all that is left once the sample has ended."""
        self._pending += self._reader.add_empty() if token in self._stop_tokens else self._reader.add(token)
        if ended is not None:
            self._reader.close()
            piece = ended.text[self._num_sent :]
        else:
            num_safe = self._num_safe()
            piece, self._pending = self._pending[:num_safe], self._pending[num_safe:]
        self._num_sent += len(piece)
        return piece

    def take_places(self, ended: Sample | None) -> list[TokenText]:
        """Return what the next tokens add whose text is sent; all that are left once the sample has ended."""
        places_T, first = self._reader.places_T, self._num_placed
        if ended is not None:
            self._num_placed = len(places_T)
            return places_T[first:]
        while self._num_placed < len(places_T) and places_T[self._num_placed].end <= self._num_sent:
            self._num_placed += 1
        return places_T[first : self._num_placed]

    def _num_safe(self) -> int:
        """Return how many pending characters precede any stop string or its possible start."""
        pending = self._pending
        whole = [start for stop in self._stop if (start := pending.find(stop)) >= 0]
        starts = [len(pending) - num_shared(pending, stop) for stop in self._stop]
        return min([*whole, *starts, len(pending)])


class TokenStream:
    """The pieces of a sample's text, each with the tokens that end in it.

    keeps_end: the token that ended the sample, and those of a stop string, come too, without bytes.
    markers: control tokens that the pieces show, marked; places are those of the text without them.
    """

    def __init__(
        self,
        model: LoadedModel,
        stop: tuple[str, ...],
        *,
        keeps_end: bool,
        markers: Markers = NO_MARKERS,
    ):
        self._stop_tokens, self._keeps_end = model.engine.stop_token_ids, keeps_end
        self._text = TextStream(model, stop)
        self._waiting: list[TokenLogprob] = []
        self._markers, self._num_chars = markers, 0

    def add(self, token: TokenLogprob, ended: Sample | None) -> tuple[str, list[PlacedToken]]:
        self._waiting.append(token)
        piece = self._text.add(token.token, ended)
        places = self._text.take_places(ended)
        placed = list(map(PlacedToken, self._waiting, places))
        del self._waiting[: len(places)]
        piece = self._marked(piece, placed)
        return piece, placed if ended is None else self._cut(placed, len(ended.text))

    def _marked(self, piece: str, placed: list[PlacedToken]) -> str:
        """Return the piece with the marked texts of its tokens where these lie."""
        first, out, at = self._num_chars, "", 0
        self._num_chars += len(piece)
        for each in placed:
            if each.place.start <= self._num_chars and (text := self._markers.of_token(each.sampled.token)):
                place = max(each.place.start - first, at)
                out, at = out + piece[at:place] + text, place
        return out + piece[at:]

    def _cut(self, placed: list[PlacedToken], num_chars: int) -> list[PlacedToken]:
        """Return the last tokens of a sample with what they add to its text."""
        cut = list[PlacedToken]()
        for each in placed:
            is_end = each is placed[-1] and each.sampled.token in self._stop_tokens
            is_cut = bool(each.place.data) and each.place.start >= num_chars
            if (is_end or is_cut) and not self._keeps_end:
                break
            cut.append(PlacedToken(each.sampled, each.place.before(num_chars)))
        return cut


def place_tokens(
    model: LoadedModel, stop: tuple[str, ...], tokens: list[TokenLogprob], sample: Sample, *, keeps_end: bool
) -> list[PlacedToken]:
    """Return the tokens of a whole sample, as its stream has them."""
    stream, placed = TokenStream(model, stop, keeps_end=keeps_end), list[PlacedToken]()
    for number, token in enumerate(tokens, 1):
        placed += stream.add(token, sample if number == len(tokens) else None)[1]
    return placed


def marked_text(model: LoadedModel, stop: tuple[str, ...], sample: Sample, markers: Markers) -> str:
    """Return the text of a whole sample, as its stream's pieces have it."""
    tokens_T = sample.tokens_T
    if markers.texts.keys().isdisjoint(tokens_T):
        return sample.text
    stream = TokenStream(model, stop, keeps_end=False, markers=markers)
    ended = [*[None] * (len(tokens_T) - 1), sample]
    return "".join(stream.add(TokenLogprob(t, 0.0), end)[0] for t, end in zip(tokens_T, ended, strict=True))


def place_prompt(
    token_bytes: TokenBytes, tokens_T: list[int], logprobs: list[TokenLogprob], text: str
) -> list[PlacedToken]:
    """Return the tokens of a prompt, the first with logprob 0, where they lie in its text.

    A token that the tokenizer adds before a text, such as <s>, is not in it.
    """
    reader = TokenReader(token_bytes, skip_special_tokens=False)
    shown = "".join(map(reader.add, tokens_T)) + reader.close()
    num_added = len(shown) - len(text) if shown.endswith(text) else 0
    places = [each.after(-num_added) for each in reader.places_T]
    places = [TokenText(each.data, max(each.start, 0), max(each.end, 0)) for each in places]
    sampled = [TokenLogprob(tokens_T[0], 0.0), *logprobs]
    return list(map(PlacedToken, sampled, [each.before(len(text)) for each in places]))
