"""Route tokens to experts: choose k of E for each token, weigh them, and sort the rows by expert.

    ids_TK     the k largest router logits, ascending by expert, int64
    weights_TK softmax over all experts at these, or over the chosen ones, fp32
    tokens_S   the tokens of the S = T k sorted rows, those of expert 0 first, ascending within an expert
    offsets    int64 [E + 1]: expert e has the rows offsets[e] .. offsets[e + 1] - 1

Letters: T tokens, K chosen experts of a token (k), E experts, S = T k rows, D width. Experts of a token are
summed in the order of their ids, so the sum does not depend on which of two has the larger logit.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from qerl.kernels.runtime import row_kernel

CASES = ((1, 4, 2), (7, 8, 3), (64, 32, 4))  # T, E, k


class SortedRows(NamedTuple):
    tokens_S: Tensor
    inverse_S: Tensor
    """The sorted row of each pair (token, place)."""
    offsets: Tensor


def choose(logits_TE: Tensor, num_chosen: int) -> Tensor:
    """Return ids_TK, without a gradient."""
    return logits_TE.detach().topk(num_chosen, dim=-1).indices.sort(dim=-1).values


def weigh(logits_TE: Tensor, ids_TK: Tensor, over: Literal["all", "chosen"]) -> Tensor:
    """Return weights_TK of these experts, fp32; differentiable in the logits."""
    logits_TE = logits_TE.float()
    if over == "all":
        return logits_TE.softmax(-1).gather(1, ids_TK)
    return logits_TE.gather(1, ids_TK).softmax(-1)


def sort_rows(ids_TK: Tensor, num_experts: int) -> SortedRows:
    assert num_experts <= 256, "an expert's id is sorted as one byte"
    flat_S, order_S = ids_TK.flatten().to(torch.uint8).sort(stable=True)
    inverse_S = torch.empty_like(order_S)
    inverse_S[order_S] = torch.arange(len(order_S), device=order_S.device)
    experts_E = torch.arange(num_experts + 1, device=order_S.device)
    offsets = torch.searchsorted(flat_S.to(torch.int64), experts_E)
    return SortedRows(order_S // ids_TK.shape[1], inverse_S, offsets)


def sort_layers(ids_LS: Tensor, num_chosen: int, num_experts: int) -> list[SortedRows]:
    """Return the same of the pairs of several layers, in a few launches for all of them."""
    assert num_experts <= 256, "an expert's id is sorted as one byte"
    order_LS = ids_LS.to(torch.uint8).sort(dim=1, stable=True).indices
    place_S = torch.arange(ids_LS.shape[1], device=ids_LS.device)
    inverse_LS = torch.empty_like(order_LS).scatter_(1, order_LS, place_S.expand_as(order_LS))
    ids_LS = ids_LS.long()
    counts_LE = ids_LS.new_zeros(len(ids_LS), num_experts).scatter_add_(1, ids_LS, torch.ones_like(ids_LS))
    offsets_LE = torch.nn.functional.pad(counts_LE.cumsum(1), (1, 0))
    order_LS.floor_divide_(num_chosen)
    return [SortedRows(*layer) for layer in zip(order_LS, inverse_LS, offsets_LE, strict=True)]


def spread(x_TD: Tensor, rows: SortedRows, num_chosen: int) -> Tensor:
    """Return x_SD, sorted; its gradient sums a token's rows in the order of its experts, in fp32."""
    return _Spread.apply(x_TD, rows.tokens_S, rows.inverse_S, num_chosen)


