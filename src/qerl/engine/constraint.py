"""Restrict a sample's next token besides the sampling parameters: by a grammar."""

from typing import Protocol

from torch import Tensor


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
