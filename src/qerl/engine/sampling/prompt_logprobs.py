"""Log-probabilities of a prompt's own tokens, from the hidden states of its prefill, at temperature 1."""

import dataclasses
from collections.abc import Callable

from torch import Tensor

from qerl.types import TokenLogprob

_ROWS = 64  # logits at once: 39 MB at V 152,064


@dataclasses.dataclass(eq=False, slots=True)
class PromptLogprobs:
    num_top: int
    """Most likely tokens that are reported for each position."""
    tokens: list[TokenLogprob] = dataclasses.field(default_factory=list)
    """From the second token on: nothing predicts the first."""

    def add(self, logits: Callable[[Tensor], Tensor], tokens_T: list[int], hidden_TD: Tensor) -> None:
        """Append the tokens that the hidden states predict, which continue those so far."""
        targets = tokens_T[len(self.tokens) + 1 :][: len(hidden_TD)]
        for start in range(0, len(targets), _ROWS):
            block = targets[start : start + _ROWS]
            logprobs_BV = logits(hidden_TD[start : start + len(block)]).log_softmax(-1)
            rows = [logprobs_BV[b, token].item() for b, token in enumerate(block)]
            tops = top_tokens(logprobs_BV, self.num_top)
            self.tokens += map(TokenLogprob, block, rows, tops)


def top_tokens(logprobs_BV: Tensor, num: int) -> list[tuple[tuple[int, float], ...]]:
    """Return each row's most likely tokens with their logprobs; excluded tokens are left out."""
    if num == 0:
        return [()] * len(logprobs_BV)
    values_BV, indices_BV = logprobs_BV.topk(min(num, logprobs_BV.shape[1]), dim=-1)
    rows = zip(indices_BV.tolist(), values_BV.tolist(), strict=True)
    return [tuple((i, v) for i, v in zip(*row, strict=True) if v > float("-inf")) for row in rows]
