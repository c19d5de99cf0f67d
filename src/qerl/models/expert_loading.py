"""Read the experts of a mixture one at a time, and quantize each as it is read.

    peak memory = the packed stacks + one expert        tests/models/test_mixture_loading.py

Codes that fit the format are taken as they are; gate and up of an expert that were quantized with different
global scales are decoded and quantized again together. expert_names.py lists the forms that checkpoints have.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from qerl.errors import naming
from qerl.formats import BF16, INT8, MXFP4, NVFP4, PackedWeight
from qerl.models.architecture import Architecture
from qerl.models.checkpoint.expert_names import expert_modules
from qerl.models.checkpoint.source import Checkpoint, fitting_weight, layout_of, stored_weight
from qerl.models.checkpoint.state_dict import check_float, read_float
from qerl.models.layer_spec import ExpertSpec
from qerl.models.mixture import ExpertLinear
from qerl.models.tiled_experts import ExpertRows, stacked

Encode = Callable[[Tensor], PackedWeight]


def load_experts(
    experts: ExpertLinear,
    checkpoint: Checkpoint,
    a: Architecture,
    layer_index: int,
    format: str,
    encode: Encode,
    rows: ExpertRows | None = None,
) -> None:
    """Load one stack of a layer, expert by expert, and its biases. encode: makes a weight in `format`. rows:
    order of the rows in tiles, for weights that fit; None: no tiles."""
    at, x = f"model.layers.{layer_index}.", experts.spec

    def weight_of(expert: int) -> PackedWeight:
        return expert_weight(checkpoint, a, at, x, expert, format, encode).to(experts.device)

    experts.load_weight(stacked(x.num_experts, weight_of, rows))
    if experts.bias is not None:
        experts.bias.copy_(read_float(checkpoint, f"{at}{x.name}_bias"))


def expert_weight(
    checkpoint: Checkpoint, a: Architecture, at: str, x: ExpertSpec, expert: int, format: str, encode: Encode
) -> PackedWeight:
    """Return one expert's weight [N, K]; of a quantized checkpoint an expert in full precision stays BF16."""
    modules = [at + module for module in expert_modules(a, x, expert)]
    if layout_of(checkpoint) is not None:
        if stored_weight(checkpoint, modules[0]) is None:
            return BF16.encode(read_expert(checkpoint, a, at, x, expert))
        weights = (fitting_weight(checkpoint, module, format) for module in modules)
        if (joined := _joined([each for each in weights if each is not None], len(modules))) is not None:
            return joined
    with naming(f"{checkpoint.path}: {at}{x.name}, expert {expert}"):
        return encode(read_expert(checkpoint, a, at, x, expert))


def _joined(weights: list[PackedWeight], num: int) -> PackedWeight | None:
    """Return `num` weights as one, row after row; None if one is missing or they are not one weight."""
    if len(weights) < num or num == 1:
        return weights[0] if weights else None
    if isinstance(weights[0], NVFP4) and any(
        not torch.equal(weight.tensors()["global_scale"], weights[0].global_scale) for weight in weights
    ):
        return None
    if not isinstance(weights[0], NVFP4 | MXFP4 | INT8):
        return None
    parts = [weight.tensors() for weight in weights]
    rows = {
        name: tensor if name == "global_scale" else torch.cat([part[name] for part in parts])
        for name, tensor in parts[0].items()
    }
    return type(weights[0])(**rows)


def read_expert(checkpoint: Checkpoint, a: Architecture, at: str, x: ExpertSpec, expert: int) -> Tensor:
    """Return one expert's float weight [N, K]."""
    assert a.mixture is not None
    one = slice(expert, expert + 1)
    if a.mixture.stored in ("stacked", "transposed"):
        is_stacked = a.mixture.stored == "stacked"
        name = f"{at}{x.name}{'.weight' * is_stacked}"
        weight = check_float(checkpoint, name, checkpoint.read_rows(name, one)[0])
        return weight if is_stacked else weight.T.contiguous()
    parts = [read_float(checkpoint, f"{at}{module}.weight") for module in expert_modules(a, x, expert)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
