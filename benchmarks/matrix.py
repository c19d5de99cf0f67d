"""Compile every CUDA kernel for every architecture: registers, spills, shared memory, CTAs at once.

A decode step's kernels are compiled as the package launches them: its launchers run over tensors without
memory, for a card that need not be there, and note their kernels (nvrtc.py: dry_run). The learner's kernels
take only tensors on a GPU and are listed here.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Literal
from unittest import mock

import torch
from torch import Tensor

from benchmarks.cubin import KernelUse, kernels_of
from benchmarks.product_variants import (
    delta_chunks_variant,
    grouped_variants,
    hopper_variants,
    portable_variants,
)
from qerl.formats import BF16, FP8
from qerl.formats.fp8 import BLOCK
from qerl.kernels.attention.attention_options import PLAIN, AttentionOptions
from qerl.kernels.attention.decode_attention import DecodeAttention, LayerCache
from qerl.kernels.attention.decode_state import DecodeState
from qerl.kernels.delta_net.delta_net_step import DeltaNetStep, DeltaWeights, Gates
from qerl.kernels.delta_net.gated_delta_net import DeltaShape
from qerl.kernels.experts import grouped_product, moe_route
from qerl.kernels.head.head_portable import PortableHeadSample
from qerl.kernels.head.head_sample import Head, HeadSample, NVFP4Head
from qerl.kernels.linear import int8_codes, int8_product
from qerl.kernels.linear.int8_codes import RotatedWeight, Rotation, Weight, WeightTiles
from qerl.kernels.runtime.architectures import ARCHITECTURES, TESTED, CudaArchitecture
from qerl.kernels.runtime.nvrtc import KernelVariant, cached_cubin, dry_run
from qerl.kernels.tiles.lora_shrink import LoraShrink
from qerl.kernels.tiles.lora_shrink_portable import PortableLoraShrink
from qerl.kernels.tiles.nvfp4_decode import NVFP4Decode, PackedAdapter, pays_to_compute_lora_hidden
from qerl.kernels.tiles.nvfp4_tile import TILE_BYTES, TILE_K, TILE_ROWS
from qerl.kernels.tiles.portable_product import PortableProduct
from qerl.kernels.tiles.row_slots import RowSlots
from qerl.kernels.tiles.tile_layout import TileLayout
from qerl.models.architecture import Architecture
from qerl.models.layer_spec import LinearGroupSpec, layer_spec
from qerl.models.random_weights import shape

_SMS = {"sm_80": 108, "sm_86": 82, "sm_89": 128, "sm_90a": 132, "sm_100a": 148, "sm_120a": 170}
_TABLE_PAGE = Path(__file__).parents[1] / "dev" / "architectures.md"
_START, _END = "<!-- kernels -->", "<!-- end of kernels -->"
_META, _PAGE, _PAGES, _SLOTS = torch.device("meta"), 16, 128, 9
_KV = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
_MIXTURES = ((32, 4), (128, 8))  # experts, chosen: gpt-oss-20b and Qwen3-30B-A3B
_WAITING = ("nvfp4_decode.cu", "portable_product.cu")  # their grids count on CTAS at once
_MAX_LOCAL_BYTES = {  # measured so
    "nvfp4_decode.cu": 16,
    "head_sample.cu": 40,
    "head_portable.cu": 16,  # the widest tile, with temperatures by row
    "gated_delta_chunks.cu": 8,
    "portable_product.cu": 64,
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MatrixOptions:
    architectures: tuple[str, ...] = TESTED
    """Architectures to compile for, as NVRTC names them."""

    shapes: tuple[str, ...] = ("qwen2.5-0.5b", "qwen2.5-7b", "qwen2.5-72b")
    """Models whose decode steps are compiled."""

    rows: tuple[int, ...] = (1, 8, 64, 256)
    """Samples that a step runs."""

    lora_rank: int = 32
    """LoRA rank; 0 is no adapter."""

    workers: int = 2
    """Threads that compile."""

    write: bool = False
    """Write the table into dev/architectures.md instead of printing it."""


def print_matrix(options: MatrixOptions) -> None:
    """Print a table of what every kernel uses on every architecture: registers of a thread, KB of shared
    memory and CTAs at once on a multiprocessor, each from the least to the most of its variants."""
    cards = [ARCHITECTURES[name] for name in options.architectures]
    uses = {card.name: measure(_all_variants(options, card), card, options.workers) for card in cards}
    lines = list(_table(cards, uses))
    if options.write:
        page = _TABLE_PAGE.read_text()
        start, end = page.index(_START) + len(_START), page.index(_END)
        _TABLE_PAGE.write_text("\n".join((page[:start], "", *lines, "", page[end:])))
    else:
        print("\n".join(lines))
    for card in cards:
        for variant, use in uses[card.name].items():
            for fault in faults(variant, use, card):
                print(f"\n{fault}")


def _table(cards: list[CudaArchitecture], uses: dict[str, dict[KernelVariant, KernelUse]]) -> Iterator[str]:
    kernels = sorted({(variant.file, variant.name) for compiled in uses.values() for variant in compiled})
    yield " | ".join(("| file: kernel", *(card.name for card in cards))) + " |"
    yield " --- ".join("|" * (len(cards) + 2))
    for file, name in kernels:
        cells = (_cell(uses[card.name], card, file, name) for card in cards)
        yield " | ".join((f"| {file.removesuffix('.cu')}: {name}", *cells)) + " |"


def _all_variants(options: MatrixOptions, card: CudaArchitecture) -> list[KernelVariant]:
    every = (*learner_variants(card), *mixture_variants(card), *portable_variants(card))
    deltas = (delta_variants(shape("qwen3.5-9b"), card, rows) for rows in (1, 64))
    names = dict.fromkeys((*every, *itertools.chain(*deltas)))
    kinds: tuple[Literal["bf16", "fp8"], ...] = ("bf16", "fp8")
    for model, rows, kv in itertools.product(options.shapes, options.rows, kinds):
        step = decode_variants(
            shape(model), card, rows, rank=options.lora_rank, kv=kv, heads=(BF16, FP8, NVFP4Head)
        )
        names |= dict.fromkeys(step)
    for model, rows in itertools.product(options.shapes, options.rows) if options.lora_rank else ():
        by_row = decode_variants(shape(model), card, rows, rank=options.lora_rank, by_row=True)
        names |= dict.fromkeys(by_row)
    return list(names)


def _cell(uses: dict[KernelVariant, KernelUse], card: CudaArchitecture, file: str, name: str) -> str:
    compiled = {variant: use for variant, use in uses.items() if (variant.file, variant.name) == (file, name)}
    if not compiled:
        return "-"
    shared = [(use.shared_bytes + variant.shared_bytes) / 1024 for variant, use in compiled.items()]
    ctas = [resident(variant, use, card) for variant, use in compiled.items()]
    spilled = max(use.local_bytes for use in compiled.values())
    registers = _range(use.registers for use in compiled.values())
    cell = f"{registers}; {_range(map(round, shared))} KB; {_range(ctas)}"
    return cell + (f"; spills {spilled} bytes" if spilled else "")


def _range(numbers: Iterable[int]) -> str:
    ordered = sorted(numbers)
    return str(ordered[0]) if ordered[0] == ordered[-1] else f"{ordered[0]}-{ordered[-1]}"


def measure(
    variants: Iterable[KernelVariant], card: CudaArchitecture, workers: int = 2
) -> dict[KernelVariant, KernelUse]:
    """Compile each file with its definitions, unless the disk cache has it; return what its kernels use."""
    variants = list(dict.fromkeys(variants))
    sources = list(dict.fromkeys((each.file, each.defines) for each in variants))
    with ThreadPoolExecutor(workers) as pool:
        cubins = pool.map(lambda source: cached_cubin(source[0], dict(source[1]), card.name), sources)
        kernels = {source: kernels_of(cubin) for source, cubin in zip(sources, cubins, strict=True)}
    return {each: kernels[each.file, each.defines][each.name] for each in variants}


def resident(variant: KernelVariant, use: KernelUse, card: CudaArchitecture) -> int:
    return card.resident_ctas(variant.threads, use.registers, use.shared_bytes + variant.shared_bytes)


def faults(variant: KernelVariant, use: KernelUse, card: CudaArchitecture) -> list[str]:
    """Return why a kernel cannot be launched on the card, or is slower than it should be."""
    what = f"{variant.file} {variant.name} {dict(variant.defines)} on {card.name}:"
    problems, shared = [], use.shared_bytes + variant.shared_bytes
    if use.local_bytes > _MAX_LOCAL_BYTES.get(variant.file, 0):
        problems.append(f"{what} {use.local_bytes} bytes of a thread do not fit its registers")
    if use.split_copies:
        problems.append(
            f"{what} {use.split_copies} copies have a shared address that NVRTC may encode wrongly"
        )
    if shared > card.shared_bytes:
        problems.append(f"{what} {shared} bytes of shared memory; a CTA has {card.shared_bytes}")
    if use.most_threads is not None and variant.threads > use.most_threads:
        problems.append(f"{what} {variant.threads} threads; it is compiled for {use.most_threads}")
    needed = dict(variant.defines)["CTAS"] if variant.file in _WAITING else 1
    if shared <= card.shared_bytes and resident(variant, use, card) < needed:
        problems.append(f"{what} {resident(variant, use, card)} CTAs at once; it needs {needed}")
    return problems


def learner_variants(card: CudaArchitecture) -> list[KernelVariant]:
    """Return the kernels of prefill and update, and those that no decode step below launches."""

    def norm(name: str, width: int, x_bytes: int, table: int) -> KernelVariant:
        threads = min(-(-width // 8 // 32) * 32, 512)
        defines = (("TABLE", table), ("THREADS", threads), ("WIDTH", width), ("X_BYTES", x_bytes))
        return KernelVariant("rms_norm.cu", name, defines, threads, 0)

    norms = [
        norm(name, *widths)
        for name in ("rms_norm", "rms_norm_backward")
        for widths in ((128, 2, 0), (896, 4, 1), (3584, 4, 0), (8192, 4, 0))
    ]
    swiglus = ("swiglu", "swiglu_wide", "swiglu_backward", "swiglu_wide_backward")
    kernels = [
        *norms,
        *(KernelVariant("rotary.cu", "rotate", (("HEAD", h), ("THREADS", 128)), 128, 0) for h in (64, 128)),
        *(
            KernelVariant("head_norm.cu", name, (("HEAD", 128), ("NORM", norm), ("THREADS", n)), n, 0)
            for name in ("head_norm", "head_norm_backward")
            for norm, n in ((0, 96), (0, 128), (1, 96), (1, 160))
        ),
        *(KernelVariant("swiglu.cu", name, (), 256, 0) for name in swiglus),
        *(KernelVariant("stack_unpack.cu", "stack_unpack", (("BLOCK", b),), 256, 0) for b in (16, 32)),
        KernelVariant("expert_rows.cu", "scale_and_add", (), 256, 0),
        KernelVariant("sum_copies.cu", "sum_copies", (), 256, 0),
        KernelVariant("short_conv.cu", "short_conv", (("ROWS", 16), ("THREADS", 128)), 128, 0),
        delta_chunks_variant(card),
        *(KernelVariant("routing.cu", f"gather_{name}", (), 256, 0) for name in ("fp32", "bf16", "backward")),
        *(
            KernelVariant("clamped_swiglu.cu", f"clamped_swiglu{name}", (), 256, 0)
            for name in ("", "_backward")
        ),
        *(
            KernelVariant("logprob.cu", "logprob", (*cap, ("THREADS", 1024)), 1024, 0)
            for cap in ((), (("SOFTCAP", 1),))
        ),
        *(
            KernelVariant("tile_unpack.cu", "tile_unpack", (("FORMAT", layout.define),), 256, 0)
            for layout in TileLayout
        ),
        KernelVariant("fused_linear.cu", "copy_rows", (("PARTS", 1),), 256, 0),
        KernelVariant("fused_linear.cu", "place_adapters", (("PARTS", 3),), 256, 0),
        *(KernelVariant("head_finish.cu", "head_finish", (("STEP", step),), 512, 0) for step in (0, 1)),
        KernelVariant("fp8_pages.cu", "write_fp8", (("H", 128), ("KV_HEADS", 4), ("PAGE", 16)), 128, 0),
    ]
    if card.has_wgmma:
        kernels += int8_variants()
    if card.number >= 89:  # before Ada there are no FP8 conversions
        kernels.append(KernelVariant("fp8_linear.cu", "quantize_rows", (), 256, 0))
    return kernels


def int8_variants() -> list[KernelVariant]:
    """Return the kernels of Hopper's products of 8-bit integers, for the sizes of their CASES."""
    wide = _tensor(128, dtype=torch.float32)
    weights: list[Weight] = [_tensor(128, 64)]
    for layout, in_turns in itertools.product(TileLayout, (False, True)):
        tiles = _tensor(2, 1, layout.tile_bytes, dtype=torch.uint8)
        weights.append(WeightTiles(tiles, wide, layout, in_turns))
    with _pretended(ARCHITECTURES["sm_90a"]), dry_run() as variants:
        for width in {width for _, n, k in int8_product.CASES for width in (n, k)}:
            int8_codes.rotated_rows(_tensor(1, width), None)
        for weight, along_k in itertools.product(weights, (False, True)):
            rotation = Rotation.of(weight, wide, along_k=along_k)
            rotated, u_TR = RotatedWeight(rotation.codes(weight), rotation), _tensor(1, 16)
            if along_k:
                y_TF, gate_TF = _tensor(1, 64), _tensor(1, 64)
                int8_product.put_gate_up(_tensor(1, 64), u_TR, _tensor(128, 16), rotated, y_TF, gate_TF)
            else:
                int8_product.input_gradient(_tensor(1, 128), rotated, u_TR, _tensor(16, 64))
    return list(variants)


