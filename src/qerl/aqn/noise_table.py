"""The noise rows of tokens when noise.scope is group or sample: one row of the norms' noise per key.

    group     key: the prompt's index            a prompt's tokens use the row of its samples
    sample    key: the sample's index in its group; the prompt, computed once for all of its samples, uses
              row 0, and so do the samples' first tokens, which follow from its last token

Row 0 has no noise. The other rows are filled when first needed, from (seed, step, layer, key) only: a key's
noise depends neither on its row nor on other keys, batches or preemption: tests/aqn/test_noise_table.py.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

Members = tuple[int, Sequence[int]]
"""A prompt's index in the task, and the indices of some of its samples in its group."""
Fill = Callable[[slice, Sequence[int]], None]
"""Fill these rows of every norm with the noise of these keys."""


@dataclasses.dataclass(frozen=True, slots=True)
class NoiseScope:
    """The keys of a prompt's own tokens (None: no noise) and of its samples."""

    of_prompt: Callable[[int], int | None]
    of_sample: Callable[[int, int], int]


SCOPES = {
    "group": NoiseScope(lambda prompt_index: prompt_index, lambda prompt_index, sample_index: prompt_index),
    "sample": NoiseScope(lambda prompt_index: None, lambda prompt_index, sample_index: sample_index),
}


class NormWithNoise(Protocol):
    """NoisedRMSNorm (noised_norm.py), or the noise of another model's norm (module_noise.py)."""

    weight: Tensor
    """Factors of the norm, [D]."""
    noise: Tensor
    """fp32 [D], or [rows, D]: what is added to the weight."""


class NoiseTable:
    """Every row is 0 before `open`, and outside of `start` and `stop`."""

    def __init__(self, norms: Sequence[NormWithNoise]):
        """norms: two for each layer, in the layers' order: before q|k|v, before gate|up."""
        self.norms = norms
        self.is_open = False
        """True if the norms hold rows of noise instead of one vector for all tokens."""
        self.num_drawn = 0
        """Number of rows filled since the latest `start`."""
        self._scope, self._num_keys = SCOPES["sample"], 0
        self._rows: dict[int, int] = {}
        self._fill: Fill | None = None

    def open(self, scope: str, num_keys: int) -> None:
        """Allocate the rows; num_keys is the maximum number of keys per call of `rows`. Call it before graphs
        are recorded."""
        self.is_open, self._scope, self._num_keys = True, SCOPES[scope], num_keys
        for norm in self.norms:
            shape = 1 + num_keys, norm.noise.shape[-1]
            norm.noise = torch.zeros(shape, dtype=norm.noise.dtype, device=norm.noise.device)

    def start(self, fill: Fill) -> None:
        self._rows, self._fill, self.num_drawn = {}, fill, 0

    def stop(self) -> None:
        """Make every token use row 0."""
        self._rows, self._fill = {}, None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Remove all noise within the context."""
        before, fill = [norm.noise.clone() for norm in self.norms], self._fill
        try:
            self._fill = None
            for norm in self.norms:
                norm.noise.zero_()
            yield
        finally:
            self._fill = fill
            for norm, noise in zip(self.norms, before, strict=True):
                norm.noise.copy_(noise)

    def rows(self, members: Sequence[Members]) -> list[tuple[int, list[int]]]:
        """Return (the prompt's row, its samples' rows) of each member, valid until the next call, which may
        refill the rows."""
        keys = [
            (self._scope.of_prompt(prompt), [self._scope.of_sample(prompt, sample) for sample in samples])
            for prompt, samples in members
        ]
        if self._fill is not None:
            self._place(dict.fromkeys(key for _, sample_keys in keys for key in sample_keys), self._fill)
        row = self._rows.get
        return [(0 if key is None else row(key, 0), [row(k, 0) for k in others]) for key, others in keys]

    def _place(self, keys: dict[int, None], fill: Fill) -> None:
        assert len(keys) <= self._num_keys, f"{len(keys)} noises requested, the table has {self._num_keys}"
        new = [key for key in keys if key not in self._rows]
        if len(self._rows) + len(new) > self._num_keys:
            self._rows, new = {}, list(keys)
        if new:
            first = 1 + len(self._rows)
            self._rows |= {key: first + i for i, key in enumerate(new)}
            fill(slice(first, first + len(new)), new)
            self.num_drawn += len(new)
