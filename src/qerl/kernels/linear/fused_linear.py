"""Linears of one input as one product, each with its own LoRA adapter, alpha and bias.

    y_i = alpha_i * (x @ W_i^T) + scaling_i * (x @ a_i^T) @ b_i^T + bias_i

    [x | u]              [T, K + R]    u_i = scaling_i / alpha_i * (x @ a_i^T), rounded once
    [W_1 | b_1       ]   [N, K + R]    R: the ranks of all adapters; the rest is zero
    [W_2 |     b_2   ]                 y = alpha * [x | u] @ [W | b]^T

The frozen product adds the adapters in its accumulator, which makes cuBLAS 1.7 % slower (the four products of
a 7B layer at 4,096 tokens, R = 32: 2.90 ms for 2.85; H200). Separate products for the adapters would write
all of y and read it again: 0.8 GB and 0.19 ms a layer. u is stored in the columns that `row_kernel.rows`
leaves behind each row of x; without them x is copied. With an alpha for each row, b is divided by it, and
the columns of the one product are multiplied by their alphas (scale_columns.py, or the kernel of SwiGLU).

`linear_onto` adds to the fp32 residual stream in the same product, with no rounding to x's dtype in between.
`fused_swiglu` rounds silu(gate) * up only, not gate and up, which brings the engine and the learner of a 7B
model closer (dev/log/precision.md). It holds gate and up in fp32 for `wide_rows` rows at a time; its backward
pass reads gate and the result, which the next product keeps anyway. Where only the gradient needs it (a
recomputed layer) and products for gradients are of integers, gate and up are too, and none is stored in fp32.

dx = alpha * dy @ W + scaling (dy @ b) @ a;  da = scaling * (dy @ b)^T @ x;  db = alpha * dy^T @ u
"""

import dataclasses
import itertools
import struct
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from qerl.kernels.linear import int8_product
from qerl.kernels.linear.int8_codes import RotatedWeight
from qerl.kernels.linear.lora_linear import Adapter
from qerl.kernels.linear.scale_columns import add_scaled, scale_columns
from qerl.kernels.pointwise import swiglu
from qerl.kernels.pointwise.gradient_dtype import in_dtype, request_dtype
from qerl.kernels.pointwise.matmul_fp32 import add_product, product, summed
from qerl.kernels.runtime import row_kernel

CASES = ((5, 64, (96,), 8), (37, 128, (64, 32, 32), 16), (130, 576, (1536, 1536), 32))  # T, K, widths, R


WIDE_ROWS = 2048  # the tiles of the product divide evenly among the SMs
_WIDE_NUMBERS = WIDE_ROWS * 2 * 18_944  # 310 MB of gate and up in fp32, 2,048 rows at the 7B shape


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class LinearPart:
    """One linear of a fused product."""

    width: int
    alpha: float | Tensor
    """One number, or fp32 [N], one for each row."""
    bias_N: Tensor | None
    adapter: Adapter | None


Operand = Callable[[torch.dtype, bool], Tensor]  # (dtype, True): [W | b], [N, K + R]; (dtype, False): W alone


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class RotatedOperand:
    """An operand whose products for the gradient are of 8-bit integers (int8_product.py)."""

    operand: Operand
    rotated: Callable[[], RotatedWeight]
    """For products with dy."""
    again: Callable[[], RotatedWeight] | None = None
    """For the products of `fused_swiglu`, if only gradients are needed; None: they are in x's dtype."""

    def __call__(self, dtype: torch.dtype, has_b: bool) -> Tensor:
        return self.operand(dtype, has_b)


def reference(x_TK: Tensor, operand_NK: Tensor, parts: Sequence[LinearPart]) -> Tensor:
    """Compute the definition in float64, [T, N] of all parts; differentiable in x and the masters."""
    outputs, x_TK = [], x_TK.double()
    for part, w_NK in zip(parts, operand_NK.double().split([p.width for p in parts]), strict=True):
        y_TN = part.alpha * (x_TK @ w_NK.T)
        if part.adapter is not None:
            a = part.adapter
            y_TN = y_TN + a.scaling * (x_TK @ a.a_RK.double().T) @ a.b_NR.double().T
        outputs.append(y_TN if part.bias_N is None else y_TN + part.bias_N.double())
    return torch.cat(outputs, 1)


