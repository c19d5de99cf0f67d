"""Refuse what a model that transformers runs cannot do, one line for the first setting that asks for it."""

from qerl.config import RunConfig
from qerl.config.conflicts import NEEDS_OUR_DECODER, holding
from qerl.errors import UserError
from qerl.models.transformers_backend.backend import backend_of


def check_backend(config: RunConfig) -> None:
    """Raise UserError if transformers is to run the model and a setting needs our own decoder."""
    if backend_of(config.model) == "qerl":
        return
    setting = holding(config, NEEDS_OUR_DECODER).partition(", ")[0]
    if setting:
        raise UserError(
            f"{setting} needs the package's own decoder, but transformers' code runs this model"
            " (model.backend): set it back to its default"
        )
