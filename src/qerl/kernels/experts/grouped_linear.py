"""y = x @ W_e^T of rows that are sorted by expert, plus the products of the experts' LoRA adapters.

    y_SN[s] = alpha_e * x_SK[s] @ W_e^T + scaling * (x_SK[s] @ a_e^T) @ b_e^T + bias_e

for offsets[e] <= s < offsets[e + 1]. S rows (each token once for each of its experts), E experts, K input
features, N outputs, R rank. A layer's experts are never unpacked whole: an expert that has rows is unpacked
for its product, in the forward pass and again in the backward pass, and the one before it is freed; on a GPU
in bfloat16 some of them at a time (expert_product.py). Experts without rows are not read. No sum runs over
rows of two experts, so the order of every sum is fixed.

PyTorch gives a row other bits in a product of another number of rows, and how many rows an expert has depends
on all rows of the batch. With `rows_at_once` an expert's rows are multiplied that many at a time, the last
ones padded with zeros: every product of an expert then has one shape, and the bits of a row depend on that
row alone (engine.exact).
"""

import itertools
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from qerl.formats.stack import WeightStack
from qerl.kernels.experts.expert_product import can_multiply, multiply
from qerl.kernels.linear.lora_linear import Adapter, lora_linear

CASES = (((0, 3, 0, 5), 64, 96, 4), ((1, 0, 0, 0), 64, 32, 1), ((9, 4, 17, 2), 128, 64, 8))  # rows, K, N, R


class GroupedAdapter(NamedTuple):
    """Adapters of E experts; a or b with a leading dimension of 1 is shared by all. Masters are fp32 and get
    the gradients, working copies are in x's dtype."""

    a_ERK: Tensor
    b_ENR: Tensor
    a_work_ERK: Tensor
    b_work_ENR: Tensor
    scaling: float

    def unbind(self, num_experts: int) -> list[Adapter]:
        """Return the adapter of each expert; the gradients of a shared one are summed expert by expert."""
        a, b, a_work, b_work = (
            list(t.unbind(0)) * (num_experts if len(t) == 1 else 1)
            for t in (self.a_ERK, self.b_ENR, self.a_work_ERK, self.b_work_ENR)
        )
        return [Adapter(*each, self.scaling) for each in zip(a, b, a_work, b_work, strict=True)]


def reference(
    x_SK: Tensor,
    offsets: Sequence[int],
    weights_ENK: Tensor,
    bias_EN: Tensor | None,
    a_ERK: Tensor | None,
    b_ENR: Tensor | None,
    scaling: float,
) -> Tensor:
    """Compute the definition in float64, row by row; differentiable."""
    experts = [e for e in range(len(weights_ENK)) for _ in range(offsets[e], offsets[e + 1])]
    rows = []
    for x_K, e in zip(x_SK.double(), experts, strict=True):
        y_N = weights_ENK[e].double() @ x_K
        if a_ERK is not None and b_ENR is not None:
            a_RK, b_NR = a_ERK[e if len(a_ERK) > 1 else 0], b_ENR[e if len(b_ENR) > 1 else 0]
            y_N = y_N + scaling * b_NR.double() @ (a_RK.double() @ x_K)
        rows.append(y_N if bias_EN is None else y_N + bias_EN[e].double())
    return torch.stack(rows)


def grouped_linear(
    x_SK: Tensor,
    offsets: Tensor,
    experts: WeightStack,
    *,
    bias_EN: Tensor | None = None,
    adapter: GroupedAdapter | None = None,
    ends: Sequence[int] | None = None,
    rows_at_once: int | None = None,
) -> Tensor:
    """Return y_SN; differentiable in x and the adapter's masters. offsets: int64 [E + 1], from 0 to S; ends:
    the same as numbers, if they are known. rows_at_once: rows of every product, a multiple of 16 on a CPU;
    None: all rows of an expert in one."""
    num_experts, num_outputs, in_width = experts.shape
    ends = offsets.tolist() if ends is None else ends
    assert len(ends) == num_experts + 1 and ends[0] == 0 and ends[-1] == len(x_SK)
    assert x_SK.dim() == 2 and x_SK.shape[1] == in_width
    if rows_at_once is None and len(x_SK) and can_multiply(x_SK, experts):
        return multiply(x_SK, ends, experts, bias_EN, adapter)
    adapters = [None] * num_experts if adapter is None else adapter.unbind(num_experts)
    alphas, parts = experts.alphas, []
    for e, x_sK in enumerate(x_SK.split([end - start for start, end in itertools.pairwise(ends)])):
        if len(x_sK):
            operand = partial(_operand, experts, e, x_SK.dtype)
            bias_N = None if bias_EN is None else bias_EN[e]
            rest = alphas[e], adapters[e], bias_N
            if rows_at_once is None:
                parts.append(lora_linear(x_sK, operand, *rest))
            else:
                parts.append(_in_pieces(x_sK, operand(), rows_at_once, *rest))
    return torch.cat(parts) if parts else x_SK.new_empty(0, num_outputs)


def _in_pieces(
    x_sK: Tensor,
    operand_NK: Tensor,
    rows: int,
    alpha: float | Tensor,
    adapter: Adapter | None,
    bias_N: Tensor | None,
) -> Tensor:
    """Return the products of one expert's rows, `rows` at a time; the last ones are padded with zeros."""
    padded = torch.cat((x_sK, x_sK.new_zeros(-len(x_sK) % rows, x_sK.shape[1])))
    pieces = [lora_linear(each, lambda: operand_NK, alpha, adapter, bias_N) for each in padded.split(rows)]
    return torch.cat(pieces)[: len(x_sK)]


def _operand(experts: WeightStack, index: int, dtype: torch.dtype) -> Tensor:
    return experts[index].operand(dtype)
