"""Read the experts of a mixture one at a time, and quantize each as it is read.

    peak memory = the packed stacks + one expert        tests/models/test_mixture_loading.py

expert_names.py lists the forms in which checkpoints have them.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from qerl.errors import UserError
from qerl.formats import PackedWeight
from qerl.formats.stack import PackedStack
from qerl.models.architecture import Architecture
from qerl.models.expert_names import PARTS, separate_name
from qerl.models.layer_spec import ExpertSpec
from qerl.models.mixture import ExpertLinear
from qerl.models.source import Checkpoint
from qerl.models.state_dict import check_float, read_float

Encode = Callable[[Tensor], PackedWeight]


def load_experts(
    experts: ExpertLinear, checkpoint: Checkpoint, a: Architecture, layer_index: int, encode: Encode
) -> None:
    """Load one stack of a layer, expert by expert, and its biases."""
    at, x = f"model.layers.{layer_index}.", experts.spec
    experts.load_weight(PackedStack.of(x.num_experts, _encoded(checkpoint, a, at, x, encode)))
    if experts.bias is not None:
        experts.bias.copy_(read_float(checkpoint, f"{at}{x.name}_bias"))


def _encoded(
    checkpoint: Checkpoint, a: Architecture, at: str, x: ExpertSpec, encode: Encode
) -> Iterator[PackedWeight]:
    for expert in range(x.num_experts):
        weight_NK = read_expert(checkpoint, a, at, x, expert)
        try:
            yield encode(weight_NK)
        except UserError as error:
            raise UserError(f"{checkpoint.path}: {at}{x.name}, expert {expert}: {error}") from error


def read_expert(checkpoint: Checkpoint, a: Architecture, at: str, x: ExpertSpec, expert: int) -> Tensor:
    """Return one expert's float weight [N, K]."""
    assert a.mixture is not None
    if a.mixture.stored == "separate":
        names = [at + separate_name(x, expert, part) for part in PARTS[x.name]]
        parts = [read_float(checkpoint, name) for name in names]
        return parts[0] if len(parts) == 1 else torch.cat(parts)
    one = slice(expert, expert + 1)
    if a.mixture.stored == "stacked":
        name = f"{at}{x.name}.weight"
        return check_float(checkpoint, name, checkpoint.read_rows(name, one)[0])
    name = at + x.name
    return check_float(checkpoint, name, checkpoint.read_rows(name, one)[0]).T
