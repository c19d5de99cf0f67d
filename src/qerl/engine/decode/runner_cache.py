"""Choose the forward pass and the sampler of decode steps, and keep the runners of earlier calls.

    forward   KernelForward where kernels of `engine.kernels` support the decoder, and adapters by row if it
              has them, else TorchForward
    sampler   FusedSampler with it, if tokens are drawn by temperature alone, else TorchSampler;
              FusedRowSampler or RowSampler for a LiveBatch, whose rows have their own parameters

A runner keeps its recorded graphs, so it lives as long as the cache that they point into. In exact mode every
forward pass, teacher forcing included, has numbers of rows between which the bits of a row do not change.
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import torch

from qerl.config import EngineConfig
from qerl.engine.cache.kv_cache import KVCache
from qerl.engine.decode.forward import DecodeForward, TorchForward
from qerl.engine.decode.kernel_forward import MAX_ROWS, KernelForward
from qerl.engine.decode.linears import ONE_ORDER_ROWS, PackedLinears
from qerl.engine.decode.mixture import kernel_routers
from qerl.engine.decode.runner import DecodeRunner, bucket_of
from qerl.engine.decode.teacher_forcing import TeacherForcing
from qerl.engine.sampling.row_sampler import FusedRowSampler, RowSampler
from qerl.engine.sampling.sampler import FusedSampler, Sampler, TorchSampler
from qerl.engine.schedule.page_pool import num_pages
from qerl.formats import BF16, FP8
from qerl.kernels.attention.chunked_attention import chunked_decode
from qerl.kernels.attention.decode_shape import CHUNK
from qerl.kernels.experts.grouped_hopper import HopperGroupedProduct
from qerl.kernels.experts.grouped_product import GroupedProduct
from qerl.kernels.head.head_portable import PortableHeadSample
from qerl.kernels.head.head_sample import Head, HeadSample, NVFP4Head
from qerl.kernels.runtime.compile_ahead import BackgroundCompiler
from qerl.kernels.runtime.compile_tally import CompileReport
from qerl.kernels.runtime.nvrtc import KernelVariant
from qerl.kernels.tiles.lora_shrink import LoraShrink
from qerl.kernels.tiles.lora_shrink_portable import PortableLoraShrink
from qerl.models.adapter_bank import AdapterBank
from qerl.models.architecture import Architecture
from qerl.models.decoder import Decoder
from qerl.models.device import Kernels, choose_kernels
from qerl.models.packed.packed_linear import PackedNVFP4, PackedTiles
from qerl.types import Sampling

_GPU_STEPS = 8
_WHOLE_ROWS = 16
_MAX_RUNNERS = 8  # users of a server choose temperatures; each runner may hold graphs for every bucket
_PAGES_AT_ONCE = 16  # tables are made a little wider than needed, for the next call
# A wider table drops all recorded graphs, so the second one is wider by a quarter at least: prompts that grow
# from call to call widen it a few times in a run, not at each of them.
_GROWTH = 1.25
# Products and sampling of 1 to 8 rows are the same code on Hopper
# (tests/engine/decode/test_recorded_runners.py), bound by the weights' bytes. One graph instead of four
# leaves out three recordings and, as samples end, three waits for the device to arrange fewer rows.
_SHARED_ROWS = 8


class RunnerCache:
    def __init__(
        self,
        decoder: Decoder,
        config: EngineConfig,
        stop_token_ids: frozenset[int],
        kernels: Kernels | None = None,
    ):
        """kernels: of the GPU that the device of a decoder without memory stands for; None: the device's."""
        self._decoder, self._config = decoder, config
        self.kernels: Kernels = kernels or choose_kernels(config.kernels, decoder.device)
        """The kernels of decode steps, unless there is an obstacle."""
        exact = exact_mode_obstacle(decoder.architecture) if config.exact else None
        self.obstacle = exact or KernelForward.obstacle(decoder, config.block_size, self.kernels)
        """The reason why decode steps use PyTorch operations; None if they use the kernels."""
        self._is_fast = self.obstacle is None
        max_rows = config.max_rows(has_kernels=self._is_fast)
        self.max_rows = min(max_rows, MAX_ROWS) if self._is_fast else max_rows
        self._min_rows, self._rows = 1, bucket_of(self.max_rows, self.max_rows)
        if config.exact:
            self._min_rows, self._rows = self._exact_rows()
        self._stop_tokens = torch.tensor(sorted(stop_token_ids) or [-1], dtype=torch.int32).to(decoder.device)
        self._head: HeadSample | None = None
        self._forwards: dict[bool, DecodeForward] = {}
        self._max_pages = 0
        self.expected_pages = 0
        """Pages of the longest sequence that is expected in later calls: no table is narrower."""
        self._runners: dict[tuple[Sampling | None, AdapterBank | None], DecodeRunner] = {}
        self._teacher_forcing: TeacherForcing | None = None
        self.compiled: CompileReport | None = None
        """The kernels compiled before the first step; None if none were, as with PyTorch's operations."""
        self._compilers: dict[tuple[bool, bool], BackgroundCompiler] = {}
        self._pool: Any = None
        self._compile_s = 0.0

    def of(self, cache: KVCache, sampling: Sampling | None, max_pages: int, num_first: int) -> DecodeRunner:
        """Return the runner for sequences of up to max_pages pages of this cache, at first of num_first
        samples; without sampling parameters every row has its own."""
        runner = self._runner(cache, sampling, max_pages)
        kind = self._decoder.adapter_bank is not None, sampling is None  # adapters, and temperatures, by row
        if self._uses_kernels and kind not in self._compilers:
            start_s = time.perf_counter()
            report, self._compilers[kind] = runner.compile_ahead(num_first, self.max_rows)
            self.compiled = self.compiled or report
            self._compile_s += time.perf_counter() - start_s
        runner.discard_unread()
        return runner

    def bank_obstacle(self, bank: AdapterBank) -> str | None:
        """Return why decode steps with adapters of this bank use PyTorch operations; None if they use the
        kernels."""
        if self.obstacle is None and self._config.exact:
            return "adapters by row have no exact mode"
        return self.obstacle or KernelForward.bank_obstacle(self._decoder, bank)

    @property
    def _uses_kernels(self) -> bool:
        """True if steps of the decoder, with the bank that it has now, use the kernels."""
        bank = self._decoder.adapter_bank
        return self._is_fast and (bank is None or self.bank_obstacle(bank) is None)

    def wait_compiled(self) -> None:
        """Return when the kernels of other numbers of rows are compiled, too."""
        for compiler in self._compilers.values():
            compiler.wait()

    def variants(self, cache: KVCache, sampling: Sampling, max_pages: int) -> list[KernelVariant]:
        """Return the kernels that `of` compiles, now or in the background; none with PyTorch's operations."""
        if not self._is_fast:
            return []
        return self._runner(cache, sampling, max_pages).variants(range(1, self.max_rows + 1))

    def _runner(self, cache: KVCache, sampling: Sampling | None, max_pages: int) -> DecodeRunner:
        if max_pages > self._max_pages:
            self.clear()
            self._max_pages = self._table_pages(max_pages)
        if (is_fast := self._uses_kernels) not in self._forwards:
            make = self._make_forward(is_fast)
            self._forwards[is_fast] = make(self._decoder, cache, self._rows, self._max_pages)
        if sampling is not None:  # without what a runner never sees
            sampling = dataclasses.replace(sampling, max_tokens=1, stop=())
        key = sampling, self._decoder.adapter_bank  # whose tensors graphs point to
        if key not in self._runners:
            while len(self._runners) >= _MAX_RUNNERS:
                del self._runners[next(iter(self._runners))]
            self._runners[key] = self._make_runner(sampling, self._forwards[is_fast], is_fast)
        return self._runners[key]

    def _table_pages(self, max_pages: int) -> int:
        """Return the width of a new table for sequences of max_pages pages and the expected ones: at most a
        little wider than the model's longest sequence."""
        limit = num_pages(self._decoder.max_positions, self._config.block_size)
        wanted = min(max(self.expected_pages, int(_GROWTH * self._max_pages)), limit)
        return -(-max(max_pages, wanted) // _PAGES_AT_ONCE) * _PAGES_AT_ONCE

    def take_compile_s(self) -> float:
        """Return the seconds of compiling since this was last called."""
        taken, self._compile_s = self._compile_s, 0.0
        return taken

    def teacher_forcing(self) -> TeacherForcing:
        """Return teacher forcing for the same sequences as the latest `of`."""
        assert self._config.exact and self._forwards
        if self._teacher_forcing is None:
            self._teacher_forcing = TeacherForcing(
                self._forwards[self._uses_kernels],
                rows=self._rows,
                max_pages=self._max_pages,
                page_tokens=self._config.block_size,
                device=self._decoder.device,
                pool=self._pool,
            )
        self._teacher_forcing.num_tokens = self._teacher_forcing.num_forwards = 0
        return self._teacher_forcing

    def clear(self) -> None:
        self._runners.clear()
        self._forwards.clear()
        self._teacher_forcing = None
        # freed with its last graph
        self._pool = torch.cuda.graph_pool_handle() if self._decoder.device.type == "cuda" else None

    def publish(self) -> None:
        for forward in self._forwards.values():
            forward.publish()

    def _make_runner(self, sampling: Sampling | None, forward: DecodeForward, is_fast: bool) -> DecodeRunner:
        config, device = self._config, self._decoder.device
        return DecodeRunner(
            forward,
            self._sampler(sampling),
            max_rows=self._rows,
            max_pages=self._max_pages,
            page_tokens=config.block_size,
            max_steps=config.decode_steps_per_sync or (1 if device.type == "cpu" else _GPU_STEPS),
            min_rows=self._min_rows,
            device=device,
            pool=self._pool,
            min_graph_rows=min_graph_rows(self._decoder.architecture, is_fast=is_fast),
        )

    def _make_forward(self, is_fast: bool) -> Callable[..., DecodeForward]:
        exact = self._config.exact
        if not is_fast:
            one_order = functools.partial(TorchForward, decode=chunked_decode, expert_rows=_WHOLE_ROWS)
            return one_order if exact else TorchForward
        is_portable, weights = self.kernels == "portable", [x.weight for _, x in self._decoder.linears()]
        return functools.partial(
            KernelForward,
            products=functools.partial(
                PackedLinears,
                rows_at_once=ONE_ORDER_ROWS if exact else MAX_ROWS,
                is_portable=is_portable,
                layouts={w.group.layout for w in weights if isinstance(w, PackedTiles)},
            ),
            chunk=CHUNK if exact else None,
            shrink=PortableLoraShrink if is_portable else LoraShrink,
            grouped=GroupedProduct if is_portable else HopperGroupedProduct,
        )

    def _exact_rows(self) -> tuple[int, int]:
        """Return (fewest rows of a step, rows of teacher forcing). The packed kernels, and those of experts
        and of their routers, take any number: a row's bits do not depend on it. With torch's products they
        do and, on a CPU, on the row's place too unless 16 divides the number."""
        routers, linears = kernel_routers(self._decoder), self._decoder.linears()
        by_kernels = all(isinstance(x.weight, PackedTiles) or x in routers for _, x in linears)
        if self._is_fast and by_kernels and kernel_head(self._decoder, self.kernels) is not None:
            return 1, max(bucket_of(self.max_rows, self.max_rows), ONE_ORDER_ROWS)
        rows = -(-self.max_rows // _WHOLE_ROWS) * _WHOLE_ROWS
        return rows, rows

    def _sampler(self, sampling: Sampling | None) -> Sampler:
        if sampling is None:
            kernels = None if self._config.exact else self._head_kernels()
            if kernels is None:  # in exact mode a score must not depend on who drew the token
                return RowSampler(self._decoder, self._stop_tokens, self._rows)
            return FusedRowSampler(kernels, self._decoder, self._stop_tokens, self._rows)
        truncates = (sampling.top_k, sampling.top_p, sampling.min_p) != (None, None, None)
        kernels = None if truncates else self._head_kernels()
        if kernels is None:
            return TorchSampler(self._decoder, sampling, self._stop_tokens)
        return FusedSampler(kernels, sampling, self._stop_tokens)

    def _head_kernels(self) -> HeadSample | None:
        """Return the kernels of the head; None if none of them supports it."""
        head = None if self._head else kernel_head(self._decoder, self.kernels)
        if head is None:
            return self._head
        lm_head, device = self._decoder.lm_head, self._decoder.device
        options = {"scale": lm_head.scale, "softcap": lm_head.softcap}
        if self.kernels == "hopper":
            self._head = HeadSample(head, self._rows, device, **options)
        else:
            assert not isinstance(head, NVFP4Head)  # kernel_head
            self._head = PortableHeadSample(head, self._rows, device, **options)
        return self._head


def exact_mode_obstacle(a: Architecture) -> str | None:
    """Return why exact mode does not use the decode kernels; None if it does."""
    if a.delta is not None:
        return "in exact mode recurrent states take the tokens of a prompt one by one, which they do not"
    return None


def min_graph_rows(architecture: Architecture, *, is_fast: bool) -> int:
    """Return the rows of the smallest graph. PyTorch has faster products for one row, and idle rows of a
    mixture would read the weights of experts that no sample needs."""
    return _SHARED_ROWS if is_fast and architecture.mixture is None else 1


def kernel_head(decoder: Decoder, kernels: Kernels) -> Head | None:
    """Return the decoder's own head in the form of a sampling kernel; None if none of these supports it."""
    head, (vocab_size, width) = decoder.lm_head, decoder.lm_head.shape
    fits = vocab_size % 16 == 0 and width % 64 == 0 and decoder.compute == torch.bfloat16
    if kernels == "torch" or not fits:
        return None
    if isinstance(head.packed, FP8):
        return head.packed
    if isinstance(head.packed, PackedNVFP4) and kernels == "hopper":
        return NVFP4Head(head.packed.group.tiles, head.packed.group.factors_N)
    return BF16(head.operand()) if head.packed is None else None
