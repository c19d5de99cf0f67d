"""The share of a mixture's experts in the plan of memory and speed.

    weights      as their format packs them; NVFP4 and MXFP4 in the decode kernels' tiles, 0.5625 bytes a
                 weight and two factors for each output, and a bias in fp32 besides
    adapters     rank * (E K + E N) a stack, a shared A or B once
    unpacked     the learner's buffer (kernels/experts/expert_product.py), or one expert at a time
    activations  of k experts a row: x for adapters, gate and up, h for adapters, y

k experts chosen of E; D F K N as in types.py. tests/learner/test_plan_mixture.py
holds each sum against one written out by hand.
"""

from qerl.config import AdapterConfig, RunConfig
from qerl.formats import FORMATS
from qerl.kernels.experts.expert_product import buffer_experts
from qerl.models.architecture import Architecture
from qerl.models.layer_spec import ExpertSpec, counted_specs

_TILED = ("nvfp4", "mxfp4")
_TILE_BYTES = 0.5625
_KERNEL_UNPACK_BYTES = 2.5625  # moved by kernels/experts/stack_unpack.py for each 4-bit weight


def stack_bytes(x: ExpertSpec, format: str) -> float:
    """Return the bytes of a stack's packed weights, factors and biases; in tiles also of the biases that
    decode steps add, in fp32 and in the tiles' order."""
    outputs, bias_bytes = x.num_experts * x.out_width, 2
    bytes_per_weight, factors = FORMATS[format].bytes_per_weight, 4 * x.num_experts
    if format == "bf16":
        factors = 0
    elif format in _TILED:
        bytes_per_weight, bias_bytes = _TILE_BYTES, 6
        factors = 4 * outputs + (4 * outputs if format == "mxfp4" else 4 * x.num_experts)
    return x.num_weights * bytes_per_weight + factors + bias_bytes * outputs * x.has_bias


def num_adapter_weights(a: Architecture, adapter: AdapterConfig) -> int:
    """Return the number of weights in A and B of the experts' adapters."""
    if adapter.experts == "none":
        return 0
    return adapter.expert_rank * sum(
        count * (1 if adapter.experts == "shared_a" else x.num_experts) * x.in_width
        + count * (1 if adapter.experts == "shared_b" else x.num_experts) * x.out_width
        for spec, count in counted_specs(a)
        for x in spec.experts
    )


def unpacked_bytes(a: Architecture, format: str, element_bytes: int) -> float:
    """Return the bytes of experts that are unpacked at a time; 0 without a mixture, and for BF16 weights
    computed in bf16."""
    if format == "bf16" and element_bytes == 2:
        return 0.0
    stacks = [x for spec, _ in counted_specs(a) for x in spec.experts]
    return max((_num_unpacked(x, element_bytes) * _expert_bytes(x, element_bytes) for x in stacks), default=0)


def _num_unpacked(x: ExpertSpec, element_bytes: int) -> int:
    if element_bytes != 2:
        return 1
    return buffer_experts(x.num_experts, x.out_width, x.in_width, element_bytes)


def _expert_bytes(x: ExpertSpec, element_bytes: int) -> float:
    return float(element_bytes * x.out_width * x.in_width)


def saved_bytes_per_row(a: Architecture, adapter: AdapterConfig, element_bytes: int) -> float:
    """Return the bytes that a layer's router and experts save for their backward pass, for each row."""
    mixture = a.mixture
    assert mixture is not None
    has_adapters = adapter.experts != "none"
    activation = 2 * element_bytes * mixture.width
    inputs = element_bytes * (a.width + mixture.width) * has_adapters
    chosen = activation + inputs + element_bytes * a.width + 4  # the weight
    return mixture.num_chosen * chosen + 4 * mixture.num_experts + 4 * a.width * adapter.router


def route_bytes_per_row(a: Architecture) -> int:
    """Return the bytes of all layers' ids and two orders as int64, which a pass keeps for each row."""
    return 0 if a.mixture is None else 3 * 8 * a.mixture.num_chosen * len(a.layers_with_experts)


def backward_bytes_per_row(a: Architecture, element_bytes: int) -> float:
    """Return the peak bytes of gradients of y, h, gate and up in the experts' backward pass, for each row."""
    mixture = a.mixture
    assert mixture is not None
    chosen = element_bytes * (3 * mixture.width + a.width)
    return mixture.num_chosen * chosen


def pass_bytes_per_row(a: Architecture, element_bytes: int) -> float:
    """Return the bytes of the experts' activations in a forward pass without gradient, for each row."""
    mixture = a.mixture
    assert mixture is not None
    chosen = element_bytes * (2 * a.width + 3 * mixture.width)
    return mixture.num_chosen * chosen


def num_active_weights(a: Architecture) -> int:
    """Return the number of expert weights that one token is multiplied by."""
    return sum(count * spec.active_expert_weights(a) for spec, count in counted_specs(a))


def touched_share(a: Architecture, num_rows: int) -> float:
    """Return the expected share of a layer's experts that have rows, if all are equally likely."""
    if a.mixture is None:
        return 0.0
    return 1 - (1 - a.mixture.num_chosen / a.mixture.num_experts) ** num_rows


def num_touched(a: Architecture, num_rows: int) -> float:
    """Return the expected number of experts with rows, over all layers."""
    experts = 0 if a.mixture is None else a.mixture.num_experts * len(a.layers_with_experts)
    return experts * touched_share(a, num_rows)


def learner_unpack_bytes(a: Architecture, config: RunConfig) -> float:
    """Return the bytes moved to unpack all experts once."""
    if config.model.format == "bf16":
        return 0.0
    weights = sum(count * x.num_weights for spec, count in counted_specs(a) for x in spec.experts)
    return weights * _KERNEL_UNPACK_BYTES
