"""Run decode steps in bursts: the device samples many tokens in a row before the host reads any.

    set_batch   the running samples become rows 0..B-1 of the DecodeState; rows of unread bursts move there
    launch      a burst of steps; a row that reaches a stop token or its last position stays idle after it
    read        the tokens of the oldest unread burst

On a GPU a burst replays one CUDA graph once per step. The graph is recorded when a batch size is first used,
and the next burst may be launched before this one is read; only `read` waits. Batch sizes are rounded up to a
bucket, so few graphs serve all of them. On a CPU a step is called directly, with exactly the running rows.
"""

import collections
import dataclasses
import time
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qerl.engine.decode.forward import DecodeForward
from qerl.engine.sampling.row_sampler import FusedRowSampler
from qerl.engine.sampling.sampler import FusedSampler, Sampler
from qerl.engine.schedule.live_sample import LiveSample
from qerl.engine.schedule.page_pool import num_pages
from qerl.kernels.attention.decode_state import DecodeState
from qerl.kernels.runtime.architectures import architecture_name
from qerl.kernels.runtime.compile_ahead import BackgroundCompiler, compile_ahead
from qerl.kernels.runtime.compile_tally import CompileReport
from qerl.kernels.runtime.cuda_graph import record_graph
from qerl.kernels.runtime.nvrtc import KernelVariant, dry_run

_BATCH = "tokens_B", "positions_B", "ends_B", "keys_B", "noise_rows_B", "states_B"
FIRST_TOKEN_ROWS = 64
"""Rows when first tokens are sampled: logits of 64 tokens at V 152,064 take 39 MB in fp32."""
BUCKETS = (1, 2, 4, *range(8, 65, 8), *range(80, 257, 16))


def bucket_of(num_rows: int, max_rows: int) -> int:
    """Return the number of rows of the graph that serves num_rows samples."""
    return min((bucket for bucket in BUCKETS if bucket >= num_rows), default=max_rows)


@dataclasses.dataclass(frozen=True, slots=True)
class Burst:
    """tokens_WB[w][b] is row b's token at step w; values after a sample's end are undefined."""

    samples_B: list[LiveSample]
    tokens_WB: Tensor
    logprobs_WB: Tensor
    is_done: torch.cuda.Event | None
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens besides the engine's that ended rows on the device."""


