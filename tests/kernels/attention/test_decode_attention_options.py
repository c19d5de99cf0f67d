"""Decode attention with windows, caps, sinks, partial rotation, gates and heads of 256."""

import dataclasses

import pytest
import torch

from conftest import rms_error
from kernels import kernel_uses
from kernels.attention.test_decode_attention import (
    POSITIONS,
    RAGGED,
    check,
    made,
    plain,
    random_norms,
    step,
    turning_angles,
)
from qerl.kernels.attention import decode_attention as op
from qerl.kernels.attention import decode_shape
from qerl.kernels.attention.attention_options import PLAIN, AttentionOptions
from qerl.models.rope import Angles, rotate_heads

__all__ = ["made"]  # a fixture

DTYPES = [torch.bfloat16, torch.float8_e4m3fn]
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a")
LONG = (*RAGGED[:-2], 1999, POSITIONS)


def sinks(N):
    return torch.linspace(-4, 6, N)


def options_of(name, N):
    return {
        "plain": PLAIN,
        "scale": AttentionOptions(scale=0.05),
        "cap": AttentionOptions(softcap=3.0, scale=0.2),
        "sinks": AttentionOptions(sinks_N=sinks(N)),
        "window": AttentionOptions(window=100),
        "all": AttentionOptions(scale=0.1, softcap=5.0, window=77, sinks_N=sinks(N)),
    }[name]


