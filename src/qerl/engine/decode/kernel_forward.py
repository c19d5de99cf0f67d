"""The decode step on an NVIDIA GPU: seven to fourteen launches a layer, each product with its adapter in it.

    h = embed(token)
    x = norm(h)         q|k|v = x W^T + u B^T + bias                    o = attention(rope(q|k|v))
                        h += o W^T + u B^T
    x = norm(h)         y = silu(gate) * up of x W^T + u B^T
                        h += y W^T + u B^T                              L times
    hidden = norm(h)                                                    h in fp32, all else in bf16

u = scaling * x @ A^T of the product's input x. The kernels for packed linears make it in the same launch
where that is faster (`computes_lora_hidden`); otherwise the norm's launch makes it, or one of its own ahead
of o and down. For BF16 weights it is stored behind the rows of x: [x | u] @ [W | B]^T is one cuBLAS
call (linears.py).

A layer is the step of its mixer and the step of its MLP (layer.py), chosen by its kind in MIXERS and
MLPS. The step reads the modules' own weights, norms and noise and keeps no copy of them. `publish` refreshes
the stacked working copies of the adapters (A of q|k|v, of gate|up; B in the order of the packed rows) in
place.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from qerl.engine.cache.kv_cache import KVCache
from qerl.engine.decode.attention import AttentionSteps
from qerl.engine.decode.delta import DeltaSteps
from qerl.engine.decode.layer import LayerStep, StepParts, StepRows
from qerl.engine.decode.linears import FusedLinears, LinearGroup, PackedLinears
from qerl.engine.decode.mixture import MixtureSteps, stack_obstacle
from qerl.engine.decode.mlp import MLPSteps
from qerl.kernels.attention.decode_attention import DecodeAttention
from qerl.kernels.attention.decode_state import DecodeState
from qerl.kernels.experts.grouped_hopper import HopperGroupedProduct
from qerl.kernels.experts.grouped_product import GroupedProduct
from qerl.kernels.tiles.lora_shrink import LoraShrink
from qerl.kernels.tiles.row_slots import MAX_SLOTS
from qerl.models.adapter_bank import AdapterBank
from qerl.models.architecture import Architecture
from qerl.models.decoder import Decoder, Layer
from qerl.models.device import Kernels, best_kernels
from qerl.models.packed.packed_linear import PackedTiles

MAX_ROWS = 256
_MAX_RANK = 128
NO_KERNELS = "they are for NVIDIA GPUs from Ampere on"
MIXERS = {"attention": AttentionSteps, "delta": DeltaSteps}
"""Steps by LayerKind.mixer."""
MLPS = {"dense": MLPSteps, "experts": MixtureSteps}
"""Steps by LayerKind.mlp."""


class KernelForward:
    is_capturable = True

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        max_rows: int,
        max_pages: int,
        products: Callable[[torch.device], FusedLinears] = PackedLinears,
        chunk: int | None = None,
        shrink: Callable[[torch.device], LoraShrink] = LoraShrink,
        attention: Callable[..., DecodeAttention] = DecodeAttention,
        grouped: Callable[[torch.device], GroupedProduct] = HopperGroupedProduct,
    ):
        """products: multiplies packed linears; chunk: as DecodeAttention takes it; shrink: norms and u;
        grouped: multiplies experts."""
        self._decoder, self._shrink = decoder, shrink(decoder.device)
        parts = StepParts(
            decoder=decoder,
            cache=cache,
            shrink=self._shrink,
            packed=products(decoder.device),
            max_rows=max_rows,
            max_pages=max_pages,
            chunk=chunk,
            attention=attention,
            grouped=grouped,
        )
        mixers = {name: MIXERS[name](parts) for name in {k.mixer for k in decoder.architecture.kinds}}
        self._attention, self._steps = mixers.get("attention"), _steps(parts, mixers)
        self._bank_versions: tuple[AdapterBank, dict[int, int]] | None = None

    @staticmethod
    def obstacle(decoder: Decoder, page_tokens: int, kernels: Kernels | None = None) -> str | None:
        """Return why the kernels cannot run this decoder; None if they can. kernels: default, the best."""
        ranks = {linear.rank for _, linear in decoder.linears()}
        return kernel_obstacle(
            decoder.architecture,
            kernels or best_kernels(decoder.device),
            decoder.compute,
            ranks=ranks,
            page_tokens=page_tokens,
        ) or stack_obstacle(decoder)

    @staticmethod
    def bank_obstacle(decoder: Decoder, bank: AdapterBank) -> str | None:
        """Return why rows cannot have adapters of this bank in a decoder that the kernels run."""
        if any((kind.mixer, kind.mlp) != ("attention", "dense") for kind in decoder.architecture.kinds):
            return "adapters by row are for attention and dense MLPs"
        if not all(isinstance(linear.weight, PackedTiles) for _, linear in decoder.linears()):
            return "adapters by row are for weights in tiles"
        if bank.max_rank > _MAX_RANK:
            return f"they take ranks up to {_MAX_RANK}, here {bank.max_rank}"
        if bank.max_adapters >= MAX_SLOTS:
            return f"they take up to {MAX_SLOTS - 1} adapters by row, here {bank.max_adapters}"
        return None

    def publish(self) -> None:
        for step in self._steps:
            for group in step.groups:
                group.publish()

    def prepare(self, state: DecodeState, lengths_B: list[int], num_rows: int) -> None:
        if isinstance(self._attention, AttentionSteps):
            self._attention.kernel.set_chunk(state, lengths_B, num_rows)
        bank = self._decoder.adapter_bank
        if bank is not None and (bank, versions := bank.take()) != self._bank_versions:
            for group in (group for step in self._steps for group in step.groups):
                assert isinstance(group, LinearGroup)  # bank_obstacle
                group.banked(bank).update(versions)
            self._bank_versions = bank, versions

    def __call__(self, state: DecodeState, num_rows: int) -> Tensor:
        return self._run(StepRows(state, num_rows, is_together=False, bank=self._decoder.adapter_bank))

    def together(self, state: DecodeState, num_rows: int) -> Tensor:
        return self._run(StepRows(state, num_rows, is_together=True, bank=self._decoder.adapter_bank))

    def _run(self, rows: StepRows) -> Tensor:
        decoder = self._decoder
        h_BD = self._shrink.embed(rows.state.tokens_B[: rows.num_rows], decoder.embed_tokens.weight)
        if decoder.embedding_scale != 1:
            h_BD.mul_(decoder.embedding_scale)
        for step in self._steps:
            h_BD = step(h_BD, rows)
        return self._shrink.norm(h_BD, decoder.norm.weight, None, decoder.norm.eps)


def _steps(parts: StepParts, mixers: dict[str, AttentionSteps | DeltaSteps]) -> list[LayerStep]:
    """Return the steps of each layer, its mixer's and its MLP's, layer by layer."""
    kinds = parts.decoder.architecture.kinds
    mlps = {name: MLPS[name](parts) for name in {kind.mlp for kind in kinds}}
    steps = []
    for index, (layer, kind) in enumerate(zip(parts.decoder.layers, kinds, strict=True)):
        assert isinstance(layer, Layer)
        steps += [mixers[kind.mixer](index, layer), mlps[kind.mlp](index, layer)]
    return steps


def kernel_obstacle(
    a: Architecture, kernels: Kernels, compute: torch.dtype, *, ranks: set[int], page_tokens: int
) -> str | None:
    """Return why the kernels cannot run such a decoder; None if they can. ranks: of the adapters."""
    if kernels == "torch":
        return NO_KERNELS
    if compute != torch.bfloat16:
        return "they compute in bf16"
    for steps in (*(MLPS[kind.mlp] for kind in a.kinds), *(MIXERS[kind.mixer] for kind in a.kinds)):
        if (obstacle := steps.obstacle(a, page_tokens)) is not None:
            return obstacle
    has_dense = any(kind.mlp == "dense" for kind in a.kinds)
    widths = (a.width, a.ff_width * has_dense, a.num_heads * a.head_size, a.num_kv_heads * a.head_size)
    if odd := [width for width in widths if width % 64]:
        return f"they take widths that are multiples of 64, here {odd[0]}"
    if max(ranks, default=0) > _MAX_RANK:
        return f"they take ranks up to {_MAX_RANK}, here {max(ranks)}"
    return None
