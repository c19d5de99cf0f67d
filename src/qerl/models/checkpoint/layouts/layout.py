"""The description of a checkpoint's quantized weights, and the reading and checking that all layouts share.

A layout is one file of this package with one function (folder, quantization_config) -> Layout, and one row
in READERS of __init__.py, by `quant_method`. The function looks at names, shapes and dtypes of the stored
tensors and returns a StoredWeight for each quantized weight, under the name that the checkpoint gives its
module ("model.layers.0.self_attn.qkv_proj"). It reads tensors only where a shape depends on them. Everything
else follows from that: folder.py shows the weight to the rest of the package as a float tensor
{module}.weight [N, K], and hands the packed one to the loader. Names, fused q | k | v, notices and missing
tensors are not a layout's concern.

    def read_layout(folder, config):
        weights = {}
        for module in modules_with(folder, "qweight"):
            n, k = ...                                             # from folder.shapes
            parts = tuple(f"{module}.{x}" for x in ("qweight", "scales"))
            read = partial(_read, folder, module)
            weights[module] = StoredWeight((n, k), "int4 per 128", None, parts, read)
        return Layout("AWQ", weights)
"""

import dataclasses
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from qerl.errors import UserError
from qerl.formats import FP8, FP8Flow, PackedWeight


class LayoutError(UserError):
    """A config or tensor of a layout is wrong; its caller puts the folder's path before the message."""


class TensorFolder(Protocol):
    """The files of a checkpoint: SafetensorsFolder."""

    path: Path
    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, torch.dtype]

    def read(self, name: str) -> Tensor:
        """Return the tensor as stored, on the CPU, in its own memory."""
        ...

    def read_rows(self, name: str, rows: slice) -> Tensor: ...


@dataclasses.dataclass(frozen=True, slots=True)
class StoredWeight:
    """One quantized weight of a checkpoint."""

    shape: tuple[int, int]
    """[N, K], N outputs and K inputs, whatever the order of the stored codes."""
    kind: str
    """Format and granularity, as messages name them: "FP8 per 128 x 128"."""
    format: str | None
    """The name in FORMATS that the codes and scales fit exactly; None: none."""
    parts: tuple[str, ...]
    """Names of all stored tensors that the weight is read from, the bias not included."""
    read: Callable[[], PackedWeight | Tensor]
    """Return a PackedWeight of `format`, or float32 [N, K] if `format` is None; raise LayoutError that names
    the tensor for a wrong dtype, a wrong shape, or scales that are not finite."""


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """The quantized weights of one checkpoint."""

    name: str
    """As messages name it: "ModelOpt"."""
    weights: dict[str, StoredWeight]
    """By the checkpoint's name of the module, without ".weight". What is not here is stored in full
    precision, and stays in BF16 when loaded: checkpoints leave weights unquantized on purpose."""
    unused: frozenset[str] = frozenset()
    """Names of stored tensors that are not needed, such as scales of activations."""
    dropped: tuple[str, ...] = ()
    """Requests of the checkpoint that are not carried out: "quantization of activations to 8 bits"."""


def modules_with(folder: TensorFolder, suffix: str) -> list[str]:
    """Return the modules that have a tensor of this last name: "weight_packed"."""
    end = f".{suffix}"
    return [name.removesuffix(end) for name in folder.shapes if name.endswith(end)]


def read_part(
    folder: TensorFolder,
    name: str,
    dtypes: torch.dtype | Collection[torch.dtype],
    shape: tuple[int, ...],
    rows: slice | None = None,
) -> Tensor:
    """Read a tensor of this shape and one of these dtypes, or some of its rows; raise LayoutError for another
    or a missing one."""
    allowed = (dtypes,) if isinstance(dtypes, torch.dtype) else tuple(dtypes)
    if name not in folder.shapes:
        raise LayoutError(f"has no tensor {name}")
    if folder.shapes[name] != shape:
        raise LayoutError(f"{name} is {list(folder.shapes[name])}, must be {list(shape)}")
    if folder.dtypes[name] not in allowed:
        names = " or ".join(str(dtype) for dtype in allowed)
        raise LayoutError(f"{name} must be {names}, is {folder.dtypes[name]}")
    return folder.read(name) if rows is None else folder.read_rows(name, rows)


def check_finite(name: str, scales: Tensor) -> Tensor:
    """Return scales of a float dtype, of 8 bits E4M3 or E5M2; raise LayoutError for NaN or infinity."""
    if scales.numel() and not _is_finite(scales):
        raise LayoutError(f"{name} holds NaN or infinity")
    return scales


def _is_finite(scales: Tensor) -> bool:
    if scales.itemsize > 1:
        return bool(torch.stack(torch.aminmax(scales)).isfinite().all())
    assert scales.dtype in (torch.float8_e4m3fn, torch.float8_e5m2), scales.dtype
    # The bits without the sign grow with the magnitude. E4M3 [8960, 96]: 0.03 ms, in float32 6.8 ms.
    largest = torch.tensor(torch.finfo(scales.dtype).max).to(scales.dtype).view(torch.uint8)
    return bool((scales.view(torch.uint8) & 0x7F).max() <= largest)


def check_positive(name: str, scale: Tensor) -> Tensor:
    """Return a tensor of one number; raise LayoutError unless it is finite and positive."""
    if check_finite(name, scale).item() <= 0:
        raise LayoutError(f"{name} must be positive, is {scale.item()}")
    return scale


def fits(stored: str | None, format: str) -> bool:
    """True if codes in the format `stored` are codes in `format`, too."""
    return stored == format or (stored, format) == (FP8.name, FP8Flow.name)


def in_format(weight: PackedWeight, format: str) -> PackedWeight:
    """Return a weight whose format fits as one of `format`; its tensors are shared."""
    if type(weight) is FP8 and format == FP8Flow.name:
        return FP8Flow(weight.codes, weight.scales)
    assert weight.name == format, (weight.name, format)
    return weight
