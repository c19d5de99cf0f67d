"""grouped_linear on a GPU: experts are unpacked into a buffer, some at a time, for one grouped product.

    u = x @ a_e^T        y = alpha_e * (x @ W_e^T) + scaling * u @ b_e^T + bias_e
    dx = alpha_e * (dy @ W_e) + scaling * (dy @ b_e) @ a_e

The buffer has at most BUFFER_BYTES (or one expert), is used again for the next group of experts, and freed
after the product: a layer of gpt-oss-120b has 4.2 GB of gate and up in bfloat16. Only experts with rows are
unpacked. Grouped products are torch's (grouped_mm): each expert's rows are multiplied by themselves, so no
sum runs over rows of two experts. Ranks are padded with zeros to a multiple of 8, as its alignment needs.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from qerl.formats.stack import ChosenStack, WeightStack
from qerl.kernels.experts.expert_rows import scale_and_add
from qerl.kernels.experts.stack_unpack import needs_buffer, unpack_stack
from qerl.kernels.runtime import row_kernel

BUFFER_BYTES = 260 << 20  # gate and up of 43 experts of Qwen3-30B-A3B: 3 parts
_ALIGNED = 8
_GROUPED_MM: Any = getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)


def can_multiply(x_SK: Tensor, experts: WeightStack) -> bool:
    """True if these are multiplied here: bfloat16 on a GPU from Ampere on; alphas are one for each expert, or
    powers of two."""
    return (
        x_SK.is_cuda
        and x_SK.dtype == torch.bfloat16
        and _GROUPED_MM is not None
        and torch.cuda.get_device_capability(x_SK.device) >= (8, 0)
        and all(size % _ALIGNED == 0 for size in experts.shape[1:])
        and (isinstance(experts.alphas, list) or isinstance(experts, ChosenStack))
    )


def buffer_experts(num_experts: int, num_outputs: int, in_width: int, element_bytes: int = 2) -> int:
    """Return how many experts are unpacked at once."""
    return max(1, min(num_experts, BUFFER_BYTES // (num_outputs * in_width * element_bytes)))


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """Experts that are unpacked together, and their rows."""

    chosen: list[int]
    chosen_G: Tensor
    ends_G: Tensor
    """The end of each expert's rows, counted from the part's first row, int32."""
    rows: slice


class RowEnds(tuple[int, ...]):
    """0 and the end of each expert's rows, and what products of these rows have made of them."""

    @functools.cached_property
    def _grouped(self) -> "dict[tuple[int, torch.device], GroupedRows]":
        return {}

    def grouped(self, max_experts: int, device: torch.device) -> "GroupedRows":
        if (max_experts, device) not in self._grouped:
            self._grouped[max_experts, device] = GroupedRows.of(self, max_experts, device)
        return self._grouped[max_experts, device]


