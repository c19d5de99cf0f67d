"""Which noise a token takes where it is not the same for all: rows of the norms' noise, one for each key.

    group     key: the prompt's index            a prompt's tokens take the row of its samples
    sample    key: the sample's index in its group; the prompt, which is computed once for all of its samples,
              takes row 0, and so does the draw of their first tokens, by the prompt's last token

Row 0 is no noise. The others are drawn when first asked for, from (seed, step, layer, key) alone: which row a
key gets means nothing, and no other key, batch or pause changes its numbers: tests/aqn/test_noise_table.py.
"""

import dataclasses
from collections.abc import Callable, Sequence

import torch

from qerl.aqn.noised_norm import NoisedRMSNorm

Members = tuple[int, Sequence[int]]
"""A prompt's index in the task, and the indices of some of its samples in its group."""
Fill = Callable[[slice, Sequence[int]], None]
"""Draws the noise of these keys into these rows of every norm."""


@dataclasses.dataclass(frozen=True, slots=True)
class NoiseScope:
    """What has a noise of its own: the keys of a prompt's own tokens, None for none, and of its samples."""

    of_prompt: Callable[[int], int | None]
    of_sample: Callable[[int, int], int]


SCOPES = {
    "group": NoiseScope(lambda prompt_index: prompt_index, lambda prompt_index, sample_index: prompt_index),
    "sample": NoiseScope(lambda prompt_index: None, lambda prompt_index, sample_index: sample_index),
}


class NoiseTable:
    """Every row is 0 until it is opened, and outside of start and stop."""

    def __init__(self, norms: Sequence[NoisedRMSNorm]):
        """norms: two for each layer, in the layers' order: before q|k|v, before gate|up."""
        self.norms = norms
        self.is_open = False
        """Whether the norms hold rows of noise, and not one vector for all tokens."""
        self.num_drawn = 0
        """Rows drawn since the latest `start`."""
        self._per, self._num_keys = SCOPES["sample"], 0
        self._rows: dict[int, int] = {}
        self._fill: Fill | None = None

    def open(self, per: str, num_keys: int) -> None:
        """num_keys: most that one call of `rows` names. To be done before graphs are recorded."""
        self.is_open, self._per, self._num_keys = True, SCOPES[per], num_keys
        for norm in self.norms:
            shape = 1 + num_keys, norm.noise.shape[-1]
            norm.noise = torch.zeros(shape, dtype=norm.noise.dtype, device=norm.noise.device)

    def start(self, fill: Fill) -> None:
        self._rows, self._fill, self.num_drawn = {}, fill, 0

    def stop(self) -> None:
        """From here on every token's row is 0."""
        self._rows, self._fill = {}, None

    def rows(self, members: Sequence[Members]) -> list[tuple[int, list[int]]]:
        """(the prompt's row, its samples' rows) of each; they hold until the next call, which may draw others
        over them."""
        keys = [
            (self._per.of_prompt(prompt), [self._per.of_sample(prompt, sample) for sample in samples])
            for prompt, samples in members
        ]
        if self._fill is not None:
            self._seat(dict.fromkeys(key for _, sample_keys in keys for key in sample_keys), self._fill)
        row = self._rows.get
        return [(0 if own is None else row(own, 0), [row(key, 0) for key in each]) for own, each in keys]

    def _seat(self, keys: dict[int, None], fill: Fill) -> None:
        assert len(keys) <= self._num_keys, f"{len(keys)} noises asked for, the table has {self._num_keys}"
        new = [key for key in keys if key not in self._rows]
        if len(self._rows) + len(new) > self._num_keys:
            self._rows, new = {}, list(keys)
        if new:
            first = 1 + len(self._rows)
            self._rows |= {key: first + i for i, key in enumerate(new)}
            fill(slice(first, first + len(new)), new)
            self.num_drawn += len(new)
