"""The bytes of activations: what is kept for the backward pass, a layer's backward pass, the head's passes.

Sizes are per row. A recomputed layer of more than CHUNK_ROWS rows differentiates its MLP in chunks
(learner/chunked_mlp.py). It takes the larger of

    MLP           what attention saved, h after attention, its gradient and the result's;  one chunk's MLP
    attention     what it saved, both gradients of h, and what FlashAttention's backward pass allocates

A layer that is not chunked takes all that it saved, and the gradients of its MLP; what FlashAttention 2
allocates does not count there: for the sequences of some thousand rows that a micro-batch has, it is less
than the gradients of gate and up. Of a mixture's k experts a row: x for adapters, gate and up, h for
adapters, y.
"""

from qerl.config import LearnConfig
from qerl.cost.cache import num_routes
from qerl.cost.form import ModelForm
from qerl.cost.operands import largest_operand_bytes
from qerl.kernels.head.head_operand import slice_columns
from qerl.kernels.linear.fused_linear import wide_rows
from qerl.kernels.pointwise.matmul_fp32 import CHUNK_ROWS
from qerl.models.architecture import Architecture
from qerl.models.layer_spec import LayerSpec, counted_specs
from qerl.models.lm_head import packed_width

_SMS = 132  # FlashAttention 2 splits the gradient of q into as many sums as occupy them


def saved_bytes(a: Architecture, form: ModelForm, spec: LayerSpec) -> float:
    """Return the bytes that a layer's forward pass saves for its backward pass, for each row.

    Saved in the compute dtype: inputs of products and swiglu, q, k and v, the attention output,
    inputs of norms after attention and MLP. Without the fused swiglu, gate, its activation and up are saved.
    Saved in fp32: inputs of the norms, and the softmax's sums. In a layer with Gated DeltaNet: what its
    linears return, the convolution's result in both dtypes, and the output before and after its norm.
    """
    gate_up = (1 + form.saves_up if a.activation == "silu" else 3) * a.ff_width * (not spec.experts)
    gate_up += a.width * sum(norm is not None for norm in (a.norms.after_attention, a.norms.after_mlp))
    inputs = sum(map(form.row_width, spec.groups[:2] if spec.experts else spec.groups))
    size = form.element_bytes
    experts = _saved_expert_bytes(a, form) if spec.experts else 0
    if spec.kind.mixer == "delta":
        assert a.delta is not None
        mixed = spec.qkv.out_width + a.delta.channels + 2 * a.delta.value_width
        fp32 = 2 * a.width + 2 * a.delta.channels + a.delta.value_width
        return size * (inputs + gate_up + mixed) + 4 * fp32 + experts
    q, k = spec.qkv.out_widths[:2]  # values are as wide as keys, with a linear of their own or without
    return size * (inputs + gate_up + 2 * q + 2 * k) + 4 * (2 * a.width + a.num_heads) + experts


def _saved_expert_bytes(a: Architecture, form: ModelForm) -> int:
    """Return the bytes that a layer's router and experts save for their backward pass, for each row."""
    mixture, size, adapter = a.mixture, form.element_bytes, form.adapter
    assert mixture is not None
    inputs = size * (a.width + mixture.width) * (adapter.experts != "none")
    chosen = 2 * size * mixture.width + inputs + size * a.width + 4  # the weight
    return mixture.num_chosen * chosen + 4 * mixture.num_experts + 4 * a.width * adapter.router


def backward_bytes_per_row(a: Architecture, form: ModelForm) -> float:
    """Return the peak bytes of gradients in a layer's backward pass, for each row.

    Counted: gate, up and h in the compute dtype, h twice in fp32, and swiglu's own gradient, which overwrites
    its input where that is not read again. Of experts: gradients of y, h, gate and up.
    """
    size, has_dense = form.element_bytes, any(kind.mlp == "dense" for kind in a.kinds)
    widest = ((3 - form.saves_up) * a.ff_width + a.width) * has_dense
    if a.mixture is not None:
        widest = max(widest, a.mixture.num_chosen * (3 * a.mixture.width + a.width) + a.width)
    return size * widest + 4 * 2 * a.width


