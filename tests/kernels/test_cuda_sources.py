"""The CUDA sources compile for Hopper, which NVRTC does without a GPU."""

import re

import pytest

from benchmarks.matrix import int8_variants
from kernels import kernel_uses
from qerl.kernels.experts import grouped_hopper
from qerl.kernels.head.head_sample import choose_tile
from qerl.kernels.runtime import nvrtc
from qerl.kernels.tiles.nvfp4_tile import TOKEN_TILES
from qerl.kernels.tiles.portable_shrink import MAKES_U

DECODE = {"MT": 8, "WG": 1, "KB": 128, "STAGES": 4, "CTAS": 1, "GROUP": 4, "U_WORDS": 49152}
WITH_U = DECODE | {"WG": 2, "STAGES": 2, "RANK": 32, "SPLIT": 0, "GIVEN_U": 1}
ATTENTION = {"H": 64, "GROUP": 7, "KV_HEADS": 2, "PAGE": 16, "CHUNK": 128}
DELTA = {"KEY_HEADS": 2, "GROUP": 2}
HEAD = {"MT": 32, "WR": 2, "WM": 1, "KB": 128, "STAGES": 2, "CTAS": 1, "WIDTH": 1024}
SHRINK = {"TOKEN_TILES": 1, "ROW_TILES": 1, "UNITS": 1, "WARPS": 8, "CLUSTER": 8}
GROUPED = {"MT": 8, "WR": 4, "R16": 1, "KB": 192, "STAGES": 4, "CTAS": 3}
GROUPED_HOPPER = grouped_hopper.defines_of(grouped_hopper.hopper_tile(64, 2880), 2, True)
PORTABLE = {"MT": 8, "WR": 4, "WM": 1, "R16": 1, "KB": 256, "STAGES": 4, "CTAS": 2, "RANK": 16}

CONFIGURATIONS = (
    ("clamped_swiglu.cu", {}),
    ("decode_attention.cu", ATTENTION | {"FP8": 0, "STAGES": 4, "CTAS": 6}),
    ("decode_attention.cu", ATTENTION | {"FP8": 1, "STAGES": 4, "CTAS": 6}),
    ("decode_attention_write.cu", ATTENTION | {"FP8": 1}),
    *(("delta_net_step.cu", DELTA | {"BY_HEAD": b, "RANK": 16 * b, "AHEAD": b}) for b in (0, 1)),
    ("expert_shrink.cu", {"RANK": 4, "GATHER": 1}),
    ("fp8_linear.cu", {}),
    ("fp8_pages.cu", {"H": 128, "PAGE": 16, "KV_HEADS": 4}),
    ("fused_linear.cu", {"PARTS": 3}),
    ("gated_delta_chunks.cu", {"CTAS": 2}),
    ("grouped_product.cu", GROUPED | {"SWIGLU": 2, "GATHER": 1, "EARLY": 0}),
    ("grouped_product.cu", GROUPED | {"SWIGLU": 0, "GATHER": 0, "EARLY": 1}),
    ("grouped_product.cu", GROUPED | {"SWIGLU": 2, "GATHER": 1, "EARLY": 0, "RANK": 4, "ORDER": 2}),
    ("grouped_hopper.cu", GROUPED_HOPPER),
    ("expert_rows.cu", {}),
    ("head_finish.cu", {"STEP": 1}),
    *(("head_norm.cu", {"HEAD": 128, "THREADS": 96, "NORM": norm}) for norm in (0, 1)),
    *(
        ("head_portable.cu", HEAD | {"FORMAT": format, "OUTPUT": 0, "BY_ROW": b})
        for format in (0, 1)
        for b in (0, 1)
    ),
    *((variant.file, dict(variant.defines)) for variant in int8_variants()),
    *(
        ("head_sample.cu", {**choose_tile(rows, kind, 1024).defines, "OUTPUT": 0, "BY_ROW": b})
        for kind in range(3)
        for rows, b in ((8, 0), (8, 1), (256, 1))
    ),
    ("logprob.cu", {"THREADS": 1024}),
    ("lora_shrink.cu", SHRINK | {"NORM": 0, "TABLE": 0}),
    ("lora_shrink.cu", SHRINK | {"NORM": 1, "TABLE": 1}),
    ("lora_shrink.cu", SHRINK | {"NORM": 1, "TABLE": 0, "SLOTS": 1}),
    ("lora_shrink_portable.cu", SHRINK | {"TABLE": 1}),
    ("lora_shrink_portable.cu", SHRINK | {"TABLE": 0, "SLOTS": 1}),
    ("moe_route.cu", {"E": 128, "CHOSEN": 8, "OVER_ALL": 1, "MT": 16}),
    ("nvfp4_decode.cu", DECODE | {"RANK": 0, "SWIGLU": 0, "SPLIT": 0, "GIVEN_U": 0, "U_BYTES": 0}),
    ("nvfp4_decode.cu", DECODE | {"RANK": 16, "SWIGLU": 1, "SPLIT": 1, "GIVEN_U": 0, "U_BYTES": 0}),
    ("nvfp4_decode.cu", DECODE | {"RANK": 16, "SWIGLU": 1, "SPLIT": 0, "GIVEN_U": 0, "U_BYTES": 512}),
    *(
        ("nvfp4_decode.cu", WITH_U | {"MT": width, "SWIGLU": 0, "U_BYTES": shared})
        for width in TOKEN_TILES[4:]
        for shared in ((0, width * 64) if width % 64 == 0 else (width * 64,))
    ),
    ("nvfp4_decode.cu", WITH_U | {"MT": 96, "WG": 3, "SWIGLU": 1, "U_BYTES": 96 * 128}),
    (
        "nvfp4_decode.cu",
        DECODE | {"RANK": 16, "SWIGLU": 1, "SPLIT": 1, "GIVEN_U": 1, "U_BYTES": 0, "SLOTS": 1},
    ),
    *(("tile_unpack.cu", {"FORMAT": format}) for format in range(4)),
    ("tile_unpack.cu", {"FORMAT": 0, "FACTORS": 1}),
    *(("portable_product.cu", PORTABLE | {"SWIGLU": s, "FORMAT": f}) for f in range(4) for s in (0, 1)),
    ("portable_product.cu", PORTABLE | {"SWIGLU": 1, "FORMAT": 0} | MAKES_U),
    ("portable_product.cu", PORTABLE | {"SWIGLU": 0, "FORMAT": 0, "LATE_WAIT": 1, "SLOTS": 1}),
    ("rms_norm.cu", {"WIDTH": 96, "THREADS": 32, "X_BYTES": 4, "TABLE": 1}),
    ("rotary.cu", {"HEAD": 64, "THREADS": 128}),
    ("round_columns.cu", {"ROWS": 2, "THREADS": 128}),
    ("routing.cu", {}),
    ("sum_copies.cu", {}),
    ("scale_columns.cu", {}),
    ("short_conv.cu", {"ROWS": 16, "THREADS": 128}),
    ("stack_unpack.cu", {"BLOCK": 16}),
    ("stack_unpack.cu", {"BLOCK": 32}),
    ("swiglu.cu", {}),
)


