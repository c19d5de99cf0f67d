"""The switch for kernels that no GPU has run yet. They are not used unless QERL_UNTRIED=1 is set: what they
would compute, PyTorch's operations or older kernels do.

A part leaves the switch when its tests marked gpu have passed on a GPU (CONTRIBUTING.md).
"""

import os

VARIABLE = "QERL_UNTRIED"


def are_used() -> bool:
    """True if the user asks for kernels that no GPU has run."""
    return os.environ.get(VARIABLE) == "1"
