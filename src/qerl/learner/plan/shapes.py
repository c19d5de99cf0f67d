"""Find the architecture of a model by its name, without reading its weights."""

from pathlib import Path

from qerl.errors import UserError
from qerl.models.architecture import Architecture
from qerl.models.random_weights import SHAPES, shape_of_hub_id


def read_architecture(model: str) -> Architecture:
    """Return the architecture of a named shape, of a hub id of one, or of a checkpoint, of which only the
    config is read. A folder of the same name comes before the hub id."""
    if (named := _named_shape(model)) is not None:
        return named
    from qerl.models.source import BUILT_IN, locate
    from qerl.models.state_dict import architecture_of  # a named shape needs no file readers

    if "/" not in model and model != BUILT_IN and not Path(model).exists():
        raise UserError(f"{model}: no folder, file or hub id, and no shape; there are {', '.join(SHAPES)}")
    return architecture_of(locate(model).open())


def read_layout(model: str, format: str) -> str | None:
    """Return how a checkpoint is quantized and what of it is loaded unchanged; None if it is not, or if
    `model` is the name of a shape."""
    if _named_shape(model) is not None:
        return None
    from qerl.models.layouts.notice import describe
    from qerl.models.source import layout_of, locate

    layout = layout_of(locate(model).open())
    return None if layout is None else describe(layout, format)


def _named_shape(model: str) -> Architecture | None:
    if model in SHAPES:
        return SHAPES[model]
    named = None if Path(model).exists() else shape_of_hub_id(model)
    return None if named is None else SHAPES[named]