def mixture_variants(card: CudaArchitecture) -> list[KernelVariant]:
    """Return the kernels of a mixture of experts in decode steps."""
    variants = grouped_variants(card) + (hopper_variants() if card.has_wgmma else [])
    for experts, chosen in _MIXTURES:
        for name, threads in (("router_logits", 256), ("route", 1024), ("add_experts", 128)):
            defines = {"E": experts, "CHOSEN": chosen, "OVER_ALL": 0, "MT": grouped_product.ITEM_ROWS[0]}
            pairs = () if name == "router_logits" else tuple(sorted(defines.items()))
            variants.append(KernelVariant(moe_route.FILE, name, pairs, threads, 0))
    return variants


def decode_variants(
    a: Architecture,
    card: CudaArchitecture,
    rows: int,
    *,
    rank: int,
    kv: Literal["bf16", "fp8"] = "bf16",
    noise_table: bool = False,
    heads: tuple[type, ...] = (BF16,),
    by_row: bool = False,
) -> list[KernelVariant]:
    """Return the kernels that a decode step of this many rows launches on the card.

    heads: formats of the output head; NVFP4's has a sampling kernel on Hopper alone. by_row: rows have
    adapters of their own.
    """
    with _pretended(card), dry_run() as variants:
        state = DecodeState.empty(rows, _PAGES, 1, _META)
        _attend(a, state, _KV[kv])
        if a.delta is not None:
            _step_delta(a, a.delta, state, rank)
        _multiply(a, card, rows, rank, noise_table, _slots(rows) if by_row else None)
        for head in (_head(format, a) for format in heads):
            if card.has_wgmma:
                _sample(HeadSample(head, rows, _META), state, a.width)
            if not isinstance(head, NVFP4Head):
                _sample(PortableHeadSample(head, rows, _META), state, a.width)
    return list(variants)


