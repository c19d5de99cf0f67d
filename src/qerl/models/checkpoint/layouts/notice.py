"""Say which layout a checkpoint has, what is loaded as it is, and what is not."""

import collections

from qerl.formats import FP8Flow
from qerl.models.checkpoint.layouts.layout import Layout, fits


def describe(layout: Layout, format: str) -> str:
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


def layout_notices(layout: Layout, format: str) -> list[str]:
    """Return a line on what is dropped and one on what is decoded and quantized again to `format`."""
    dropped = [each for each in layout.dropped if format != FP8Flow.name or not each.endswith("to 8 bits")]
    again = [key for key in _counts(layout, format) if not key[2]]
    kinds = " and ".join(kind for kind, _, _ in again)
    exact = sorted({stored for _, stored, _ in again if stored})
    advice = f" (--model.format {' or '.join(exact)} loads them as they are)" if exact else ""
    return [
        f"{' and '.join(dropped)} {'is' if len(dropped) == 1 else 'are'} dropped; inputs of the quantized"
        " weights are in model.dtype"
    ] * bool(dropped) + [
        f"{layout.name} weights in {kinds} are decoded and quantized again to {format}{advice}"
    ] * bool(again)


def _counts(layout: Layout, format: str) -> dict[tuple[str, str | None, bool], int]:
    """Return the number of weights by kind, format and whether it fits."""
    weights = layout.weights.values()
    counts = collections.Counter((w.kind, w.format, fits(w.format, format)) for w in weights)
    return dict(sorted(counts.items(), key=lambda item: item[0][0]))
