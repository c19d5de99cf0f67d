"""The forward pass over a packed batch, up to the final norm: of the learner, and of a teacher."""

import torch
from torch import Tensor

from qerl.kernels.attention.attention_options import AttentionOptions
from qerl.kernels.attention.tree_attention import tree_attention
from qerl.kernels.head.divergence import Head
from qerl.kernels.head.logprob import Softcap
from qerl.kernels.runtime.gpu_memory import sent
from qerl.learner.packing import PackedBatch
from qerl.models.decoder import Decoder, RunLayer, run_layer
from qerl.models.delta_net import recur_over
from qerl.models.linear_pass import PLAIN, LinearPass
from qerl.models.mixture import Route, RowsByLayer


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
