"""Pack chunks into forwards of at most max_tokens rows; one that does not fit is split.

A chunk is consecutive tokens of one sequence whose earlier positions are cached.
"""

import dataclasses
from collections.abc import Callable, Iterator

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillChunk:
    tokens_T: list[int]
    first_position: int
    pages: list[int]
    noise_row: int = 0
    """Row in the noise table of the norms."""
    on_hidden: Callable[[Tensor], None] | None = None
    """Called with the hidden states of its next tokens, [rows, D], after each forward."""
    state: list[int] = dataclasses.field(default_factory=list)
    """Slot of the recurrent states before its next token, and after it; empty if no layer has any."""
    is_cached: bool = False
    """True if the keys and values are in the pages already, and only the states are not."""
    window_pages: dict[int, int] = dataclasses.field(default_factory=dict)
    """Those of layers with a window, by their place: for the positions that later queries see."""
    prompt_window_pages: dict[int, int] = dataclasses.field(default_factory=dict)
    """Likewise of the prompt, for reading only."""

    @property
    def positions(self) -> range:
        return range(self.first_position, self.first_position + len(self.tokens_T))


def chunk_rows(chunks: list[PrefillChunk]) -> Tensor:
    """Return (tokens, positions, chunk indices, noise rows) of the chunks' rows in order: int32 [4, rows]."""
    lengths = torch.tensor([len(chunk.tokens_T) for chunk in chunks])
    per_chunk = torch.tensor([[i, chunk.noise_row] for i, chunk in enumerate(chunks)], dtype=torch.int32)
    spans = (chunk.positions for chunk in chunks)
    columns = (
        torch.tensor([token for chunk in chunks for token in chunk.tokens_T], dtype=torch.int32),
        torch.cat([torch.arange(span.start, span.stop, dtype=torch.int32) for span in spans]),
        *per_chunk.repeat_interleave(lengths, dim=0).unbind(1),
    )
    return torch.stack(columns)


def split_into_forwards(
    chunks: list[PrefillChunk], max_tokens: int
) -> Iterator[list[tuple[PrefillChunk, bool]]]:
    """Split the chunks into forwards of at most max_tokens rows; True marks the last part of a chunk."""
    parts, num_free = [], max_tokens
    for chunk in chunks:
        first = 0
        while first < len(chunk.tokens_T):
            tokens_T = chunk.tokens_T[first : first + num_free]
            part = dataclasses.replace(chunk, tokens_T=tokens_T, first_position=chunk.first_position + first)
            first += len(tokens_T)
            num_free -= len(tokens_T)
            parts.append((part, first == len(chunk.tokens_T)))
            if num_free == 0:
                yield parts
                parts, num_free = [], max_tokens
    if parts:
        yield parts
