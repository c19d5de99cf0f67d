"""What a layer's attention computes besides softmax(q k^T / sqrt(H)) v.

    s = scale * q k^T            scale: 1 / sqrt(H) if none is given
    s = cap * tanh(s / cap)      with a soft cap
    p = softmax([s, sink])       with sinks: one logit a head, which only takes probability
    a query at position i sees the positions j with i - window < j <= i

`AttentionOptions()` is plain attention, the only kind that the fused kernels compute.
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

    def softmax(self, scores_BKGQS: Tensor) -> Tensor:
        """Return p over the last dimension of masked scores; G query heads share one of K key heads."""
        if self.sinks_N is None:
            return scores_BKGQS.softmax(-1)
        B, K, G, Q, _ = scores_BKGQS.shape
        sinks = self.sinks_N.view(1, K, G, 1, 1).expand(B, K, G, Q, 1)
        return torch.cat((scores_BKGQS, sinks), -1).softmax(-1)[..., :-1]


PLAIN = AttentionOptions()
