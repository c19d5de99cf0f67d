"""Causal attention over packed trees: each branch sees its prompt and itself; forward and backward.

    o_n = softmax(q_n @ k^T / sqrt(H)) @ v      over the keys a query may see; k, v of head n * K // N

On a GPU in 16 bits FlashAttention computes it: flash_attention_4.py where that is installed, else
flash_attention.py. A tree becomes a list of runs, each a separate sequence whose last query sees its last
key:

    run          queries            keys, gathered
    prompt       its rows           its rows
    a branch     its rows           the prompt's rows, its rows

R counts the gathered keys: a prompt's row appears once for the prompt and once per branch, and its gradient
is the sum over all of these in fp32, branch by branch in the order of the rows. The backward kernel adds the
parts of dq with atomics unless torch's deterministic mode is on, so it is turned on for that one call. For 4
x 2,048 rows (N 28, K 4, H 128, H200) the forward pass takes 0.56 ms and the backward pass 1.6 ms. In all
other cases (CPU, fp32, other head sizes, soft caps) `attention.packed_attention` computes it.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.deterministic
from torch import Tensor

from qerl.kernels.attention import PackedLayout, packed_attention, reference
from qerl.kernels.attention_options import PLAIN, AttentionOptions
from qerl.kernels.flash_attention import SequenceEnds, flash_attention, is_for_flash
from qerl.kernels.flash_attention_4 import flash_attention_4, is_for_flash_4
from qerl.kernels.gpu_memory import sent
from qerl.types import Tree

__all__ = ["CASES", "TreeLayout", "over_runs", "reference", "tree_attention"]

CASES = (  # N, K, H, trees as (prompt, branches)
    (4, 4, 16, ((7, ()), (1, ()))),
    (6, 2, 32, ((5, (3, 0, 9)), (12, (1,)), (1, (1, 1, 1, 1)))),
    (14, 2, 64, ((24, (5, 8, 2, 13)), (31, (4, 4, 4, 4)), (300, ()))),
    (14, 2, 128, ((40, (67, 3, 0, 20)), (21, (130,)))),
)

AttendRuns = Callable[[Tensor, Tensor, Tensor, "TreeLayout"], Tensor]


@dataclasses.dataclass(frozen=True, eq=False)
class TreeLayout:
    """The runs of a batch's trees, computed once and used by every layer."""

    trees: tuple[Tree, ...]
    key_rows_R: Tensor
    ends: SequenceEnds
    """The ends of each run's rows and gathered keys."""
    own_T: Tensor
    """The index among the R keys of each row's key in its own run."""
    copies: tuple[tuple[Tensor, Tensor], ...]
    """For the first branch of every tree, the second, ...: the prompts' rows, their indices among the R."""

    @classmethod
    def of(cls, trees: list[Tree], device: torch.device | str = "cpu") -> "TreeLayout":
        """Return the layout of trees that together cover the rows 0..T-1."""
        trees = sorted(trees, key=lambda tree: tree.start)
        key_rows: list[range] = []
        num_queries, num_keys, own = list[int](), list[int](), list[range]()
        copies: list[list[tuple[range, range]]] = []
        row = key = 0
        for tree in trees:
            assert tree.start == row, "the trees leave rows out"
            prompt = range(tree.start, tree.start + tree.prompt_tokens)
            branches = [length for length in tree.branch_tokens if length]
            for index, length in enumerate([tree.prompt_tokens, *branches]):
                seen = len(prompt) if index else 0
                key_rows += [prompt[:seen], range(row, row + length)]
                own.append(range(key + seen, key + seen + length))
                num_queries.append(length)
                num_keys.append(seen + length)
                if index:
                    copies += [[]] * (index > len(copies))
                    copies[index - 1] = [*copies[index - 1], (prompt, range(key, key + seen))]
                row, key = row + length, own[-1].stop
        as_tensor = functools.partial(_indices, device=device)
        return cls(
            trees=tuple(trees),
            key_rows_R=as_tensor(key_rows),
            ends=SequenceEnds.of(num_queries, num_keys, device),
            own_T=as_tensor(own),
            copies=tuple(
                (as_tensor([rows for rows, _ in pairs]), as_tensor([copied for _, copied in pairs]))
                for pairs in copies
            ),
        )

    @functools.cached_property
    def packed(self) -> PackedLayout:
        return PackedLayout.of(list(self.trees), self.own_T.device)

    def windowed(self, window: int | None) -> PackedLayout:
        if window is None:
            return self.packed
        if window not in self._windowed:
            self._windowed[window] = PackedLayout.of(list(self.trees), self.own_T.device, window)
        return self._windowed[window]

    @functools.cached_property
    def _windowed(self) -> dict[int, PackedLayout]:
        return {}


