"""Sample rows of different requests: each has its own temperature, truncation, constraint and report.

Rows that differ in temperature only are sampled on the device alone, so that a burst may have many steps and
a CUDA graph. If any row is truncated, constrained or reports its most likely tokens, a burst is one step: the
host must see its tokens. A row's tokens do not depend on the other rows: the randomness is TorchSampler's.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from qerl.algo.seeds import last_round
from qerl.engine.sampling.prompt_logprobs import top_tokens
from qerl.engine.sampling.sampler import Sampler
from qerl.engine.sampling.token_sampling import finite_temperature, inverse_transform, threshold
from qerl.engine.schedule.live_sample import LiveSample
from qerl.errors import UserError
from qerl.models.policy_model import PolicyModel
from qerl.types import Sampling


class RowSampler(Sampler):
    def __init__(self, decoder: PolicyModel, stop_tokens: Tensor, max_rows: int):
        super().__init__(stop_tokens)
        self._decoder, self._device = decoder, decoder.device
        self._temperatures_B1 = torch.ones(max_rows, 1, device=self._device)
        self._is_greedy_B = torch.zeros(max_rows, dtype=torch.bool, device=self._device)
        self._truncations: list[tuple[Sampling, Tensor]] = []
        self._constrained: list[tuple[int, LiveSample]] = []
        self._reported: list[tuple[int, LiveSample]] = []

    def bind(self, samples_B: list[LiveSample]) -> None:
        B, samplings = len(samples_B), [_sampling(s) for s in samples_B]
        values = [(finite_temperature(x) or 1.0, float(x.temperature == 0)) for x in samplings]
        host = torch.tensor(values, dtype=torch.float32).view(B, 2).to(self._device)
        self._temperatures_B1[:B, 0].copy_(host[:, 0])
        self._is_greedy_B[:B].copy_(host[:, 1] > 0)
        kinds: dict[Sampling, list[int]] = {}
        for b, x in enumerate(samplings):
            truncation = Sampling(max_tokens=1, top_k=x.top_k, top_p=x.top_p, min_p=x.min_p)
            if x.temperature > 0 and truncation != Sampling(max_tokens=1):
                kinds.setdefault(truncation, []).append(b)
        self._truncations = [(x, torch.tensor(rows, device=self._device)) for x, rows in kinds.items()]
        self._constrained = [(b, s) for b, s in enumerate(samples_B) if s.constraint is not None]
        self._reported = [(b, s) for b, s in enumerate(samples_B) if s.group.num_top_logprobs]
        self.is_capturable = not (self._truncations or self._constrained or self._reported)

    def sample(self, hidden_MD: Tensor, keys_M: Tensor, positions_M: Tensor) -> tuple[Tensor, Tensor]:
        M, logits_MV = len(hidden_MD), self._decoder.logits(hidden_MD)
        for b, s in self._constrained:
            if s.finish is None and s.constraint is not None:
                try:
                    s.allowed_V = s.constraint.allowed_V()
                except UserError as error:
                    s.failure = error
                else:
                    logits_MV[b].masked_fill_(~s.allowed_V.to(self._device), -torch.inf)
        scaled_MV = logits_MV / self._temperatures_B1[:M]
        for truncation, rows in self._truncations:
            row_logits = scaled_MV[rows]
            if (lowest := threshold(row_logits, truncation)) is not None:  # None: it keeps all tokens
                scaled_MV[rows] = row_logits.masked_fill(row_logits < lowest, -torch.inf)
        p_MV = scaled_MV.softmax(-1)
        tokens_M, logprobs_M = inverse_transform(p_MV, last_round(keys_M, positions_M))
        best_p_M, best_M = p_MV.max(-1)
        is_greedy_M = self._is_greedy_B[:M]
        self._report(p_MV)
        return best_M.where(is_greedy_M, tokens_M), best_p_M.log().where(is_greedy_M, logprobs_M)

    def bind_scores(self, temperature: float) -> None:
        """Score tokens that were sampled at this temperature from now on."""
        self._temperatures_B1.fill_(temperature or 1.0)

    def score(
        self, hidden_MD: Tensor, tokens_M: Tensor, leave_out: Callable[[Tensor], None] | None = None
    ) -> Tensor:
        logits_MV = self._decoder.logits(hidden_MD)
        if leave_out is not None:
            leave_out(logits_MV)
        p_MV = (logits_MV / self._temperatures_B1[: len(hidden_MD)]).softmax(-1)
        return p_MV.gather(1, tokens_M[:, None])[:, 0].log()

    def _report(self, p_MV: Tensor) -> None:
        if self._reported:
            rows = torch.tensor([b for b, _ in self._reported], device=self._device)
            max_reported = max(s.group.num_top_logprobs for _, s in self._reported)
            tops = top_tokens(p_MV[rows].log(), max_reported)
            for (_, s), top in zip(self._reported, tops, strict=True):
                s.top_logprobs = top[: s.group.num_top_logprobs]


def _sampling(s: LiveSample) -> Sampling:
    assert s.group.sampling is not None
    return s.group.sampling
