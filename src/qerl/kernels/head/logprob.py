"""Log-probabilities of given tokens and entropies of their distributions, a part of the logits at a time.

    l_CV = hidden_TD[rows_C] @ head_VD.T / temperature        p_CV = softmax(l_CV)
    with a soft cap: l_CV = cap * tanh(scale * hidden_TD[rows_C] @ head_VD.T / cap) / temperature
    logprob_C = l_C[target] - logsumexp(l_CV)         entropy_C = logsumexp(l_CV) - sum_v p_CV * l_CV
    d logprob_C / d hidden_TD[rows_C] = (onehot(target) - p_CV) @ head_VD / temperature
    where only some tokens were allowed (token_mask.py), the sum of exp in logsumexp and p are over these

    hidden_TD   any float    its rows predict           head_VD   fp32 or 16 bits: the products' operands
    rows_C      int64        the row of each target     logits, probabilities, gradients' sums: fp32
    targets_C   int64        the tokens

The gradient of a token's logprob is one number that scales d logprob / d hidden. The forward pass computes
that row while the logits exist and keeps it, fp32 [C, D]: two products with the head in all. Recomputing the
logits in the backward pass would be a third.

A vocabulary of up to MAX_COLUMNS tokens (head_operand.py) is read at once, of a larger one a slice of
columns P after the other. r is the target if it is there, else another token:

    s = l_r - logprob_r     S' = logaddexp(S, s)     the log sums of this slice and of all so far
    acc_CD = exp(S - S') acc_CD - exp(s - S') sum_{v in P, v != target} p_v head_v
    d logprob_C / d hidden = (-expm1(logprob) head_target + acc_CD) / temperature      -expm1: 1 - p

No tensor is larger than [chunk_tokens, columns], and a packed head is unpacked a slice at a time, once for
all rows.

A head that is trained has a master, whose gradient the backward pass adds up from the logits of some rows at
a time, computed once more: sum_c grad_c (onehot(target) - p_cV)^T hidden_c / temperature.

On a GPU in bfloat16 one kernel reads a chunk's logits twice and writes onehot - p: 14 bytes per logit,
including the product's. torch's operations move about 75, which takes as long again as the products. A soft
cap is computed in it too.
"""

import struct
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qerl.kernels.head.head_operand import (
    MAX_COLUMNS,
    HeadOperand,
    PackedOperand,
    operand_rows,
    slices_of,
)
from qerl.kernels.head.token_mask import TokenMask
from qerl.kernels.pointwise.add_rows import add_rows
from qerl.kernels.pointwise.matmul_fp32 import add_product, product
from qerl.kernels.runtime import row_kernel
from qerl.kernels.runtime.nvrtc import addresses

CASES = ((1, 8, 32, 4), (7, 16, 50, 3), (24, 32, 1000, 8), (33, 64, 4099, 64))  # T, D, V, chunk_tokens
_THREADS = 1024


def reference(
    hidden_TD: Tensor,
    head_VD: Tensor,
    targets_T: Tensor,
    *,
    temperature: float,
    allowed_TV: Tensor | None = None,
    softcap: "Softcap | None" = None,
):
    """The definition above in float64, differentiable, all logits at once. allowed_TV: bool; None: all."""
    logits_TV = hidden_TD.double() @ head_VD.double().T
    if softcap is not None:
        logits_TV = softcap.cap * (logits_TV * (softcap.scale / softcap.cap)).tanh()
    logits_TV = logits_TV / temperature
    if allowed_TV is not None:
        logits_TV = logits_TV.masked_fill(~allowed_TV, -torch.inf)
    logprobs_TV = logits_TV.log_softmax(-1)
    logprob_T = logprobs_TV.gather(1, targets_T[:, None]).squeeze(1)
    return logprob_T, -(logprobs_TV.exp() * logprobs_TV.clamp(min=-1e9)).sum(-1)


