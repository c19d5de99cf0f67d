"""The bytes of a model's weights and adapters, and the parameters that are active for a token.

    weights      bytes_per_weight of the format, or 0.5625 in the decode kernels' tiles; 4 for each output;
                 BF16 for linears that are not quantized; of experts two factors for each output in tiles of
                 MXFP4, and a bias in fp32 besides
    embedding    2 V D, head the same; a packed head V D in its format, tied or not, a tied bf16 head nothing
    adapter      rank * (K + N) a linear; rank * (E K + E N) a stack of experts, a shared A or B once
    by row       of several in one step, A and B twice, alone and side by side for prefill, and a slot of the
                 decode kernels for each that there may be and for none (engine/decode/group_bank.py)
    whole        D of each norm, V D of embedding and head, where they are trained; once more as they were

A token is multiplied by k experts of a layer's E. A step of several rows reads those that some row chose,

    E (1 - (1 - k / E)^rows)        if each row chooses k at random

Letters as in types.py; N, K outputs and inputs of a linear.
"""

import math

from qerl.config import AdapterConfig
from qerl.formats import FORMATS
from qerl.kernels.tiles.row_slots import kernel_rank
from qerl.models.architecture import Architecture
from qerl.models.layer_spec import (
    ExpertSpec,
    LinearGroupSpec,
    LinearSpec,
    adapter_targets,
    counted_specs,
    layer_specs,
)
from qerl.models.lm_head import packed_width
from qerl.models.peft.peft_selection import adapter_of, linear_names

PASSES = {"none": 2, "layer": 3, "offload": 3}
"""Number of times that an update multiplies by a weight, by learn.gradient_checkpointing: forwards, for the
gradient of its inputs, and forwards again. Frozen weights have no gradient of their own."""
_TILE_BYTES = 0.5625  # of a weight in 4 bits (models/packed/packed_linear.py)


def counted_groups(a: Architecture) -> list[tuple[LinearGroupSpec, int]]:
    """Return each kind of group of linears, with the number of layers that have it."""
    return [(group, count) for spec, count in counted_specs(a) for group in spec.groups]


def counted_stacks(a: Architecture) -> list[tuple[ExpertSpec, int]]:
    """Return each kind of stack of experts, with the number of layers that have it."""
    return [(x, count) for spec, count in counted_specs(a) for x in spec.experts]


def linear_weights(a: Architecture) -> tuple[int, int]:
    """Return the number of weights of all linears but experts: (in model.format, those that stay in BF16)."""
    linears = [(x, count) for group, count in counted_groups(a) for x in group.linears]
    quantized = sum(count * x.num_weights for x, count in linears if x.is_quantized)
    return quantized, sum(count * x.num_weights for x, count in linears) - quantized