def fused_linear(
    x_TK: Tensor, operand: Operand, parts: Sequence[LinearPart], *, gaps_are_free: bool = False
) -> tuple[Tensor, ...]:
    """Return y_TN of each part, as columns of one tensor; differentiable in x and the masters.

    gaps_are_free: the memory between the rows of x is unused, so u may be stored there.
    """
    assert x_TK.dim() == 2
    return _FusedLinear.apply(x_TK, None, operand, tuple(parts), gaps_are_free, True, *_masters(parts))


def linear_onto(
    h_TN: Tensor,
    x_TK: Tensor,
    operand: Operand,
    part: LinearPart,
    *,
    gaps_are_free: bool = False,
    needs_output: bool = True,
) -> Tensor:
    """Add y to h in place, both in fp32; differentiable in h too. needs_output: False if only gradients are
    needed; y is then skipped."""
    assert x_TK.dim() == 2 and h_TN.shape == (len(x_TK), part.width) and h_TN.dtype == torch.float32
    settings = operand, (part,), gaps_are_free, needs_output
    y_TN = _FusedLinear.apply(x_TK, h_TN, *settings, *_masters([part]))[0]
    return request_dtype(y_TN, x_TK.dtype)


def wide_rows(width: int) -> int:
    """Return the rows that `fused_swiglu` computes at once: more where gate and up, together of this width,
    are narrow, since a launch takes the host longer than these rows take the device."""
    return max(_WIDE_NUMBERS // width // WIDE_ROWS, 1) * WIDE_ROWS


def fused_swiglu(
    x_TK: Tensor, operand: Operand, parts: Sequence[LinearPart], *, room: int = 0, gaps_are_free: bool = False
) -> Tensor:
    """Return silu(y_1) * y_2 [T, F], rounded once, with `room` free columns behind each row."""
    assert x_TK.dim() == 2 and len(parts) == 2 and parts[0].width == parts[1].width
    is_learning = torch.is_grad_enabled()
    return _FusedSwiGLU.apply(x_TK, operand, tuple(parts), room, gaps_are_free, is_learning, *_masters(parts))


def _masters(parts: Sequence[LinearPart]) -> list[Tensor]:
    return [m for part in parts if part.adapter for m in (part.adapter.a_RK, part.adapter.b_NR)]


class _FusedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TK, sum_TN, operand, parts, gaps_are_free, needs_output, *masters):
        ctx.operand, ctx.parts = operand, parts
        x_TC = _with_u(x_TK, parts, gaps_are_free)
        ctx.save_for_backward(x_TC)
        if sum_TN is not None and not needs_output:
            ctx.mark_dirty(sum_TN)
            return (sum_TN,)
        w_NC = operand(x_TK.dtype, True)
        if sum_TN is not None:
            ctx.mark_dirty(sum_TN)
            return (_add_product(sum_TN, x_TC, w_NC, parts[0]),)
        y_TN = torch.empty(len(x_TC), len(w_NC), dtype=x_TC.dtype, device=x_TC.device)
        _put(y_TN, x_TC, w_NC, parts)
        return y_TN.split([part.width for part in parts], 1)

    @staticmethod
    def backward(ctx, *dy):
        (x_TC,) = ctx.saved_tensors
        dy_TN = in_dtype(side_by_side(dy), x_TC.dtype)
        dx_TK, gradients = _gradients(dy_TN, x_TC, ctx.operand, ctx.parts, ctx.needs_input_grad[0])
        dsum_TN = dy[0] if ctx.needs_input_grad[1] else None
        return dx_TK, dsum_TN, None, None, None, None, *gradients


class _FusedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TK, operand, parts, room, gaps_are_free, is_learning, *masters):
        x_TC = _with_u(x_TK, parts, gaps_are_free)
        T, F = len(x_TC), parts[0].width
        y_TF = row_kernel.rows(T, F, room, x_TC)
        gate_TF = torch.empty(T, F, dtype=x_TC.dtype, device=x_TC.device) if is_learning else None
        if isinstance(operand, RotatedOperand) and operand.again is not None and gate_TF is not None:
            _put_gate_up_again(y_TF, gate_TF, x_TC, operand.again(), parts)
        else:
            _put_gate_up(y_TF, gate_TF, x_TC, operand(x_TK.dtype, True), parts)
        if is_learning:
            # y.data: the next product writes u behind the rows of y, which autograd would count as a change
            ctx.save_for_backward(x_TC, gate_TF, y_TF.data)
            ctx.operand, ctx.parts = operand, parts
        return y_TF

    @staticmethod
    def backward(ctx, dy_TF):  # type: ignore[override]
        x_TC, gate_TF, y_TF = ctx.saved_tensors
        dy_TN = swiglu.wide_gradient(dy_TF, gate_TF, y_TF)
        dx_TK, gradients = _gradients(dy_TN, x_TC, ctx.operand, ctx.parts, ctx.needs_input_grad[0])
        return dx_TK, None, None, None, None, None, *gradients


