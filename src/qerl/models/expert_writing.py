"""Write the experts of a mixture in a quantized checkpoint, expert by expert.

separate      compressed-tensors: experts.{e}.gate_proj.weight_packed, .weight_scale, ...: gate and up share
              one global scale, as vLLM fuses them
transposed    MXFP4 only, as gpt-oss is published: experts.gate_up_proj_blocks, _scales; all else in BF16
stacked       no layout is known
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from qerl.errors import UserError
from qerl.formats import MXFP4, PackedWeight
from qerl.formats.stack import PackedStack
from qerl.models.architecture import Architecture
from qerl.models.checkpoint.expert_names import expert_modules
from qerl.models.checkpoint.layouts import mxfp4_blocks
from qerl.models.checkpoint.layouts.rows import cut_rows
from qerl.models.checkpoint.source import Checkpoint
from qerl.models.checkpoint.state_dict import read_float
from qerl.models.expert_loading import Encode, expert_weight
from qerl.models.layer_spec import ExpertSpec, layer_specs


def as_written(a: Architecture, format: str) -> Architecture:
    """Return the architecture with the names that `qerl quantize` writes; raise UserError if it has none."""
    mixture = a.mixture
    if mixture is None or mixture.stored == "separate":
        return a
    if mixture.stored in ("transposed", "blocks") and format == MXFP4.name:
        return dataclasses.replace(a, mixture=dataclasses.replace(mixture, stored="blocks"))
    formats = "mxfp4" if mixture.stored in ("transposed", "blocks") else "no 4-bit format"
    raise UserError(f"the experts of {a.family} can be written in {formats}, not in {format}")


def can_be_written(a: Architecture, format: str) -> bool:
    """True if `qerl quantize` writes such a model in this format."""
    try:
        as_written(a, format)
    except UserError:
        return False
    return True


def expert_tensors(
    checkpoint: Checkpoint, a: Architecture, format: str, suffixes: dict[str, str], encode: Encode
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of all experts. suffixes: of the tensors' names by the format's fields."""
    for layer, spec in enumerate(layer_specs(a)):
        at = f"model.layers.{layer}."
        for x in spec.experts:
            weights = (expert_weight(checkpoint, a, at, x, e, format, encode) for e in range(x.num_experts))
            yield from stack_tensors(a, at, x, weights, suffixes)
            if x.has_bias:
                yield f"{at}{x.name}_bias", read_float(checkpoint, f"{at}{x.name}_bias")


def stack_tensors(
    a: Architecture, at: str, x: ExpertSpec, weights: Iterator[PackedWeight], suffixes: dict[str, str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of one stack, from each expert's weight in order."""
    if a.mixture is None or a.mixture.stored != "separate":
        parts = PackedStack.of(x.num_experts, weights).parts
        yield from mxfp4_blocks.block_tensors(f"{at}{x.name}", parts["codes"], parts["scales"]).items()
        return
    for expert, weight in enumerate(weights):
        modules = expert_modules(a, x, expert)
        step = x.out_width // len(modules)
        for index, module in enumerate(modules):
            part = cut_rows(weight, slice(index * step, (index + 1) * step))
            assert part is not None
            tensors = part.tensors()
            yield from ((f"{at}{module}.{suffix}", tensors[f].clone()) for f, suffix in suffixes.items())


def blocks_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config of gpt-oss with the quantization_config that its published checkpoints have."""
    plain = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    quantization = {"quant_method": mxfp4_blocks.NAME, "modules_to_not_convert": plain}
    return config | {"quantization_config": quantization}
