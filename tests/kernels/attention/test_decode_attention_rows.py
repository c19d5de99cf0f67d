"""Decode attention of few rows on a CPU: chunks that many warps add up have the bits of one warp's sum."""

import dataclasses

import pytest
import torch

from conftest import rms_error
from kernels.attention.test_decode_attention import bits, random_norms, step, turning_angles
from kernels.attention.test_decode_attention_options import options_of
from kernels.cuda_on_cpu import CpuKernel, copy_sources, has_compiler
from qerl.kernels.attention import decode_attention as op
from qerl.kernels.attention.decode_shape import CHUNK, LONG_CHUNKS, Variant, choose_stages

CASES = [  # N, K, H, options, is_gated
    (7, 1, 64, "plain", False),
    (3, 1, 64, "sinks", True),
    (12, 1, 64, "cap", False),
    (4, 2, 128, "window", False),
    (2, 1, 256, "plain", False),
]
LENGTHS = (CHUNK, 0, 1, 3 * CHUNK, 40, 2 * CHUNK + 1, 3 * CHUNK + 77)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    if not has_compiler():
        pytest.skip("needs g++")
    folder = tmp_path_factory.mktemp("cuda")
    copy_sources(folder)
    return folder


@pytest.fixture
def attention(monkeypatch):
    """Kernels that believe in a GPU of one multiprocessor."""
    gpu = dataclasses.make_dataclass("Gpu", ["multi_processor_count", "shared_memory_per_multiprocessor"])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu(1, 228 * 1024))
    return op.DecodeAttention


def run(kernel, case, norms, options, sources, *, has_few_rows, chunk=None):
    """Return o of one CTA, which leaves all words of the workspace empty. chunk: of state.chunk_1."""
    case, B = case.copy(), len(case.qkv)
    variant = Variant.of(case.angles.shape[1], options)
    stages, _ = choose_stages(kernel._head_size, kernel._kv_dtype, 6, B, 228 * 1024)
    defines = kernel._defines(CHUNK, variant) | {"STAGES": stages, "CTAS": 6, "FEW_ROWS": int(has_few_rows)}
    if chunk is not None:
        defines |= {"VARIABLE": 1, "CHUNK": LONG_CHUNKS[-1]}
        case.state.chunk_1.fill_(chunk)
    out = torch.full((B, kernel._heads * kernel._head_size), float("nan")).bfloat16()
    given = kernel._parameters(case.qkv, case.angles, case.cache, case.state, out, norms, options)
    compiled = CpuKernel(
        "decode_attention.cu", "decode_attention", defines | {"Operands": "Parameters"}, sources
    )
    compiled.launch(grid=1, block_threads=32, parameters=(given,))
    assert (kernel.workspace == -1).all()
    return out, case


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize(("N", "K", "H", "name", "is_gated"), CASES)
def test_many_warps_add_a_row_s_chunks_to_the_bits_of_one(
    N, K, H, name, is_gated, kv_dtype, attention, sources, rng
):
    options, norms = options_of(name, N), random_norms(H, rng)
    options = dataclasses.replace(options, window=200) if options.window else options
    case = step(LENGTHS, N, K, H, rng, kv_dtype=kv_dtype)
    case = dataclasses.replace(
        case, qkv=torch.randn(7, (N * (1 + is_gated) + 2 * K) * H, generator=rng).bfloat16()
    )
    kernel = attention(N, K, H, 16, kv_dtype, 7, 32, torch.device("cpu"), is_gated=is_gated)
    (one, one_case), (many, many_case) = (
        run(kernel, case, norms, options, sources, has_few_rows=few) for few in (False, True)
    )
    assert torch.equal(bits(many), bits(one))
    assert torch.equal(bits(many_case.cache.k), bits(one_case.cache.k))
    truth_case = case.copy()
    truth = op.reference(truth_case.qkv, case.angles, truth_case.cache, case.state, norms, options, is_gated)
    assert rms_error(many, truth) < (0.01 if kv_dtype == torch.bfloat16 else 0.03)


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("name", ["plain", "window"])
def test_chunks_may_have_as_many_positions_as_the_state_says(name, kv_dtype, attention, sources, rng):
    options, case = options_of(name, 4), step(LENGTHS, 4, 1, 64, rng, kv_dtype=kv_dtype)
    options = dataclasses.replace(options, window=200) if options.window else options
    kernel = attention(4, 1, 64, 16, kv_dtype, 7, 32, torch.device("cpu"))
    truth_case = case.copy()
    truth = op.reference(truth_case.qkv, case.angles, truth_case.cache, case.state, None, options)
    fixed, _ = run(kernel, case, None, options, sources, has_few_rows=False)
    for chunk in (CHUNK, 192, 320, 512):
        got, after = run(kernel, case, None, options, sources, has_few_rows=False, chunk=chunk)
        assert rms_error(got, truth) < (0.01 if kv_dtype == torch.bfloat16 else 0.03)
        assert torch.equal(bits(after.cache.k), bits(truth_case.cache.k))
        is_same = torch.equal(bits(got), bits(fixed))
        assert is_same == (chunk == CHUNK)


@pytest.mark.parametrize("size", [2e-5, 3000.0])
def test_small_and_large_values_stay_in_the_range_of_half_precision(size, attention, sources, rng):
    """The largest of a new head of values is 6 to 8 times `size`."""
    case, norms = step(LENGTHS, 7, 1, 128, rng, kv_dtype=torch.float8_e4m3fn), random_norms(128, rng)
    case.cache.v_scales.mul_(size)
    case.qkv[:, -128:] *= size
    kernel = attention(7, 1, 128, 16, torch.float8_e4m3fn, 7, 32, torch.device("cpu"))
    got, _ = run(kernel, case, norms, options_of("plain", 7), sources, has_few_rows=True)
    truth = op.reference(case.qkv, case.angles, case.copy().cache, case.state, norms)
    assert rms_error(got, truth) < 0.01


def test_more_chunks_than_are_loaded_together(attention, sources, rng):
    """35 chunks: maxima and weights in two parts, and places in two parts of 32."""
    lengths = (34 * CHUNK + 5, 7, 33 * CHUNK)
    case = step(lengths, 4, 1, 64, rng)
    case.angles = turning_angles(64, 35 * CHUNK)
    kernel = attention(4, 1, 64, 16, torch.bfloat16, 3, 35 * CHUNK // 16, torch.device("cpu"))
    (one, _), (many, _) = (
        run(kernel, case, None, options_of("plain", 4), sources, has_few_rows=few) for few in (False, True)
    )
    assert torch.equal(bits(many), bits(one)) and many.isfinite().all()
