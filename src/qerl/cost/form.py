"""The form in which a run holds a model: formats of its weights, dtype of activations, adapter."""

import dataclasses
import math

import torch

from qerl.config import AdapterConfig, ModelConfig
from qerl.kernels.pointwise.matmul_fp32 import CHUNK_ROWS
from qerl.models.architecture import Architecture
from qerl.models.device import COMPUTE
from qerl.models.layer_spec import LinearGroupSpec

_ROW_MULTIPLE = 64  # a row that holds an adapter's columns too is padded to a multiple of this


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelForm:
    """ModelForm.of(config.model, config.adapter)"""

    format: str
    head_format: str
    compute: torch.dtype
    adapter: AdapterConfig

    @classmethod
    def of(cls, model: ModelConfig, adapter: AdapterConfig) -> "ModelForm":
        compute = COMPUTE.get(model.dtype, torch.bfloat16)
        return cls(format=model.format, head_format=model.head_format, compute=compute, adapter=adapter)

    @property
    def element_bytes(self) -> int:
        """The bytes of one element of an activation, an unpacked weight or a working copy."""
        return self.compute.itemsize

    @property
    def unpacks(self) -> bool:
        """False for BF16 weights computed in bf16, which are their own operands."""
        return self.format != "bf16" or self.element_bytes != 2

    @property
    def saves_up(self) -> bool:
        """True if swiglu's backward pass reads up; else it recovers up from its result
        (kernels/pointwise/swiglu.py)."""
        return self.format == "fp8-flow"

    def row_width(self, group: LinearGroupSpec) -> int:
        """Return the elements of a row of the group's input with the columns that its adapters add to it, at
        most where linears are selected by name."""
        adapter = self.adapter
        num_adapters = sum(
            adapter.selects_names or x.short_name in adapter.target_modules for x in group.linears
        )
        rank = adapter.max_rank * num_adapters * (adapter.kind == "lora")
        return math.ceil((group.in_width + rank) / _ROW_MULTIPLE) * _ROW_MULTIPLE if rank else group.in_width

    def is_chunked(self, a: Architecture, rows: int) -> bool:
        """True if recomputed layers differentiate their MLPs in chunks, as learner/chunked_mlp.py decides."""
        can_be = a.mixture is None and self.adapter.kind == "lora" and self.adapter.dropout == 0
        return can_be and rows > CHUNK_ROWS and not self.saves_up
