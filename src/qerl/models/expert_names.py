"""Names and shapes of a mixture's experts in checkpoints.

    separate     experts.{e}.{gate,up}_proj.weight [F, D]   experts.{e}.down_proj.weight [D, F]    Qwen, OLMoE
    stacked      experts.gate_up_proj.weight [E, 2 F, D]    experts.down_proj.weight [E, D, F]     Granite
    transposed   experts.gate_up_proj [E, D, 2 F]           experts.down_proj [E, F, D]            gpt-oss
                 and {gate_up,down}_proj_bias [E, N]        all with mlp. before it

The decoder has gate_up_proj [E, 2 F, D] and down_proj [E, D, F]; of experts that are stored one by one,
gate's rows come before up's, else they are in the order of the checkpoint.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from qerl.models.architecture import Architecture
from qerl.models.layer_spec import ExpertSpec, LayerSpec

PARTS = {"mlp.experts.gate_up_proj": ("gate_proj", "up_proj"), "mlp.experts.down_proj": ("down_proj",)}
"""Linears of a separate expert by the stack that holds them."""


def expert_shapes(a: Architecture, spec: LayerSpec) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a layer's expert tensors in a float checkpoint, by name without the layer."""
    shapes: dict[str, tuple[int, ...]] = {}
    for x in spec.experts:
        assert a.mixture is not None
        num, n, k = x.num_experts, x.out_width, x.in_width
        if a.mixture.stored == "separate":
            parts = PARTS[x.name]
            names = [separate_name(x, e, part) for e in range(num) for part in parts]
            shapes |= dict.fromkeys(names, (n // len(parts), k))
        elif a.mixture.stored == "stacked":
            shapes[f"{x.name}.weight"] = (num, n, k)
        else:
            shapes[x.name] = (num, k, n)
        if x.has_bias:
            shapes[f"{x.name}_bias"] = (num, n)
    return shapes


def separate_name(x: ExpertSpec, expert: int, part: str) -> str:
    """separate_name(down, 3, "down_proj") -> "mlp.experts.3.down_proj.weight\""""
    return f"{x.name.rpartition('.')[0]}.{expert}.{part}.weight"


def float_tensors(
    a: Architecture, at: str, x: ExpertSpec, weights: Iterator[Tensor], bias_EN: Tensor | None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a float checkpoint, from each expert's weight [N, K] in order."""
    assert a.mixture is not None
    if a.mixture.stored == "separate":
        for expert, weight_NK in enumerate(weights):
            parts = PARTS[x.name]
            for part, rows in zip(parts, weight_NK.chunk(len(parts)), strict=True):
                yield at + separate_name(x, expert, part), rows.contiguous()
    elif a.mixture.stored == "stacked":
        yield f"{at}{x.name}.weight", torch.stack(list(weights))
    else:
        yield at + x.name, torch.stack([weight_NK.T for weight_NK in weights])
    if bias_EN is not None:
        yield f"{at}{x.name}_bias", bias_EN
