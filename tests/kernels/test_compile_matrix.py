"""Every CUDA kernel compiles for every architecture without spills and fits the card; needs no GPU.

Only what has changed since it was recorded is compiled (kernel_uses.py).
"""

import dataclasses
import itertools

import pytest
import torch

from benchmarks import matrix
from kernels import kernel_uses
from qerl.kernels.attention.attention_options import AttentionOptions
from qerl.kernels.delta_net.delta_net_step import copies_ahead
from qerl.kernels.runtime.architectures import ARCHITECTURES, TESTED
from qerl.kernels.runtime.nvrtc import KernelVariant
from qerl.models.random_weights import SHAPES, shape

STEPS = {  # model, rows, cache, whether each row has its own noise
    "7b": ("qwen2.5-7b", 64, "bf16", False),
    "7b of 112": ("qwen2.5-7b", 112, "bf16", False),
    "7b of 176": ("qwen2.5-7b", 176, "fp8", False),
    "7b of 224": ("qwen2.5-7b", 224, "fp8", False),
    "half": ("qwen2.5-0.5b", 8, "fp8", True),
    "wide": ("qwen2.5-72b", 256, "fp8", False),
    "hybrid": ("qwen3.5-9b", 64, "bf16", False),
}
SAME_CODE = {"sm_89": "sm_86"}
"""Architectures that get the code of another, with its limits: two tiles show that the kernels compile."""
CASES = (  # each architecture once, and the widest tiles on the smallest card and on Hopper
    *(("7b", name) for name in TESTED if name != "sm_86"),
    *(("half", name) for name in ("sm_86", "sm_90a", "sm_120a")),
    *(("wide", name) for name in ("sm_86", "sm_90a")),
    ("hybrid", "sm_86"),
    *((f"7b of {rows}", "sm_90a") for rows in (112, 176, 224)),
)


@pytest.fixture(scope="module", autouse=True)
def nvrtc():
    pytest.importorskip("cuda.bindings.nvrtc")


def faults_of(variants, card):
    uses = kernel_uses.measure(variants, card)
    return [fault for variant, use in uses.items() for fault in matrix.faults(variant, use, card)]


def sums_of(variant):
    """Return what a thread's registers depend on most: its part of the tile, and how many CTAs run."""
    defines = dict(variant.defines)
    return tuple(defines.get(key, 1) for key in ("MT", "R16", "WM", "WR", "CTAS"))


def form_of(variant):
    keys = ("FORMAT", "RANK", "SWIGLU", "GIVEN_U")
    return tuple((key, number) for key, number in variant.defines if key in keys)


