"""Show the quantized weights of a folder as float tensors, and hand out their codes.

    stored                                      shown
    {module}.weight_packed, .weight_scale, ...  {module}.weight [N, K], decoded to float32 when it is read
    tensors that are not needed                 nothing

Code that reads float checkpoints (check_tensors, encode_group, quantization_error) therefore reads these too.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qerl.errors import UserError, naming
from qerl.formats import PackedWeight
from qerl.models.checkpoint.layouts.layout import Layout, LayoutError, StoredWeight, TensorFolder
from qerl.models.checkpoint.layouts.rows import cut_rows
from qerl.models.checkpoint.one_thread import one_thread


class QuantizedFolder:
    """A Checkpoint in a folder, with the checkpoint's names."""

    def __init__(self, folder: TensorFolder, layout: Layout):
        self.path: Path = folder.path
        self.config: dict[str, Any] = folder.config
        self.layout = layout
        self._folder = folder
        self._last: tuple[str, PackedWeight | Tensor] | None = None
        hidden = layout.unused.union(*(weight.parts for weight in layout.weights.values()))
        self.shapes = {name: shape for name, shape in folder.shapes.items() if name not in hidden}
        for module, weight in layout.weights.items():
            if missing := [part for part in weight.parts if part not in folder.shapes]:
                raise UserError(f"{self.path}: has no tensor {missing[0]}")
            if f"{module}.weight" in self.shapes:
                raise UserError(f"{self.path}: {module} has a weight in full precision and a quantized one")
            self.shapes[f"{module}.weight"] = weight.shape
        self.dtypes = {name: folder.dtypes[name] for name in folder.shapes if name not in hidden}
        self.dtypes |= dict.fromkeys((f"{module}.weight" for module in layout.weights), torch.float32)

    def read(self, name: str) -> Tensor:
        module = name.removesuffix(".weight")
        if module == name or module not in self.layout.weights:
            return self._folder.read(name)
        weight = self._read(module, keep=False)
        return weight if isinstance(weight, Tensor) else weight.decode()

    def read_rows(self, name: str, rows: slice) -> Tensor:
        module = name.removesuffix(".weight")
        if module == name or module not in self.layout.weights:
            return self._folder.read_rows(name, rows)
        weight = self._read(module, keep=True)
        if isinstance(weight, Tensor):
            return weight[rows].clone()
        cut = cut_rows(weight, rows)
        return weight.decode()[rows].clone() if cut is None else cut.decode()

    def packed(self, module: str, rows: slice | None = None) -> PackedWeight | None:
        """Return the weight, or some of its rows, with the stored codes; None if it is stored in full
        precision, or its codes fit none of our formats."""
        stored = self.layout.weights.get(module)
        if stored is None or stored.format is None:
            return None
        with one_thread():  # the codes are only checked
            weight = self._read(module, keep=rows is not None)
        assert not isinstance(weight, Tensor) and weight.shape == stored.shape
        return weight if rows is None else cut_rows(weight, rows)

    def stored(self, module: str) -> StoredWeight | None:
        """Return how the weight is quantized; None: it is not."""
        return self.layout.weights.get(module)

    def _read(self, module: str, keep: bool) -> PackedWeight | Tensor:
        """Return one weight. `keep` it for the next call, where the linears that it holds come in turn."""
        if self._last is not None and self._last[0] == module:
            return self._last[1]
        self._last = None
        with naming(self.path, LayoutError):
            weight = self.layout.weights[module].read()
        if keep:
            self._last = module, weight
        return weight
