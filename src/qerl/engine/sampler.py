"""Sample the next token of every row from hidden states, and advance the decode state.

    TorchSampler   logits, then token_sampling.py: all sampling parameters, any device
    FusedSampler   kernels/head_sample.py: temperature only, logits never written to memory, on a GPU

A token's randomness is a function of its row's key and position. TorchSampler uses seeds.uniform of (seed,
step, prompt, sample, token index in the sample), with the last round computed on the device: the same bits on
every device (tests/engine/test_sampler.py). FusedSampler uses the kernel's own generator.
"""

from typing import Protocol

import torch
from torch import Tensor

from qerl.algo.seeds import last_round, mix, rounds
from qerl.engine.token_sampling import sample_tokens, score_tokens
from qerl.kernels.decode_state import DecodeState
from qerl.models.decoder import Decoder
from qerl.types import Sampling


class Sampler(Protocol):
    is_capturable: bool
    """True if a step can be captured in a CUDA graph: it never waits for the device."""

    def key(self, coordinates: tuple[int, ...], prompt_tokens: int) -> int:
        """Return the row key of (seed, step, prompt, sample) or (seed, step, prompt, sample, branch)."""
        ...

    def sample(self, hidden_MD: Tensor, keys_M: Tensor, positions_M: Tensor) -> tuple[Tensor, Tensor]:
        """Return (tokens_M, logprobs_M) after hidden states at these positions; NaN logits give a NaN."""
        ...

    def step(self, hidden_BD: Tensor, state: DecodeState) -> None:
        """Sample for the first B rows and advance them; see kernels/decode_state.py."""
        ...

    def score(self, hidden_MD: Tensor, tokens_M: Tensor) -> Tensor:
        """Return logprobs_M of these int64 tokens, bitwise as if they were sampled from as many rows."""
        ...


class HeadSampler(Protocol):
    """The fused LM head and sampler that kernels/head_sample.py returns for a device."""

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
        self.is_capturable = sampling.top_p is None or sampling.top_p >= 1

    def key(self, coordinates: tuple[int, ...], prompt_tokens: int) -> int:
        return rounds(*coordinates, 1 - prompt_tokens)  # token index = position + 1 - prompt_tokens

    def sample(self, hidden_MD: Tensor, keys_M: Tensor, positions_M: Tensor) -> tuple[Tensor, Tensor]:
        uniforms_M = last_round(keys_M, positions_M)
        return sample_tokens(self._decoder.logits(hidden_MD), self._sampling, uniforms_M)

    def step(self, hidden_BD: Tensor, state: DecodeState) -> None:
        B = len(hidden_BD)
        tokens_B, logprobs_B = self.sample(hidden_BD, state.keys_B[:B], state.positions_B[:B])
        advance(state, tokens_B, logprobs_B, self._stop_tokens)

    def score(self, hidden_MD: Tensor, tokens_M: Tensor) -> Tensor:
        return score_tokens(self._decoder.logits(hidden_MD), self._sampling, tokens_M)


class FusedSampler:
    is_capturable = True

    def __init__(self, kernel: HeadSampler, temperature: float, stop_tokens: Tensor):
        self._kernel, self._stop_tokens = kernel, stop_tokens
        self._temperature = torch.full((1,), temperature, device=stop_tokens.device)

    def key(self, coordinates: tuple[int, ...], prompt_tokens: int) -> int:
        return mix(*coordinates)

    def sample(self, hidden_MD: Tensor, keys_M: Tensor, positions_M: Tensor) -> tuple[Tensor, Tensor]:
        return self._kernel.draw(hidden_MD, keys_M, positions_M, self._temperature)

    def step(self, hidden_BD: Tensor, state: DecodeState) -> None:
        self._kernel.step(hidden_BD, state, self._stop_tokens, self._temperature)

    def score(self, hidden_MD: Tensor, tokens_M: Tensor) -> Tensor:
        return self._kernel.score(hidden_MD, tokens_M, self._temperature)


def advance(state: DecodeState, tokens_B: Tensor, logprobs_B: Tensor, stop_tokens: Tensor) -> None:
    """Write the tokens to the ring buffer and move each live row to its next position, or end it."""
    B, tokens_B = len(tokens_B), tokens_B.int()
    positions_B, slot = state.positions_B[:B], state.place_1.long()
    is_live_B = positions_B >= 0
    next_B = positions_B + 1
    is_last_B = (tokens_B[:, None] == stop_tokens).any(1) | (next_B >= state.ends_B[:B])
    is_last_B |= ~logprobs_B.isfinite()
    ring_tokens, ring_logprobs = state.drawn_tokens_WB[:, :B], state.drawn_logprobs_WB[:, :B]
    ring_tokens.index_copy_(0, slot, (tokens_B * is_live_B)[None])
    ring_logprobs.index_copy_(0, slot, logprobs_B.where(is_live_B, 0)[None])
    state.tokens_B[:B].copy_(tokens_B.where(is_live_B, state.tokens_B[:B]))
    positions_B.copy_(next_B.where(is_live_B & ~is_last_B, -1))
    state.place_1.add_(1)
