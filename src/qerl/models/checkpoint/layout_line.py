"""Say how a checkpoint is quantized: what is loaded unchanged or quantized again, and what stays in BF16."""

from qerl.formats import FORMATS
from qerl.models.checkpoint.layouts.notice import describe
from qerl.models.checkpoint.source import Checkpoint, layout_of, stored_weight
from qerl.models.checkpoint.state_dict import architecture_of, unquantized_linears
from qerl.models.layer_spec import layer_specs


def layout_line(checkpoint: Checkpoint, format: str) -> str | None:
    """Return the line of `qerl check` and `qerl plan`; None for a checkpoint in full precision."""
    layout = layout_of(checkpoint)
    if layout is None:
        return None
    architecture = architecture_of(checkpoint)
    never = unquantized_linears(architecture)
    plain = [
        linear.num_weights
        for index, spec in enumerate(layer_specs(architecture))
        for linear in spec.linears
        if (name := f"model.layers.{index}.{linear.name}") not in never
        and stored_weight(checkpoint, name) is None
    ]
    line = describe(layout, format)
    more_gb = sum(plain) * (FORMATS["bf16"].bytes_per_weight - FORMATS[format].bytes_per_weight) / 1e9
    if more_gb > 0:
        line += f"; {len(plain)} linears in full precision stay in BF16: {more_gb:.2f} GB more"
    return line
