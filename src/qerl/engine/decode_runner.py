"""Runs decode steps in bursts: the device draws many tokens in a row before the host looks at any.

    arrange   the running samples become rows 0..B-1 of the DecodeState       the host knows all their tokens
    launch    a burst of steps; whoever reaches a stop token or its last position rests until the next arrange
    read      what the oldest unread burst drew

On a GPU a burst is that many replays of one CUDA graph, recorded when a number of rows is first used, and the
next burst may be launched before this one is read; only `read` waits. Rows are rounded up to a bucket, so
that few graphs serve all batches. On a CPU a step is called directly, with exactly the running rows.
"""

import collections
import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qerl.engine.decode_forward import DecodeForward
from qerl.engine.sampler import Sampler
from qerl.engine.scheduler import LiveSample, num_pages
from qerl.kernels.cuda_graph import record_graph
from qerl.kernels.decode_state import DecodeState

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)


def bucket_of(num_rows: int, max_rows: int) -> int:
    """The rows that a graph for so many samples has."""
    return min((bucket for bucket in BUCKETS if bucket >= num_rows), default=max_rows)


@dataclasses.dataclass(frozen=True, slots=True)
class Burst:
    """Row b drew tokens_WB[w][b] at step w; what follows its sample's end means nothing."""

    samples_B: list[LiveSample]
    tokens_WB: Tensor
    logprobs_WB: Tensor
    is_done: torch.cuda.Event | None


class DecodeRunner:
    def __init__(
        self,
        forward: DecodeForward,
        draw: Sampler,
        *,
        max_rows: int,
        max_pages: int,
        page_tokens: int,
        max_steps: int,
        least_rows: int,
        device: torch.device,
        pool: Any,
    ):
        """least_rows: fewest rows of a step, whoever runs."""
        self.draw = draw
        self.num_steps = 0
        """Launched since this was last set to 0."""
        self._forward, self._page_tokens, self._pool = forward, page_tokens, pool
        self._records = device.type == "cuda" and draw.is_recordable
        self.max_steps = max_steps if self._records or device.type == "cpu" else 1
        self.max_rows, self._least_rows, self._device = max_rows, least_rows, device
        self._host = DecodeState.empty(self.max_rows, max_pages, 1, "cpu")
        self._state = DecodeState.empty(self.max_rows, max_pages, self.max_steps, device)
        self._samples_B: list[LiveSample] = []
        self._unread: collections.deque[Burst] = collections.deque()
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    @property
    def num_ahead(self) -> int:
        """Steps launched and not read."""
        return sum(len(burst.tokens_WB) for burst in self._unread)

    @property
    def num_unread(self) -> int:
        """Bursts."""
        return len(self._unread)

    def would_shrink(self, num_samples: int) -> bool:
        """Whether so few samples would run as fewer rows."""
        return num_samples > 0 and self._rows(num_samples) < self._rows(len(self._samples_B))

    def first(self, hidden_MD: Tensor, keys_M: Tensor, positions_M: Tensor) -> tuple[Tensor, Tensor]:
        """draw.first, of as many rows as a step has at least."""
        M = len(keys_M)
        more = (0, max(self._least_rows - M, 0))
        hidden_BD, keys_B, positions_B = (
            F.pad(hidden_MD, (0, 0, *more)),
            F.pad(keys_M, more),
            F.pad(positions_M, more),
        )
        tokens_B, logprobs_B = self.draw.first(hidden_BD, keys_B, positions_B)
        return tokens_B[:M], logprobs_B[:M]

    def arrange(self, samples_B: list[LiveSample], keys_B: list[int]) -> None:
        """These samples are the rows now; every burst has been read."""
        assert not self._unread and len(samples_B) <= self.max_rows
        host, self._samples_B = self._host, list(samples_B)
        host.positions_B.fill_(-1)
        B = len(samples_B)
        ints = torch.tensor(
            [
                (s.tokens_T[-1], s.num_positions - 1, s.group.prompt_tokens + s.max_tokens - 1)
                for s in samples_B
            ],
            dtype=torch.int32,
        ).view(B, 3)
        host.tokens_B[:B], host.positions_B[:B], host.ends_B[:B] = ints.unbind(1)
        host.keys_B[:B] = torch.tensor(keys_B, dtype=torch.int64)
        host.noise_rows_B[:B] = torch.tensor([s.noise_row for s in samples_B], dtype=torch.int32)
        host.tables_BX.fill_(0)
        self._write_tables(range(B))
        for name in ("tokens_B", "positions_B", "ends_B", "keys_B", "noise_rows_B", "tables_BX"):
            self._upload(name)

    def allocate(self, grown: list[LiveSample]) -> None:
        """These have new pages."""
        if grown:
            is_grown = {id(s) for s in grown}
            self._write_tables(b for b, s in enumerate(self._samples_B) if id(s) in is_grown)
            self._upload("tables_BX")

    def launch(self, num_steps: int) -> None:
        assert 0 < num_steps <= self.max_steps and self._samples_B
        self._state.place_1.zero_()
        num_rows = self._rows(len(self._samples_B))
        with torch.no_grad():
            for _ in range(num_steps):
                self._step(num_rows)
        self.num_steps += num_steps
        self._unread.append(self._burst(num_steps))

    def read(self) -> Burst:
        burst = self._unread.popleft()
        if burst.is_done is not None:
            burst.is_done.synchronize()
        return burst

    def forget(self) -> None:
        """Drops what is unread."""
        self._unread.clear()

    def _rows(self, num_samples: int) -> int:
        num_rows = bucket_of(num_samples, num_samples) if self._records else num_samples
        return min(max(num_rows, self._least_rows), self.max_rows)

    def _step(self, num_rows: int) -> None:
        if num_rows in self._graphs:
            self._graphs[num_rows].replay()
            return
        self._eager_step(num_rows)  # compiles what it needs, which a recording could not
        if self._records:
            self._graphs[num_rows] = graph = torch.cuda.CUDAGraph()
            with record_graph(graph, pool=self._pool):
                self._eager_step(num_rows)

    def _eager_step(self, num_rows: int) -> None:
        state = self._state
        if not self._records:  # a graph must serve every length; a call needs the longest only
            longest = max(s.num_positions for s in self._samples_B) + self.num_ahead + self.max_steps
            width = num_pages(longest, self._page_tokens)
            state = state.of_width(width)
        self.draw.step(self._forward(state, num_rows), state)

    def _burst(self, num_steps: int) -> Burst:
        B = len(self._samples_B)
        drawn = (self._state.drawn_tokens_WB[:num_steps, :B], self._state.drawn_logprobs_WB[:num_steps, :B])
        if self._device.type == "cpu":
            return Burst(self._samples_B, drawn[0].clone(), drawn[1].clone(), None)
        copies = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in drawn]
        for copy, tensor in zip(copies, drawn, strict=True):
            copy.copy_(tensor, non_blocking=True)
        is_done = torch.cuda.Event()
        is_done.record()
        return Burst(self._samples_B, copies[0], copies[1], is_done)

    def _write_tables(self, rows) -> None:
        tables = self._host.tables_BX.numpy()
        for b in rows:
            pages = self._samples_B[b].pages
            tables[b, : len(pages)] = pages

    def _upload(self, name: str) -> None:
        """From a pinned copy, which torch keeps until the device has read it."""
        values = getattr(self._host, name)
        pinned = values.pin_memory() if self._device.type == "cuda" else values
        getattr(self._state, name).copy_(pinned, non_blocking=True)