@dataclasses.dataclass(frozen=True, slots=True)
class GroupedRows:
    """The experts that have rows, cut evenly into parts of at most `max_experts` experts."""

    parts: list[_Part]
    whole: _Part

    @classmethod
    def of(cls, ends: Sequence[int], max_experts: int, device: torch.device) -> "GroupedRows":
        """ends: E + 1 numbers, from 0 to S."""
        chosen = [e for e in range(len(ends) - 1) if ends[e + 1] > ends[e]]
        size = -(-len(chosen) // max(-(-len(chosen) // max_experts), 1))
        cuts = [chosen[at : at + size] for at in range(0, len(chosen), size)] if chosen else []
        relative = [ends[e + 1] - ends[cut[0]] for cut in cuts for e in cut]
        absolute = [ends[e + 1] for e in chosen]
        table = torch.tensor([chosen, relative, absolute], dtype=torch.int32).to(device, non_blocking=True)
        parts, at = [], 0
        for cut in cuts:
            columns = slice(at, at + len(cut))
            rows = slice(ends[cut[0]], ends[cut[-1] + 1])
            parts.append(_Part(cut, table[0, columns], table[1, columns], rows))
            at += len(cut)
        return cls(parts, _Part(chosen, table[0], table[2], slice(0, ends[-1])))


def multiply(
    x_SK: Tensor,
    ends: Sequence[int],
    experts: WeightStack,
    bias_EN: Tensor | None,
    adapter: tuple[Tensor, Tensor, Tensor, Tensor, float] | None,
) -> Tensor:
    """Return y_SN; arguments as those of grouped_linear, adapter: the fields of a GroupedAdapter."""
    max_experts = buffer_experts(*experts.shape, x_SK.element_size())
    rows = (ends if isinstance(ends, RowEnds) else RowEnds(ends)).grouped(max_experts, x_SK.device)
    a_ERK, b_ENR, a_work, b_work, scaling = adapter or (None,) * 5
    low_rank = _LowRank(a_work, b_work, 0.0 if scaling is None else scaling)
    return _Grouped.apply(x_SK, rows, experts, bias_EN, low_rank, a_ERK, b_ENR)


@dataclasses.dataclass(frozen=True, slots=True)
class _LowRank:
    """The adapters' working copies, or none."""

    a_ERK: Tensor | None
    b_ENR: Tensor | None
    scaling: float

    def a_of(self, part: _Part) -> Tensor:
        """Return a_GRK of the part's experts, with rows of zeros."""
        assert self.a_ERK is not None
        return _padded(_picked(self.a_ERK, part), 1)

    def b_of(self, part: _Part) -> Tensor:
        """Return b_GNR, with columns of zeros."""
        assert self.b_ENR is not None
        return _padded(_picked(self.b_ENR, part), 2)

    def inputs(self, x_SK: Tensor, whole: _Part) -> tuple[Tensor | None, Tensor | None]:
        """Return (u_SR, scaling * u_SR padded), or None without adapters."""
        if self.a_ERK is None:
            return None, None
        u_SR = _grouped(x_SK, self.a_of(whole).transpose(1, 2), whole.ends_G)
        u_SR = u_SR[:, : self.a_ERK.shape[1]]
        return u_SR, _padded(u_SR * self.scaling, 1)

    def plus_of(self, inputs_SR: Tensor | None, part: _Part) -> Tensor | None:
        if inputs_SR is None:
            return None
        return _grouped(inputs_SR[part.rows], self.b_of(part).transpose(1, 2), part.ends_G)

    def gradients(self, x_SK: Tensor, u_SR: Tensor, dy_SN: Tensor, whole: _Part) -> tuple[Tensor, ...]:
        """Return (scaling * du_SR padded, da_ERK, db_ENR), the last two in fp32."""
        assert self.a_ERK is not None and self.b_ENR is not None
        du_SR = _grouped(dy_SN, self.b_of(whole), whole.ends_G)
        da = _outer(du_SR, x_SK, whole, self.a_ERK)[:, : self.a_ERK.shape[1]]
        db = _outer(dy_SN, _padded(u_SR, 1), whole, self.b_ENR)[:, :, : self.b_ENR.shape[2]]
        return du_SR * self.scaling, da.mul_(self.scaling), db.mul_(self.scaling)


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_SK, rows, experts, bias_EN, low_rank, a_ERK, b_ENR):
        u_SR, inputs_SR = low_rank.inputs(x_SK, rows.whole)
        ctx.save_for_backward(None if u_SR is None else x_SK, u_SR)
        ctx.rows, ctx.experts, ctx.low_rank = rows, experts, low_rank
        plus = functools.partial(low_rank.plus_of, inputs_SR)
        return _product(x_SK, experts, rows, bias_EN, plus, transposes=True)

    @staticmethod
    def backward(ctx, dy_SN):  # type: ignore[override]
        (x_SK, u_SR), rows, low_rank = ctx.saved_tensors, ctx.rows, ctx.low_rank
        dy_SN = dy_SN.contiguous()
        da_ERK = db_ENR = dx_SK = du_SR = None
        if u_SR is not None:
            du_SR, da_ERK, db_ENR = low_rank.gradients(x_SK, u_SR, dy_SN, rows.whole)

        def plus(part: _Part) -> Tensor | None:
            return None if du_SR is None else _grouped(du_SR[part.rows], low_rank.a_of(part), part.ends_G)

        if ctx.needs_input_grad[0]:
            dx_SK = _product(dy_SN, ctx.experts, rows, None, plus, transposes=False)
        return dx_SK, None, None, None, None, da_ERK, db_ENR


