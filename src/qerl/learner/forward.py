"""Logprobs and entropies of a packed batch's sampled tokens under the current model, with gradients.

DecoderForward       our decoder: packed rows, chunks of logits (kernels/head/logprob.py)
TransformersForward  padded_forward.py: transformers' model, a padded row for each sample
"""

from typing import Protocol

from torch import Tensor

from qerl.config import RunConfig
from qerl.kernels.head.divergence import Head
from qerl.kernels.head.logprob import chunked_logprob
from qerl.learner.activation_checkpointing import RECOMPUTE
from qerl.learner.packed_forward import head_of, packed_hidden
from qerl.learner.packing import PackedBatch
from qerl.learner.padded_forward import TransformersForward
from qerl.learner.router_replay import RouterReplay, RoutingReading
from qerl.models.decoder import Decoder
from qerl.models.linear_pass import PLAIN, LinearPass
from qerl.models.policy_model import PolicyModel
from qerl.models.transformers_backend.transformers_model import TransformersModel


class LearnerForward(Protocol):
    def __call__(self, batch: PackedBatch, linear_pass: LinearPass = PLAIN) -> tuple[Tensor, Tensor]:
        """Return (logprob_C, entropy_C) of the sampled tokens; only the logprobs have a gradient."""
        ...


def forward_of(model: PolicyModel, config: RunConfig) -> LearnerForward:
    """Return the forward pass of this model."""
    if isinstance(model, TransformersModel):
        return TransformersForward(model, config.learn, config.sample.temperature)
    assert isinstance(model, Decoder)
    return DecoderForward(model, config)


class DecoderForward:
    def __init__(self, decoder: Decoder, config: RunConfig):
        self._decoder, self._config = decoder, config
        self._run_layer = RECOMPUTE[config.learn.gradient_checkpointing](decoder.device)
        self._replay: RouterReplay | None = None  # of the latest pass of a mixture

    def __call__(self, batch: PackedBatch, linear_pass: LinearPass = PLAIN) -> tuple[Tensor, Tensor]:
        head = self.head()
        return chunked_logprob(
            self.hidden(batch, linear_pass),
            head.operand,
            batch.targets_C,
            rows_C=batch.source_rows_C,
            temperature=head.temperature,
            softcap=head.softcap,
            chunk_tokens=head.chunk_tokens,
            mask=batch.mask,
        )

    def hidden(self, batch: PackedBatch, linear_pass: LinearPass) -> Tensor:
        architecture, self._replay, known = self._decoder.architecture, None, None
        if architecture.mixture is not None:
            is_replayed = self._config.algo.router_replay
            self._replay = RouterReplay(architecture, batch.routes_T, is_replayed=is_replayed)
            known = self._replay.rows_by_layer()
        return packed_hidden(self._decoder, batch, self._run_layer(), self._replay, known, linear_pass)

    def routing(self) -> RoutingReading | None:
        """Return what the latest pass did with the routes; None without a mixture."""
        return None if self._replay is None else self._replay.reading()

    def head(self) -> Head:
        temperature, learn = self._config.sample.temperature, self._config.learn
        return head_of(self._decoder, temperature=temperature, chunk_tokens=learn.logprob_chunk_tokens)
