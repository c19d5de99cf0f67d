"""Options of a layer's attention beyond softmax(q k^T / sqrt(H)) v.

    s = scale * q k^T            scale: 1 / sqrt(H) if none is given
    s = cap * tanh(s / cap)      with a soft cap
    p = softmax([s, sink])       with sinks: one logit a head, which only takes probability
    a query at position i sees the positions j with i - window < j <= i

`AttentionOptions()` is plain attention. flash_attention.py says which kinds FlashAttention computes.
"""

import dataclasses

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AttentionOptions:
    """AttentionOptions(scale=1 / 16, softcap=50.0, window=4096)"""

    scale: float | None = None
    softcap: float | None = None
    window: int | None = None
    """Number of positions that a query sees, its own included; None: all before it."""
    sinks_N: Tensor | None = None
    """fp32, one of each query head; without a gradient."""

    @property
    def is_plain(self) -> bool:
        return (self.scale, self.softcap, self.window, self.sinks_N) == (None, None, None, None)

    def scale_of(self, head_size: int) -> float:
        return head_size**-0.5 if self.scale is None else self.scale

    def scaled(self, scores: Tensor, head_size: int) -> tuple[Tensor, Tensor | None]:
        """Return s of q k^T, which is overwritten, and the slope of the cap, None without one."""
        scores.mul_(self.scale_of(head_size))
        if self.softcap is None:
            return scores, None
        bent = scores.div_(self.softcap).tanh_()
        return bent * self.softcap, 1 - bent.square()

    def seen_tables(self, tables_BX: Tensor, lengths_B: Tensor, page_tokens: int) -> tuple[Tensor, Tensor]:
        """Return the tables of the pages that the window reaches, and the lengths counted from the first."""
        if self.window is None:
            return tables_BX, lengths_B
        X = tables_BX.shape[1]
        num_seen = min((self.window - 2) // page_tokens + 2, X)
        first_B = (lengths_B - self.window).clamp(min=0) // page_tokens
        pages_BY = first_B[:, None] + torch.arange(num_seen, device=tables_BX.device)
        seen_BY = tables_BX.gather(
            1, pages_BY.clamp(max=X - 1)
        )  # what is beyond the table is beyond the length
        return seen_BY, lengths_B - first_B * page_tokens

    def softmax(self, scores_BKGQS: Tensor) -> Tensor:
        """Return p over the last dimension of masked scores; G query heads share one of K key heads."""
        if self.sinks_N is None:
            return scores_BKGQS.softmax(-1)
        B, K, G, Q, _ = scores_BKGQS.shape
        sinks = self.sinks_N.view(1, K, G, 1, 1).expand(B, K, G, Q, 1)
        return torch.cat((scores_BKGQS, sinks), -1).softmax(-1)[..., :-1]


PLAIN = AttentionOptions()
