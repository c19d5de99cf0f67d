"""Run a CUDA kernel as C++ on a CPU: each thread of a CTA is a fiber, CTAs run in turn.

    with on_cpu(): DeltaNetStep(shape, rows, cpu, is_by_head=False).step(...)        needs g++ with C++20

For kernels in plain CUDA: barriers, shuffles, atomics, streaming loads and stores. Of the assembly these
are replaced: the conversion to bfloat16, powers of 2, logarithms, matrix instructions (mma.cuh), copies
(async_copy.cuh), words that CTAs pass on (memory.cuh; of CTAs that wait for later ones there must be one). It
shows indices and arithmetic, not what depends on the order of CTAs, on an early launch or on a GPU's memory.
"""

import contextlib
import ctypes
import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from unittest import mock

from qerl.config.cache import cache_folder
from qerl.kernels.runtime.nvrtc import sources

SHIM = r"""
#include <math.h>
#include <setjmp.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>
#define __device__
#define __global__
#define __grid_constant__
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(...)
#define __CUDA_ARCH__ 800
struct uint4 { unsigned x, y, z, w; };
struct uint2 { unsigned x, y; };
struct float4 { float x, y, z, w; };
struct float2 { float x, y; };
struct Index { int x; };
static Index threadIdx, blockIdx, gridDim;
struct Fiber { ucontext_t context; jmp_buf place; bool has_begun, has_ended; };
static Fiber fibers[1024];
static int num_fibers;
static void yield() {
  const int from = threadIdx.x;
  int to = from;
  do to = (to + 1) % num_fibers;
  while (to != from && fibers[to].has_ended);
  threadIdx.x = to;
  if (to == from || _setjmp(fibers[from].place)) return;
  if (fibers[to].has_begun) _longjmp(fibers[to].place, 1);  // setcontext() makes a system call
  fibers[to].has_begun = true;
  setcontext(&fibers[to].context);
}
struct Barrier {
  int count, arrived, turn;
  void wait() {
    const int own = turn;
    if (++arrived == count) {
      arrived = 0, turn++;
      return;
    }
    while (turn == own) yield();
  }
};
static Barrier block, warps[32];
static float lanes[32][32];
static unsigned char dynamic_memory[1 << 18];
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static float2 make_float2(float x, float y) { return {x, y}; }
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
template <class To, class From> static To bits(From x) { To y; memcpy(&y, &x, 4); return y; }
static float __uint_as_float(unsigned x) { return bits<float>(x); }
static unsigned __float_as_uint(float x) { return bits<unsigned>(x); }
static float __int_as_float(int x) { return bits<float>(x); }
#define __expf expf
static float __fdividef(float x, float y) { return x / y; }
static float __fmul_rn(float x, float y) { return x * y; }
static float __fdiv_rn(float x, float y) { return x / y; }
static int __float2int_rn(float x) { return (int)rintf(x); }
static unsigned __cvta_generic_to_shared(const void* p) { return (const unsigned char*)p - dynamic_memory; }
static int min(int x, int y) { return x < y ? x : y; }
static int max(int x, int y) { return x > y ? x : y; }
static float rsqrtf(float x) { return 1 / sqrtf(x); }
static void __syncthreads() { block.wait(); }
static void __threadfence() {}
static float4 __ldcs(const float4* from) { return *from; }
static uint4 __ldcs(const uint4* from) { return *from; }
static void __stcs(float4* to, float4 x) { *to = x; }
static int atomicAdd(int* to, int x) { return __atomic_fetch_add(to, x, __ATOMIC_SEQ_CST); }
static unsigned to_bfloat16(float x) {
  const unsigned u = bits<unsigned>(x);
  return (u + 0x7FFF + (u >> 16 & 1)) >> 16;
}
static unsigned to_half(float x) {
  const float size = fabsf(x);
  const unsigned sign = bits<unsigned>(x) >> 16 & 0x8000;
  if (isnan(x)) return 0x7FFF;
  if (size >= 65520.f) return sign | 0x7C00;
  const int exponent = size < 0x1p-14f ? -14 : ilogbf(size);
  return sign | (unsigned)rintf(ldexpf(size, 10 - exponent)) + ((exponent + 14) << 10);
}
static float half_of_16_bits(unsigned x) {
  const int exponent = x >> 10 & 31, mantissa = x & 1023;
  const float finite = exponent ? ldexpf(1024 + mantissa, exponent - 25) : ldexpf(mantissa, -24);
  const float size = exponent < 31 ? finite : mantissa ? NAN : INFINITY;
  return x & 0x8000 ? -size : size;
}
static unsigned scaled_by_2_120(unsigned pair) {  // of two bfloat16
  const float low = bits<float>(pair << 16) * 0x1p120f, high = bits<float>(pair & 0xFFFF0000u) * 0x1p120f;
  return to_bfloat16(high) << 16 | to_bfloat16(low);
}
static float __shfl_xor_sync(unsigned, float x, int mask) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  lanes[warp][lane] = x;
  warps[warp].wait();
  const float y = lanes[warp][lane ^ mask];
  warps[warp].wait();
  return y;
}
static float __shfl_up_sync(unsigned, float x, int by) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  lanes[warp][lane] = x;
  warps[warp].wait();
  const float y = lanes[warp][lane < by ? lane : lane - by];
  warps[warp].wait();
  return y;
}
static void __syncwarp() { warps[threadIdx.x / 32].wait(); }
static int __shfl_sync(unsigned, int x, int from) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  lanes[warp][lane] = bits<float>(x);
  warps[warp].wait();
  const int y = bits<int>(lanes[warp][from % 32]);
  warps[warp].wait();
  return y;
}
static unsigned __ballot_sync(unsigned, bool x) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  lanes[warp][lane] = x;
  warps[warp].wait();
  unsigned y = 0;
  for (int i = 0; i < 32; i++) y |= (unsigned)(lanes[warp][i] != 0) << i;
  warps[warp].wait();
  return y;
}
static bool __any_sync(unsigned, bool x) { return __ballot_sync(0, x); }
static void __nanosleep(unsigned) { yield(); }
static int __popc(unsigned x) { return __builtin_popcount(x); }
static int __ffs(unsigned x) { return __builtin_ffs(x); }
"""
RUN = r"""
extern "C" unsigned long operand_bytes() { return sizeof(Operands); }
static const Operands* given;
static ucontext_t host;
static void run_fiber() {
  KERNEL(*given);
  fibers[threadIdx.x].has_ended = true;
  yield();
  setcontext(&host);  // the last one
}
extern "C" void run(const Operands* operands, int grid, int threads) {
  const size_t stack_bytes = 1 << 17;
  char* stacks = (char*)malloc(stack_bytes * threads);
  gridDim = {grid}, given = operands, num_fibers = threads;
  for (int b = 0; b < grid; b++) {
    blockIdx = {b}, threadIdx = {0};
    block = {threads};
    for (int w = 0; w < threads / 32; w++) warps[w] = {32};
    for (int t = 0; t < threads; t++) {
      fibers[t].has_begun = fibers[t].has_ended = false;
      getcontext(&fibers[t].context);
      fibers[t].context.uc_stack = {stacks + t * stack_bytes, 0, stack_bytes};
      makecontext(&fibers[t].context, run_fiber, 0);
    }
    fibers[0].has_begun = true;
    swapcontext(&host, &fibers[0].context);
  }
  free(stacks);
}
"""
MATRIX = r"""
#pragma once
#include "types.cuh"
#pragma GCC push_options
#pragma GCC optimize("O2")
static u32 words[32][32][6];
static int publish(const u32* own, int count) {
  const int warp = threadIdx.x / 32;
  for (int i = 0; i < count; i++) words[warp][threadIdx.x % 32][i] = own[i];
  warps[warp].wait();
  return warp;
}
static u32 half_of(u32 word, int odd) { return odd ? word >> 16 : word & 0xFFFF; }
static float bfloat16_of(u32 x) { return bits<float>(x << 16); }
typedef float Read(u32);
static void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, Read* of = bfloat16_of) {
  const u32 own[6] = {a0, a1, a2, a3, b0, b1};
  const int warp = publish(own, 6), lane = threadIdx.x % 32;
  for (int e = 0; e < 4; e++) {
    const int row = lane / 4 + e / 2 * 8, column = lane % 4 * 2 + e % 2;
    for (int k = 0; k < 16; k++) {
      const u32 a = half_of(words[warp][row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], k % 2);
      const u32 b = half_of(words[warp][column * 4 + k % 8 / 2][4 + k / 8], k % 2);
      d[e] += of(a) * of(b);
    }
  }
  warps[warp].wait();
}
static void mma_half(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  mma(d, a0, a1, a2, a3, b0, b1, half_of_16_bits);
}
static void ldmatrix_x4(u32 (&d)[4], u32 from) {
  const int warp = publish(&from, 1), lane = threadIdx.x % 32;
  for (int m = 0; m < 4; m++)
    memcpy(&d[m], dynamic_memory + words[warp][8 * m + lane / 4][0] + lane % 4 * 4, 4);
  warps[warp].wait();
}
static void ldmatrix_x4_transposed(u32 (&d)[4], u32 from) {
  const int warp = publish(&from, 1), lane = threadIdx.x % 32;
  for (int m = 0; m < 4; m++) {
    u16 pair[2];
    for (int e = 0; e < 2; e++)
      memcpy(&pair[e], dynamic_memory + words[warp][8 * m + lane % 4 * 2 + e][0] + lane / 4 * 2, 2);
    d[m] = pair[0] | (u32)pair[1] << 16;
  }
  warps[warp].wait();
}
static u32 transpose8x8(u32 a) {
  const int warp = publish(&a, 1), lane = threadIdx.x % 32;
  u32 pair[2];
  for (int e = 0; e < 2; e++)
    pair[e] = half_of(words[warp][(lane % 4 * 2 + e) * 4 + lane / 8][0], lane / 4 % 2);
  warps[warp].wait();
  return pair[0] | pair[1] << 16;
}
#pragma GCC pop_options
"""
COPIES = r"""
#pragma once
#include "types.cuh"
static void copy_async(u32 to, const void* from) { memcpy(dynamic_memory + to, from, 16); }
static u32 own_register(u32 v) { return v; }
static u64 once_policy() { return 0; }
static void copy_async_once(u32 to, const void* from, u64) { copy_async(to, from); }
static void copy_async_once_if(bool is_wanted, u32 to, const void* from, u64) {
  if (is_wanted) copy_async(to, from);
}
static void copy_async_if(bool condition, u32 to, const void* from) { if (condition) copy_async(to, from); }
static void commit_copies() {}
template <int PENDING>
static void wait_copies() {}
"""
MEMORY = r"""
#pragma once
#include "types.cuh"
static u32 smem_u32(const void* p) { return __cvta_generic_to_shared(p); }
static u32 load_relaxed(const u32* p) { return *p; }
static void load_relaxed(const u32* p, u32 (&v)[2]) { memcpy(v, p, 8); }
static void load_relaxed(const u32* p, u32 (&v)[4]) { memcpy(v, p, 16); }
static void store_relaxed(u32* p, u32 a) { *p = a; }
static void store_relaxed(u32* p, u32 a, u32 b) { p[0] = a, p[1] = b; }
static void store_relaxed(u32* p, u32 a, u32 b, u32 c, u32 d) { p[0] = a, p[1] = b, p[2] = c, p[3] = d; }
"""
REPLACED = {"mma.cuh": MATRIX, "async_copy.cuh": COPIES, "memory.cuh": MEMORY}
INCLUDE = re.compile(r'^#include "(.+)"', re.MULTILINE)
CACHE = cache_folder() / "on_cpu"
DYNAMIC = re.compile(r"extern __shared__ __align__\(\d+\) u8 (\w+)\[\];")
CONVERSION = re.compile(r'asm\("cvt\.rn\.bf16x2\.f32.*?\);')
HALVES = re.compile(r'asm\("cvt\.rn\.f16x2\.f32.*?\);')
POWER = re.compile(r'asm\("ex2\.approx\.ftz\.f32.*?\);')
LOGARITHM = re.compile(r'asm\("lg2\.approx\.ftz\.f32.*?\);')
PRODUCT = re.compile(r'asm\("fma\.rn\.bf16x2[^:]*: "=r"\(y\).*?\);')