def some_of(variants, name):
    """One variant of each tile on sm_86, and on two of the other architectures in turn, in another form
    (format, adapter, SwiGLU, u made) on each; the tile with the most registers on all, on sm_86 in each form.
    `python -m benchmarks matrix` compiles them all."""
    tiles = {tile: [v for v in variants if sums_of(v) == tile] for tile in sorted(map(sums_of, variants))}
    turn = TESTED.index(name)
    chosen = [
        same[len(same) * ((turn + i) % len(TESTED)) // len(TESTED)] for i, same in enumerate(tiles.values())
    ]
    if name in SAME_CODE:
        return [chosen[-1], chosen[0]]
    if name == "sm_86":
        return [*chosen, *{form_of(v): v for v in tiles[max(tiles)]}.values()]
    others = [each for each in TESTED if each != "sm_86" and each not in SAME_CODE]
    return [*chosen[others.index(name) % 2 : -1 : 2], chosen[-1]]


def faults_of_some(variants, name):
    """Faults of some variants as they are compiled, and of all with the most registers of those."""
    card, variants = ARCHITECTURES[name], list(variants)
    uses = kernel_uses.measure(some_of(variants, name), card)
    most = {sums_of(v): use for v, use in sorted(uses.items(), key=lambda item: item[1].registers)}
    return [
        *(fault for variant, use in uses.items() for fault in matrix.faults(variant, use, card)),
        *(
            fault
            for variant in variants
            if sums_of(variant) in most
            for fault in matrix.faults(variant, most[sums_of(variant)], card)
        ),
    ]


@pytest.mark.parametrize("name", TESTED)
def test_the_learners_kernels_fit(name):
    """Every variant on the smallest card and on Hopper, one of each kernel on the others: none takes more
    than 66 registers."""
    card = ARCHITECTURES[name]
    variants = matrix.learner_variants(card)
    if name not in ("sm_86", "sm_90a"):
        variants = {variant.name: variant for variant in variants}.values()
    assert not faults_of(variants, card)


@pytest.mark.parametrize(("step", "name"), CASES)
def test_a_decode_steps_kernels_fit(step, name):
    model, rows, kv, noise_table = STEPS[step]
    card = ARCHITECTURES[name]
    variants = matrix.decode_variants(shape(model), card, rows, rank=32, kv=kv, noise_table=noise_table)
    files = {variant.file for variant in variants}
    assert files >= {"decode_attention.cu", "decode_attention_write.cu"}
    assert ("delta_net_step.cu" in files) == (shape(model).delta is not None)
    hopper = {"nvfp4_decode.cu", "lora_shrink.cu", "head_sample.cu"}
    assert (files & hopper == hopper) == card.has_wgmma and (files & hopper == set()) != card.has_wgmma
    assert not faults_of(variants, card)


@pytest.mark.parametrize("name", TESTED)
def test_the_portable_products_tiles_fit(name):
    variants = matrix.portable_variants(ARCHITECTURES[name])
    assert len(variants) > 20 and not faults_of_some(variants, name)


@pytest.mark.parametrize("name", TESTED)
def test_the_kernels_of_mixtures_fit(name):
    card = ARCHITECTURES[name]
    by_name = {}
    for variant in matrix.mixture_variants(card):
        by_name.setdefault(variant.name, []).append(variant)
    products, hopper = by_name.pop("grouped_product"), by_name.pop("grouped_hopper", [])
    others = [variant for same in by_name.values() for variant in same]
    assert len(products) > 10 and len(others) == 8 and bool(hopper) == card.has_wgmma
    largest = [variant for variant in hopper if dict(variant.defines)["MT"] == 64]
    assert not faults_of_some(products, name) and not faults_of([*others, *largest], card)


@pytest.mark.parametrize("name", TESTED)
def test_attention_of_every_model_fits_every_card(name):
    """Two stages are the least. A CTA is one warp; with heads of 128 in BF16 and 256 rows the cards with
    100 KB run two, which have 64 KB in flight."""
    card = ARCHITECTURES[name]
    for a, rows, kv in itertools.product(SHAPES.values(), (1, 8, 64, 256), ("bf16", "fp8")):
        for variant in matrix.attention_variants(a, card, rows, kv):
            assert variant.shared_bytes <= card.shared_bytes
            assert card.resident_ctas(variant.threads, 255, variant.shared_bytes) >= 2


@pytest.mark.parametrize("name", TESTED)
def test_the_step_of_gated_deltanet_fits_twice(name):
    """Two CTAs keep 128 KB of states in registers, and as much ahead in shared memory if that holds it."""
    card = ARCHITECTURES[name]
    variants = (matrix.delta_variants(SHAPES["qwen3.5-9b"], card, rows) for rows in (1, 64))
    uses = kernel_uses.measure(itertools.chain(*variants), card)
    assert len(uses) == (4 if copies_ahead(card) else 2)
    assert not [fault for v, use in uses.items() for fault in matrix.faults(v, use, card)]
    assert all(use.local_bytes == 0 and matrix.resident(v, use, card) >= 2 for v, use in uses.items())


@pytest.mark.parametrize("name", ["sm_86", "sm_90a"])
def test_attention_with_the_largest_heads_and_every_option_fits(name):
    card = ARCHITECTURES[name]
    a = dataclasses.replace(SHAPES["qwen3-8b"], num_heads=8, num_kv_heads=1, head_size=256)
    sinks_N = torch.zeros(8, device="meta")
    options = AttentionOptions(softcap=50.0, window=512, sinks_N=sinks_N)
    variants = [
        *matrix.attention_variants(a, card, 64, "bf16", options),
        *matrix.attention_variants(a, card, 256, "fp8", options),
    ]
    assert {dict(variant.defines)["H"] for variant in variants} == {256}
    assert not faults_of(variants, card)


SHRINK = {"TABLE": 0, "TOKEN_TILES": 1, "ROW_TILES": 1, "UNITS": 2, "WARPS": 8, "CLUSTER": 8}


def shrink(threads=256, shared_bytes=0, **defines):
    pairs = tuple(sorted((SHRINK | defines).items()))
    return KernelVariant("lora_shrink_portable.cu", "shrink", pairs, threads, shared_bytes)


@pytest.mark.parametrize(
    ("made_up", "wrong"),
    [
        (shrink(), []),
        (shrink(UNITS=8, TOKEN_TILES=4, ROW_TILES=2), ["do not fit its registers"]),
        (shrink(shared_bytes=100 * 1024), ["a CTA has 101376"]),
        (shrink(threads=512), ["it is compiled for 256"]),
    ],
)
def test_a_kernel_that_spills_or_exceeds_the_card_is_found(made_up, wrong):
    found = faults_of([made_up], ARCHITECTURES["sm_86"])
    assert len(found) == len(wrong) and all(text in fault for text, fault in zip(wrong, found, strict=True))


def test_a_kernel_whose_ctas_wait_for_each_other_must_have_them_at_once():
    """An RTX 3090 runs 100 KB at a time: two CTAs of 49 KB, which with the system's 1 KB are 50."""
    card, a = ARCHITECTURES["sm_86"], shrink()
    use = kernel_uses.measure([a], card)[a]
    for shared_kb, is_right in ((40, True), (50, False)):
        waiting = KernelVariant("portable_product.cu", "any", (("CTAS", 2),), 256, shared_kb * 1024)
        assert (matrix.faults(waiting, use, card) == []) == is_right
