"""Rows of an embedding whose fp32 master is trained.

h_t = weight[token_t]        fp32, from the working copy        dmaster_v = sum of dh_t over the rows t of v
"""

import torch
from torch import Tensor

from qerl.kernels.pointwise.add_rows import add_rows


def reference(tokens_T: Tensor, weight_VD: Tensor) -> Tensor:
    """The definition in float64; differentiable."""
    return weight_VD.double()[tokens_T]


def trained_embedding(tokens_T: Tensor, weight_VD: Tensor, master_VD: Tensor) -> Tensor:
    """Return h, fp32 [T, D]; the master gets the gradient, in a fixed order of rows."""
    assert weight_VD.shape == master_VD.shape and master_VD.dtype == torch.float32
    return _TrainedEmbedding.apply(tokens_T, weight_VD, master_VD)


class _TrainedEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tokens_T, weight_VD, master_VD):
        ctx.save_for_backward(tokens_T)
        ctx.shape = master_VD.shape
        return weight_VD[tokens_T].float()

    @staticmethod
    def backward(ctx, dh_TD):  # type: ignore[override]
        (tokens_T,) = ctx.saved_tensors
        d_VD = torch.zeros(ctx.shape, dtype=torch.float32, device=dh_TD.device)
        add_rows(d_VD, tokens_T, dh_TD)
        return None, None, d_VD
