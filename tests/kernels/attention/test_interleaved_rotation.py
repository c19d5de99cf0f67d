"""Rotation of neighboring elements (GLM-4) in decode attention: queries, and keys written to the cache."""

import dataclasses
import struct

import pytest
import torch

from kernels import kernel_uses
from kernels.attention import test_decode_attention
from kernels.attention.test_decode_attention import POSITIONS, RAGGED, random_norms, step, turning_angles
from kernels.cuda_on_cpu import CpuKernel, copy_sources, has_compiler
from qerl.kernels.attention import decode_attention as op
from qerl.kernels.attention.attention_options import PLAIN, AttentionOptions
from qerl.kernels.runtime.architectures import TESTED
from qerl.kernels.runtime.nvrtc import addresses
from qerl.models.rope import Angles, rotate_heads

made = test_decode_attention.made  # a fixture
DTYPES = [torch.bfloat16, torch.float8_e4m3fn]
LONG = (*RAGGED[:-2], 1999, POSITIONS)
BOTH = r"""
#include "decode_attention_query.cuh"
#include "decode_attention_write.cu"
extern "C" void both(const Parameters& p) {  // write to the cache; write the queries to p.out
  decode_attention_write(p);
  Unit u;
  u.row = blockIdx.x / KV_HEADS, u.head = blockIdx.x % KV_HEADS, u.position = p.positions[u.row];
  u32 q[NT][KT][2];
  load_queries(p, u, q);
  const int t = threadIdx.x % 4;
  for (int n = 0; n < NT; n++) {
    const int head = n * 8 + threadIdx.x / 4;
    if (head >= GROUP) continue;
    u16* to = p.out + ((size_t)blockIdx.x * GROUP + head) * H;
    for (int k = 0; k < KT; k++)
      for (int j = 0; j < 2; j++)
        for (int i = 0; i < 2; i++) {
          const u32 bits = q[n][k][j] >> 16 * i & 0xFFFF;
          const float x = FP8 ? half_of_16_bits(bits) : __uint_as_float(bits << 16);
          to[16 * k + (FP8 ? 4 * t + 2 * i + j : 8 * j + 2 * t + i)] = __float_as_uint(x) >> 16;
        }
  }
}
"""


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    if not has_compiler():
        pytest.skip("needs g++")
    folder = tmp_path_factory.mktemp("cuda")
    copy_sources(folder)
    (folder / "both.cu").write_text(BOTH)
    return folder


def parameters(case, norms, out, chunks=1):
    """As DecodeAttention packs them, of tensors on the CPU."""
    q_norm, k_norm, eps = norms or (None, None, 0.0)
    cache, tables = case.cache, case.state.tables_BX
    tensors = (case.qkv, case.angles, cache.k, cache.v, cache.k_scales, cache.v_scales)
    pointers = addresses(*tensors, case.state.positions_B, tables, q_norm, k_norm, out, *[None] * 3)
    return struct.pack("14Q2f3i4x", *pointers, eps, 1.0, len(case.qkv), tables.stride(0), chunks)


CASES = [  # N, K, H, rotated elements, interleaved
    (32, 2, 128, 64, True),
    (6, 2, 64, 64, True),
    (4, 1, 256, 64, True),
    (4, 2, 128, 128, True),
    (4, 2, 128, 64, False),
]