def _product(
    x_SK: Tensor,
    experts: WeightStack,
    rows: GroupedRows,
    bias_EN: Tensor | None,
    plus: Callable[[_Part], Tensor | None],
    *,
    transposes: bool,
) -> Tensor:
    """Return alpha_e * x @ W_e^T (or W_e) + bias_e + plus(part), part by part."""
    _, n, k = experts.shape
    y_SN = None if len(rows.parts) == 1 else x_SK.new_empty(len(x_SK), n if transposes else k)
    alpha_E = _alphas(experts)
    for part, operand_GNK in _operands(experts, rows, x_SK.dtype):
        if transposes:
            operand_GNK = operand_GNK.transpose(1, 2)
        product = _grouped(x_SK[part.rows], operand_GNK, part.ends_G)
        out = product if y_SN is None else y_SN[part.rows]
        added = {"alpha_E": alpha_E, "bias_EN": bias_EN, "plus_SN": plus(part)}
        scale_and_add(product, part.chosen_G, part.ends_G, **added, out=out)
        if y_SN is None:
            return product
    assert y_SN is not None
    return y_SN


def _operands(experts: WeightStack, rows: GroupedRows, dtype: torch.dtype) -> Iterator[tuple[_Part, Tensor]]:
    _, n, k = experts.shape
    largest = max((len(part.chosen) for part in rows.parts), default=0) if needs_buffer(experts, dtype) else 0
    buffer = torch.empty(largest, n, k, dtype=dtype, device=rows.whole.ends_G.device)
    for part in rows.parts:
        has_row_alphas = experts.alpha_E.dim() == 2  # powers of two, which change no bit of the mantissas
        is_multiplied = has_row_alphas and row_kernel.are_vectors(buffer)
        operand_GNK = unpack_stack(experts, part.chosen, part.chosen_G, buffer, is_multiplied)
        if has_row_alphas and not is_multiplied:
            operand_GNK.mul_(experts.alpha_E.index_select(0, part.chosen_G)[:, :, None].to(dtype))
        yield part, operand_GNK


def _alphas(experts: WeightStack) -> Tensor | None:
    """Return alpha_E, or None if the operands have them or all are 1."""
    alphas = experts.alphas
    return None if isinstance(alphas, Tensor) or all(alpha == 1 for alpha in alphas) else experts.alpha_E


def _grouped(x_SK: Tensor, w_GKN: Tensor, ends_G: Tensor) -> Tensor:
    return _GROUPED_MM(x_SK, w_GKN, offs=ends_G)


def _outer(y_SN: Tensor, x_SK: Tensor, whole: _Part, like: Tensor) -> Tensor:
    """Return each expert's y^T @ x, fp32 [E, N, K]; their sum [1, N, K] if `like` is shared."""
    if len(like) == 1:
        return (y_SN.T @ x_SK).float()[None]
    products_GNK = _grouped(y_SN.T, x_SK, whole.ends_G).float()
    if len(whole.chosen) == len(like):
        return products_GNK
    zeros = products_GNK.new_zeros(len(like), *products_GNK.shape[1:])
    return zeros.index_copy_(0, whole.chosen_G.long(), products_GNK)


def _picked(t: Tensor, part: _Part) -> Tensor:
    """Return the tensors of the part's experts; a shared one for each of them."""
    if len(t) == 1:
        return t.expand(len(part.chosen), *t.shape[1:])
    return t if len(part.chosen) == len(t) else t.index_select(0, part.chosen_G)


def _padded(t: Tensor, dim: int) -> Tensor:
    """Return t, contiguous, with zeros behind it along dim up to a multiple of 8."""
    missing = -t.shape[dim] % _ALIGNED
    return torch.nn.functional.pad(t, [0, 0] * (t.dim() - 1 - dim) + [0, missing]).contiguous()
