"""The parts of the kernels that read adapters by row, compiled as C++ for a CPU, against the reference."""

import ctypes
import re
import struct

import pytest
import torch

from conftest import rms_error
from kernels import cuda_on_cpu
from qerl.kernels.runtime.nvrtc import addresses
from qerl.kernels.tiles.lora_shrink import ShrinkTile, choose_split, pack_operands, shrink_defines
from qerl.kernels.tiles.row_slots import RowSlots, expand, hidden

SHIM = """
static unsigned __reduce_or_sync(unsigned, unsigned x) {
  unsigned y = 0;
  for (int i = 0; i < 32; i++) y |= (unsigned)__shfl_sync(0, (int)x, i);
  return y;
}
template <class T> static T __ldg(const T* p) { return *p; }
static uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static float4 __ldcg(const float4* p) { return *p; }
static void __stcg(float4* p, float4 x) { *p = x; }
"""
EPILOGUE = """
#define GIVEN_U 1
#include "packed_epilogue.cuh"
struct Operands { Epilogue e; const u32* u; float* sums; };
// A warp for each 16 rows and TOKENS tokens; the sums of an epilogue begin at a number of their own.
static void add_all(const Operands& o) {
  const int warp = blockIdx.x, lane = threadIdx.x, g = lane / 4, t = lane % 4;
  const int row0 = warp % (o.e.N / 16) * 16, m0 = warp / (o.e.N / 16) * (GROUPS_HERE * 8);
  float acc[GROUPS_HERE][4];
  for (int i = 0; i < GROUPS_HERE * 4; i++) acc[i / 4][i % 4] = i;
  add_low_rank(acc, o.e, o.u, row0, m0, g, t);
  for (int n = 0; n < GROUPS_HERE; n++)
    for (int i = 0; i < 4; i++) {
      const int m = m0 + n * 8 + 2 * t + i % 2;
      if (m < o.e.M) o.sums[m * o.e.N + row0 + g + i / 2 * 8] = acc[n][i] - (n * 4 + i);
    }
}
#define KERNEL add_all
"""
SHRINK = """
#define Operands ShrinkOperands
#include "lora_shrink_portable.cu"
#undef Operands
struct Operands { ShrinkOperands o; float* partials; u32* turns; };
static void shrink_all(const Operands& p) { shrink(p.o, p.partials, p.turns); }
#define KERNEL shrink_all
"""
LOADS = (
    (r'asm volatile\("ld\.global\.v(\d)\.u32.*?"l"\(p\) : "memory"\);', r"memcpy(&v, p, 4 * \1);"),
    (r'asm volatile\("ld\.global\.nc\.L1.*?\);', "v = *(const uint4*)p;"),
    (r'asm volatile\("atom\.acq_rel.*?\);', "arrived = __atomic_fetch_add(turn, 1, __ATOMIC_SEQ_CST);"),
    (r'asm volatile\("st\.relaxed\.gpu\.global\.u32 \[%0\], 0;.*?\);', "*turn = 0;"),
)


@pytest.fixture(scope="module")
def library_of(tmp_path_factory):
    """Return a source with these constants as a library."""
    if not cuda_on_cpu.has_compiler():
        pytest.skip("needs g++ with C++20")
    folder = tmp_path_factory.mktemp("cpu")
    cuda_on_cpu.copy_sources(folder)
    for name in ("packed_epilogue.cuh", "shrink_unit.cuh", "lora_shrink_portable.cu"):
        text = (folder / name).read_text()
        for assembly, plain in LOADS:
            text = re.sub(assembly, plain, text)
        (folder / name).write_text(text)

    def build(source, constants):
        file = folder / "kernel.cpp"
        file.write_text(cuda_on_cpu.SHIM + SHIM + source + cuda_on_cpu.RUN)
        library = folder / f"{abs(hash((source, *constants.items())))}.so"
        cuda_on_cpu.compile_library(file, library, "-O1", constants)
        return ctypes.CDLL(str(library))

    return build


