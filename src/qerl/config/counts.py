"""Check counts among the options of a command."""

from qerl.errors import UserError


def check_counts(**values: int | tuple[int, ...] | None) -> None:
    """Raise UserError unless every value is at least 1; None is not checked."""
    for name, value in values.items():
        each = value if isinstance(value, tuple) else () if value is None else (value,)
        if min(each, default=1) < 1:
            raise UserError(f"{name} must be positive, got {min(each)}")