def head_variants(
    a: Architecture, card: CudaArchitecture, rows: int, format: type, *, scale: float, softcap: float | None
) -> list[KernelVariant]:
    """Return Hopper's kernels of sampling alone, with a factor and a cap of the logits."""
    with _pretended(card), dry_run() as variants:
        head = HeadSample(_head(format, a), rows, _META, scale=scale, softcap=softcap)
        _sample(head, DecodeState.empty(rows, _PAGES, 1, _META), a.width)
    return list(variants)


def delta_variants(a: Architecture, card: CudaArchitecture, rows: int) -> list[KernelVariant]:
    """Return the kernels of Gated DeltaNet alone."""
    assert a.delta is not None
    with _pretended(card), dry_run() as variants:
        _step_delta(a, a.delta, DecodeState.empty(rows, _PAGES, 1, _META), rank=32)
    return list(variants)


def attention_variants(
    a: Architecture,
    card: CudaArchitecture,
    rows: int,
    kv: Literal["bf16", "fp8"],
    options: AttentionOptions = PLAIN,
) -> list[KernelVariant]:
    """Return the kernels of attention alone."""
    with _pretended(card), dry_run() as variants:
        _attend(a, DecodeState.empty(rows, _PAGES, 1, _META), _KV[kv], options)
    return list(variants)


