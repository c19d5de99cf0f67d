"""Lengths of a rollout's samples, and the least time that decoding them can take.

    length_i = min(round(median * exp(sigma * z_i)), max_tokens), at least 1;  z_i ~ N(0, 1) of (seed, i)
    floor    = sum over decode steps of the floor of a step with its rows and their caches (roofline.py)

A sample of n tokens takes n - 1 decode steps: its first token comes from the prompt's forward pass, which
the floor leaves out. Samples start in order as rows become free. A prompt is read once for the rows that
share it.
"""

import dataclasses
import heapq
import math
import random
from collections.abc import Callable, Sequence

from qerl.algo.seeds import mix
from qerl.bench.case import SamplingCase
from qerl.bench.roofline import Limit, rows_floor_ms
from qerl.models.architecture import Architecture


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Lengths(kind="log-normal", median_tokens=600, sigma=0.8, max_tokens=4096, seed=0).of(256)"""

    kind: str
    median_tokens: int
    sigma: float
    max_tokens: int
    seed: int

    def of(self, num_samples: int) -> list[int]:
        """Return the length of each sample, in tokens; those of fewer samples are the first of more."""
        draw = LENGTHS[self.kind]
        drawn = [draw(self, random.Random(mix(self.seed, index))) for index in range(num_samples)]
        return [min(max(round(length), 1), self.max_tokens) for length in drawn]


LENGTHS: dict[str, Callable[[Lengths, random.Random], float]] = {
    "log-normal": lambda lengths, rng: rng.lognormvariate(math.log(lengths.median_tokens), lengths.sigma),
    "constant": lambda lengths, rng: lengths.median_tokens,
}


def starts(lengths_S: Sequence[int], rows: int) -> list[int]:
    """Return the decode step at which each sample starts: at once while rows are free, then in order."""
    free_at = [0] * min(rows, len(lengths_S))
    starts_S = []
    for length in lengths_S:
        start = heapq.heappop(free_at)
        starts_S.append(start)
        heapq.heappush(free_at, start + length - 1)
    return starts_S


def live_rows(lengths_S: Sequence[int], rows: int, group_size: int) -> list[tuple[int, int, int]]:
    """Return (rows, sampled tokens in their caches, prompts) of each decode step."""
    starts_S = starts(lengths_S, rows)
    spans = [(start, start + length - 1) for start, length in zip(starts_S, lengths_S, strict=True)]
    num_steps = max(end for _, end in spans)
    rows_W, tokens_W, prompts_W = [0] * num_steps, [0] * num_steps, [0] * num_steps
    for start, end in spans:
        for step in range(start, end):
            rows_W[step] += 1
            tokens_W[step] += step - start + 1
    for first in range(0, len(spans), group_size):
        group = [span for span in spans[first : first + group_size] if span[0] < span[1]]
        for step in {step for start, end in group for step in range(start, end)}:
            prompts_W[step] += 1
    return list(zip(rows_W, tokens_W, prompts_W, strict=True))


def rollout_floor_s(
    limit: Limit, a: Architecture, case: SamplingCase, lengths_S: Sequence[int], rows: int
) -> float:
    """Return the least time of all decode steps with this many rows, in seconds."""
    each_ms = (
        rows_floor_ms(limit, a, case, num_rows, tokens + prompts * case.prompt_tokens)
        for num_rows, tokens, prompts in live_rows(lengths_S, rows, case.group_size)
    )
    return sum(each_ms) / 1e3


def tail_s(finish_s: Sequence[float], num_rows: int) -> float:
    """Return the time during which fewer than num_rows samples were unfinished, until the last one finished.

    finish_s: when each sample finished, ascending.
    """
    return finish_s[-1] - finish_s[max(len(finish_s) - num_rows, 0)]