@pytest.mark.parametrize(
    ("N", "K", "H", "rotary", "is_interleaved", "kv_dtype"),
    [(*case, DTYPES[i % 2]) for i, case in enumerate(CASES)],
)
def test_the_kernels_code_on_a_cpu_rotates_as_torch(N, K, H, rotary, is_interleaved, kv_dtype, sources, rng):
    case = step((3, 40), N, K, H, rng, kv_dtype=kv_dtype)
    case.angles = turning_angles(rotary)
    norms = random_norms(H, rng) if N == 6 else None
    defines = {"H": H, "GROUP": N // K, "KV_HEADS": K, "PAGE": 16, "CHUNK": 128, "ROTARY": rotary}
    defines |= {"INTERLEAVED": int(is_interleaved), "FP8": int(kv_dtype != torch.bfloat16)}
    options = (case.state.positions_B, K, H, norms, False, is_interleaved)
    q_BNH, *_ = op.split_heads(case.qkv, case.angles, *options)
    out = torch.empty_like(q_BNH)
    truth = case.copy()
    op.reference(case.qkv, case.angles, truth.cache, case.state, norms, PLAIN, *options[-2:])
    kernel = CpuKernel("both.cu", "both", defines | {"Operands": "Parameters"}, sources)
    kernel.launch(grid=2 * K, block_threads=32, parameters=(parameters(case, norms, out),))
    assert few_differ(out.view(torch.int16), q_BNH.view(torch.int16))
    for mine, theirs in ((case.cache.k, truth.cache.k), (case.cache.v, truth.cache.v)):
        whole = torch.int16 if kv_dtype == torch.bfloat16 else torch.uint8
        assert few_differ(mine.view(whole), theirs.view(whole))


def few_differ(a, b):
    """True if the bits are the same, but for a sum that is rounded twice."""
    a, b = a.int(), b.int()
    return (a != b).float().mean() < 2e-3 and (a - b).abs().max() <= 1


@pytest.mark.parametrize("rotary", [32, 64])
def test_the_reference_rotates_as_the_model(rotary, rng):
    N, K, H = 4, 2, 64
    case = step((3, 40), N, K, H, rng)
    case.angles = turning_angles(rotary)
    at = case.state.positions_B
    q, k, v, _ = op.split_heads(case.qkv, case.angles, at, K, H, None, is_interleaved=True)
    heads = case.qkv.view(2, N + 2 * K, H)
    cosine, sine = case.angles[at.long(), None].chunk(2, -1)
    angles = Angles(torch.cat((cosine, cosine), -1), torch.cat((-sine, sine), -1), None)
    for ours, theirs in ((q, heads[:, :N]), (k, heads[:, N : N + K])):
        assert torch.equal(ours, rotate_heads(theirs.contiguous(), angles, is_interleaved=True))
        assert not torch.equal(ours, rotate_heads(theirs.contiguous(), angles, is_interleaved=False))
    assert torch.equal(v, heads[:, N + K :])


BUILDS = [*((name, 128, 16, 1) for name in TESTED), ("sm_86", 128, 16, 0), ("sm_90a", 256, 8, 1)]


@pytest.mark.parametrize(("name", "H", "GROUP", "fp8"), BUILDS)
def test_interleaved_variants_keep_everything_in_registers(name, H, GROUP, fp8):
    pytest.importorskip("cuda.bindings.nvrtc")
    defines = {"H": H, "GROUP": GROUP, "KV_HEADS": 2, "PAGE": 16, "CHUNK": 128, "FP8": fp8}
    defines |= {"ROTARY": 64, "INTERLEAVED": 1}
    for file, more in (("decode_attention", {"STAGES": 2, "CTAS": 6}), ("decode_attention_write", {})):
        use = kernel_uses.uses(f"{file}.cu", defines | more, name)[file]
        assert use.local_bytes == 0 and use.registers <= 255


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", DTYPES)
@pytest.mark.parametrize("options", [PLAIN, AttentionOptions(window=100, softcap=5.0)], ids=["plain", "both"])
@pytest.mark.parametrize(("N", "K", "H", "rotary", "is_interleaved"), CASES)
def test_interleaved_rotation_is_no_less_exact_than_torch(
    N, K, H, rotary, is_interleaved, options, kv_dtype, made, rng
):
    case = step(LONG, N, K, H, rng, kv_dtype=kv_dtype)
    case.angles = turning_angles(rotary)
    kernel = made(N, K, H, 16, kv_dtype, is_interleaved=is_interleaved)
    test_decode_attention.check(kernel, case, None, options, is_interleaved)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", DTYPES)
def test_interleaved_rows_of_one_sequence_together_are_as_one_by_one(kv_dtype, made, rng):
    N, K, H, T = 32, 2, 128, 64
    case = step((T,) * T, N, K, H, rng, kv_dtype=kv_dtype).moved("cuda")
    case.angles, kernel = turning_angles(64).cuda(), made(N, K, H, 16, kv_dtype, is_interleaved=True)
    case.state.tables_BX[:] = case.state.tables_BX[0].clone()
    case.state.positions_B[:] = torch.arange(T)
    one, together = case.copy(), case.copy()
    rows = []
    for t in range(T):
        alone = torch.full_like(case.state.positions_B, -1)
        alone[t] = t
        state = dataclasses.replace(case.state, positions_B=alone)
        rows.append(kernel.attend(one.qkv, one.angles, one.cache, state)[t])
    got = kernel.attend_together(case.qkv, case.angles, together.cache, case.state)
    assert torch.equal(got, torch.stack(rows))