def case(M, N, K, R, S, groups, rng):
    """x, a, b and the slots of rows in no order; slot 0 has no adapter, and its b is not a number."""
    x, a = torch.randn(M, K, generator=rng).bfloat16(), torch.randn(S, groups * R, K, generator=rng)
    b, a[0] = torch.randn(S, N, R, generator=rng).bfloat16(), 0
    b[0] = torch.nan
    slots_M = torch.randint(0, S, (M,), generator=rng).int()
    slots_M[-1] = S - 1
    return x, a.div(K**0.5).bfloat16(), b, RowSlots(slots_M, torch.rand(S, generator=rng) + 0.5)


@pytest.mark.parametrize(
    ("M", "N", "R", "S", "groups", "count"),
    [(1, 32, 16, 2, 1, 1), (13, 96, 32, 5, 3, 2), (40, 48, 16, 32, 1, 4), (100, 64, 32, 9, 1, 16)],
)
@pytest.mark.parametrize("swiglu", [0, 1])
def test_the_epilogue_adds_each_rows_own_adapter(M, N, R, S, groups, count, swiglu, library_of, rng):
    groups = 2 if swiglu else groups
    x, a, b, rows = case(M, N, 64, R, S, groups, rng)
    starts, u = ((N // 3, N // 3 * 2) if groups == 3 else ()), hidden(x, a, rows).bfloat16().contiguous()
    ends = [*starts, 2**31 - 1, 2**31 - 1][:2]
    sums = torch.zeros(M, N)
    pointers = addresses(None, None, b, None, None, rows.slots_M)
    operands = struct.pack("6Q4i", *pointers, M, N, *ends) + struct.pack("2Q", *addresses(u, sums))
    library = library_of(EPILOGUE, {"RANK": R, "SWIGLU": swiglu, "SLOTS": 1, "GROUPS_HERE": count})
    assert library.operand_bytes() == len(operands)
    library.run(operands, N // 16 * -(-M // (8 * count)), 32)
    b[0] = 0  # which the reference multiplies by 0
    if swiglu:  # gate has the first 8 of 16 rows, up the others
        order = torch.arange(N).view(-1, 2, 8).transpose(0, 1).flatten()
        want = torch.empty(M, N, dtype=torch.float64)
        want[:, order] = expand(u, b[:, order], rows, (N // 2,))
    else:
        want = expand(u, b, rows, starts)
    assert rms_error(sums, want) < 1e-5
    assert (sums[rows.slots_M == 0] == 0).all()


@pytest.mark.parametrize(
    ("M", "K", "R", "S", "tile"),
    [(1, 64, 16, 2, (8, 16)), (13, 1152, 48, 5, (8, 32)), (40, 896, 32, 32, (16, 32))],
)
def test_the_launch_of_u_reads_each_rows_own_adapter(M, K, R, S, tile, library_of, rng):
    x, a, _, rows = case(M, 16, K, R, S, 1, rng)
    tile, split = ShrinkTile(*tile), choose_split(K)
    u = torch.full((M, R), torch.nan, dtype=torch.bfloat16)
    copy = torch.full((M, K), torch.nan, dtype=torch.bfloat16)
    clusters = tile.clusters(M, R) * S
    partials, turns = (
        torch.empty(clusters * split.cluster * tile.tokens * tile.rows),
        torch.zeros(clusters).int(),
    )
    operands = pack_operands(x, None, None, None, 0.0, a, 0.0, copy, u, rows)
    operands += struct.pack("2Q", *addresses(partials, turns))
    library = library_of(SHRINK, {"TABLE": 0} | shrink_defines(tile, split, True))
    assert library.operand_bytes() == len(operands)
    for _ in range(2):  # the second finds what the first has left
        library.run(operands, clusters * split.cluster, 256)
        assert torch.equal(copy, x) and not turns.any()
        assert rms_error(u, hidden(x, a, rows)) < 3e-3
        assert (u[rows.slots_M == 0] == 0).all()
