"""Logprobs and entropies of a packed batch's sampled tokens under the current model, with gradients.

DecoderForward       our decoder: packed rows, chunks of logits (kernels/head/logprob.py)
TransformersForward  padded_forward.py: transformers' model, a padded row for each sample
"""

import torch
from torch import Tensor

from qerl.config import RunConfig
from qerl.kernels.attention.attention_options import AttentionOptions
from qerl.kernels.attention.tree_attention import tree_attention
from qerl.kernels.head.divergence import Head
from qerl.kernels.head.logprob import Softcap, chunked_logprob
from qerl.kernels.runtime.gpu_memory import sent
from qerl.learner.activation_checkpointing import RECOMPUTE
from qerl.learner.packing import PackedBatch
from qerl.learner.padded_forward import TransformersForward
from qerl.learner.router_replay import RouterReplay, RoutingReading
from qerl.models.decoder import Decoder, RunLayer, run_layer
from qerl.models.delta_net import recur_over
from qerl.models.linear_pass import PLAIN, LinearPass
from qerl.models.mixture import Route, RowsByLayer
from qerl.models.policy_model import PolicyModel
from qerl.models.transformers_backend.transformers_model import TransformersModel


def forward_of(model: PolicyModel, config: RunConfig) -> "TransformersForward | DecoderForward":
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
        """Return (logprob_C, entropy_C) of the sampled tokens; only the logprobs have a gradient."""
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
            master_VD=self._decoder.lm_head.full,
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


def packed_hidden(
    decoder: Decoder,
    batch: PackedBatch,
    run_layer: RunLayer = run_layer,
    route: Route | None = None,
    rows_by_layer: RowsByLayer | None = None,
    linear_pass: LinearPass = PLAIN,
) -> Tensor:
    """Return hidden_TD of the batch's rows; hidden_TD[source_rows_C] predict its targets. route, and what it
    is known to choose: of a mixture of experts."""

    def attend(layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, options: AttentionOptions) -> Tensor:
        return tree_attention(q_TNH, k_TKH, v_TKH, batch.layout, options)

    recur = recur_over(batch.trees, decoder.device)
    noise_rows_T = _noise_rows(decoder, batch)
    rows = noise_rows_T, recur, route, None, rows_by_layer, linear_pass
    return decoder(batch.tokens_T, batch.positions_T, attend, run_layer, *rows)


def head_of(decoder: Decoder, *, temperature: float, chunk_tokens: int) -> Head:
    """Return the LM head; without a cap its alpha is folded into the temperature."""
    head = decoder.lm_head
    softcap = None if head.softcap is None else Softcap(head.softcap, head.alpha)
    return Head(head.sliced_operand(), temperature / (1.0 if softcap else head.alpha), softcap, chunk_tokens)


def _noise_rows(decoder: Decoder, batch: PackedBatch) -> Tensor | None:
    """Return each row's row of the noise table; None if there is no table."""
    if not decoder.noise_table.is_open:
        return None
    lengths, rows = [], []
    for tree, (prompt_row, sample_rows) in zip(
        batch.trees, decoder.noise_table.rows(batch.members), strict=True
    ):
        lengths += [tree.prompt_tokens, *tree.branch_tokens]
        rows += [prompt_row, *sample_rows]
    rows_T = torch.tensor(rows, dtype=torch.int32).repeat_interleave(torch.tensor(lengths))
    return sent(rows_T, decoder.device)
