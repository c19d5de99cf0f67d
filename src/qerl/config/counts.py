"""What the options of several commands are held to."""

from qerl.errors import UserError


def check_counts(**values: tuple[int, ...]) -> None:
    for name, each in values.items():
        if min(each, default=1) < 1:
            raise UserError(f"{name} must be positive, got {min(each)}")
