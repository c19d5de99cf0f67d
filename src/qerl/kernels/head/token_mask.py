"""Leave tokens out of some rows of logits: those that a grammar did not allow when they were sampled.

    logits_CV[c][v] = LEFT_OUT where rows has c and the bit v of its set is 0

A set has one bit for each token, packed eight a byte, the lowest first: 19 KB for a vocabulary of 152,064.
LEFT_OUT is finite: its probability is exactly 0, and 0 times it is 0 in an entropy, where -inf gives NaN.
"""

import bisect
import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from qerl.kernels.runtime.gpu_memory import sent
from qerl.types import AllowedTokens

LEFT_OUT = -1e20


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class TokenMask:
    """TokenMask(rows=[3, 4], sets=[0, 0], bits_UX=...): rows 3 and 4 choose among the tokens of set 0."""

    rows: list[int]
    """Ascending."""
    sets: list[int]
    """For each of them, its row of bits_UX."""
    bits_UX: Tensor
    """uint8 [sets, bytes of one]."""

    @staticmethod
    def joined(
        parts: Sequence[AllowedTokens | None], lengths: list[int], device: torch.device
    ) -> "TokenMask | None":
        """Return the mask of consecutive samples of these lengths; None if every token is allowed."""
        numbers, rows, sets, start = dict[bytes, int](), list[int](), list[int](), 0
        for part, length in zip(parts, lengths, strict=True):
            for c, index in enumerate(part.set_C if part is not None else ()):
                if part is not None and index is not None:
                    rows.append(start + c)
                    sets.append(numbers.setdefault(part.sets[index], len(numbers)))
            start += length
        if not rows:
            return None
        bits = torch.frombuffer(bytearray(b"".join(numbers)), dtype=torch.uint8)
        return TokenMask(rows, sets, sent(bits.view(len(numbers), -1), device))

    def fill_(self, logits_CV: Tensor, start: int, first_token: int = 0) -> None:
        """Fill what is left out, in place. start: the row that logits_CV[0] is. first_token: the token of
        its first column, a multiple of 8."""
        assert first_token % 8 == 0
        first, last = (bisect.bisect_left(self.rows, c) for c in (start, start + len(logits_CV)))
        if first == last:
            return
        device, num_tokens = logits_CV.device, logits_CV.shape[1]
        rows_M = sent(torch.tensor(self.rows[first:last]) - start, device)
        bytes_X = slice(first_token // 8, -(-(first_token + num_tokens) // 8))
        bits_MX = self.bits_UX[sent(torch.tensor(self.sets[first:last]), device), bytes_X]
        shifts_8 = torch.arange(8, dtype=torch.uint8, device=device)
        is_allowed_MV = (bits_MX[:, :, None] >> shifts_8 & 1).flatten(1)[:, :num_tokens].bool()
        logits_CV[rows_M] = logits_CV[rows_M].masked_fill(~is_allowed_MV, LEFT_OUT)