def _put_gate_up(
    y_TF: Tensor, gate_TF: Tensor | None, x_TC: Tensor, w_NC: Tensor, parts: Sequence[LinearPart]
) -> None:
    T, N = len(x_TC), len(w_NC)
    step = wide_rows(N)
    wide_TN = torch.empty(min(T, step), N, dtype=torch.float32, device=x_TC.device)
    factors_N, bare = None, parts
    if len(_runs(parts)) == 1 and isinstance(parts[0].alpha, Tensor) and parts[0].bias_N is None:
        factors_N = _factors(parts)
        bare = [dataclasses.replace(part, alpha=1.0) for part in parts]
    for start in range(0, T, step):
        some = slice(start, min(start + step, T))
        gate_up_TN = wide_TN[: some.stop - start]
        _put(gate_up_TN, x_TC[some], w_NC, bare)
        saved_TF = None if gate_TF is None else gate_TF[some]
        swiglu.put_swiglu(gate_up_TN, y_TF[some], saved_TF, factors_N)


def _put_gate_up_again(
    y_TF: Tensor, gate_TF: Tensor, x_TC: Tensor, weight: RotatedWeight, parts: Sequence[LinearPart]
) -> None:
    """The same by a product of integers."""
    rank, u_TR, b_NR = sum(map(_rank, parts)), None, None
    x_TK = x_TC[:, : x_TC.shape[1] - rank]
    if rank:
        u_TR = x_TC[:, x_TK.shape[1] :]
        b_NR = x_TC.new_empty(sum(part.width for part in parts), rank)
        _place_adapters(b_NR, parts)
    int8_product.put_gate_up(x_TK, u_TR, b_NR, weight, y_TF, gate_TF)


def _gradients(
    dy_TN: Tensor, x_TC: Tensor, operand: Operand, parts: Sequence[LinearPart], wants_dx: bool
) -> tuple[Tensor | None, list[Tensor]]:
    """Return dx and the gradient of each master: of all a in one product, and of neighboring b likewise."""
    rank, row, column = sum(map(_rank, parts)), 0, 0
    x_TK, u_TR = x_TC.tensor_split([x_TC.shape[1] - rank], dim=1)
    du_TR, none = row_kernel.unread(dy_TN.new_empty(len(dy_TN), rank)), dy_TN.new_empty(1)
    for part in parts:
        if (adapter := part.adapter) is not None:
            dy_part, columns = dy_TN[:, row : row + part.width], slice(column, column + _rank(part))
            du = du_TR[:, columns]
            torch.addmm(none, dy_part, adapter.b_work_NR, beta=0, alpha=adapter.scaling, out=du)
            column = columns.stop
        row += part.width
    db = _b_gradients(dy_TN, u_TR, parts)
    da = summed(du_TR, x_TK).split([_rank(part) for part in parts if part.adapter]) if db else ()
    gradients = [of for both in zip(da, db, strict=True) for of in both]
    return _input_gradient(dy_TN, du_TR, operand, parts) if wants_dx else None, gradients


def _b_gradients(dy_TN: Tensor, u_TR: Tensor, parts: Sequence[LinearPart]) -> list[Tensor]:
    """Return the gradient of each b, fp32 [N, R]. Neighbors with the same alpha are blocks on the diagonal of
    one product, as a launch takes longer than the other blocks: k and v of 128 rows have one tile each."""

    def alpha(part: LinearPart) -> float | None:
        number = part.alpha if isinstance(part.alpha, float) else 1.0
        return None if part.adapter is None else number

    row, column, db = 0, 0, []
    for factor, run in itertools.groupby(parts, key=alpha):
        widths, ranks = zip(*((part.width, _rank(part)) for part in run), strict=True)
        rows, columns = slice(row, row + sum(widths)), slice(column, column + sum(ranks))
        if factor is not None:
            blocks = summed(dy_TN[:, rows], u_TR[:, columns], factor).split(widths)
            pairs = zip(blocks, itertools.accumulate(ranks), ranks, strict=True)
            db += [block[:, end - rank : end] for block, end, rank in pairs]
        row, column = rows.stop, columns.stop
    return db