def _attend(
    a: Architecture, state: DecodeState, dtype: torch.dtype, options: AttentionOptions = PLAIN
) -> None:
    rows, heads = len(state.positions_B), (a.num_heads, a.num_kv_heads, a.head_size)
    gated = a.attention_gate
    attention = DecodeAttention(
        *heads, _PAGE, dtype, rows, _PAGES, _META, is_gated=gated, is_interleaved=a.rope_is_interleaved
    )
    pages = (_PAGES, _PAGE, a.num_kv_heads)
    cache = LayerCache(_tensor(*pages, a.head_size, dtype=dtype), _tensor(*pages, a.head_size, dtype=dtype))
    if dtype != torch.bfloat16:
        scales = _tensor(_PAGES, a.num_kv_heads, _PAGE, dtype=torch.float32)
        cache = dataclasses.replace(cache, k_scales=scales, v_scales=scales)
    qkv_BX = _tensor(rows, (a.num_heads * (1 + gated) + 2 * a.num_kv_heads) * a.head_size)
    angles = _tensor(_PAGE * _PAGES, a.rotated, dtype=torch.float32)
    attention.attend_together(qkv_BX, angles, cache, state, options=options)


def _sample(head: HeadSample, state: DecodeState, width: int) -> None:
    rows, stop = len(state.positions_B), _tensor(1, dtype=torch.int32)
    for temperatures in {1, rows}:  # one, or each row's own
        head.step(_tensor(rows, width), state, stop, _tensor(temperatures, dtype=torch.float32))