def kept_bytes(a: Architecture, form: ModelForm, learn: LearnConfig, rows: int) -> float:
    """Return the bytes of what a pass keeps on the device for the backward passes of its layers.

    none: all layers' saved rows. layer: each layer's input. offload: four inputs. Besides, the ids and two
    orders, as int64, of routes of layers with experts.
    """
    routes = rows * 3 * 8 * num_routes(a)
    if learn.gradient_checkpointing == "none":
        return routes + rows * sum(count * saved_bytes(a, form, spec) for spec, count in counted_specs(a))
    num_inputs = a.num_layers if learn.gradient_checkpointing == "layer" else min(4, a.num_layers)
    return routes + rows * num_inputs * 4 * a.width


def host_bytes(a: Architecture, learn: LearnConfig, rows: int) -> float:
    """Return the bytes of the layers' inputs in host memory."""
    return rows * a.num_layers * 4 * a.width * (learn.gradient_checkpointing == "offload")


def layer_bytes(a: Architecture, form: ModelForm, learn: LearnConfig, rows: int) -> float:
    """Return the peak bytes of a layer's backward pass, with its second forward pass if there is one."""
    if learn.gradient_checkpointing == "none":
        return rows * backward_bytes_per_row(a, form)
    return max(_recomputed_bytes(a, form, spec, rows) for spec, _ in counted_specs(a))


def _recomputed_bytes(a: Architecture, form: ModelForm, spec: LayerSpec, rows: int) -> float:
    saved, backward = saved_bytes(a, form, spec), backward_bytes_per_row(a, form)
    if not form.is_chunked(a, rows) or spec.kind.mixer == "delta":
        return rows * (saved + backward)
    size, (q, k) = form.element_bytes, spec.qkv.out_widths[:2]
    inputs = sum(map(form.row_width, spec.groups[:2]))
    normed = a.width * (a.norms.after_attention is not None)
    mixed = size * (inputs + 2 * q + 2 * k + normed) + 4 * (a.width + a.num_heads)
    of_mlp = rows * (mixed + 3 * 4 * a.width) + CHUNK_ROWS * (saved - mixed + backward)
    splits = -(-_SMS // a.num_heads)
    attention = splits * 4 * q + size * (3 * q + 2 * k)
    return max(of_mlp, rows * (mixed + 2 * 4 * a.width + size * (a.width + q) + attention))


def pass_bytes(a: Architecture, form: ModelForm, rows: int) -> float:
    """Return the bytes of a forward pass without gradient: one layer's activations, gate and up (in fp32 for
    some rows, except in FP8's kernels), and the layer's largest operand."""
    specs, size = [spec for spec, _ in counted_specs(a)], form.element_bytes
    gate_up = 2 * size * rows if form.saves_up else 8 * min(rows, wide_rows(2 * a.ff_width))
    row = size * (4 * a.width + 2 * max(x.qkv.out_width for x in specs))
    row += 0 if a.delta is None else a.delta.working_bytes
    mlp = max(
        rows * expert_pass_bytes(a, size) if x.experts else (rows * size + gate_up) * a.ff_width
        for x in specs
    )
    return rows * row + mlp + largest_operand_bytes(a, form)


def expert_pass_bytes(a: Architecture, element_bytes: int) -> int:
    """Return the bytes of the experts' activations in a forward pass without gradient, for each row."""
    mixture = a.mixture
    return 0 if mixture is None else element_bytes * mixture.num_chosen * (2 * a.width + 3 * mixture.width)


def head_bytes(
    a: Architecture, form: ModelForm, learn: LearnConfig, rows: int, *, has_divergence: bool = False
) -> float:
    """Return the bytes of the head's passes: a chunk of logits and their gradient, of one slice of the
    vocabulary (all of it for a divergence), [T, D] twice in fp32 and once in the compute dtype, and a slice
    of a packed head's operand."""
    chunk, is_packed = min(learn.logprob_chunk_tokens, rows), form.head_format != "bf16"
    size = form.element_bytes
    columns = a.vocab_size if has_divergence else slice_columns(a.vocab_size, a.width, is_packed=is_packed)
    operand = size * columns * packed_width(a.width) if is_packed else 0
    # A divergence has logits and probabilities at once.
    logits = chunk * columns * (4 + 4 * has_divergence + size)
    return logits + rows * a.width * (2 * 4 + size) + operand