class DecodeRunner:
    def __init__(
        self,
        forward: DecodeForward,
        sampler: Sampler,
        *,
        max_rows: int,
        max_pages: int,
        page_tokens: int,
        max_steps: int,
        min_rows: int,
        device: torch.device,
        pool: Any,
        min_graph_rows: int = 1,
    ):
        """min_rows: minimum rows of a step, padded if fewer samples run. pool: of the CUDA graphs.
        min_graph_rows: rows of the smallest graph, which also serves fewer samples; the other rows idle."""
        self.sampler = sampler
        self.num_steps = 0
        """Steps launched since this was last set to 0."""
        self.record_s = 0.0
        """Seconds of the first step of each number of rows and of its recording, since this was set to 0."""
        self._forward, self._page_tokens, self._pool = forward, page_tokens, pool
        self.max_rows, self._max_steps, self._device = max_rows, max_steps, device
        self._min_rows, self._min_graph_rows = min_rows, min_graph_rows
        self._host = DecodeState.empty(max_rows, max_pages, 1, "cpu")
        self._state = DecodeState.empty(max_rows, max_pages, max_steps, device)
        self._samples_B: list[LiveSample] = []
        self._unread: collections.deque[Burst] = collections.deque()
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    @property
    def _uses_graphs(self) -> bool:
        is_capturable = self.sampler.is_capturable and self._forward.is_capturable
        return self._device.type != "cpu" and is_capturable  # on meta: as on the GPU that it stands for

    @property
    def max_steps(self) -> int:
        """Steps of a burst. A sampler that waits for the device may also need the host between two steps."""
        return self._max_steps if self.sampler.is_capturable else 1

    @property
    def max_unread_bursts(self) -> int:
        return 0 if self.max_steps == 1 else 1

    @property
    def num_unread_steps(self) -> int:
        """Steps launched and not read."""
        return sum(len(burst.tokens_WB) for burst in self._unread)

    @property
    def num_unread_bursts(self) -> int:
        return len(self._unread)

    def would_shrink(self, num_samples: int) -> bool:
        """True if num_samples would run with fewer rows than now."""
        return num_samples > 0 and self._rows(num_samples) < self._rows(len(self._samples_B))

    def sample(self, hidden_MD: Tensor, keys_M: Tensor, positions_M: Tensor) -> tuple[Tensor, Tensor]:
        """Call Sampler.sample with rows padded to min_rows."""
        M = len(keys_M)
        padding = (0, max(self._min_rows - M, 0))
        tokens_B, logprobs_B = self.sampler.sample(
            F.pad(hidden_MD, (0, 0, *padding)), F.pad(keys_M, padding), F.pad(positions_M, padding)
        )
        return tokens_B[:M], logprobs_B[:M]

    def compile_ahead(self, num_samples: int, max_samples: int) -> tuple[CompileReport, BackgroundCompiler]:
        """Compile in parallel the kernels of steps of num_samples samples. Return the report and a compiler
        that has started on those of up to max_samples, the closest numbers of rows first."""
        first = min(num_samples, self.max_rows)
        report = compile_ahead(self.variants({first, min(first, FIRST_TOKEN_ROWS)}), self._device)
        others = sorted(range(1, max_samples + 1), key=lambda samples: abs(samples - first))
        variants, capability = self.variants(others), torch.cuda.get_device_capability(self._device)
        compiler = BackgroundCompiler(lambda: variants, architecture_name(capability))
        compiler.start()
        return report, compiler

    @torch.no_grad()
    def variants(self, num_samples: Iterable[int]) -> list[KernelVariant]:
        """Return the kernels of steps of each of these numbers of samples, and of sampling first tokens.

        The kernels only note what they would launch; PyTorch's operations run, on tensors that no kernel has
        filled.
        """
        samples, state = [min(each, self.max_rows) for each in num_samples], self._state
        with dry_run() as variants:
            for num_rows in dict.fromkeys(map(self._rows, samples)):
                hidden_BD = self._forward(state, num_rows)
                if isinstance(self.sampler, FusedSampler | FusedRowSampler):
                    self.sampler.sample(hidden_BD, state.keys_B[:num_rows], state.positions_B[:num_rows])
                    self.sampler.step(hidden_BD, state)
        return list(variants)

    def set_batch(self, samples_B: list[LiveSample], keys_B: list[int]) -> None:
        """Make these samples the rows. Those with unread tokens must run on, as the device knows them."""
        assert len(samples_B) <= self.max_rows
        moved = self._unread_rows(samples_B)
        host, self._samples_B = self._host, list(samples_B)
        self.sampler.bind(self._samples_B)
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
        host.states_B[:B] = torch.tensor([s.state[0] if s.state else 0 for s in samples_B], dtype=torch.int32)
        host.tables_BX.fill_(0)
        for name in _BATCH:
            self._upload(name)
        if moved is not None:
            to_M, tokens_M, positions_M = moved
            self._state.tokens_B.index_copy_(0, to_M, tokens_M)
            self._state.positions_B.index_copy_(0, to_M, positions_M)
        self._write_tables(range(B))

    def _unread_rows(self, samples_B: list[LiveSample]) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return what the host has not read: the rows of these samples that are rows now, their newest tokens
        and positions. None: it has read all."""
        if not self._unread:
            return None
        row_of = {id(s): b for b, s in enumerate(self._samples_B)}
        pairs = [(b, row_of[id(s)]) for b, s in enumerate(samples_B) if id(s) in row_of]
        to_M, from_M = (
            self._pinned(torch.tensor(pairs, dtype=torch.int64).view(-1, 2))
            .to(self._device, non_blocking=True)
            .unbind(1)
        )
        return to_M, self._state.tokens_B[from_M], self._state.positions_B[from_M]

    def update_pages(self, samples: list[LiveSample]) -> None:
        """Upload the block tables of samples that got new pages."""
        if samples:
            updated = {id(s) for s in samples}
            self._write_tables(b for b, s in enumerate(self._samples_B) if id(s) in updated)

    def launch(self, num_steps: int) -> None:
        assert 0 < num_steps <= self.max_steps and self._samples_B
        self._state.place_1.zero_()
        num_rows = self._rows(len(self._samples_B))
        unread = self.num_unread_steps
        lengths_B = [s.num_positions + unread for s in self._samples_B]
        self._forward.prepare(self._state, lengths_B, num_rows)
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

    def discard_unread(self) -> None:
        """Drop unread bursts."""
        self._unread.clear()

    def _rows(self, num_samples: int) -> int:
        num_rows, min_rows = num_samples, self._min_rows
        if self._uses_graphs:
            num_rows, min_rows = bucket_of(num_samples, num_samples), max(min_rows, self._min_graph_rows)
        return min(max(num_rows, min_rows), self.max_rows)

    def _step(self, num_rows: int) -> None:
        # A sampler that had a graph recorded may need the host for its present rows (row_sampler.py).
        if self._uses_graphs and num_rows in self._graphs:
            self._graphs[num_rows].replay()
            return
        start_s = time.perf_counter()
        self._eager_step(num_rows)  # compiles kernels, which must not happen in a recording
        if self._uses_graphs:
            self._graphs[num_rows] = graph = torch.cuda.CUDAGraph()
            with record_graph(graph, pool=self._pool):
                self._eager_step(num_rows)
            self.record_s += time.perf_counter() - start_s

    def _eager_step(self, num_rows: int) -> None:
        state = self._state
        if not self._uses_graphs:  # a graph must serve every length, a direct call only the longest present
            longest = max(s.num_positions for s in self._samples_B) + self.num_unread_steps + self.max_steps
            state = state.of_width(num_pages(longest, self._page_tokens))
        self.sampler.step(self._forward(state, num_rows), state)

    def _burst(self, num_steps: int) -> Burst:
        B = len(self._samples_B)
        tokens_WB = self._state.drawn_tokens_WB[:num_steps, :B]
        logprobs_WB = self._state.drawn_logprobs_WB[:num_steps, :B]
        stops = self.sampler.row_stop_ids
        if self._device.type == "cpu":
            return Burst(self._samples_B, tokens_WB.clone(), logprobs_WB.clone(), None, stops)
        copies = [
            torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True)
            for t in (tokens_WB, logprobs_WB)
        ]
        is_done = torch.cuda.Event()
        is_done.record()
        return Burst(self._samples_B, copies[0], copies[1], is_done, stops)

    def _write_tables(self, rows: Iterable[int]) -> None:
        tables, windowed = self._host.tables_BX.numpy(), self._host.window_tables_BX.numpy()
        has_windows = False
        for b in rows:
            pages, held = self._samples_B[b].pages, self._samples_B[b].window_pages
            tables[b, : len(pages)] = pages
            windowed[b, list(held)] = list(held.values())
            has_windows |= bool(held)
        self._upload("tables_BX")
        if has_windows:
            self._upload("window_tables_BX")

    def _upload(self, name: str) -> None:
        getattr(self._state, name).copy_(self._pinned(getattr(self._host, name)), non_blocking=True)

    def _pinned(self, values: Tensor) -> Tensor:
        """Return a pinned copy, which torch keeps until the device has read it."""
        return values.pin_memory() if self._device.type == "cuda" else values
