"""Causal attention over packed trees: each branch sees its prompt and itself; forward and backward.

    o_n = softmax(q_n @ k^T / sqrt(H)) @ v      over the keys a query may see; k, v of head n * K // N

On a GPU in 16 bits FlashAttention computes it, with a tree as a list of runs (runs.py): flash_attention_4.py
where that is installed, else flash_attention.py. The backward kernel of the latter adds the parts of dq with
atomics unless torch's deterministic mode is on, so it is turned on for that one call. For 4 x 2,048 rows (N
28, K 4, H 128, H200) the forward pass takes 0.56 ms and the backward pass 1.6 ms. In all other cases (CPU,
fp32, other head sizes, soft caps) `attention.packed_attention` computes it.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.deterministic
from torch import Tensor

from qerl.kernels.attention.attention import PackedLayout, packed_attention, reference
from qerl.kernels.attention.attention_options import PLAIN, AttentionOptions
from qerl.kernels.attention.flash_attention import SequenceEnds, attend, gradients, is_for_flash
from qerl.kernels.attention.flash_attention_4 import flash_attention_4, is_for_flash_4
from qerl.kernels.attention.runs import Run, Runs, split
from qerl.kernels.runtime.architectures import num_sms
from qerl.types import Tree

__all__ = ["CASES", "TreeLayout", "flash_over_runs", "over_runs", "reference", "tree_attention"]

CASES = (  # N, K, H, trees as (prompt, branches)
    (4, 4, 16, ((7, ()), (1, ()))),
    (6, 2, 32, ((5, (3, 0, 9)), (12, (1,)), (1, (1, 1, 1, 1)))),
    (14, 2, 64, ((24, (5, 8, 2, 13)), (31, (4, 4, 4, 4)), (300, ()))),
    (14, 2, 128, ((40, (67, 3, 0, 20)), (21, (130,)))),
)

AttendRuns = Callable[[Tensor, Tensor, Tensor, SequenceEnds], Tensor]


@dataclasses.dataclass(frozen=True, eq=False)
class TreeLayout:
    """The runs of a batch's trees, computed once and used by every layer."""

    trees: tuple[Tree, ...]
    runs: Runs

    @classmethod
    def of(cls, trees: list[Tree], device: torch.device | str = "cpu") -> "TreeLayout":
        """Return the layout of trees that together cover the rows 0..T-1."""
        trees = sorted(trees, key=lambda tree: tree.start)
        runs = list[Run]()
        for tree in trees:
            assert tree.start == (runs[-1].rows.stop if runs else 0), "the trees leave rows out"
            prompt = range(tree.start, tree.start + tree.prompt_tokens)
            runs.append(Run(prompt))
            for length in filter(None, tree.branch_tokens):
                row = runs[-1].rows.stop
                runs.append(Run(range(row, row + length), (prompt,)))
        return cls(trees=tuple(trees), runs=Runs.of(runs, device))

    @property
    def device(self) -> torch.device:
        return self.runs.key_rows_R.device

    def split_runs(self, num_heads: int) -> Runs:
        """Return the runs of FlashAttention 2's backward pass. With a window a long run costs no more a row
        than a short one, and stays whole."""
        if num_heads not in self._split_runs:
            runs, is_gpu = list(self.runs.runs), self.device.type == "cuda"
            parts = split(runs, num_heads, num_sms(self.device)) if is_gpu else runs
            self._split_runs[num_heads] = self.runs if parts is runs else Runs.of(parts, self.device)
        return self._split_runs[num_heads]

    @functools.cached_property
    def _split_runs(self) -> dict[int, Runs]:
        return {}

    def windowed(self, window: int | None) -> PackedLayout:
        if window not in self._windowed:
            self._windowed[window] = PackedLayout.of(list(self.trees), self.device, window)
        return self._windowed[window]

    @functools.cached_property
    def _windowed(self) -> dict[int | None, PackedLayout]:
        return {}


def tree_attention(
    q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, layout: TreeLayout, options: AttentionOptions = PLAIN
) -> Tensor:
    """Return o_TNH, differentiable in q, k and v; deterministic."""
    assert len(q_TNH) == len(k_TKH) == layout.runs.num_rows and k_TKH.shape == v_TKH.shape
    if is_for_flash_4(q_TNH, k_TKH.shape[1], options):
        return over_runs(q_TNH, k_TKH, v_TKH, layout, functools.partial(flash_attention_4, options=options))
    is_flash = q_TNH.is_cuda and q_TNH.dtype != torch.float32
    if is_flash and is_for_flash(q_TNH.shape[2], options):
        return flash_over_runs(q_TNH, k_TKH, v_TKH, layout, options)
    return packed_attention(q_TNH, k_TKH, v_TKH, layout.windowed(options.window), options)


def over_runs(
    q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, layout: TreeLayout, attend_runs: AttendRuns
) -> Tensor:
    """Compute tree attention with attend_runs(q_TNH, k_RKH, v_RKH, ends), which must be differentiable."""
    return _OverRuns.apply(q_TNH, k_TKH, v_TKH, layout.runs, attend_runs)


def flash_over_runs(
    q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, layout: TreeLayout, options: AttentionOptions = PLAIN
) -> Tensor:
    """Compute tree attention by FlashAttention 2; keys and values are gathered again for its gradient."""
    return _FlashOverRuns.apply(q_TNH, k_TKH, v_TKH, layout, options)


class _OverRuns(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_TNH, k_TKH, v_TKH, runs, attend_runs):
        ctx.runs, is_learning = runs, any(ctx.needs_input_grad)
        operands = q_TNH, *runs.gathered(k_TKH, v_TKH)
        ctx.operands = [x.detach().requires_grad_(is_learning) for x in operands]
        with torch.set_grad_enabled(is_learning):
            ctx.o_TNH = attend_runs(*ctx.operands, runs.ends)
        return ctx.o_TNH.detach()

    @staticmethod
    def backward(ctx, do_TNH):  # type: ignore[override]
        with _deterministic():
            d = torch.autograd.grad(ctx.o_TNH, ctx.operands, do_TNH.contiguous())
        ctx.o_TNH = ctx.operands = None
        return d[0], *ctx.runs.summed(d[1], d[2]), None, None


class _FlashOverRuns(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_TNH, k_TKH, v_TKH, layout, options):
        ctx.layout, ctx.options = layout, options
        k_RKH, v_RKH = layout.runs.gathered(k_TKH, v_TKH)
        attended = attend(q_TNH, k_RKH, v_RKH, layout.runs.ends, options)
        ctx.save_for_backward(q_TNH, k_TKH, v_TKH, *attended)
        return attended[0]

    @staticmethod
    def backward(ctx, do_TNH):  # type: ignore[override]
        q_TNH, k_TKH, v_TKH, *attended = ctx.saved_tensors
        is_whole = ctx.options.window is not None
        runs = ctx.layout.runs if is_whole else ctx.layout.split_runs(q_TNH.shape[1])
        k_RKH, v_RKH = runs.gathered(k_TKH, v_TKH)
        operands = do_TNH.contiguous(), q_TNH, k_RKH, v_RKH, tuple(attended)
        with _deterministic():
            dq_TNH, dk_RKH, dv_RKH = gradients(*operands, runs.ends, ctx.options)
        return dq_TNH, *runs.summed(dk_RKH, dv_RKH), None, None


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
