"""The forward pass of a decode step: from the newest token of each of the first B rows to its hidden state.

    TorchForward    the decoder's own modules with paged attention in PyTorch: any device, format and dtype
    KernelForward   kernel_forward.py: this project's kernels, on NVIDIA GPUs from Ampere on

Layers with a window read only the pages that it reaches.

Unused rows (position -1) write to the cache's unused slots; their results are ignored.
"""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from qerl.engine.cache.kv_cache import KVCache
from qerl.engine.cache.layer_pages import LayerPages, slots_of
from qerl.engine.cache.state_cache import StateCache
from qerl.kernels.attention.attention import paged_decode
from qerl.kernels.attention.attention_options import AttentionOptions
from qerl.kernels.attention.decode_state import DecodeState
from qerl.kernels.delta_net.gated_delta_net import DeltaInputs, mix_step
from qerl.models.decoder import Decoder
from qerl.models.delta_net import Recur


class DecodeForward(Protocol):
    @property
    def is_capturable(self) -> bool:
        """False if the host must see values in the middle, so that no CUDA graph can be recorded."""
        ...

    def __call__(self, state: DecodeState, num_rows: int) -> Tensor:
        """Return hidden_BD and write the rows' keys and values; each row is of another sequence."""
        ...

    def together(self, state: DecodeState, num_rows: int) -> Tensor:
        """Return the same bits for rows of which several may be of one sequence and attend to each other."""
        ...

    def publish(self) -> None:
        """Take over the adapters' present working copies."""
        ...

    def prepare(self, state: DecodeState, lengths_B: list[int], num_rows: int) -> None:
        """Set what the next steps of num_rows rows read besides the rows; lengths_B: of those in use."""
        ...


class TorchForward:
    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        max_rows: int,
        max_pages: int,
        decode: Callable[..., Tensor] = paged_decode,
        expert_rows: int | None = None,
    ):
        """decode: paged_decode, or a function with its signature; expert_rows: of Decoder.forward."""
        self._decoder, self._cache, self._decode, self._expert_rows = decoder, cache, decode, expert_rows

    @property
    def is_capturable(self) -> bool:
        """False for counts of rows by expert, and for adapters by row, whose tables change."""
        return self._decoder.architecture.mixture is None and self._decoder.adapter_bank is None

    def publish(self) -> None:
        """Do nothing: the decoder's modules read the working copies themselves."""

    def prepare(self, state: DecodeState, lengths_B: list[int], num_rows: int) -> None:
        """Do nothing: attention reads the rows alone."""

    def __call__(self, state: DecodeState, num_rows: int) -> Tensor:
        return self._run(state, num_rows, _one_step)

    def together(self, state: DecodeState, num_rows: int) -> Tensor:
        return self._run(state, num_rows, _steps_in_order)

    def _run(self, state: DecodeState, num_rows: int, recur_on: Callable[..., Recur]) -> Tensor:
        cache = self._cache
        positions_B = state.positions_B[:num_rows].long()
        is_live_B = positions_B >= 0
        positions_B = positions_B.clamp(min=0)
        lengths_B = positions_B + 1
        kinds: dict[LayerPages, tuple[Tensor, Tensor]] = {}  # tables and slots of the new tokens
        seen: dict[tuple[LayerPages, int | None], tuple[Tensor, Tensor]] = {}  # tables and lengths by window

        def places(pages: LayerPages, of: DecodeState) -> tuple[Tensor, Tensor]:
            tables_BX = of.tables_BX[:num_rows].long()
            pages_B = tables_BX.gather(1, positions_B[:, None] // cache.page_tokens)[:, 0]
            slots_B = slots_of(pages_B, positions_B, cache.page_tokens)
            return tables_BX, slots_B.where(is_live_B, pages.unused_slot)

        def attend(
            layer_index: int, q_BNH: Tensor, k_BKH: Tensor, v_BKH: Tensor, options: AttentionOptions
        ) -> Tensor:
            pages = cache.of_layer(layer_index)
            if pages not in kinds:
                kinds[pages] = places(pages, cache.state_of(layer_index, state))
            tables_BX, slots_B = kinds[pages]
            pages.write(layer_index, slots_B, k_BKH, v_BKH)
            key = pages, options.window
            if key not in seen:
                seen[key] = options.seen_tables(tables_BX, lengths_B, cache.page_tokens)
            tables, lengths = seen[key]
            k, v, tables = pages.readable(layer_index, tables, q_BNH.dtype)
            return self._decode(q_BNH, k, v, tables, lengths, options)

        route = None
        if cache.pages.routes is not None:
            kinds[cache.pages] = places(cache.pages, state)
            route = cache.recording(kinds[cache.pages][1])
        recur = None
        if cache.states is not None:
            states_B = state.states_B[:num_rows].long().where(is_live_B, cache.states.unused_slot)
            recur = recur_on(cache.states, states_B, positions_B)
        tokens_B = state.tokens_B[:num_rows].long()
        return self._decoder(
            tokens_B,
            positions_B,
            attend,
            recur=recur,
            noise_rows_T=state.noise_rows_B[:num_rows],
            route=route,
            expert_rows=self._expert_rows,
        )


def _one_step(states: StateCache, slots_B: Tensor, positions_B: Tensor) -> Recur:
    """Return a function that takes each row's states one token further, in its slot."""

    def recur(layer_index: int, inputs: DeltaInputs) -> Tensor:
        o_BNV, after = mix_step(inputs, states.read(layer_index, slots_B))
        states.write(layer_index, slots_B, after)
        return o_BNV

    return recur


def _steps_in_order(states: StateCache, slots_B: Tensor, positions_B: Tensor) -> Recur:
    """Return the same for rows of which several may have one slot: step after step, each of as many rows, so
    that a row has the bits of a decode step. Rows at position 0 start from zeros."""
    earlier_BB = (slots_B[:, None] == slots_B[None, :]).tril(-1)
    nth_B = earlier_BB.sum(1).where(slots_B != states.unused_slot, 0)
    # a graph serves every batch: up to as many rows of one sequence as there are rows
    num_steps = len(slots_B) if slots_B.is_cuda else int(nth_B.max()) + 1
    chosen = [nth_B == step for step in range(num_steps)]
    slots = [slots_B.where(chosen_B, states.unused_slot) for chosen_B in chosen]
    is_new_B = positions_B == 0

    def recur(layer_index: int, inputs: DeltaInputs) -> Tensor:
        o_BNV: Tensor | None = None
        for chosen_B, step_slots_B in zip(chosen, slots, strict=True):
            y_BNV, after = mix_step(inputs, states.read(layer_index, step_slots_B, is_new_B))
            states.write(layer_index, step_slots_B, after)
            o_BNV = y_BNV if o_BNV is None else y_BNV.where(chosen_B[:, None, None], o_BNV)
        assert o_BNV is not None
        return o_BNV

    return recur