def _indices(ranges: list[range], device: torch.device | str) -> Tensor:
    return sent(torch.cat([torch.arange(r.start, r.stop) for r in ranges]), device)


def tree_attention(
    q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, layout: TreeLayout, options: AttentionOptions = PLAIN
) -> Tensor:
    """Return o_TNH, differentiable in q, k and v; deterministic."""
    assert len(q_TNH) == len(k_TKH) == len(layout.own_T) and k_TKH.shape == v_TKH.shape
    if is_for_flash_4(q_TNH, k_TKH.shape[1], options):
        return over_runs(q_TNH, k_TKH, v_TKH, layout, functools.partial(_flash_4, options=options))
    is_flash = q_TNH.is_cuda and q_TNH.dtype != torch.float32
    if is_flash and is_for_flash(q_TNH.shape[2], options):
        return over_runs(q_TNH, k_TKH, v_TKH, layout, functools.partial(_flash, options=options))
    return packed_attention(q_TNH, k_TKH, v_TKH, layout.windowed(options.window), options)


def _flash(
    q_TNH: Tensor, k_RKH: Tensor, v_RKH: Tensor, layout: TreeLayout, *, options: AttentionOptions
) -> Tensor:
    return flash_attention(q_TNH, k_RKH, v_RKH, layout.ends, options)


def _flash_4(
    q_TNH: Tensor, k_RKH: Tensor, v_RKH: Tensor, layout: TreeLayout, *, options: AttentionOptions
) -> Tensor:
    return flash_attention_4(q_TNH, k_RKH, v_RKH, layout.ends, options)


def over_runs(
    q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, layout: TreeLayout, attend_runs: AttendRuns
) -> Tensor:
    """Compute tree attention with attend_runs(q_TNH, k_RKH, v_RKH, layout), which must be differentiable."""
    return _OverRuns.apply(q_TNH, k_TKH, v_TKH, layout, attend_runs)


class _OverRuns(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_TNH, k_TKH, v_TKH, layout, attend_runs):
        ctx.layout, is_learning = layout, any(ctx.needs_input_grad)
        k_RKH, v_RKH = k_TKH, v_TKH
        if layout.copies:
            k_RKH, v_RKH = (x.index_select(0, layout.key_rows_R) for x in (k_TKH, v_TKH))
        ctx.operands = [x.detach().requires_grad_(is_learning) for x in (q_TNH, k_RKH, v_RKH)]
        with torch.set_grad_enabled(is_learning):
            ctx.o_TNH = attend_runs(*ctx.operands, layout)
        return ctx.o_TNH.detach()

    @staticmethod
    def backward(ctx, do_TNH):  # type: ignore[override]
        with _deterministic():
            dq_TNH, dk_RKH, dv_RKH = torch.autograd.grad(ctx.o_TNH, ctx.operands, do_TNH.contiguous())
        ctx.o_TNH = ctx.operands = None
        return dq_TNH, _sum_copies(dk_RKH, ctx.layout), _sum_copies(dv_RKH, ctx.layout), None, None


def _sum_copies(d_RKH: Tensor, layout: TreeLayout) -> Tensor:
    """Return d_TKH: each row's gradient plus its copies'. No call adds to a row twice: the order is fixed."""
    if not layout.copies:
        return d_RKH
    d_TKH = d_RKH.index_select(0, layout.own_T).float()
    for rows, copied in layout.copies:
        d_TKH.index_add_(0, rows, d_RKH.index_select(0, copied).float())
    return d_TKH.to(d_RKH.dtype)


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    settings: Any = torch.utils.deterministic
    fills = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = False  # it would write every new tensor an extra time
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        settings.fill_uninitialized_memory = fills
