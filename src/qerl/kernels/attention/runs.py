"""A batch's rows as sequences, each with the rows whose keys its queries see, as FlashAttention takes them.

    run          queries            keys, gathered
    prompt       its rows           its rows
    a branch     its rows           the prompt's rows, its rows

The last query of a run sees its last key. R counts the gathered keys: a prompt's row appears once for the
prompt and once per branch, and its gradient is the sum over all of these, in fp32 and in the order of the R
(kernels/attention/sum_copies.cu): 0.03 ms for 8,000 rows of 4 heads of 128, keys and values (H200).

To be the same each time, FlashAttention 2's backward pass gives ceil(SMs / (runs * heads)) blocks of threads
to a head of a run: one where there are many runs. Then the longest run of ragged ones decides how long it
takes: 3.5 ms for 7 runs of up to 3,074 rows and 28 heads, and 2.2 where `split` parts the long ones, whose
earlier rows are then gathered for each part (H200, dev/log/attention.md).
"""

import dataclasses
import functools
import math
import struct

import torch
from torch import Tensor

from qerl.kernels.attention.flash_attention import SequenceEnds
from qerl.kernels.runtime import row_kernel
from qerl.kernels.runtime.gpu_memory import sent
from qerl.kernels.runtime.nvrtc import addresses

_THREADS = 256
_BLOCK = 128  # rows: the kernel's blocks of keys, and twice or once those of queries
_MIN_ROWS = 2048  # of a batch: below, splitting saves less than 0.1 ms
_MAX_ROWS = 32_768  # up to here the gradients of the copies (2 GB at 7B) are less than what an MLP takes
_MAX_COPIES = 4  # R of split runs by the rows, at most


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    rows: range
    before: tuple[range, ...] = ()
    """The rows that all of its queries see besides its own."""

    @property
    def num_keys(self) -> int:
        return len(self.rows) + sum(map(len, self.before))

    @property
    def cost(self) -> float:
        """Pairs of a query and a key that it sees."""
        return len(self.rows) * (self.num_keys - len(self.rows) / 2)


@dataclasses.dataclass(frozen=True, eq=False)
class Runs:
    """Runs that together are the rows 0..T-1, in this order."""

    runs: tuple[Run, ...]
    key_rows_R: Tensor
    ends: SequenceEnds
    """The ends of each run's rows and gathered keys."""

    @classmethod
    def of(cls, runs: list[Run], device: torch.device | str) -> "Runs":
        seen = [rows for run in runs for rows in (*run.before, run.rows)]
        return cls(
            runs=tuple(runs),
            key_rows_R=sent(torch.cat([torch.arange(rows.start, rows.stop) for rows in seen]), device),
            ends=SequenceEnds.of([len(run.rows) for run in runs], [run.num_keys for run in runs], device),
        )

    @property
    def num_rows(self) -> int:
        return self.runs[-1].rows.stop

    @property
    def has_copies(self) -> bool:
        return len(self.key_rows_R) > self.num_rows

    def gathered(self, k_TKH: Tensor, v_TKH: Tensor) -> tuple[Tensor, Tensor]:
        """Return (k_RKH, v_RKH)."""
        if not self.has_copies:
            return k_TKH, v_TKH
        return k_TKH.index_select(0, self.key_rows_R), v_TKH.index_select(0, self.key_rows_R)

    def summed(self, dk_RKH: Tensor, dv_RKH: Tensor) -> tuple[Tensor, Tensor]:
        """Return (dk_TKH, dv_TKH): each row's gradient, summed over its copies."""
        if not self.has_copies:
            return dk_RKH, dv_RKH
        places_R, starts = self._places
        if not row_kernel.are_vectors(dk_RKH, dv_RKH):
            return _sums(dk_RKH, places_R, starts), _sums(dv_RKH, places_R, starts)
        dk_RKH, dv_RKH, width = dk_RKH.contiguous(), dv_RKH.contiguous(), dk_RKH[0].numel()
        dk_TKH, dv_TKH = (x.new_empty(self.num_rows, *x.shape[1:]) for x in (dk_RKH, dv_RKH))
        tensors = dk_RKH, dv_RKH, places_R, starts, dk_TKH, dv_TKH
        row_kernel.kernel("sum_copies.cu", "sum_copies", dk_RKH.device).launch(
            grid=-(-self.num_rows * width // (8 * _THREADS)),
            block_threads=_THREADS,
            parameters=(struct.pack("6Q2i", *addresses(*tensors), self.num_rows, width),),
        )
        return dk_TKH, dv_TKH

    @functools.cached_property
    def _places(self) -> tuple[Tensor, Tensor]:
        """int32: the indices among the R, row by row and ascending within each; each row's first of these,
        then R."""
        rows_R, places_R = self.key_rows_R.sort(stable=True)
        starts = torch.searchsorted(rows_R, torch.arange(self.num_rows + 1, device=rows_R.device))
        return places_R.int(), starts.int()


def split(runs: list[Run], num_heads: int, num_sms: int) -> list[Run]:
    """Return the runs, the long ones split if a chain of one takes 1.5 times a multiprocessor's share of all
    heads' work: into parts of about half that share, or of a whole one, whichever keeps R within four
    times the rows; else as they are. A part sees the rows of the parts before it."""
    num_rows, blocks = runs[-1].rows.stop, -(-num_sms // (len(runs) * num_heads))
    turns = -(-len(runs) * num_heads * blocks // num_sms) if blocks > 1 else 1
    share = sum(run.cost for run in runs) * num_heads / num_sms
    chain = max(run.cost for run in runs) * turns / blocks
    if not _MIN_ROWS <= num_rows <= _MAX_ROWS or chain <= 1.5 * share:
        return runs
    for max_cost in (share / 2, share):
        parts = [part for run in runs for part in parts_of(run, max_cost)]
        if sum(part.num_keys for part in parts) <= _MAX_COPIES * num_rows:
            return parts
    return runs


def parts_of(run: Run, max_cost: float) -> list[Run]:
    """Return the run split from its end on, in multiples of 128 rows but for the first part, so that no part
    costs much more than max_cost unless it has 128 rows."""
    parts, rows = [], run.rows
    while rows:
        left = Run(rows, run.before)
        num_keys = left.num_keys
        # the root of rows * (num_keys - rows / 2) = max_cost
        fitting = num_keys - math.sqrt(max(num_keys**2 - 2 * max_cost, 0))
        size = max(int(fitting) // _BLOCK * _BLOCK, _BLOCK)
        size = len(rows) if left.cost <= max_cost or len(rows) < size + _BLOCK // 2 else size
        earlier, last = rows[:-size], rows[-size:]
        parts.append(Run(last, (*run.before, earlier) if earlier else run.before))
        rows = earlier
    return parts[::-1]


def _sums(d_RKH: Tensor, places_R: Tensor, starts: Tensor) -> Tensor:
    return torch.segment_reduce(
        d_RKH.index_select(0, places_R).float(), "sum", offsets=starts.long(), axis=0
    ).to(d_RKH.dtype)
