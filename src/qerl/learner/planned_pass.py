"""List the kernels of a prefill and an update from the model's config.json, before any weight is read."""

import torch
from torch import Tensor

from qerl.kernels.attention_options import AttentionOptions
from qerl.kernels.logprob import chunked_logprob
from qerl.kernels.nvrtc import KernelVariant, dry_run
from qerl.learner.packed_forward import head_of
from qerl.models.decoder import Decoder

_ROWS = 16  # any number: the kernels of these passes do not depend on it


def pass_kernels(decoder: Decoder, *, chunk_tokens: int) -> list[KernelVariant]:
    """Return the kernels of a forward pass and of one with its backward pass; attention is PyTorch's.

    decoder: without memory (models/outline.py), of layers with attention and dense MLPs; none are listed for
    others. chunk_tokens: learn.logprob_chunk_tokens.
    """
    if any(kind.mixer != "attention" or kind.mlp != "dense" for kind in decoder.architecture.kinds):
        return []
    positions_T = torch.arange(_ROWS, device=decoder.device)
    with dry_run() as variants:
        with torch.no_grad():
            decoder(positions_T, positions_T, _attend)
        hidden_TD = decoder(positions_T, positions_T, _attend)
        head = head_of(decoder, temperature=1.0, chunk_tokens=chunk_tokens)
        options = {"softcap": head.softcap, "chunk_tokens": head.chunk_tokens}
        logprob_T, _ = chunked_logprob(hidden_TD, head.operand, positions_T, temperature=1.0, **options)
        logprob_T.sum().backward()
    return list(variants)


def _attend(
    layer_index: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, options: AttentionOptions
) -> Tensor:
    """Stand for attention, which launches none of the kernels here: of its inputs' shapes and gradients."""
    return q_TNH * (k_TKH.sum() + v_TKH.sum())
