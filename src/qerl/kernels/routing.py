"""Route tokens to experts: choose k of E for each token, weigh them, and sort the rows by expert.

    ids_TK     the k largest router logits, ascending by expert, int64
    weights_TK softmax over all experts at these, or over the chosen ones, fp32
    order_S    of the S = T k pairs (token, place), those of expert 0 first, by token within an expert
    offsets    int64 [E + 1]: expert e has the rows offsets[e] .. offsets[e + 1] - 1

Letters: T tokens, K chosen experts of a token (k), E experts, S = T k rows, D width. Experts of a token are
summed in the order of their ids, so the sum does not depend on which of two has the larger logit.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

CASES = ((1, 4, 2), (7, 8, 3), (64, 32, 4))  # T, E, k


class SortedRows(NamedTuple):
    order_S: Tensor
    inverse_S: Tensor
    """Where each pair's row is after sorting."""
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
    flat_S = ids_TK.flatten()
    order_S = flat_S.argsort(stable=True)
    counts_E = torch.bincount(flat_S, minlength=num_experts)
    assert len(counts_E) == num_experts, "an expert that there is not"
    inverse_S = torch.empty_like(order_S)
    inverse_S[order_S] = torch.arange(len(order_S), device=order_S.device)
    return SortedRows(order_S, inverse_S, torch.nn.functional.pad(counts_E.cumsum(0), (1, 0)))


def spread(x_TD: Tensor, rows: SortedRows, num_chosen: int) -> Tensor:
    """Return x_SD, sorted; its gradient sums a token's rows in the order of its experts."""
    T, D = x_TD.shape
    return x_TD[:, None].expand(T, num_chosen, D).reshape(-1, D)[rows.order_S]


def combine(y_SD: Tensor, weights_TK: Tensor, rows: SortedRows) -> Tensor:
    """Return the weighted sum over each token's experts, fp32 [T, D]."""
    y_TKD = y_SD[rows.inverse_S].view(*weights_TK.shape, -1)
    return (y_TKD.float() * weights_TK[..., None]).sum(1)


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
