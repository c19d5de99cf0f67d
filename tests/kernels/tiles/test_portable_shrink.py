"""The kernel that makes u inside the portable product, compiled as C++ for a CPU, and its memory.

Each thread of a CTA is a fiber; CTAs run in turn, all of them their slices first and then their sums, so
that none waits for another.
"""

import ctypes
import re
import struct

import pytest
import torch

from conftest import rms_error
from kernels import cuda_on_cpu
from qerl.kernels.runtime.nvrtc import sources
from qerl.kernels.tiles.packed_product import PackedAdapter
from qerl.kernels.tiles.portable_shrink import MAKES_U, PortableShrink

SIZES = ((8, 3584, 96), (64, 18944, 32), (64, 29568, 64), (32, 8192, 384))  # tokens, K, rows of A


def memory():
    return PortableShrink(torch.device("cpu"))


@pytest.mark.parametrize(("tokens", "K", "rows"), SIZES)
def test_the_sums_of_7b_and_72b_fit_the_memory(tokens, K, rows):
    assert memory().fits(tokens, K, rows)


@pytest.mark.parametrize(("tokens", "K", "rows"), [(64, 29568, 128), (256, 3584, 384)])
def test_what_does_not_fit_the_memory_is_made_apart(tokens, K, rows):
    assert not memory().fits(tokens, K, rows)


def test_a_given_u_and_none_take_no_memory():
    shrink, (a, b) = memory(), (torch.zeros(n, 64, dtype=torch.bfloat16) for n in (16, 128))
    u = torch.zeros(3, 16, dtype=torch.bfloat16)
    assert shrink.low_rank(None, 8) == bytes(40)
    given = shrink.low_rank(PackedAdapter(a, b, 2.0, (), u), 8)
    made = shrink.low_rank(PackedAdapter(a, b, 2.0), 8)
    assert given[:8] == made[:8] == a.data_ptr().to_bytes(8, "little") and given[32:] == made[32:]
    assert given[16:24] == u.data_ptr().to_bytes(8, "little") and given[8:16] == given[24:32] == bytes(8)
    assert made[8:16] == shrink.partials.data_ptr().to_bytes(8, "little")


HEADERS = {
    "memory.cuh": """
        #pragma once
        #include "types.cuh"
        static u32 load_relaxed(const u32* p) { return *p; }
        template <int N> static void load_relaxed(const u32* p, u32 (&v)[N]) { memcpy(v, p, 4 * N); }
        static void store_relaxed(u32* p, u32 a) { *p = a; }
        template <class... More> static void store_relaxed(u32* p, u32 a, More... more) {
          *p = a;
          store_relaxed(p + 1, more...);
        }
    """,
    "mma.cuh": """
        #pragma once
        #include "types.cuh"
        static u32 A[32][32][4], B[32][32][2];
        static float half(u32 w, int k) { return __uint_as_float(k % 2 ? w & 0xFFFF0000u : w << 16); }
        static void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
          const int w = threadIdx.x / 32, lane = threadIdx.x % 32;
          const u32 a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
          memcpy(A[w][lane], a, 16), memcpy(B[w][lane], b, 8);
          warps[w].wait();
          for (int i = 0; i < 4; i++)
            for (int k = 0; k < 16; k++)
              d[i] += half(A[w][lane / 4 * 4 + k % 8 / 2][i / 2 + k / 8 * 2], k) *
                      half(B[w][(lane % 4 * 2 + i % 2) * 4 + k % 8 / 2][k / 8], k);
          warps[w].wait();
        }
    """,
    "packed_epilogue.cuh": '#include "bfloat16.cuh"\n#include "workspace.cuh"\n',
}
MAIN = """
static Index blockDim;
static int __syncthreads_or(int bit) {
  static int any;
  if (threadIdx.x == 0) any = 0;
  __syncthreads();
  if (bit) any = 1;
  __syncthreads();
  return any;
}
#include "portable_shrink.cuh"
struct Operands {
  LowRank l;
  const u16* x;
  int M, K, tokens, threads, is_last;
};
static void run_part(const Operands& o) {
  blockDim = {o.threads};
  Shrink shrink(o.l, o.tokens, o.K);
  if (!o.is_last) {
    if (blockIdx.x < MAKERS) shrink.multiply(o.x, o.M);  // nobody waits for the others
    return;
  }
  shrink.turn = __syncthreads_or(threadIdx.x ? 0 : load_relaxed(o.l.turns));
  shrink.add();
  __syncthreads();
  shrink.end();
}
#define KERNEL run_part
"""