def expert_weights(a: Architecture) -> int:
    """Return the number of weights of one expert of each layer."""
    return sum(count * x.num_weights // x.num_experts for x, count in counted_stacks(a))


def num_active_expert_params(a: Architecture) -> int:
    """Return the number of parameters of experts that are active for one token."""
    return 0 if a.mixture is None else a.mixture.num_chosen * expert_weights(a)


def num_active_params(a: Architecture) -> int:
    """Return the number of parameters that are active for one token, those of the head included."""
    return sum(linear_weights(a)) + num_active_expert_params(a) + a.vocab_size * a.width


def experts_read(a: Architecture, num_rows: int) -> float:
    """Return how many experts of a layer a step of num_rows rows is expected to read."""
    if a.mixture is None:
        return 0
    experts, chosen = a.mixture.num_experts, a.mixture.num_chosen
    return experts * (1 - (1 - chosen / experts) ** num_rows)


def weight_bytes(a: Architecture, format: str) -> float:
    """Return the bytes of the packed linears, their biases, one factor for each output, of routers in BF16
    and of experts. In tiles for the formats that have them."""
    experts = sum(count * stack_bytes(x, format) for x, count in counted_stacks(a))
    linears = ((x, count) for group, count in counted_groups(a) for x in group.linears)
    return experts + sum(count * _linear_bytes(x, format) for x, count in linears)


def _linear_bytes(x: LinearSpec, format: str) -> float:
    format = format if x.is_quantized else "bf16"
    bytes_per_weight = _TILE_BYTES if format in ("mxfp4", "nf4") else FORMATS[format].bytes_per_weight
    bias = (4 if x.short_name == "router" else 2) * x.out_width * x.has_bias
    return x.num_weights * bytes_per_weight + 4 * (format != "bf16") * x.out_width + bias


def stack_bytes(x: ExpertSpec, format: str) -> float:
    """Return the bytes of a stack's packed weights, factors and biases; in tiles also of the biases that
    decode steps add, in fp32 and in the tiles' order."""
    outputs, bias_bytes = x.num_experts * x.out_width, 2
    bytes_per_weight, factors = FORMATS[format].bytes_per_weight, 4 * x.num_experts
    if format == "bf16":
        factors = 0
    elif format in ("nvfp4", "mxfp4"):
        bytes_per_weight, bias_bytes = _TILE_BYTES, 6
        factors = 4 * outputs + (4 * outputs if format == "mxfp4" else 4 * x.num_experts)
    return x.num_weights * bytes_per_weight + factors + bias_bytes * outputs * x.has_bias


def embedding_bytes(
    a: Architecture, head_format: str = "bf16", num_noise_rows: int = 1, element_bytes: int = 2
) -> float:
    """Return the bytes of the embedding, the head, the norms and their noise, and what else is not packed."""
    in_fp32 = sum(
        count * (sum(spec.norm_widths.values()) + sum(map(math.prod, spec.other_shapes.values())))
        for spec, count in counted_specs(a)
    )
    norms = 4 * (in_fp32 + (2 * num_noise_rows * a.num_layers + 1) * a.width)
    head = 0.0 if a.tied_head else element_bytes * a.width
    if head_format != "bf16":
        head = FORMATS[head_format].bytes_per_weight * packed_width(a.width)
    return a.vocab_size * (element_bytes * a.width + head) + norms


def num_trained_weights(a: Architecture, adapter: AdapterConfig) -> int:
    """Return the number of weights that learn: adapters, or the target linears' own, and whole modules."""
    others = num_expert_adapter_weights(a, adapter) + num_whole_weights(a, adapter)
    if adapter.selects_names:
        return _num_named_weights(a, adapter) + others
    targets, layers = adapter_targets(a, adapter), adapter.layers_to_transform
    specs = counted_specs(a)
    if layers is not None:
        specs = tuple((spec, 1) for layer, spec in enumerate(layer_specs(a)) if layer in layers)
    linears = [(x, n) for spec, n in specs for x in spec.linears if x.short_name in targets]
    if adapter.kind == "full":
        return sum(n * x.num_weights for x, n in linears)
    return adapter.rank * sum(n * (x.out_width + x.in_width) for x, n in linears) + others


def row_adapter_bytes(
    widths: int, element_bytes: int, *, num_adapters: int, max_rank: int, max_adapters: int
) -> int:
    """Return the bytes of this many adapters by row; widths: of all inputs and outputs of the linears."""
    ranks = 2 * max_rank * num_adapters + kernel_rank(max_rank) * (1 + max_adapters)
    return element_bytes * widths * ranks


def num_norm_weights(a: Architecture, adapter: AdapterConfig) -> int:
    """Return the number of weights of the norms that learn."""
    return a.num_layers * len(a.norms.names) * a.width if adapter.train_norms else 0


def num_whole_weights(a: Architecture, adapter: AdapterConfig) -> int:
    """Return the number of weights that learn whole, beside adapters: they are their own working copies."""
    return num_norm_weights(a, adapter) + len(adapter.modules_to_save) * a.vocab_size * a.width


def base_bytes(a: Architecture, adapter: AdapterConfig, element_bytes: int) -> int:
    """Return the bytes of the same weights as they were before training."""
    num_norms = num_norm_weights(a, adapter)
    return 4 * num_norms + element_bytes * (num_whole_weights(a, adapter) - num_norms)


def _num_named_weights(a: Architecture, adapter: AdapterConfig) -> int:
    """Return the same where linears are selected by their full names."""
    total = 0
    for layer, spec in enumerate(layer_specs(a)):
        for x in spec.linears:
            numbers = adapter_of(adapter, linear_names(a, f"layers.{layer}.{x.name}"))
            if numbers is not None:
                full, low = x.num_weights, numbers.rank * (x.out_width + x.in_width)
                total += full if adapter.kind == "full" else low
    return total


def num_expert_adapter_weights(a: Architecture, adapter: AdapterConfig) -> int:
    """Return the number of weights in A and B of the experts' adapters."""
    if adapter.experts == "none":
        return 0
    return adapter.expert_rank * sum(
        count * (1 if adapter.experts == "shared_a" else x.num_experts) * x.in_width
        + count * (1 if adapter.experts == "shared_b" else x.num_experts) * x.out_width
        for x, count in counted_stacks(a)
    )


def optimizer_bytes(num_weights: int, optimizer: str) -> float:
    """Return the bytes of AdamW's moments; 8-bit moments have one fp32 factor for each block of 256."""
    return num_weights * (8 if optimizer == "adamw" else 2 * (1 + 4 / 256))
