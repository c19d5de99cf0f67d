"""Sample rows of different requests: each has its own temperature, truncation, constraint and report.

    RowSampler        all of them, from logits in memory, on any device
    FusedRowSampler   temperatures by kernels/head/head_sample.py, the rest by a RowSampler, on a GPU

Rows that differ in their temperatures only are sampled on the device alone, so that a burst may have many
steps and a CUDA graph, one for any mix. If any row is truncated, constrained or reports its most likely
tokens, a burst is one step: the host sees its tokens, and top_p waits for the device. A row's tokens do not
depend on the other rows: a FusedRowSampler chooses by row who draws it, from the row's own parameters. The
randomness of a RowSampler is TorchSampler's, and of rows that the kernel draws FusedSampler's.
"""

import itertools
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from qerl.algo.seeds import last_round, mix
from qerl.engine.sampling.prompt_logprobs import top_tokens
from qerl.engine.sampling.sampler import Sampler
from qerl.engine.sampling.token_sampling import by_sorting, finite_temperature, inverse_transform, threshold
from qerl.engine.schedule.live_sample import LiveSample
from qerl.errors import UserError
from qerl.kernels.attention.decode_state import DecodeState
from qerl.kernels.head.head_sample import HeadSample
from qerl.kernels.runtime.gpu_memory import sent
from qerl.types import Sampling

_MAX_ROW_STOPS = 8


class HasLogits(Protocol):
    """A PolicyModel, or the kernels of its head."""

    def logits(self, hidden_MD: Tensor, /) -> Tensor:
        """Return logits, fp32 [M, V]."""
        ...


class _RowStops:
    """The engine's stop tokens, and those that end every bound row: with others a sample goes on on the
    device until the host has read them, and the batch is then rebuilt without an unread burst."""

    def __init__(self, stop_tokens: Tensor):
        self.tokens = torch.cat((stop_tokens, stop_tokens.new_full((_MAX_ROW_STOPS,), -1)))
        self._shared = frozenset[int]()

    def bind(self, samples_B: list[LiveSample]) -> frozenset[int]:
        """Return the tokens that end every row, which the device reads from now on."""
        sets = {s.group.stop_token_ids for s in samples_B} or {frozenset()}
        known = (token for token in sorted(frozenset.intersection(*sets)) if 0 <= token < 2**31)
        shared = frozenset(itertools.islice(known, _MAX_ROW_STOPS))
        if shared != self._shared:
            values = [*shared, *[-1] * (_MAX_ROW_STOPS - len(shared))]
            self.tokens[-_MAX_ROW_STOPS:].copy_(
                sent(torch.tensor(values, dtype=torch.int32), self.tokens.device)
            )
            self._shared = shared
        return shared


class RowSampler(Sampler):
    def __init__(self, head: HasLogits, stop_tokens: Tensor, max_rows: int):
        self._stops = _RowStops(stop_tokens)
        super().__init__(self._stops.tokens)
        self._head, self._device = head, stop_tokens.device
        self._temperatures_B1 = torch.ones(max_rows, 1, device=self._device)
        self._is_greedy_B = torch.zeros(max_rows, dtype=torch.bool, device=self._device)
        self._truncations: list[tuple[Sampling, Tensor]] = []
        self._constrained: list[tuple[int, LiveSample]] = []
        self._reported: list[tuple[int, LiveSample]] = []

    def bind(self, samples_B: list[LiveSample]) -> None:
        B, samplings = len(samples_B), [_sampling(s) for s in samples_B]
        values = [(finite_temperature(x) or 1.0, float(x.temperature == 0)) for x in samplings]
        host = sent(torch.tensor(values, dtype=torch.float32).view(B, 2), self._device)
        self._temperatures_B1[:B, 0].copy_(host[:, 0])
        self._is_greedy_B[:B].copy_(host[:, 1] > 0)
        kinds: dict[Sampling, list[int]] = {}
        for b, x in enumerate(samplings):
            if _is_truncated(x):
                truncation = Sampling(max_tokens=1, top_k=x.top_k, top_p=x.top_p, min_p=x.min_p)
                kinds.setdefault(truncation, []).append(b)
        self._truncations = [(x, torch.tensor(rows, device=self._device)) for x, rows in kinds.items()]
        self._constrained = [(b, s) for b, s in enumerate(samples_B) if s.constraint is not None]
        self._reported = _reported(samples_B)
        self.row_stop_ids = self._stops.bind(samples_B)
        self.is_capturable = not (self._truncations or self._constrained or self._reported)

    def sample(self, hidden_MD: Tensor, keys_M: Tensor, positions_M: Tensor) -> tuple[Tensor, Tensor]:
        M, logits_MV = len(hidden_MD), self._head.logits(hidden_MD)
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
            lowest = threshold(row_logits, truncation, by_sorting)
            if lowest is not None:  # None: it keeps all tokens
                scaled_MV[rows] = row_logits.masked_fill(row_logits < lowest, -torch.inf)
        p_MV = scaled_MV.softmax(-1)
        tokens_M, logprobs_M = inverse_transform(p_MV, last_round(keys_M, positions_M))
        best_p_M, best_M = p_MV.max(-1)
        is_greedy_M = self._is_greedy_B[:M]
        if self._reported:
            rows = torch.tensor([b for b, _ in self._reported], device=self._device)
            _report([s for _, s in self._reported], p_MV[rows].log())
        return best_M.where(is_greedy_M, tokens_M), best_p_M.log().where(is_greedy_M, logprobs_M)

    def bind_scores(self, temperature: float) -> None:
        """Score tokens that were sampled at this temperature from now on."""
        self._temperatures_B1.fill_(temperature or 1.0)

    def score(
        self, hidden_MD: Tensor, tokens_M: Tensor, leave_out: Callable[[Tensor], None] | None = None
    ) -> Tensor:
        logits_MV = self._head.logits(hidden_MD)
        if leave_out is not None:
            leave_out(logits_MV)
        p_MV = (logits_MV / self._temperatures_B1[: len(hidden_MD)]).softmax(-1)
        return p_MV.gather(1, tokens_M[:, None])[:, 0].log()