def _chunk(
    logits_CV: Tensor, head_VD: Tensor, targets_C1: Tensor, temperature: float, has_slope: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return (logprob_C, entropy_C, onehot - p in the head's dtype) of one chunk."""
    if _has_kernel(logits_CV, head_VD):
        return launch(logits_CV, targets_C1, temperature, has_slope)
    logits_CV.div_(temperature).sub_(logits_CV.amax(1, keepdim=True))
    p_CV = logits_CV.exp()
    total_C1 = p_CV.sum(1, keepdim=True)
    p_CV.div_(total_C1)
    log_total_C = total_C1.squeeze(1).log()
    logprob_C = logits_CV.gather(1, targets_C1).squeeze(1) - log_total_C
    entropy_C = log_total_C - logits_CV.mul_(p_CV).sum(1)
    if not has_slope:
        return logprob_C, entropy_C, None
    # Round after the subtraction: near p = 1 the difference of rounded terms would be inexact.
    p_CV.neg_().scatter_add_(1, targets_C1, torch.ones_like(targets_C1, dtype=torch.float32))
    return logprob_C, entropy_C, p_CV.to(head_VD.dtype)


def _has_kernel(logits_CV: Tensor, head_VD: Tensor) -> bool:
    return row_kernel.are_vectors(head_VD) and logits_CV.shape[1] % 8 == 0


def launch(
    logits_CV: Tensor,
    targets_C1: Tensor,
    temperature: float,
    has_slope: bool,
    softcap: "Softcap | None" = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return (logprob_C, entropy_C, d logprob / d logit * temperature, bfloat16) by the kernel. softcap:
    logits_CV are products, and the slope is theirs."""
    C, V = logits_CV.shape
    device = logits_CV.device
    logprob_C, entropy_C = (torch.empty(C, dtype=torch.float32, device=device) for _ in range(2))
    slope_CV = torch.empty(C, V, dtype=torch.bfloat16, device=device) if has_slope else None
    defines, targets_C1 = {"THREADS": _THREADS}, targets_C1.contiguous()
    operands = struct.pack(
        "5Qif", *addresses(logits_CV, targets_C1, logprob_C, entropy_C, slope_CV), V, 1 / temperature
    )
    if softcap is not None:
        defines["SOFTCAP"] = 1
        operands += struct.pack("2f", softcap.scale, softcap.cap)
    kernel = row_kernel.kernel("logprob.cu", "logprob", device, **defines)
    kernel.launch(grid=C, block_threads=_THREADS, parameters=(operands,))
    return logprob_C, entropy_C, slope_CV


def cap_(logits_TV: Tensor, cap: float) -> Tensor:
    """Cap the logits in place."""
    return logits_TV.div_(cap).tanh_().mul_(cap)


class Softcap(NamedTuple):
    """Softcap(cap=30.0, scale=1.0)"""

    cap: float
    scale: float
    """Factor of the products before the cap."""

    def bend_(self, products_CV: Tensor) -> Tensor:
        """Turn products into capped logits in place; return d capped / d product."""
        capped_CV = cap_(products_CV.mul_(self.scale), self.cap)
        return (capped_CV / self.cap).square_().neg_().add_(1).mul_(self.scale)


class _Settings(NamedTuple):
    temperature: float
    chunk_tokens: int
    softcap: Softcap | None
    mask: TokenMask | None

    def caps_in_kernel(self, head_VD: Tensor) -> bool:
        has_kernel = row_kernel.are_vectors(head_VD) and head_VD.shape[0] % 8 == 0
        return self.softcap is not None and self.mask is None and has_kernel

    def bend_(self, logits_CV: Tensor, row: int, column: int) -> Tensor | None:
        """Cap and mask the logits in place; return d capped / d product, None without a cap. row, column:
        those that logits_CV[0, 0] has among all."""
        bend_CV = None if self.softcap is None else self.softcap.bend_(logits_CV)
        if self.mask is not None:
            self.mask.fill_(logits_CV, row, column)
        return bend_CV


def _walk(
    hidden_TD: Tensor,
    rows_C: Tensor,
    head: HeadOperand,
    targets_C: Tensor,
    settings: _Settings,
    slope_CD: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return (logprob_C, entropy_C), by chunks; fill slope_CD (fp32), if given, with d logprob / d hidden."""
    columns, *more = slices_of(head)
    if more:
        return _walk_slices(hidden_TD, rows_C, head, targets_C, settings, slope_CD)
    head_VD = operand_rows(head, columns)
    logprob_C = torch.empty(len(rows_C), dtype=torch.float32, device=hidden_TD.device)
    entropy_C = torch.empty_like(logprob_C)
    for start in range(0, len(rows_C), settings.chunk_tokens):
        some = slice(start, start + settings.chunk_tokens)
        hidden_CD = hidden_TD.index_select(0, rows_C[some]).to(head_VD.dtype)
        logits_CV, bend_CV = product(hidden_CD, head_VD.T), None
        arguments = targets_C[some, None], settings.temperature, slope_CD is not None
        if settings.caps_in_kernel(head_VD):
            logprob_C[some], entropy_C[some], slope_CV = launch(logits_CV, *arguments, settings.softcap)
        else:
            bend_CV = settings.bend_(logits_CV, start, 0)
            logprob_C[some], entropy_C[some], slope_CV = _chunk(logits_CV, head_VD, *arguments)
        del logits_CV
        if slope_CD is not None and slope_CV is not None:
            slope_CV = slope_CV if bend_CV is None else slope_CV.mul_(bend_CV)
            slope_CD[some] = product(slope_CV, head_VD).div_(settings.temperature)
        del slope_CV  # otherwise it would coexist with the next chunk's logits
    return logprob_C, entropy_C


class _SliceReading(NamedTuple):
    """Each row's distribution over one slice. r: the target where it is in the slice, else another token."""

    logit_C: Tensor
    """The logit of r, after cap and temperature."""
    logprob_C: Tensor
    """The logprob of r."""
    entropy_C: Tensor
    bend_C: Tensor
    """d capped / d product of r."""

    def put(self, some: slice, values: tuple[Tensor, ...]) -> None:
        for whole_C, part_C in zip(self, values, strict=True):
            whole_C[some] = part_C


class _Running:
    """Each row's distribution over the slices read so far, in float64: 1 - p of a likely target is small."""

    def __init__(self, read: _SliceReading):
        self.logit_C, self.bend_C = read.logit_C, read.bend_C
        """Those of the target, once its slice is read."""
        self.total_C = read.logit_C.double() - read.logprob_C
        """log sum exp."""
        self.entropy_C = read.entropy_C.double()

    def join(self, read: _SliceReading, is_inside_C: Tensor) -> tuple[Tensor, Tensor]:
        """Add a slice; return the shares of the slices before and of this one in all probability, fp32."""
        slice_C = read.logit_C.double() - read.logprob_C
        total_C = torch.logaddexp(self.total_C, slice_C)
        old_C, new_C = self.total_C - total_C, slice_C - total_C  # logs of the shares
        self.entropy_C = old_C.exp() * (self.entropy_C - old_C) + new_C.exp() * (read.entropy_C - new_C)
        self.logit_C = torch.where(is_inside_C, read.logit_C, self.logit_C)
        self.bend_C = torch.where(is_inside_C, read.bend_C, self.bend_C)
        self.total_C = total_C
        return old_C.exp().float(), new_C.exp().float()


def _walk_slices(
    hidden_TD: Tensor,
    rows_C: Tensor,
    head: HeadOperand,
    targets_C: Tensor,
    settings: _Settings,
    slope_CD: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return and fill what _walk does, one slice of the vocabulary after the other."""
    running = part_CD = target_CD = None
    if slope_CD is not None:
        part_CD, target_CD = torch.empty_like(slope_CD), torch.zeros_like(slope_CD, dtype=head.dtype)
    for columns in slices_of(head):
        head_PD = operand_rows(head, columns)
        is_inside_C = (targets_C >= columns.start) & (targets_C < columns.stop)
        local_C = (targets_C - columns.start).clamp_(0, len(head_PD) - 1)
        into_CD = slope_CD if running is None else part_CD
        read = _SliceReading(*(torch.empty_like(targets_C, dtype=torch.float32) for _ in range(4)))
        for start in range(0, len(rows_C), settings.chunk_tokens):
            some = slice(start, start + settings.chunk_tokens)
            hidden_CD = hidden_TD.index_select(0, rows_C[some]).to(head.dtype)
            place = start, columns.start
            values, slope_CP = _read_slice(
                hidden_CD, head_PD, local_C[some], is_inside_C[some], settings, place, into_CD is not None
            )
            read.put(some, values)
            if into_CD is not None and slope_CP is not None and target_CD is not None:
                add_product(into_CD[some], slope_CP, head_PD, beta=0)
                row_CD = head_PD.index_select(0, local_C[some])
                target_CD[some] = torch.where(is_inside_C[some, None], row_CD, target_CD[some])
            del slope_CP  # otherwise it would coexist with the next chunk's logits
        if running is None:
            running = _Running(read)
        else:
            old_C, new_C = running.join(read, is_inside_C)
            if slope_CD is not None and part_CD is not None:
                slope_CD.mul_(old_C[:, None]).addcmul_(part_CD, new_C[:, None])
        del head_PD  # otherwise it would coexist with the next slice's
    assert running is not None
    logprob_C = running.logit_C.double() - running.total_C
    if slope_CD is not None and target_CD is not None:
        factor_C = logprob_C.expm1().neg_().float().mul_(running.bend_C)
        _add_targets_(slope_CD, target_CD, factor_C, settings)
    return logprob_C.float(), running.entropy_C.float()


def _add_targets_(slope_CD: Tensor, target_CD: Tensor, factor_C: Tensor, settings: _Settings) -> None:
    """Add the targets' rows of the head times their factors, and divide by the temperature."""
    for start in range(0, len(slope_CD), settings.chunk_tokens):
        some = slice(start, start + settings.chunk_tokens)
        slope_CD[some].addcmul_(target_CD[some].float(), factor_C[some, None]).div_(settings.temperature)


def _read_slice(
    hidden_CD: Tensor,
    head_PD: Tensor,
    local_C: Tensor,
    is_inside_C: Tensor,
    settings: _Settings,
    place: tuple[int, int],
    has_slope: bool,
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Tensor | None]:
    """Return the fields of a _SliceReading, and -p_CP times the cap's slope, 0 for targets. place: the row
    and column of its first logit."""
    logits_CP, bend_CP, softcap = product(hidden_CD, head_PD.T), None, settings.softcap
    in_kernel, local_C1 = settings.caps_in_kernel(head_PD), local_C[:, None]
    if not in_kernel:
        bend_CP = settings.bend_(logits_CP, *place)
    if settings.mask is not None:  # a token that is left out would be far from all others
        local_C1 = torch.where(is_inside_C[:, None], local_C1, logits_CP.argmax(1, keepdim=True))
    logit_C = logits_CP.gather(1, local_C1).squeeze(1)
    bend_C = torch.ones_like(logit_C)
    if bend_CP is not None:
        bend_C = bend_CP.gather(1, local_C1).squeeze(1)
    elif softcap is not None:
        bend_C = softcap.bend_(logit_C)
    has_kernel = in_kernel or _has_kernel(logits_CP, head_PD)
    logit_C = logit_C * (1 / settings.temperature) if has_kernel else logit_C / settings.temperature
    arguments = local_C1, settings.temperature, has_slope
    if in_kernel:
        logprob_C, entropy_C, slope_CP = launch(logits_CP, *arguments, softcap)
    else:
        logprob_C, entropy_C, slope_CP = _chunk(logits_CP, head_PD, *arguments)
    if slope_CP is not None:
        slope_CP = slope_CP if bend_CP is None else slope_CP.mul_(bend_CP)
        minus_p_C = torch.where(is_inside_C, 0.0, logprob_C.exp().mul_(bend_C).neg_())
        slope_CP.scatter_(1, local_C1, minus_p_C[:, None].to(slope_CP.dtype))
    return (logit_C, logprob_C, entropy_C, bend_C), slope_CP


def scatter_rows(
    slope_CD: Tensor, rows_C: Tensor, grad_C: Tensor, shape: torch.Size, chunk_tokens: int
) -> Tensor:
    """Return fp32 d_TD of this shape, with grad_c slope_c added to row rows_C[c]. Sum in fp32 and in order: a
    prompt's last row gets one gradient for each of its samples."""
    d_TD = torch.zeros(shape, dtype=torch.float32, device=slope_CD.device)
    for start in range(0, len(rows_C), chunk_tokens):
        some = slice(start, start + chunk_tokens)
        add_rows(d_TD, rows_C[some], slope_CD[some] * grad_C[some, None])
    return d_TD


def _head_gradient(
    hidden_TD: Tensor, rows_C: Tensor, head_VD: Tensor, targets_C: Tensor, settings: _Settings, grad_C: Tensor
) -> Tensor:
    """Return the gradient in the head, fp32 [V, D], of logprobs with the gradients grad_C."""
    total_VD = torch.zeros(head_VD.shape, dtype=torch.float32, device=head_VD.device)
    step = max(settings.chunk_tokens * MAX_COLUMNS // max(len(head_VD), MAX_COLUMNS), 1)
    for start in range(0, len(rows_C), step):
        some = slice(start, start + step)
        hidden_CD = hidden_TD.index_select(0, rows_C[some]).to(head_VD.dtype)
        logits_CV = product(hidden_CD, head_VD.T)
        bend_CV = settings.bend_(logits_CV, start, 0)
        _, _, slope_CV = _chunk(logits_CV, head_VD, targets_C[some, None], settings.temperature, True)
        del logits_CV
        assert slope_CV is not None
        slope_CV = slope_CV if bend_CV is None else slope_CV.mul_(bend_CV)
        weighted_CD = (hidden_CD * (grad_C[some, None] / settings.temperature)).to(head_VD.dtype)
        add_product(total_VD, slope_CV.T, weighted_CD)
        del slope_CV
    return total_VD


class _Logprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_TD, rows_C, head, targets_C, settings, master_VD):
        slope_CD = torch.empty(len(rows_C), hidden_TD.shape[1], dtype=torch.float32, device=hidden_TD.device)
        logprob_C, entropy_C = _walk(hidden_TD, rows_C, head, targets_C, settings, slope_CD)
        for_head = () if master_VD is None else (hidden_TD, head, targets_C)
        ctx.save_for_backward(slope_CD, rows_C, *for_head)
        ctx.settings = settings
        ctx.shape, ctx.dtype, ctx.chunk_tokens = hidden_TD.shape, hidden_TD.dtype, settings.chunk_tokens
        ctx.mark_non_differentiable(entropy_C)
        return logprob_C, entropy_C

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        slope_CD, rows_C, *for_head = ctx.saved_tensors
        d_TD = scatter_rows(slope_CD, rows_C, grads[0], ctx.shape, ctx.chunk_tokens)
        d_VD = None
        if for_head:
            hidden_TD, head_VD, targets_C = for_head
            d_VD = _head_gradient(hidden_TD, rows_C, head_VD, targets_C, ctx.settings, grads[0])
        return d_TD.to(ctx.dtype), *[None] * 4, d_VD


def chunked_logprob(
    hidden_TD: Tensor,
    head: HeadOperand,
    targets_C: Tensor,
    *,
    temperature: float,
    chunk_tokens: int,
    rows_C: Tensor | None = None,
    softcap: Softcap | None = None,
    mask: TokenMask | None = None,
    master_VD: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return fp32 (logprob_C, entropy_C). logprob is differentiable in hidden_TD; entropy has no gradient.

    rows_C: None means one target per row. mask: None means every token is allowed. master_VD: gets the
    gradient of a head that is a tensor.
    """
    if rows_C is None:
        rows_C = torch.arange(len(hidden_TD), device=hidden_TD.device)
    assert hidden_TD.ndim == 2 and targets_C.shape == rows_C.shape and targets_C.dtype == torch.int64
    assert len(head.shape) == 2 and head.shape[1] == hidden_TD.shape[1]
    assert isinstance(head, PackedOperand) or head.stride(1) == 1
    assert temperature > 0 and chunk_tokens > 0
    settings = _Settings(temperature, chunk_tokens, softcap, mask)
    assert master_VD is None or isinstance(head, Tensor)
    if (hidden_TD.requires_grad or master_VD is not None) and torch.is_grad_enabled():
        return _Logprob.apply(hidden_TD, rows_C, head, targets_C, settings, master_VD)
    return _walk(hidden_TD.detach(), rows_C, head, targets_C, settings, None)