def combine(
    y_SD: Tensor,
    weights_TK: Tensor,
    rows: SortedRows,
    *,
    onto_TD: Tensor | None = None,
    needs_output: bool = True,
) -> Tensor:
    """Return the weighted sum over each token's experts, fp32 [T, D]; with onto, added to it in place.
    needs_output: False if only gradients are needed: onto then stays as it is."""
    return _Combine.apply(y_SD, weights_TK, rows.inverse_S, onto_TD, needs_output)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TD, tokens_S, inverse_S, num_chosen):
        ctx.save_for_backward(inverse_S)
        ctx.num_chosen = num_chosen
        return x_TD.index_select(0, tokens_S)

    @staticmethod
    def backward(ctx, dx_SD):  # type: ignore[override]
        (inverse_S,) = ctx.saved_tensors
        return _sums(dx_SD.contiguous(), None, inverse_S, ctx.num_chosen, dx_SD.dtype), None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y_SD, weights_TK, inverse_S, onto_TD, needs_output):
        ctx.save_for_backward(y_SD, weights_TK, inverse_S)
        if onto_TD is not None:
            ctx.mark_dirty(onto_TD)
        if needs_output or onto_TD is None:
            return _sums(y_SD, weights_TK, inverse_S, weights_TK.shape[1], torch.float32, onto_TD)
        return onto_TD

    @staticmethod
    def backward(ctx, d_TD):  # type: ignore[override]
        (y_SD, weights_TK, inverse_S), d_TD = ctx.saved_tensors, d_TD.contiguous()
        dy_SD, dweights_TK = torch.empty_like(y_SD), torch.empty_like(weights_TK)
        donto_TD = d_TD if ctx.needs_input_grad[3] else None
        if row_kernel.are_vectors(y_SD) and len(y_SD):
            sizes = weights_TK.shape[1], y_SD.shape[1]
            parameters = y_SD, weights_TK, inverse_S, d_TD, dy_SD, dweights_TK, *sizes
            kernel = row_kernel.kernel("routing.cu", "gather_backward", y_SD.device)
            kernel.launch(grid=len(y_SD), block_threads=256, parameters=parameters)
            return dy_SD, dweights_TK, None, donto_TD, None
        y_TKD = y_SD[inverse_S].view(*weights_TK.shape, -1)
        dy_SD[inverse_S] = (d_TD[:, None] * weights_TK[..., None]).to(dy_SD.dtype).flatten(0, 1)
        return dy_SD, (y_TKD.float() * d_TD[:, None]).sum(2), None, donto_TD, None


def _sums(
    y_SD: Tensor,
    weights_TK: Tensor | None,
    inverse_S: Tensor,
    num_chosen: int,
    dtype: torch.dtype,
    onto_TD: Tensor | None = None,
) -> Tensor:
    """Return the sum over each token's rows, times their weights, in fp32; rounded to dtype, or added to
    onto."""
    S, D = y_SD.shape
    if row_kernel.are_vectors(y_SD) and y_SD.is_contiguous() and S:
        assert onto_TD is None or (onto_TD.dtype == dtype == torch.float32 and onto_TD.is_contiguous())
        out_TD, adds = onto_TD, int(onto_TD is not None)
        if out_TD is None:
            out_TD = torch.empty(S // num_chosen, D, dtype=dtype, device=y_SD.device)
        name, blocks = f"gather_{'fp32' if dtype == torch.float32 else 'bf16'}", -(-D // 2048)
        parameters = y_SD, weights_TK, inverse_S, out_TD, num_chosen, D, blocks, adds
        row_kernel.kernel("routing.cu", name, y_SD.device).launch(
            grid=len(out_TD) * blocks, block_threads=256, parameters=parameters
        )
        return out_TD
    y_TKD = y_SD[inverse_S].view(-1, num_chosen, D).float()
    sum_TD = (y_TKD if weights_TK is None else y_TKD * weights_TK[..., None]).sum(1).to(dtype)
    return sum_TD if onto_TD is None else onto_TD.add_(sum_TD)


def reference(logits_TE: Tensor, num_chosen: int, over: Literal["all", "chosen"]) -> tuple[Tensor, Tensor]:
    """Return (ids_TK, weights_TK) in float64, token by token."""
    ids, weights = [], []
    for logits_E in logits_TE.double():
        chosen = sorted(sorted(range(len(logits_E)), key=lambda e: -float(logits_E[e]))[:num_chosen])
        exponents = (logits_E - logits_E.max()).exp()
        total = exponents.sum() if over == "all" else exponents[chosen].sum()
        ids.append(torch.tensor(chosen))
        weights.append(exponents[chosen] / total)
    return torch.stack(ids), torch.stack(weights)
