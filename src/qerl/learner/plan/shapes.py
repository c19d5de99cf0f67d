"""Find the architecture of a model by its name, without reading its weights."""

from pathlib import Path
from typing import Literal

from qerl.config import ModelConfig
from qerl.config.recipes import RECIPES
from qerl.errors import UserError, did_you_mean
from qerl.models.architecture import Architecture
from qerl.models.random_weights import SHAPES, shape_of_hub_id


def check_name(model: str) -> None:
    """Raise UserError for what can be neither a shape nor a model; nothing is read or downloaded."""
    if "/" in model or _named_shape(model) is not None or Path(model).exists():
        return
    from qerl.models.checkpoint.model_place import BUILT_IN

    if model != BUILT_IN:
        hint = did_you_mean(model, (*RECIPES, *SHAPES)) or f"; there are {', '.join(SHAPES)}"
        raise UserError(f"{model}: no folder, file or hub id, and no shape{hint}")


def read_architecture(model: str, backend: Literal["auto", "qerl", "transformers"] = "auto") -> Architecture:
    """Return the architecture of a named shape, of a hub id of one, or of a checkpoint, of which only the
    config is read. A folder of the same name comes before the hub id."""
    if (named := _named_shape(model)) is not None:
        return named
    from qerl.models.checkpoint.source import locate
    from qerl.models.checkpoint.state_dict import architecture_of  # a named shape needs no file readers
    from qerl.models.transformers_backend.backend import backend_of

    check_name(model)
    if backend_of(ModelConfig(path=model, backend=backend)) == "transformers":
        raise UserError(
            f"{model}: plan covers the package's own decoder; transformers' code runs this model,"
            " and what that takes cannot be planned: qerl check --model MODEL --speed tries it"
        )
    return architecture_of(locate(model).open())


def read_layout(model: str, format: str) -> str | None:
    """Return layout_line's line on a checkpoint; None if it is in full precision, or the name of a shape."""
    if _named_shape(model) is not None:
        return None
    from qerl.models.checkpoint.notices import layout_line
    from qerl.models.checkpoint.source import locate

    return layout_line(locate(model).open(), format)


def _named_shape(model: str) -> Architecture | None:
    if model in SHAPES:
        return SHAPES[model]
    named = None if Path(model).exists() else shape_of_hub_id(model)
    return None if named is None else SHAPES[named]
