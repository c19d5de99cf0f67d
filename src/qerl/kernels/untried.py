"""The switch for kernels that no GPU has run yet. models/untried.py says which decoders they serve."""

import os

VARIABLE = "QERL_UNTRIED"


def are_used() -> bool:
    """True if the user asks for kernels that no GPU has run."""
    return os.environ.get(VARIABLE) == "1"