def side_by_side(pieces: Sequence[Tensor]) -> Tensor:
    """Return [T, sum N] of pieces [T, N], without a copy if they are adjacent columns of one tensor."""
    first, width = pieces[0], sum(piece.shape[1] for piece in pieces)
    if len(pieces) == 1:
        return first
    end = first.data_ptr()
    for piece in pieces:
        same = piece.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or piece.data_ptr() != end or piece.stride() != (first.stride(0), 1):
            return torch.cat(list(pieces), 1)
        end += piece.shape[1] * piece.element_size()
    if first.stride(0) < width:
        return torch.cat(list(pieces), 1)
    return first.as_strided((len(first), width), first.stride())


def _rank(part: LinearPart) -> int:
    return 0 if part.adapter is None else len(part.adapter.a_RK)


def _with_u(x_TK: Tensor, parts: Sequence[LinearPart], gaps_are_free: bool) -> Tensor:
    """Return [x | u], [T, K + R]: in x's memory if it has free columns behind its rows, else in a copy."""
    (T, K), rank = x_TK.shape, sum(_rank(part) for part in parts)
    if rank == 0:
        return x_TK
    if not gaps_are_free or x_TK.stride(1) != 1 or x_TK.stride(0) < K + rank:
        x_TK = _copied(x_TK, row_kernel.rows(T, K, rank, x_TK))
    x_TC = x_TK.as_strided((T, K + rank), x_TK.stride())
    _shrink(x_TC, K, parts)
    return x_TC


def _copied(x_TK: Tensor, y_TK: Tensor) -> Tensor:
    """Copy x into y and return y."""
    (T, K), strides = x_TK.shape, (x_TK.stride(0), y_TK.stride(0))
    if T == 0 or not row_kernel.are_vectors(x_TK, y_TK):
        return y_TK.copy_(x_TK)
    kernel = row_kernel.kernel("fused_linear.cu", "copy_rows", x_TK.device, PARTS=1)
    kernel.launch(grid=T, block_threads=256, parameters=(x_TK, y_TK, T, K, *strides))
    return y_TK


def _shrink(x_TC: Tensor, columns: int, parts: Sequence[LinearPart]) -> None:
    """Fill in u, in one product for adjacent adapters with the same factor."""
    x_TK, none = x_TC[:, :columns], x_TC.new_empty(1)
    adapters = [(part.adapter.a_work_RK, _factor(part)) for part in parts if part.adapter is not None]
    for factor, alike in itertools.groupby(adapters, key=lambda adapter: adapter[1]):
        a_RK = _stacked([a_RK for a_RK, _ in alike])
        u_TR = x_TC[:, columns : columns + len(a_RK)]
        torch.addmm(none, x_TK, a_RK.T, beta=0, alpha=factor, out=u_TR)
        columns += len(a_RK)


def _factor(part: LinearPart) -> float:
    """Return what u is multiplied by; an alpha for each row divides b instead."""
    assert part.adapter is not None
    return part.adapter.scaling / (part.alpha if isinstance(part.alpha, float) else 1.0)


def _b_of(part: LinearPart) -> Tensor | None:
    if part.adapter is None or isinstance(part.alpha, float):
        return None if part.adapter is None else part.adapter.b_work_NR
    assert isinstance(part.alpha, Tensor)
    return (part.adapter.b_work_NR / part.alpha[:, None]).to(part.adapter.b_work_NR.dtype)


