"""The bytes of a micro-batch's activations: what is kept for the backward pass, and a layer's backward pass.

Sizes are per row (learner/plan/memory.py lists the letters). A recomputed layer of more than CHUNK_ROWS rows
differentiates its MLP in chunks (learner/chunked_mlp.py). It takes the larger of

    MLP           what attention saved, h after attention, its gradient and the result's;  one chunk's MLP
    attention     what it saved, both gradients of h, and what FlashAttention's backward pass allocates

A layer that is not chunked takes all that it saved, and the gradients of its MLP; what FlashAttention 2
allocates does not count there: for the sequences of some thousand rows that a micro-batch has, it is less
than the gradients of gate and up.
"""

import math

import torch

from qerl.config import RunConfig
from qerl.kernels.pointwise.matmul_fp32 import CHUNK_ROWS
from qerl.learner.plan import mixture
from qerl.models.architecture import Architecture
from qerl.models.device import COMPUTE
from qerl.models.layer_spec import LayerSpec, LinearGroupSpec, counted_specs

_ROW_MULTIPLE = 64  # a row that holds an adapter's columns too is padded to a multiple of this
_SMS = 132  # FlashAttention 2 splits the gradient of q into as many sums as occupy them


def element_bytes(config: RunConfig) -> int:
    """Return the bytes of one element of an activation, an unpacked weight or a working copy."""
    return compute_dtype(config).itemsize


def compute_dtype(config: RunConfig) -> torch.dtype:
    return COMPUTE.get(config.model.dtype, torch.bfloat16)


def saves_up(config: RunConfig) -> bool:
    """True if swiglu's backward pass reads up; else it recovers up from its result
    (kernels/pointwise/swiglu.py)."""
    return config.model.format == "fp8-flow"


def saved_bytes_per_row(a: Architecture, config: RunConfig) -> float:
    """Return the bytes that the largest layer's forward pass saves for its backward pass, for each row."""
    return max(_saved_bytes(a, config, spec) for spec, _ in counted_specs(a))


def _saved_bytes(a: Architecture, config: RunConfig, spec: LayerSpec) -> float:
    """Return those of one layer.

    Saved in the compute dtype: inputs of products and swiglu, q, k and v, the attention output,
    inputs of norms after attention and MLP. Without the fused swiglu, gate, its activation and up are saved.
    Saved in fp32: inputs of the norms, and the softmax's sums. In a layer with Gated DeltaNet: what its
    linears return, the convolution's result in both dtypes, and the output before and after its norm.
    """
    gate_up = (1 + saves_up(config) if a.activation == "silu" else 3) * a.ff_width * (not spec.experts)
    gate_up += a.width * sum(norm is not None for norm in (a.norms.after_attention, a.norms.after_mlp))
    groups = spec.groups[:2] if spec.experts else spec.groups
    inputs = sum(row_width(group.in_width, group, config) for group in groups)
    size = element_bytes(config)
    experts = mixture.saved_bytes_per_row(a, config.adapter, size) if spec.experts else 0
    if spec.kind.mixer == "delta":
        assert a.delta is not None
        mixed = spec.qkv.out_width + a.delta.channels + 2 * a.delta.value_width
        fp32 = 2 * a.width + 2 * a.delta.channels + a.delta.value_width
        return size * (inputs + gate_up + mixed) + 4 * fp32 + experts
    q, k, v = spec.qkv.out_widths
    return size * (inputs + gate_up + 2 * q + k + v) + 4 * (2 * a.width + a.num_heads) + experts


def backward_bytes_per_row(a: Architecture, config: RunConfig) -> float:
    """Return the peak bytes of gradients in a layer's backward pass, for each row.

    Counted: gate, up and h in the compute dtype, h twice in fp32, and swiglu's own gradient, which overwrites
    its input where that is not read again.
    """
    size, has_dense = element_bytes(config), any(kind.mlp == "dense" for kind in a.kinds)
    dense = size * ((3 - saves_up(config)) * a.ff_width + a.width) * has_dense
    experts = 0 if a.mixture is None else mixture.backward_bytes_per_row(a, size) + size * a.width
    return max(dense, experts) + 4 * 2 * a.width


def kept_bytes(a: Architecture, config: RunConfig, rows: int) -> float:
    """Return the bytes of what a pass keeps on the device for the backward passes of its layers.

    none: all layers' saved rows. layer: each layer's input. offload: four inputs. Besides, the routes of
    layers with experts.
    """
    routes = rows * mixture.route_bytes_per_row(a)
    if config.learn.gradient_checkpointing == "none":
        return routes + rows * sum(count * _saved_bytes(a, config, spec) for spec, count in counted_specs(a))
    num_inputs = a.num_layers if config.learn.gradient_checkpointing == "layer" else min(4, a.num_layers)
    return routes + rows * num_inputs * 4 * a.width


def host_bytes(a: Architecture, config: RunConfig, rows: int) -> float:
    """Return the bytes of the layers' inputs in host memory."""
    return rows * a.num_layers * 4 * a.width * (config.learn.gradient_checkpointing == "offload")


def layer_bytes(a: Architecture, config: RunConfig, rows: int) -> float:
    """Return the peak bytes of a layer's backward pass, with its second forward pass if there is one."""
    backward = rows * backward_bytes_per_row(a, config)
    if config.learn.gradient_checkpointing == "none":
        return backward
    return max(_recomputed_bytes(a, config, spec, rows) for spec, _ in counted_specs(a))


def _recomputed_bytes(a: Architecture, config: RunConfig, spec: LayerSpec, rows: int) -> float:
    saved, backward = _saved_bytes(a, config, spec), backward_bytes_per_row(a, config)
    if not is_chunked(a, config, rows) or spec.kind.mixer == "delta":
        return rows * (saved + backward)
    size, (q, k, v) = element_bytes(config), spec.qkv.out_widths
    inputs = sum(row_width(group.in_width, group, config) for group in spec.groups[:2])
    normed = a.width * (a.norms.after_attention is not None)
    mixed = size * (inputs + 2 * q + k + v + normed) + 4 * (a.width + a.num_heads)
    of_mlp = rows * (mixed + 3 * 4 * a.width) + CHUNK_ROWS * (saved - mixed + backward)
    splits = -(-_SMS // a.num_heads)
    attention = splits * 4 * q + size * (2 * q + q + k + v)
    return max(of_mlp, rows * (mixed + 2 * 4 * a.width + size * (a.width + q) + attention))


def is_chunked(a: Architecture, config: RunConfig, rows: int) -> bool:
    """True if recomputed layers differentiate their MLPs in chunks, as learner/chunked_mlp.py decides."""
    can_be = a.mixture is None and config.adapter.kind == "lora" and config.adapter.dropout == 0
    return can_be and rows > CHUNK_ROWS and config.model.format != "fp8-flow"


def row_width(width: int, group: LinearGroupSpec, config: RunConfig) -> int:
    """Return the elements of a row with the columns that the group's adapters add to it."""
    adapter = config.adapter
    num_adapters = sum(linear.short_name in adapter.target_modules for linear in group.linears)
    rank = adapter.rank * num_adapters * (adapter.kind == "lora")
    return math.ceil((width + rank) / _ROW_MULTIPLE) * _ROW_MULTIPLE if rank else width
