"""Sample the next token of every row from hidden states, and advance the decode state.

    TorchSampler   logits, then token_sampling.py: all sampling parameters, any device
    FusedSampler   kernels/head/head_sample.py: temperature only, logits never written to memory, on a GPU
    RowSampler, FusedRowSampler    row_sampler.py: the same for rows that differ in their parameters

A token's randomness is a function of its row's key and position. TorchSampler uses seeds.uniform of (seed,
step, prompt, sample, token index in the sample), with the last round computed on the device: the same bits on
every device (tests/engine/sampling/test_sampler.py). FusedSampler uses the kernel's own generator.
"""

import abc
from collections.abc import Callable

import torch
from torch import Tensor

from qerl.algo.seeds import last_round, mix, rounds
from qerl.engine.sampling.token_sampling import finite_temperature, sample_tokens, score_tokens
from qerl.engine.schedule.live_sample import LiveSample
from qerl.kernels.attention.decode_state import DecodeState
from qerl.kernels.head.head_sample import HeadSample
from qerl.models.policy_model import PolicyModel
from qerl.types import Sampling


class Sampler(abc.ABC):
    is_capturable = True
    """True if a step can be captured in a CUDA graph: it never waits for the device."""
    num_unfused_rows = 0
    """Rows that are drawn from logits in memory beside the kernels of the head."""

    def __init__(self, stop_tokens: Tensor):
        self._stop_tokens = stop_tokens
        self.row_stop_ids: frozenset[int] = frozenset()
        """Tokens besides the engine's that end a row of the bound samples on the device."""

    def bind(self, samples_B: list[LiveSample]) -> None:  # noqa: B027
        """Sample for these rows from now on; is_capturable may change."""

    def key(self, coordinates: tuple[int, ...], prompt_tokens: int) -> int:
        """Return the row key of (seed, step, prompt, sample) or (seed, step, prompt, sample, branch)."""
        return rounds(*coordinates, 1 - prompt_tokens)  # token index = position + 1 - prompt_tokens

    @abc.abstractmethod
    def sample(self, hidden_MD: Tensor, keys_M: Tensor, positions_M: Tensor) -> tuple[Tensor, Tensor]:
        """Return (tokens_M, logprobs_M) after hidden states at these positions; NaN logits give a NaN."""

    def step(self, hidden_BD: Tensor, state: DecodeState) -> None:
        """Sample for the first B rows and advance them; see kernels/attention/decode_state.py."""
        B = len(hidden_BD)
        tokens_B, logprobs_B = self.sample(hidden_BD, state.keys_B[:B], state.positions_B[:B])
        state.advance(tokens_B, logprobs_B, self._stop_tokens)

    @abc.abstractmethod
    def score(
        self, hidden_MD: Tensor, tokens_M: Tensor, leave_out: Callable[[Tensor], None] | None = None
    ) -> Tensor:
        """Return logprobs_M of these int64 tokens, bitwise as if they were sampled from as many rows.
        leave_out: fills in place the logits of tokens that a grammar did not allow."""


class TorchSampler(Sampler):
    def __init__(self, decoder: PolicyModel, sampling: Sampling, stop_tokens: Tensor):
        super().__init__(stop_tokens)
        self._decoder, self._sampling = decoder, sampling

    def sample(self, hidden_MD: Tensor, keys_M: Tensor, positions_M: Tensor) -> tuple[Tensor, Tensor]:
        uniforms_M = last_round(keys_M, positions_M)
        return sample_tokens(self._decoder.logits(hidden_MD), self._sampling, uniforms_M)

    def score(
        self, hidden_MD: Tensor, tokens_M: Tensor, leave_out: Callable[[Tensor], None] | None = None
    ) -> Tensor:
        assert leave_out is None, "only rows of requests have grammars"
        return score_tokens(self._decoder.logits(hidden_MD), self._sampling, tokens_M)


class FusedSampler(Sampler):
    def __init__(self, kernel: HeadSample, sampling: Sampling, stop_tokens: Tensor):
        super().__init__(stop_tokens)
        self._kernel = kernel
        self._temperature = torch.full((1,), finite_temperature(sampling), device=stop_tokens.device)

    def key(self, coordinates: tuple[int, ...], prompt_tokens: int) -> int:
        return mix(*coordinates)

    def sample(self, hidden_MD: Tensor, keys_M: Tensor, positions_M: Tensor) -> tuple[Tensor, Tensor]:
        return self._kernel.draw(hidden_MD, keys_M, positions_M, self._temperature)

    def step(self, hidden_BD: Tensor, state: DecodeState) -> None:
        self._kernel.step(hidden_BD, state, self._stop_tokens, self._temperature)

    def score(
        self, hidden_MD: Tensor, tokens_M: Tensor, leave_out: Callable[[Tensor], None] | None = None
    ) -> Tensor:
        assert leave_out is None, "only rows of requests have grammars"
        return self._kernel.score(hidden_MD, tokens_M, self._temperature)