def poisoned(case, window):
    """Fill every slot before the windows with NaN, as a page's next owner might."""
    page_tokens = case.cache.k.shape[1]
    for row, position in enumerate(case.state.positions_B.tolist()):
        at = torch.arange(max(position + 1 - window, 0))
        slots = case.state.tables_BX[row].long()[at // page_tokens] * page_tokens + at % page_tokens
        for pages in (case.cache.k, case.cache.v):
            if pages.dtype == torch.bfloat16:
                pages.flatten(0, 1)[slots] = float("nan")
            else:
                pages.view(torch.uint8).flatten(0, 1)[slots] = 0x7F
        for scales in (case.cache.k_scales, case.cache.v_scales):
            if scales is not None:
                scales[slots // page_tokens, :, slots % page_tokens] = float("nan")
    return case


def on_gpu(options):
    return dataclasses.replace(options, sinks_N=None if options.sinks_N is None else options.sinks_N.cuda())


@pytest.mark.parametrize("kv_dtype", DTYPES)
@pytest.mark.parametrize("name", ["scale", "cap", "sinks", "window", "all"])
def test_the_reference_with_options_agrees_with_paged_decode(name, kv_dtype, rng):
    N, K, H = 6, 2, 64
    options = options_of(name, N)
    case = step((1, 15, 16, 17, 0, 130, 200), N, K, H, rng, kv_dtype=kv_dtype)
    if options.window is not None:
        poisoned(case, options.window)
    without = op.reference(case.qkv, case.angles, case.copy().cache, case.state)
    truth = op.reference(case.qkv, case.angles, case.cache, case.state, None, options)
    assert truth.isfinite().all() and not truth[4].any()
    assert rms_error(plain(case, None, options), truth) < 0.01
    assert rms_error(truth, without.nan_to_num(0)) > 0.05


@pytest.mark.parametrize("rotary", [0, 32, 64])
def test_a_gated_head_with_partial_rotation_is_the_models(rotary, rng):
    N, K, H = 4, 2, 64
    case = step((3, 40), 2 * N, K, H, rng)
    case.angles = turning_angles(rotary) if rotary else torch.zeros(POSITIONS, 0)
    at = case.state.positions_B
    q, k, v, gate = op.split_heads(case.qkv, case.angles, at, K, H, None, is_gated=True)
    heads = case.qkv.view(2, 2 * N + 2 * K, H)
    halves = case.angles[at.long(), None].chunk(2, -1)
    angles = Angles(torch.cat((halves[0],) * 2, -1), torch.cat((-halves[1], halves[1]), -1), None)
    for ours, theirs in ((q, heads[:, : 2 * N : 2]), (k, heads[:, 2 * N : 2 * N + K])):
        expected = rotate_heads(theirs.contiguous(), angles, is_interleaved=False) if rotary else theirs
        assert torch.equal(ours, expected) and torch.equal(ours[..., rotary:], theirs[..., rotary:])
    assert torch.equal(v, heads[:, 2 * N + K :]) and gate is not None
    assert torch.equal(gate, heads[:, 1 : 2 * N : 2])
    bare = torch.cat((heads[:, : 2 * N : 2], heads[:, 2 * N :]), 1).flatten(1)
    truth = op.reference(case.qkv, case.angles, case.copy().cache, case.state, None, PLAIN, is_gated=True)
    ungated = op.reference(bare, case.angles, case.cache, case.state)
    assert torch.allclose(truth, ungated * gate.double().sigmoid().flatten(1), rtol=1e-12)


@pytest.mark.parametrize("chunk", [128, 256])
def test_a_window_reaches_no_more_chunks_than_are_launched(chunk):
    for window in (1, 2, 15, 127, 128, 129, 130, 255, 256, 257, 1000):
        ends = range(window, window + 2 * chunk)
        reached = max((end - 1) // chunk - (end - window) // chunk + 1 for end in ends)
        assert decode_shape.max_chunks(10**6, chunk, window) == reached
        assert decode_shape.max_chunks(chunk, chunk, window) == 1
    assert decode_shape.max_chunks(1000, chunk, None) == -(-1000 // chunk)


@pytest.mark.parametrize("kv_dtype", DTYPES)
@pytest.mark.parametrize("H", [64, 128, 256])
@pytest.mark.parametrize(("kib", "most"), [(100, 99), (164, 163), (228, 227)])
def test_every_variant_fits_shared_memory(H, kv_dtype, kib, most):
    for ctas in (3, 6, 8):
        stages, num_bytes = decode_shape.choose_stages(H, kv_dtype, ctas, 256, kib * 1024)
        assert stages >= 2 and num_bytes <= most * 1024
        tile = 16 if H * kv_dtype.itemsize == 512 else 32
        keys = tile * (H * kv_dtype.itemsize + (4 if kv_dtype == torch.float8_e4m3fn else 0))
        assert num_bytes == 2 * stages * keys + 4 * 256


ALL = {"WINDOW": 1, "SOFTCAP": 1, "SINKS": 1, "ROTARY": 64, "GATED": 1}
BUILDS = (
    *((architecture, 256, 8, 0, ALL) for architecture in ARCHITECTURES),
    ("sm_86", 128, 16, 1, {"WINDOW": 1}),
    ("sm_80", 64, 8, 1, {"SINKS": 1}),
    ("sm_90a", 256, 2, 1, {}),
)


@pytest.mark.parametrize(("architecture", "H", "GROUP", "fp8", "options"), BUILDS)
def test_variants_compile_and_keep_everything_in_registers(architecture, H, GROUP, fp8, options):
    pytest.importorskip("cuda.bindings.nvrtc")
    defines = {"H": H, "GROUP": GROUP, "KV_HEADS": 2, "PAGE": 16, "CHUNK": 128, "FP8": fp8} | options
    uses = kernel_uses.uses("decode_attention.cu", defines | {"STAGES": 2, "CTAS": 6}, architecture)
    use = uses["decode_attention"]
    assert use.local_bytes == 0 and use.registers <= 255
    if fp8:
        write = kernel_uses.uses("decode_attention_write.cu", defines, architecture)
        assert write["decode_attention_write"].local_bytes == 0


SHAPES = [(16, 2, 64), (8, 4, 128), (32, 2, 128), (8, 4, 256), (8, 1, 256)]


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", DTYPES)
@pytest.mark.parametrize("name", ["scale", "cap", "sinks", "window", "all"])
@pytest.mark.parametrize(("N", "K", "H"), SHAPES)
def test_options_are_no_less_exact_than_torch(N, K, H, name, kv_dtype, made, rng):
    options = options_of(name, N)
    case = step(LONG, N, K, H, rng, kv_dtype=kv_dtype)
    if options.window is not None:
        poisoned(case, options.window)
    check(made(N, K, H, 16, kv_dtype), case, None, on_gpu(options))


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", DTYPES)
@pytest.mark.parametrize("page_tokens", [16, 48, 256])
@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 31, 33, 127, 128, 129, 256, 300, 1000, 5000])
def test_windows_of_any_size_read_nothing_before_them(window, page_tokens, kv_dtype, made, rng):
    options = AttentionOptions(window=window)
    for N, K, H in ((8, 4, 128), (8, 4, 256)):
        case = poisoned(step(LONG, N, K, H, rng, page_tokens=page_tokens, kv_dtype=kv_dtype), window)
        check(made(N, K, H, page_tokens, kv_dtype, pages=POSITIONS // 16), case, None, options)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", DTYPES)
def test_many_rows_with_windows_have_longer_chunks(kv_dtype, made, rng):
    case = poisoned(step(LONG * 4, 16, 2, 64, rng, kv_dtype=kv_dtype), 300)
    check(made(16, 2, 64, 16, kv_dtype), case, None, AttentionOptions(window=300))


@pytest.mark.gpu
@pytest.mark.parametrize("rotary", [0, 32, 64, 128])
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize(("N", "K", "H"), [(8, 2, 256), (8, 2, 128)])
def test_gates_and_partial_rotation_are_no_less_exact_than_torch(N, K, H, has_norms, rotary, made, rng):
    case = step(LONG, 2 * N, K, H, rng).moved("cuda")
    case.angles = (turning_angles(rotary) if rotary else torch.zeros(POSITIONS, 0)).cuda()
    kernel, norms = made(N, K, H, is_gated=True), None
    if has_norms:
        q_norm, k_norm, eps = random_norms(H, rng)
        norms = q_norm.cuda(), k_norm.cuda(), eps
    truth_case, plain_case = case.copy(), case.copy()
    truth = op.reference(case.qkv, case.angles, truth_case.cache, case.state, norms, PLAIN, True)
    got = kernel.attend(case.qkv, case.angles, case.cache, case.state, norms)
    assert rms_error(got, truth) <= 1.1 * rms_error(plain(plain_case, norms, PLAIN, True), truth)
    mine, theirs = (each.cache.k.view(torch.int16).int() for each in (case, truth_case))
    assert (mine != theirs).float().mean() < 1e-3 and (mine - theirs).abs().max() <= 1


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", DTYPES)
def test_an_fp8_head_of_256_is_stored_as_torch_does(kv_dtype, made, rng):
    """Every byte of the cache, with partial rotation: `check` compares them."""
    case = step(LONG, 8, 2, 256, rng, kv_dtype=kv_dtype)
    case.angles = turning_angles(64)
    check(made(8, 2, 256, 16, kv_dtype), case)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", DTYPES)
def test_a_row_with_a_window_depends_on_that_row_alone(kv_dtype, made, rng):
    kernel, options = made(8, 4, 256, 16, kv_dtype), AttentionOptions(window=200)
    case = poisoned(step(LONG * 2, 8, 4, 256, rng, kv_dtype=kv_dtype), 200).moved("cuda")
    whole = kernel.attend(case.qkv, case.angles, case.cache, case.state, options=options)
    for B in (1, 3, 10):
        part = kernel.attend(case.qkv[:B].contiguous(), case.angles, case.cache, case.state, options=options)
        assert torch.equal(part, whole[:B])


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", DTYPES)
@pytest.mark.parametrize("window", [7, 100, 200])
def test_rows_of_one_sequence_together_with_a_window(window, kv_dtype, made, rng):
    """As one by one: in a launch of as many rows, of which one is in use."""
    N, K, H, T = 8, 4, 256, 128
    case = step((T,) * T, N, K, H, rng, kv_dtype=kv_dtype).moved("cuda")
    options, kernel = AttentionOptions(window=window), made(N, K, H, 16, kv_dtype, rows=128)
    case.state.tables_BX[:] = case.state.tables_BX[0].clone()
    case.state.positions_B[:] = torch.arange(T)
    one, together = case.copy(), case.copy()
    rows = []
    for t in range(T):
        alone = torch.full_like(case.state.positions_B, -1)
        alone[t] = t
        state = dataclasses.replace(case.state, positions_B=alone)
        rows.append(kernel.attend(one.qkv, one.angles, one.cache, state, options=options)[t])
    got = kernel.attend_together(case.qkv, case.angles, together.cache, case.state, options=options)
    assert torch.equal(got, torch.stack(rows))
