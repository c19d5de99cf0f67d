"""Describe which parts of a checkpoint are loaded unchanged, quantized again, left in BF16 or not read."""

import collections

from qerl.formats import FORMATS, FP8Flow
from qerl.models.checkpoint.layouts.layout import Layout, fits
from qerl.models.checkpoint.model_folder import unused_files
from qerl.models.checkpoint.source import Checkpoint, layout_of
from qerl.models.checkpoint.state_dict import architecture_of
from qerl.models.checkpoint.stored_names import NamedCheckpoint
from qerl.models.layer_spec import layer_specs


def layout_line(checkpoint: Checkpoint, format: str) -> str | None:
    """Return the line of `qerl check` and `qerl plan`; None for a checkpoint in full precision."""
    layout = layout_of(checkpoint)
    if layout is None:
        return None
    architecture = architecture_of(checkpoint)
    plain = [
        linear.num_weights
        for index, spec in enumerate(layer_specs(architecture))
        for linear in spec.linears
        if f"layers.{index}.{linear.name}" in architecture.bf16_linears
    ]
    line = _describe(layout, format)
    more_gb = sum(plain) * (FORMATS["bf16"].bytes_per_weight - FORMATS[format].bytes_per_weight) / 1e9
    if more_gb > 0:
        line += f"; {len(plain)} linears in full precision stay in BF16: {more_gb:.2f} GB more"
    return line


def checkpoint_notices(checkpoint: Checkpoint, format: str) -> list[str]:
    """Return lines on requests of a quantized checkpoint that are not carried out: activations are not
    quantized, and codes that do not fit `format` are decoded and quantized again."""
    layout = layout_of(checkpoint)
    if layout is None:
        return []
    dropped = [each for each in layout.dropped if format != FP8Flow.name or not each.endswith("to 8 bits")]
    again = [key for key in _counts(layout, format) if not key[2]]
    names = " and ".join(kind for kind, _, _ in again)
    exact = sorted({stored for _, stored, _ in again if stored})
    advice = f" (--model.format {' or '.join(exact)} loads them as they are)" if exact else ""
    lines = [
        f"{' and '.join(dropped)} {'is' if len(dropped) == 1 else 'are'} dropped; inputs of the quantized"
        " weights are in model.dtype"
    ] * bool(dropped) + [
        f"{layout.name} weights in {names} are decoded and quantized again to {format}{advice}"
    ] * bool(again)
    return [f"{checkpoint.path}: {line}" for line in lines]


def skipped_notices(checkpoint: Checkpoint) -> list[str]:
    """Return a line on tensors that no language model has, such as a vision encoder's, and one on weight
    files beside those that are read."""
    skipped = checkpoint.num_skipped if isinstance(checkpoint, NamedCheckpoint) else 0
    others = unused_files(checkpoint.path) if checkpoint.path.is_dir() else []
    return [
        f"{checkpoint.path}: {skipped} tensors of other modalities and of multi-token prediction"
        " are not loaded"
    ] * bool(skipped) + [f"{checkpoint.path}: not read: {', '.join(others)}"] * bool(others)


def _describe(layout: Layout, format: str) -> str:
    """Return "ModelOpt: 196 weights in NVFP4, loaded as they are"."""
    counts = _counts(layout, format)
    if not counts:
        return f"{layout.name}: no weights of linears"
    return f"{layout.name}: " + "; ".join(
        f"{num} weights in {kind}, " + ("loaded as they are" if fit else f"quantized again to {format}")
        for (kind, _, fit), num in counts.items()
    )


def is_exact(layout: Layout, format: str) -> bool:
    """True if all codes fit the format."""
    return all(fits(weight.format, format) for weight in layout.weights.values())


def kinds(layout: Layout) -> str:
    """Return "NVFP4 and FP8 per channel"."""
    return " and ".join(sorted({weight.kind for weight in layout.weights.values()}))


def _counts(layout: Layout, format: str) -> dict[tuple[str, str | None, bool], int]:
    """Return the number of weights by kind, format and whether it fits."""
    weights = layout.weights.values()
    counts = collections.Counter((w.kind, w.format, fits(w.format, format)) for w in weights)
    return dict(sorted(counts.items(), key=lambda item: item[0][0]))