@pytest.fixture(scope="module")
def library_of(tmp_path_factory):
    """Return the kernel for tiles of MT tokens."""
    if not cuda_on_cpu.has_compiler():
        pytest.skip("needs g++ with C++20")
    folder = tmp_path_factory.mktemp("cpu")
    cuda_on_cpu.copy_sources(folder)
    names = "portable_shrink.cuh", "shrink_unit.cuh"
    text, unit = (sources()[name] for name in names)
    unit, num_loads = re.subn(r'asm volatile\("ld\.global.*?\);', "v = *(const uint4*)p;", unit)
    counted = "before = __atomic_fetch_add(l.turns + 1, 1, __ATOMIC_SEQ_CST);"
    text, num_counts = re.subn(r'asm volatile\("atom.*?\);', counted, text)
    assert (num_loads, num_counts) == (2, 1)
    for name, content in (HEADERS | dict(zip(names, (text, unit), strict=True))).items():
        (folder / name).write_text(content)
    (folder / "kernel.cpp").write_text(cuda_on_cpu.SHIM + MAIN + cuda_on_cpu.RUN)

    def build(MT):
        library, constants = folder / f"{MT}.so", {"MT": MT, "RANK": 16, "SWIGLU": 0, "CTAS": 2} | MAKES_U
        cuda_on_cpu.compile_library(folder / "kernel.cpp", library, "-O1", constants)
        return ctypes.CDLL(str(library))

    return build


@pytest.mark.parametrize(
    ("MT", "M", "K", "rows", "ctas", "warps"),
    [
        (8, 5, 3584, 32, 3, 4),
        (8, 8, 896, 96, 5, 2),  # the last slice is half as long
        (16, 16, 18944, 16, 2, 8),
        (48, 40, 1152, 48, 2, 2),
        (64, 100, 640, 32, 7, 4),  # two tiles of tokens
    ],
)
def test_ctas_share_u_and_leave_clean_buffers(MT, M, K, rows, ctas, warps, library_of, rng):
    """Three launches: the buffers of u take turns."""
    library, shrink, tokens = library_of(MT), memory(), -(-M // MT) * MT
    a = torch.randn(rows, K, generator=rng).bfloat16()
    adapter = PackedAdapter(a, torch.zeros(64, rows, dtype=torch.bfloat16), 0.5)
    for launch in range(3):
        x = torch.randn(M, K, generator=rng).bfloat16()
        low_rank = shrink.low_rank(adapter, tokens)
        for is_last in (0, 1):
            operands = low_rank + struct.pack("Q5i4x", x.data_ptr(), M, K, tokens, 32 * warps, is_last)
            assert library.operand_bytes() == len(operands)
            library.run(operands, ctas, 32 * warps)
            if not is_last:
                assert (shrink.partials != -1).sum() == -(-K // MAKES_U["SLICE_K"]) * tokens * rows
        turn, count = shrink.turns.tolist()
        assert (turn, count) == ((launch + 1) % 2, 0)
        assert (shrink.partials == -1).all() and (shrink.u[turn] == -1).all()
        made, truth = shrink.u[turn ^ 1], 0.5 * x.double() @ a.double().T
        assert (made != -1).sum() == tokens * rows // 2
        u_MR = made.view(torch.bfloat16)[: M * rows].view(M, rows)
        assert rms_error(u_MR, truth) <= 1.1 * rms_error(0.5 * (x @ a.T), truth)