class FusedRowSampler(Sampler):
    def __init__(self, kernel: HeadSample, head: HasLogits, stop_tokens: Tensor, max_rows: int):
        """head: for rows that the kernel does not draw, and for reports; its products need no compiling."""
        self._stops = _RowStops(stop_tokens)
        super().__init__(self._stops.tokens)
        self._kernel, self._head, self._device = kernel, head, stop_tokens.device
        self._temperatures_B = torch.ones(max_rows, device=self._device)
        self._rest = RowSampler(head, stop_tokens, max_rows)
        self._rest_B = list[LiveSample]()
        """The samples that the kernel does not draw; then their rows and RowSampler's keys, on the device."""
        self._rest_rows = self._rest_keys = torch.zeros(0, dtype=torch.int64, device=self._device)
        self._reported: list[tuple[int, LiveSample]] = []

    def key(self, coordinates: tuple[int, ...], prompt_tokens: int) -> int:
        return mix(*coordinates)

    def bind(self, samples_B: list[LiveSample]) -> None:
        values = torch.tensor([finite_temperature(_sampling(s)) for s in samples_B], dtype=torch.float32)
        self._temperatures_B[: len(samples_B)].copy_(sent(values, self._device))
        rest = [(b, s) for b, s in enumerate(samples_B) if _needs_logits(s)]
        if rest or self._rest_B:
            self._bind_rest([b for b, _ in rest], [s for _, s in rest])
        self._reported = [(b, s) for b, s in _reported(samples_B) if not _needs_logits(s)]
        self.row_stop_ids = self._stops.bind(samples_B)
        self.num_unfused_rows = len(rest)
        self.is_capturable = not (rest or self._reported)

    def _bind_rest(self, rows: list[int], samples: list[LiveSample]) -> None:
        self._rest.bind(samples)
        keys = [
            self._rest.key((*s.group.coordinates, s.sample_index), s.group.prompt_tokens) for s in samples
        ]
        self._rest_B = samples
        self._rest_rows, self._rest_keys = sent(
            torch.tensor([rows, keys], dtype=torch.int64), self._device
        ).unbind()

    def sample(self, hidden_MD: Tensor, keys_M: Tensor, positions_M: Tensor) -> tuple[Tensor, Tensor]:
        tokens_M, logprobs_M = self._kernel.draw(hidden_MD, keys_M, positions_M, self._temperatures_B)
        if self._rest_B:
            rows = self._rest_rows
            tokens, logprobs = self._rest.sample(hidden_MD[rows], self._rest_keys, positions_M[rows])
            tokens_M[rows], logprobs_M[rows] = tokens.to(tokens_M.dtype), logprobs
        if self._reported:
            rows = torch.tensor([b for b, _ in self._reported], device=self._device)
            temperatures_M1 = self._temperatures_B[rows, None]
            temperatures_M1 = temperatures_M1.masked_fill(temperatures_M1 == 0, 1)
            logits_MV = self._head.logits(hidden_MD[rows]) / temperatures_M1
            _report([s for _, s in self._reported], logits_MV.log_softmax(-1))
        return tokens_M, logprobs_M

    def step(self, hidden_BD: Tensor, state: DecodeState) -> None:
        if self.is_capturable:
            self._kernel.step(hidden_BD, state, self._stop_tokens, self._temperatures_B)
        else:
            super().step(hidden_BD, state)

    def score(
        self, hidden_MD: Tensor, tokens_M: Tensor, leave_out: Callable[[Tensor], None] | None = None
    ) -> Tensor:
        raise AssertionError("exact mode draws all rows of requests by a RowSampler")


def _sampling(s: LiveSample) -> Sampling:
    assert s.group.sampling is not None
    return s.group.sampling


def _is_truncated(x: Sampling) -> bool:
    return x.temperature > 0 and (x.top_k, x.top_p, x.min_p) != (None, None, None)


def _needs_logits(s: LiveSample) -> bool:
    """True if the sample's parameters are not those of the kernel."""
    return s.constraint is not None or _is_truncated(_sampling(s))


def _reported(samples_B: list[LiveSample]) -> list[tuple[int, LiveSample]]:
    """Return the samples, and their rows, whose most likely tokens are reported."""
    return [(b, s) for b, s in enumerate(samples_B) if s.group.num_top_logprobs]


def _report(samples: list[LiveSample], logprobs_MV: Tensor) -> None:
    """Store each sample's most likely tokens."""
    tops = top_tokens(logprobs_MV, max(s.group.num_top_logprobs for s in samples))
    for s, top in zip(samples, tops, strict=True):
        s.top_logprobs = top[: s.group.num_top_logprobs]
