"""Names and shapes of a mixture's experts in checkpoints.

    separate     experts.{e}.{gate,up}_proj.weight [F, D]   experts.{e}.down_proj.weight [D, F]    Qwen, OLMoE
    stacked      experts.gate_up_proj.weight [E, 2 F, D]    experts.down_proj.weight [E, D, F]     Granite
    transposed   experts.gate_up_proj [E, D, 2 F]           experts.down_proj [E, F, D]            gpt-oss
                 and {gate_up,down}_proj_bias [E, N]
    blocks       experts.{gate_up,down}_proj_{blocks,scales}, of MXFP4 (layouts/mxfp4_blocks.py), which a
                 Checkpoint shows as experts.{e}.gate_up_proj.weight [2 F, D], .down_proj.weight     gpt-oss

The decoder has gate_up_proj [E, 2 F, D] and down_proj [E, D, F]; of experts that are stored one by one,
gate's rows come before up's, else they are in the order of the checkpoint.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from qerl.models.architecture import Architecture
from qerl.models.layer_spec import ExpertSpec, LayerSpec, layer_specs

_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def expert_shapes(a: Architecture, spec: LayerSpec) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a layer's expert tensors in a float checkpoint, by name without the layer."""
    shapes: dict[str, tuple[int, ...]] = {}
    for x in spec.experts:
        assert a.mixture is not None
        num, n, k = x.num_experts, x.out_width, x.in_width
        if a.mixture.stored in ("separate", "blocks"):
            modules = [module for e in range(num) for module in expert_modules(a, x, e)]
            shapes |= dict.fromkeys([f"{m}.weight" for m in modules], (n * num // len(modules), k))
        elif a.mixture.stored == "stacked":
            shapes[f"{x.name}.weight"] = (num, n, k)
        else:
            shapes[x.name] = (num, k, n)
        if x.has_bias:
            shapes[f"{x.name}_bias"] = (num, n)
    return shapes


def expert_names(a: Architecture) -> set[str]:
    """Return the names of all expert tensors of a checkpoint, biases too."""
    return {
        f"model.layers.{layer}.{name}"
        for layer, spec in enumerate(layer_specs(a))
        for name in expert_shapes(a, spec)
    }


def expert_modules(a: Architecture, x: ExpertSpec, expert: int) -> list[str]:
    """Return the names of one expert's linears, whose rows one after the other are those of the stack:
    ["mlp.experts.3.gate_proj", "mlp.experts.3.up_proj"]."""
    assert a.mixture is not None
    at, _, name = x.name.rpartition(".")
    parts = _PARTS[name] if a.mixture.stored == "separate" else (name,)
    return [f"{at}.{expert}.{part}" for part in parts]


def has_blocks(names: Iterable[str]) -> bool:
    """True if a checkpoint of gpt-oss has its experts in MXFP4."""
    return any(name.endswith(".mlp.experts.0.gate_up_proj.weight") for name in names)


def float_tensors(
    a: Architecture, at: str, x: ExpertSpec, weights: Iterator[Tensor], bias_EN: Tensor | None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a float checkpoint, from each expert's weight [N, K] in order."""
    assert a.mixture is not None
    if a.mixture.stored == "separate":
        for expert, weight_NK in enumerate(weights):
            modules = expert_modules(a, x, expert)
            for module, rows in zip(modules, weight_NK.chunk(len(modules)), strict=True):
                yield f"{at}{module}.weight", rows.contiguous()
    elif a.mixture.stored == "stacked":
        yield f"{at}{x.name}.weight", torch.stack(list(weights))
    else:
        yield at + x.name, torch.stack([weight_NK.T for weight_NK in weights])
    if bias_EN is not None:
        yield f"{at}{x.name}_bias", bias_EN