def _stacked(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def widened(w_NK: Tensor, parts: Sequence[LinearPart]) -> Tensor:
    """Return [W | b], [N, K + R]; b is written behind the rows of W, where there must be room."""
    (rows, columns), rank = w_NK.shape, sum(_rank(part) for part in parts)
    assert w_NK.stride(0) >= columns + rank
    w_NC = w_NK.as_strided((rows, columns + rank), w_NK.stride())
    if rank:
        _place_adapters(w_NC[:, columns:], parts)
    return w_NC


def _place_adapters(b_NR: Tensor, parts: Sequence[LinearPart]) -> None:
    """Put each part's b into its own rows and columns, zeros into the others."""
    tensors = [_b_of(part) for part in parts]
    if row_kernel.are_vectors(b_NR) and all(_rank(part) % 8 == 0 for part in parts):
        rows, columns = b_NR.shape
        assert all(b is None or (b.is_contiguous() and b.dtype == b_NR.dtype) for b in tensors)
        row_ends = itertools.accumulate(part.width for part in parts)
        column_ends = itertools.accumulate(_rank(part) for part in parts)
        addresses = (0 if b is None else b.data_ptr() for b in tensors)
        packed = struct.pack(f"{len(parts)}Q{2 * len(parts)}i", *addresses, *row_ends, *column_ends)
        kernel = row_kernel.kernel("fused_linear.cu", "place_adapters", b_NR.device, PARTS=len(parts))
        kernel.launch(
            grid=-(-rows * (columns // 8) // 256),
            block_threads=256,
            parameters=(b_NR, b_NR.stride(0), rows, columns, packed),
        )
        return
    b_NR.zero_()
    row = column = 0
    for part, b in zip(parts, tensors, strict=True):
        if b is not None:
            b_NR[row : row + part.width, column : column + _rank(part)] = b
        row, column = row + part.width, column + _rank(part)


def _put(y_TN: Tensor, x_TC: Tensor, w_NC: Tensor, parts: Sequence[LinearPart]) -> None:
    """Fill y, in x's dtype or fp32: one product where the parts are alike in alpha and bias, as those that
    were quantized together are."""
    row = 0
    for run in _runs(parts):
        rows = slice(row, row + sum(part.width for part in run))
        y, w, alpha, row = y_TN[:, rows], w_NC[rows].T, run[0].alpha, rows.stop
        number = alpha if isinstance(alpha, float) else 1.0
        biases = [part.bias_N for part in run if part.bias_N is not None]
        bias_N = _stacked(biases) if biases else None
        adds_bias = bias_N is not None and isinstance(alpha, float) and y.dtype == x_TC.dtype
        if y.dtype == x_TC.dtype:
            plus_N = bias_N if adds_bias else x_TC.new_empty(1)
            torch.addmm(plus_N, x_TC, w, beta=int(adds_bias), alpha=number, out=y)
        else:
            add_product(y, x_TC, w, number, beta=0)
        if isinstance(alpha, Tensor):
            scale_columns(y, _factors(run), bias_N, out=y)
        elif bias_N is not None and not adds_bias:
            y.add_(bias_N)


def _factors(run: Sequence[LinearPart]) -> Tensor:
    """Return the alphas of rows, [sum N]."""
    return _stacked([part.alpha for part in run if isinstance(part.alpha, Tensor)])


def _add_product(sum_TN: Tensor, x_TC: Tensor, w_NC: Tensor, part: LinearPart) -> Tensor:
    if isinstance(part.alpha, Tensor):
        return add_scaled(sum_TN, product(x_TC, w_NC.T), part.alpha, part.bias_N)
    add_product(sum_TN, x_TC, w_NC.T, part.alpha)
    return sum_TN if part.bias_N is None else sum_TN.add_(part.bias_N)


def _runs(parts: Sequence[LinearPart]) -> list[list[LinearPart]]:
    """Return neighbors with the same alpha or all with alphas of rows, all or none of them with a bias."""

    def kind(part: LinearPart) -> tuple[float | None, bool]:
        return part.alpha if isinstance(part.alpha, float) else None, part.bias_N is None

    alike = itertools.groupby(parts, key=kind)
    return [list(run) for _, run in alike]


def _input_gradient(dy_TN: Tensor, du_TR: Tensor, operand: Operand, parts: Sequence[LinearPart]) -> Tensor:
    a_RK = [part.adapter.a_work_RK for part in parts if part.adapter is not None]
    if isinstance(operand, RotatedOperand):
        adapter = (du_TR, _stacked(a_RK)) if a_RK else ()
        return int8_product.input_gradient(dy_TN, operand.rotated(), *adapter)
    plus_TK = du_TR @ _stacked(a_RK) if a_RK else None
    w_NK, row = operand(dy_TN.dtype, False), 0
    dx_TK = dy_TN.new_empty(len(dy_TN), w_NK.shape[1]) if plus_TK is None else plus_TK
    for run in _runs(parts):
        rows = slice(row, row + sum(part.width for part in run))
        dy_part, alpha = dy_TN[:, rows], run[0].alpha
        if isinstance(alpha, Tensor):
            scaled = torch.empty(dy_part.shape, dtype=dy_part.dtype, device=dy_part.device)
            dy_part, alpha = scale_columns(dy_part, _factors(run), None, out=scaled), 1.0
        dx_TK.addmm_(dy_part, w_NK[rows], beta=1 if a_RK or row else 0, alpha=alpha)
        row = rows.stop
    return dx_TK
