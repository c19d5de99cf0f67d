"""The bytes of unpacked operands: one layer's, those of all layers that an update keeps, and 8-bit codes.

Rows of an operand end with the adapter's columns. BF16 weights computed in bf16 are their own operands; they
hold b behind their rows, with zeros between the linears of a group (models/packed/fused_weights.py). Experts
are unpacked into the learner's buffer (kernels/experts/expert_product.py), or one at a time.
"""

from qerl.config import LearnConfig
from qerl.cost.form import ModelForm
from qerl.cost.weights import counted_groups, counted_stacks
from qerl.kernels.experts.expert_product import buffer_experts
from qerl.kernels.linear.int8_codes import code_bytes, row_code_bytes
from qerl.kernels.pointwise.matmul_fp32 import CHUNK_ROWS
from qerl.models.architecture import Architecture
from qerl.models.layer_spec import LinearGroupSpec, counted_specs


def _operand_bytes(group: LinearGroupSpec, form: ModelForm) -> int:
    if not form.unpacks:
        return 0
    if not group.is_quantized:  # BF16; routers compute in fp32
        size = 4 if group.name == "router" else form.element_bytes
        return 0 if size == 2 else size * group.num_weights
    return form.element_bytes * group.out_width * form.row_width(group)


def largest_operand_bytes(a: Architecture, form: ModelForm) -> int:
    """Return the bytes of the largest operand, or of the experts that are unpacked at a time."""
    largest = max(_operand_bytes(group, form) for group, _ in counted_groups(a))
    return max(unpacked_expert_bytes(a, form), largest)


def unpacked_expert_bytes(a: Architecture, form: ModelForm) -> int:
    """Return the bytes of experts that are unpacked at a time."""
    size, largest = form.element_bytes, 0
    for x, _ in counted_stacks(a) if form.unpacks else ():
        count = buffer_experts(x.num_experts, x.out_width, x.in_width) if size == 2 else 1
        largest = max(largest, count * size * x.out_width * x.in_width)
    return largest


def unpacked_bytes(a: Architecture, form: ModelForm, learn: LearnConfig) -> int:
    """Return the bytes of operands unpacked at a time: one, or a layer's if the layer is recomputed; besides
    a layer's, some of its experts."""
    if learn.gradient_checkpointing == "none":
        return largest_operand_bytes(a, form)
    layers = (sum(_operand_bytes(group, form) for group in spec.groups) for spec, _ in counted_specs(a))
    return unpacked_expert_bytes(a, form) + max(layers)


def operand_cache_bytes(a: Architecture, form: ModelForm, learn: LearnConfig) -> int:
    """Return the bytes of all layers' operands; FP8 multiplies its codes directly
    (kernels/linear/fp8_linear.py)."""
    if form.format == "fp8-flow":
        return 0
    groups = counted_groups(a)
    num_bytes = sum(n * _operand_bytes(x, form) for x, n in groups)
    if learn.backward == "int8":
        num_bytes += sum(n * code_bytes(x.out_width, x.in_width) for x, n in groups)
        if learn.gradient_checkpointing != "none":  # gate and up are multiplied once more
            again = [(x, n) for x, n in groups if x.name == "gate_up"]
            num_bytes += sum(n * code_bytes(x.out_width, x.in_width, along_k=True) for x, n in again)
    return num_bytes


def int8_bytes(a: Architecture, form: ModelForm, learn: LearnConfig, rows: int) -> int:
    """Return the bytes of the largest weight and gradient of outputs in 8-bit integers."""
    if learn.backward == "bf16":
        return 0
    in_chunks = learn.gradient_checkpointing != "none" and form.is_chunked(a, rows)

    def of(x: LinearGroupSpec) -> int:
        group_rows = CHUNK_ROWS if in_chunks and x.name in ("gate_up", "down") else rows
        return code_bytes(x.out_width, x.in_width) + row_code_bytes(group_rows, x.out_width)

    return max(of(group) for group, _ in counted_groups(a))


def adapter_column_bytes(a: Architecture, form: ModelForm) -> int:
    """Return the bytes behind the rows of BF16 weights, which hold the adapters' b and zeros."""
    if form.unpacks:
        return 0
    return 2 * sum(n * x.out_width * (form.row_width(x) - x.in_width) for x, n in counted_groups(a))
