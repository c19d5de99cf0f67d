"""The MLP of a layer that is run again for its backward pass, CHUNK_ROWS rows at a time.

    forward     h[rows] = feed(h[rows])
    backward    dh[rows] and the masters' gradients of feed(h[rows]), from the last rows to the first

Gate, up and their gradients take 190 KB a row of an 8B model, more than all else of the layer; so they are
in memory for one chunk, at most CHUNK_ROWS rows. A layer with more rows is always chunked: the products are
large enough to run at full speed, and an operand is unpacked once for all chunks. Gradients have the bits of
a layer that is not chunked, whose sums over rows are added up in the same order
(kernels/pointwise/matmul_fp32.py); on a GPU as far as cuBLAS chooses the same kernel for the chunk's
products as for those of all rows.

Not chunked: experts, linears whose own weight is trained or whose adapter's inputs are dropped, whose masks
are drawn for all rows at once, and FP8Flow, which scales blocks of rows.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from qerl.formats import FP8Flow
from qerl.kernels.pointwise.matmul_fp32 import row_chunks
from qerl.models.decoder import Layer, RowContext
from qerl.models.linear import QuantLinear
from qerl.models.linear_pass import LinearPass
from qerl.models.mlp import MLP


def num_chunks(layer: Layer, num_rows: int, linear_pass: LinearPass) -> int:
    """Return the number of chunks of the layer's MLP; 1: all rows at once."""
    if not isinstance(layer.mlp, MLP) or any(_needs_all_rows(x, linear_pass) for x in mlp_linears(layer)):
        return 1
    return max(len(row_chunks(num_rows)), 1)


def _needs_all_rows(linear: QuantLinear, linear_pass: LinearPass) -> bool:
    return linear.full is not None or linear in linear_pass.dropout or isinstance(linear.weight, FP8Flow)


def mlp_linears(layer: Layer) -> list[QuantLinear]:
    return [linear for group in layer.mlp.linear_groups for linear in group]


def fed_modules(layer: Layer) -> list[nn.Module]:
    """Return those of layer.feed: the MLP and its norms."""
    norms = [getattr(layer, name) for name in (layer.norms.before_mlp, layer.norms.after_mlp) if name]
    return [layer.mlp, *norms]


def feed_forward(layer: Layer, h_TD: Tensor, context: RowContext, layer_index: int) -> Tensor:
    """Return layer.feed of all rows in the place of h, without a gradient."""
    with context.linear_pass.holding() as linear_pass:
        for some in row_chunks(len(h_TD)):
            h_TD[some] = layer.feed(h_TD[some], _context_of(context, some, linear_pass), layer_index)
    return h_TD


def feed_backward(
    layer: Layer,
    h_TD: Tensor,
    context: RowContext,
    layer_index: int,
    dy_TD: Tensor,
    masters: Sequence[Tensor],
) -> tuple[Tensor, list[Tensor | None]]:
    """Return the gradients in h and in each master of layer.feed."""
    dh_TD = torch.empty_like(h_TD)
    sums: list[Tensor | None] = [None] * len(masters)
    with context.linear_pass.holding() as linear_pass:
        for some in reversed(row_chunks(len(h_TD))):
            h_CD = h_TD[some].detach().requires_grad_()
            with torch.enable_grad():
                y_CD = layer.feed(h_CD, _context_of(context, some, linear_pass), layer_index)
            dh_TD[some], *gradients = torch.autograd.grad(
                y_CD, [h_CD, *masters], dy_TD[some], allow_unused=True
            )
            sums = [new if old is None else old.add_(new) for old, new in zip(sums, gradients, strict=True)]
    return dh_TD, sums


def _context_of(context: RowContext, rows: slice, linear_pass: LinearPass) -> RowContext:
    """Return what feed reads of the context, for these rows."""
    noise_rows_T = context.noise_rows_T
    noise_rows_C = None if noise_rows_T is None else noise_rows_T[rows]
    return context._replace(noise_rows_T=noise_rows_C, linear_pass=linear_pass)
