"""List the kernels of a prefill and an update from the model's config.json, before any weight is read."""

import torch
from torch import Tensor

from qerl.kernels.attention.attention_options import AttentionOptions
from qerl.kernels.attention.tree_attention import TreeLayout
from qerl.kernels.head.logprob import chunked_logprob
from qerl.kernels.runtime.nvrtc import KernelVariant, dry_run
from qerl.learner.forward import head_of
from qerl.models.decoder import Attend, Decoder, Layer, RowContext, run_layer
from qerl.models.delta_net import recur_over
from qerl.types import Tree

_ROWS = 16  # any number: the kernels of these passes do not depend on it


def pass_kernels(decoder: Decoder, *, chunk_tokens: int) -> list[KernelVariant]:
    """Return the kernels of a forward pass and of one with its backward pass. Attention is PyTorch's, but for
    the sum of a prompt's gradients.

    decoder: without memory (models/meta_decoder.py), of layers with dense MLPs; none are listed for others.
    chunk_tokens: learn.logprob_chunk_tokens."""
    if any(kind.mlp != "dense" for kind in decoder.architecture.kinds):
        return []
    positions_T = torch.arange(_ROWS, device=decoder.device)
    tree = Tree(start=0, prompt_tokens=_ROWS // 2, branch_tokens=(_ROWS - _ROWS // 2,))
    recur = recur_over((tree,), decoder.device)
    with dry_run() as variants:
        with torch.no_grad():
            decoder(positions_T, positions_T, _attend, recur=recur)
        hidden_TD = decoder(positions_T, positions_T, _attend, _run_as_later, recur=recur)
        head = head_of(decoder, temperature=1.0, chunk_tokens=chunk_tokens)
        options = {"softcap": head.softcap, "chunk_tokens": head.chunk_tokens}
        logprob_T, _ = chunked_logprob(hidden_TD, head.operand, positions_T, temperature=1.0, **options)
        logprob_T.sum().backward()
        runs = TreeLayout.of([tree], decoder.device).runs
        copies = torch.empty(len(runs.key_rows_R), 8, dtype=decoder.compute, device=decoder.device)
        runs.summed(copies, copies)
    return list(variants)


def _run_as_later(
    layer: Layer, h_TD: Tensor, context: RowContext, layer_index: int, attend: Attend
) -> Tensor:
    """Run a layer as one that is not the first: its input has a gradient."""
    zero = torch.zeros(1, device=h_TD.device, requires_grad=True)
    return run_layer(layer, h_TD + zero, context, layer_index, attend)


def _attend(
    layer_index: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, options: AttentionOptions
) -> Tensor:
    """Stand for attention itself, which launches none of the kernels here."""
    return q_TNH * (k_TKH.sum() + v_TKH.sum())
