"""Storage formats of frozen weights. FORMATS maps names to formats."""

from qerl.formats.bf16 import BF16
from qerl.formats.fp8 import FP8
from qerl.formats.fp8_flow import FP8Flow
from qerl.formats.int8 import INT8
from qerl.formats.mxfp4 import MXFP4
from qerl.formats.nf4 import NF4
from qerl.formats.nvfp4 import NVFP4
from qerl.formats.packed import PackedWeight

__all__ = ["BF16", "FORMATS", "FP8", "INT8", "MXFP4", "NF4", "NVFP4", "FP8Flow", "PackedWeight"]

FORMATS: dict[str, type[PackedWeight]] = {f.name: f for f in (NVFP4, MXFP4, NF4, FP8, FP8Flow, INT8, BF16)}
