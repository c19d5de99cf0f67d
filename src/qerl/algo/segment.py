"""Segment reductions: sums over samples whose tokens lie one after another, and back to the tokens.

    tokens      a0 a1 a2 b0 c0 c1              Segments.of([3, 1, 2])
    total       a0+a1+a2   b0   c0+c1          per_token of it: one value for every token of its sample

Uses a padded table [S, longest]: every element is written once, so sums and gradients are deterministic on a
GPU, which index_add is not.
"""

import dataclasses

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class Segments:
    lengths_S: Tensor
    longest: int
    places_T: Tensor
    """Row-by-row position of each token in the padded table."""

    @classmethod
    def of(cls, lengths_S: list[int]) -> "Segments":
        """Return the segments of samples of these lengths, on the CPU."""
        longest, lengths = max(lengths_S, default=0), torch.tensor(lengths_S, dtype=torch.int64)
        skipped_S = torch.arange(len(lengths_S)) * longest - (lengths.cumsum(0) - lengths)
        places_T = torch.arange(int(lengths.sum())) + skipped_S.repeat_interleave(lengths)
        return cls(lengths_S=lengths, longest=longest, places_T=places_T)

    def total(self, x_T: Tensor) -> Tensor:
        """Sum over each sample, [S]."""
        num_samples = len(self.lengths_S)
        table = x_T.new_zeros(num_samples * self.longest).index_copy(0, self.places_T, x_T)
        return table.view(num_samples, self.longest).sum(1)

    def mean(self, x_T: Tensor) -> Tensor:
        """Mean over each sample, [S]; no sample is empty."""
        return self.total(x_T) / self.lengths_S

    def minimum(self, x_T: Tensor) -> Tensor:
        """Minimum of each sample, [S]."""
        num_samples = len(self.lengths_S)
        table = x_T.new_full((num_samples * self.longest,), float("inf")).index_copy(0, self.places_T, x_T)
        return table.view(num_samples, self.longest).amin(1)

    def per_token(self, x_S: Tensor) -> Tensor:
        """Repeat each sample's value for all of its tokens, [T]."""
        return x_S[:, None].expand(-1, self.longest).reshape(-1).index_select(0, self.places_T)
