"""Draws the next token of every row from the forward's hidden states, and moves the rows on.

    PlainDraw   logits, then sampling.py: every kind of Sampling, any device
    FusedDraw   kernels/head_sample.py: temperature alone, no logits written out, on a GPU

A draw's randomness is a function of the row's key and position. PlainDraw's is seeds.uniform of (seed, step,
prompt, sample, the token's number in its sample), its last round carried out on the device: the same bits on
every device (tests/engine/test_sampler.py). FusedDraw's is the kernel's own generator.
"""

from typing import Protocol

import torch
from torch import Tensor

from qerl.algo.seeds import last_round, mix, rounds
from qerl.engine.token_sampling import sample, score
from qerl.kernels.decode_state import DecodeState
from qerl.models.decoder import Decoder
from qerl.types import Sampling


class Sampler(Protocol):
    is_recordable: bool
    """Whether a step may go into a CUDA graph: it never waits for the device."""

    def key(self, coordinates: tuple[int, ...], prompt_tokens: int) -> int:
        """What keys_B holds for (seed, step, prompt, sample), or (seed, step, prompt, sample, branch)."""
        ...

    def first(self, hidden_MD: Tensor, keys_M: Tensor, positions_M: Tensor) -> tuple[Tensor, Tensor]:
        """(tokens_M, logprobs_M) after hidden states at these positions; a logprob is NaN if logits are."""
        ...

    def step(self, hidden_BD: Tensor, state: DecodeState) -> None:
        """Draws for the first B rows and moves them on; see kernels/decode_state.py."""
        ...

    def score(self, hidden_MD: Tensor, tokens_M: Tensor) -> Tensor:
        """logprobs_M of these tokens, int64: the bits that a draw of them from as many rows gives."""
        ...


class HeadSampler(Protocol):
    """What kernels/head_sample.py makes for a device."""

    def draw(
        self, hidden_MD: Tensor, keys_M: Tensor, positions_M: Tensor, temperature: Tensor
    ) -> tuple[Tensor, Tensor]: ...

    def step(
        self, hidden_MD: Tensor, state: DecodeState, stop_tokens: Tensor, temperature: Tensor
    ) -> None: ...

    def score(self, hidden_MD: Tensor, targets_M: Tensor, temperature: Tensor) -> Tensor: ...


class TorchSampler:
    def __init__(self, decoder: Decoder, sampling: Sampling, stop_tokens: Tensor):
        self._decoder, self._sampling, self._stop_tokens = decoder, sampling, stop_tokens
        self.is_recordable = sampling.top_p is None or sampling.top_p >= 1

    def key(self, coordinates: tuple[int, ...], prompt_tokens: int) -> int:
        return rounds(*coordinates, 1 - prompt_tokens)  # position + 1 - prompt_tokens tokens were drawn

    def first(self, hidden_MD: Tensor, keys_M: Tensor, positions_M: Tensor) -> tuple[Tensor, Tensor]:
        uniforms_M = last_round(keys_M, positions_M)
        return sample(self._decoder.logits(hidden_MD), self._sampling, uniforms_M)

    def step(self, hidden_BD: Tensor, state: DecodeState) -> None:
        B = len(hidden_BD)
        drawn = self.first(hidden_BD, state.keys_B[:B], state.positions_B[:B])
        move_on(state, *drawn, self._stop_tokens)

    def score(self, hidden_MD: Tensor, tokens_M: Tensor) -> Tensor:
        return score(self._decoder.logits(hidden_MD), self._sampling, tokens_M)


class FusedSampler:
    is_recordable = True

    def __init__(self, kernel: HeadSampler, temperature: float, stop_tokens: Tensor):
        self._kernel, self._stop_tokens = kernel, stop_tokens
        self._temperature = torch.full((1,), temperature, device=stop_tokens.device)

    def key(self, coordinates: tuple[int, ...], prompt_tokens: int) -> int:
        return mix(*coordinates)

    def first(self, hidden_MD: Tensor, keys_M: Tensor, positions_M: Tensor) -> tuple[Tensor, Tensor]:
        return self._kernel.draw(hidden_MD, keys_M, positions_M, self._temperature)

    def step(self, hidden_BD: Tensor, state: DecodeState) -> None:
        self._kernel.step(hidden_BD, state, self._stop_tokens, self._temperature)

    def score(self, hidden_MD: Tensor, tokens_M: Tensor) -> Tensor:
        return self._kernel.score(hidden_MD, tokens_M, self._temperature)


def move_on(state: DecodeState, tokens_B: Tensor, logprobs_B: Tensor, stop_tokens: Tensor) -> None:
    """Writes the draws into the ring and moves each live row to its next position, or ends it there."""
    B, tokens_B = len(tokens_B), tokens_B.int()
    positions_B, place = state.positions_B[:B], state.place_1.long()
    is_live_B = positions_B >= 0
    next_B = positions_B + 1
    is_last_B = (tokens_B[:, None] == stop_tokens).any(1) | (next_B >= state.ends_B[:B])
    is_last_B |= ~logprobs_B.isfinite()
    ring_tokens, ring_logprobs = state.drawn_tokens_WB[:, :B], state.drawn_logprobs_WB[:, :B]
    ring_tokens.index_copy_(0, place, (tokens_B * is_live_B)[None])
    ring_logprobs.index_copy_(0, place, logprobs_B.where(is_live_B, 0)[None])
    state.tokens_B[:B].copy_(tokens_B.where(is_live_B, state.tokens_B[:B]))
    positions_B.copy_(next_B.where(is_live_B & ~is_last_B, -1))
    state.place_1.add_(1)