@pytest.mark.parametrize(("file", "defines"), CONFIGURATIONS)
def test_a_kernel_compiles_for_hopper(file, defines):
    pytest.importorskip("cuda.bindings.nvrtc")
    assert kernel_uses.uses(file, defines, "sm_90a")


@pytest.mark.parametrize(("file", "defines"), dict(CONFIGURATIONS).items())
def test_what_is_recorded_of_a_kernel_is_what_nvrtc_gives(file, defines):
    """One variant of each file."""
    pytest.importorskip("cuda.bindings.nvrtc")
    recorded = kernel_uses.uses(file, defines, "sm_90a")
    assert kernel_uses.anew(file, defines, "sm_90a") == recorded


def test_the_key_of_a_recorded_kernel_depends_on_all_that_a_cubin_does(monkeypatch):
    pytest.importorskip("cuda.bindings.nvrtc")

    def key(file="rms_norm.cu", defines=(("WIDTH", 64),), architecture="sm_90a"):
        kernel_uses.texts_of.cache_clear()
        return kernel_uses.key_of(file, dict(defines), architecture)

    keys = {key(), key("swiglu.cu"), key(defines=(("WIDTH", 96),)), key(architecture="sm_80")}
    for name in ("rms_norm.cu", "warp.cuh", "types.cuh"):  # it includes the second, and that the third
        with monkeypatch.context() as patch:
            changed = nvrtc.sources() | {name: f"// changed\n{nvrtc.sources()[name]}"}
            patch.setattr(nvrtc, "sources", lambda texts=changed: texts)
            keys.add(key())
    with monkeypatch.context() as patch:
        patch.setattr(kernel_uses, "nvrtc_version", lambda: (1, 0))
        keys.add(key())
    assert len(keys) == 8 and key() in keys


def test_every_source_is_compiled_here():
    files = {name for name in nvrtc.sources() if name.endswith(".cu")}
    assert files == {file for file, _ in CONFIGURATIONS}


def test_every_included_header_exists_and_every_header_is_included():
    texts = nvrtc.sources()
    included = {name for text in texts.values() for name in re.findall(r'^#include "(.+)"$', text, re.M)}
    assert included == {name for name in texts if name.endswith(".cuh")}


def test_the_cache_key_depends_on_source_headers_options_and_versions(monkeypatch):
    def key(file="rotary.cu", defines=None, architecture="sm_90a", versions=(13, 0)):
        return nvrtc.cache_key(file, defines or {"HEAD": 64}, architecture, versions)

    keys = {
        key(),
        key("swiglu.cu"),
        key(defines={"HEAD": 96}),
        key(architecture="sm_80"),
        key(versions=(13, 1)),
    }
    headers = nvrtc._headers()
    monkeypatch.setattr(nvrtc, "_headers", lambda: headers | {"mma.cuh": "// changed"})
    assert len(keys | {key()}) == 6


def test_copies_with_an_l2_policy_are_bulk_copies_or_hoppers():
    """Where NVRTC 13.0 splits the others' shared address, it encodes them wrongly (split_copies)."""
    copies = {
        name: [copy for copy in found if not copy.startswith("cp.async.bulk")]
        for name, text in nvrtc.sources().items()
        if (found := re.findall(r"cp\.async\.[\w.:]+cache_hint", text))
    }
    assert [name for name, others in copies.items() if others] == ["async_copy.cuh"]
    assert len(copies) > 1
