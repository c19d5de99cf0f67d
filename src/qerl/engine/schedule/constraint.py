"""Restrict a sample's next token besides the sampling parameters: by a grammar."""

from typing import Protocol

import numpy as np
from torch import Tensor

from qerl.types import AllowedTokens


class TokenConstraint(Protocol):
    """State of one sample."""

    @property
    def is_complete(self) -> bool:
        """True if the sample can have no further token."""
        ...

    def accept(self, token: int) -> None:
        """Take the newest token of the sample."""
        ...

    def allowed_V(self) -> Tensor:
        """Return the tokens that may follow: bool [V], on the CPU."""
        ...


class AllowedLog:
    """Collects what a constraint allowed, token by token of one sample. Sets that recur are kept once: inside
    a string of JSON they hardly change."""

    def __init__(self):
        self._sets: dict[bytes, int] = {}
        self._set_T: list[int | None] = []

    def add(self, allowed_V: Tensor) -> None:
        """Take what was allowed in place of the newest token."""
        if allowed_V.all():
            self._set_T.append(None)
            return
        bits = np.packbits(allowed_V.numpy(), bitorder="little").tobytes()
        self._set_T.append(self._sets.setdefault(bits, len(self._sets)))

    def tokens(self) -> AllowedTokens:
        return AllowedTokens(tuple(self._sets), list(self._set_T))