def _step_delta(a: Architecture, shape: DeltaShape, state: DecodeState, rank: int) -> None:
    """Launch the step of Gated DeltaNet with and without adapters of its gates."""
    rows, n = len(state.positions_B), shape.num_value_heads
    is_by_head = a.delta_projections == "by_head"
    kernel = DeltaNetStep(shape, rows, _META, is_by_head=is_by_head)
    wide = dict.fromkeys(("a_log_N", "dt_bias_N"), _tensor(n, dtype=torch.float32))
    conv_CW = _tensor(shape.channels, shape.num_taps, dtype=torch.float32)
    norm_V = _tensor(shape.value_size, dtype=torch.float32)
    weights = DeltaWeights(conv_CW=conv_CW, norm_V=norm_V, eps=1e-6, **wide)
    slots = _tensor(2, *shape.conv_shape), _tensor(2, *shape.state_shape, dtype=torch.float32)
    y_BX, plain = _tensor(rows, shape.channels + shape.value_width), Gates(x_BN=_tensor(rows, 2 * n))
    u_BR, b_NR = _tensor(rows, rank * (1 if is_by_head else 2)), _tensor(2 * n, rank)
    for gates in (plain, dataclasses.replace(plain, u_BR=u_BR, b_NR=b_NR)):
        kernel.step(y_BX, gates, weights, *slots, state)