class CpuKernel:
    """CudaKernel, with one struct of parameters, `Operands`."""

    def __init__(self, file, name, defines, folder):
        source, library = folder / "kernel.cpp", folder / f"{name}{abs(hash(tuple(defines.items())))}.so"
        source.write_text(f'{SHIM}\n#include "{file}"\n{RUN}')
        compile_library(source, library, "-O0", defines | {"KERNEL": name})
        self._library = ctypes.CDLL(str(library))

    def launch(self, *, grid, block_threads, parameters):
        (operands,) = parameters
        assert len(operands) == self._library.operand_bytes()
        self._library.run(operands, grid, block_threads)


def compile_library(source: Path, library: Path, level: str, macros: Mapping[str, object]) -> None:
    """Compile it, or copy what the same text has become before: g++ takes a third of a second."""
    command = ["g++", "-std=c++20", level, "-w", "-shared", "-fPIC"]
    command += [f"-D{key}={value}" for key, value in macros.items()]
    texts = {source.name: source.read_text()}
    for text in (waiting := [*texts.values()]):
        for name in INCLUDE.findall(text):
            if name not in texts:
                texts[name] = (source.parent / name).read_text()
                waiting.append(texts[name])
    kept = CACHE / f"{hashlib.sha256(repr((command, texts)).encode()).hexdigest()}.so"
    if not kept.exists():
        subprocess.run([*command, "-o", str(library), str(source)], check=True)
        kept.parent.mkdir(parents=True, exist_ok=True)
        unfinished = kept.with_suffix(f".{os.getpid()}")
        shutil.copyfile(library, unfinished)
        unfinished.replace(kept)
    library.unlink(missing_ok=True)  # it may be loaded
    shutil.copyfile(kept, library)  # what is loaded from another place has memory of its own


def has_compiler():
    return shutil.which("g++") is not None


def copy_sources(folder: Path) -> None:
    """Copy the CUDA sources into a folder, with assembly that is replaced in C++."""
    for name, text in sources().items():
        text = CONVERSION.sub("d = to_bfloat16(high) << 16 | to_bfloat16(low);", text)
        text = HALVES.sub("d = to_half(high) << 16 | to_half(low);", text)
        text = LOGARITHM.sub("y = log2f(x);", POWER.sub("y = exp2f(x);", text))
        text = PRODUCT.sub("y = scaled_by_2_120(x);", text)
        text = DYNAMIC.sub(r"u8* \1 = dynamic_memory;", REPLACED.get(name, text))
        (folder / name).write_text(text)


@contextlib.contextmanager
def on_cpu(module, folder: Path):
    """Inside, kernels that the module compiles run on the CPU; folder is for what is compiled."""
    copy_sources(folder)
    made = lambda file, name, _, defines, shared_bytes=0: CpuKernel(file, name, defines, folder)  # noqa: E731
    with mock.patch.object(module, "compiled", made):
        yield