def _multiply(
    a: Architecture,
    card: CudaArchitecture,
    rows: int,
    rank: int,
    noise_table: bool,
    slots: RowSlots | None,
) -> None:
    shrink = LoraShrink(_META) if card.has_wgmma else PortableLoraShrink(_META)
    product = NVFP4Decode(_META) if card.has_wgmma else PortableProduct(_META)
    h_BD = shrink.embed(_tensor(rows, dtype=torch.int32), _tensor(a.vocab_size, a.width))
    weight, rows_B = _tensor(a.width, dtype=torch.float32), _tensor(rows, dtype=torch.int32)
    noise = _tensor(4, a.width, dtype=torch.float32) if noise_table else weight
    rows_M = rows_B if noise_table else None
    attention = next(kind for kind in a.kinds if kind.mixer == "attention")
    for group in layer_spec(a, attention).groups:
        x_BK, adapter = _tensor(rows, group.in_width), _adapter(group, rank, slots)
        rank_rows = 0 if adapter is None else adapter.a.shape[-2]
        if slots is not None:
            computes_lora_hidden = False
        elif isinstance(product, NVFP4Decode):
            computes_lora_hidden = pays_to_compute_lora_hidden(
                rows, group.in_width, rank_rows, group.name == "gate_up"
            )
        else:
            computes_lora_hidden = product.computes_lora_hidden(
                rows, group.out_width, group.in_width, rank_rows
            )
        if adapter is not None and not computes_lora_hidden:
            if group.input_from is not None and group.in_width == a.width:
                norm = h_BD, weight, noise, 1e-6
                _, u_BR = shrink.norm_shrink(*norm, adapter.a, 1.0, rows_M=rows_M, slots=slots)
            else:
                u_BR = shrink.shrink(x_BK, adapter.a, 1.0, slots=slots)
            adapter = dataclasses.replace(adapter, lora_hidden=u_BR)
        rows_of_tiles, columns = group.out_width // TILE_ROWS, group.in_width // TILE_K
        tiles = _tensor(rows_of_tiles, columns, TILE_BYTES, dtype=torch.uint8)
        operands = x_BK, tiles, _tensor(group.out_width, dtype=torch.float32)
        if group.name == "gate_up":
            product.swiglu(*operands, adapter=adapter)
        else:
            product.linear(*operands, adapter=adapter)
    shrink.norm(h_BD, weight, noise, 1e-6, rows_M=rows_M)


def _slots(rows: int) -> RowSlots:
    return RowSlots(_tensor(rows, dtype=torch.int32), _tensor(_SLOTS, dtype=torch.float32))


def _adapter(group: LinearGroupSpec, rank: int, slots: RowSlots | None) -> PackedAdapter | None:
    if rank == 0:
        return None
    parts, some = len(group.linears), () if slots is None else (_SLOTS,)
    a_RK, b_NR = _tensor(*some, parts * rank, group.in_width), _tensor(*some, group.out_width, rank)
    starts = (group.out_widths[0], sum(group.out_widths[:2])) if parts == 3 else ()
    return PackedAdapter(a_RK, b_NR, 1.0, starts, slots=slots)


def _head(format: type, a: Architecture) -> Head:
    v, d = a.vocab_size, a.width
    if format is BF16:
        return BF16(_tensor(v, d))
    if format is FP8:
        scales = _tensor(-(-v // BLOCK), -(-d // BLOCK), dtype=torch.float32)
        return FP8(_tensor(v, d, dtype=torch.float8_e4m3fn), scales)
    tiles = _tensor(v // TILE_ROWS, d // TILE_K, TILE_BYTES, dtype=torch.uint8)
    return NVFP4Head(tiles, _tensor(v // TILE_ROWS * TILE_ROWS, dtype=torch.float32))


def _tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=_META)


@contextlib.contextmanager
def _pretended(card: CudaArchitecture) -> Iterator[None]:
    """Inside, torch describes any device as this card, with the multiprocessors of a typical one."""
    number, sms = card.number, _SMS.get(card.name, 82)
    properties = SimpleNamespace(
        multi_processor_count=sms, shared_memory_per_multiprocessor=card.sm_shared_bytes, name=""
    )
    with (
        mock.patch.object(torch.cuda, "get_device_properties", lambda _: properties),
        mock.patch.object(torch.cuda, "get_device_capability", lambda _=None: divmod(number, 10)),
    ):
        yield
