"""Run a CUDA kernel of kernels/cuda/ as C++ on a CPU: each thread of a CTA is a thread, CTAs run in turn.

    with on_cpu(): DeltaNetStep(shape, rows, cpu, is_by_head=False).step(...)        needs g++ with C++20

For kernels in plain CUDA: barriers, shuffles, atomics, streaming loads and stores, and the conversion to
bfloat16, which is the only assembly that is replaced. It shows indices and arithmetic, not what depends on
the order of CTAs, on an early launch or on the memory of a GPU.
"""

import contextlib
import ctypes
import re
import shutil
import subprocess
from importlib import resources
from pathlib import Path
from unittest import mock

SHIM = r"""
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
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
static thread_local Index threadIdx, blockIdx;
static Index gridDim;
static pthread_barrier_t block, warps[32];
static float lanes[32][32];
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static float2 make_float2(float x, float y) { return {x, y}; }
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
template <class To, class From> static To bits(From x) { To y; memcpy(&y, &x, 4); return y; }
static float __uint_as_float(unsigned x) { return bits<float>(x); }
static unsigned __float_as_uint(float x) { return bits<unsigned>(x); }
static float __int_as_float(int x) { return bits<float>(x); }
#define __expf expf
static float __fmul_rn(float x, float y) { return x * y; }
static float __fdiv_rn(float x, float y) { return x / y; }
static int __float2int_rn(float x) { return (int)rintf(x); }
static unsigned __cvta_generic_to_shared(const void*) { return 0; }
static int min(int x, int y) { return x < y ? x : y; }
static int max(int x, int y) { return x > y ? x : y; }
static float rsqrtf(float x) { return 1 / sqrtf(x); }
static void __syncthreads() { pthread_barrier_wait(&block); }
static void __threadfence() {}
static float4 __ldcs(const float4* from) { return *from; }
static uint4 __ldcs(const uint4* from) { return *from; }
static void __stcs(float4* to, float4 x) { *to = x; }
static int atomicAdd(int* to, int x) { return __atomic_fetch_add(to, x, __ATOMIC_SEQ_CST); }
static unsigned to_bfloat16(float x) {
  const unsigned u = bits<unsigned>(x);
  return (u + 0x7FFF + (u >> 16 & 1)) >> 16;
}
static float __shfl_xor_sync(unsigned, float x, int mask) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  lanes[warp][lane] = x;
  pthread_barrier_wait(&warps[warp]);
  const float y = lanes[warp][lane ^ mask];
  pthread_barrier_wait(&warps[warp]);
  return y;
}
static int __shfl_sync(unsigned, int x, int from) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  lanes[warp][lane] = bits<float>(x);
  pthread_barrier_wait(&warps[warp]);
  const int y = bits<int>(lanes[warp][from % 32]);
  pthread_barrier_wait(&warps[warp]);
  return y;
}
static unsigned __ballot_sync(unsigned, bool x) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  lanes[warp][lane] = x;
  pthread_barrier_wait(&warps[warp]);
  unsigned y = 0;
  for (int i = 0; i < 32; i++) y |= (unsigned)(lanes[warp][i] != 0) << i;
  pthread_barrier_wait(&warps[warp]);
  return y;
}
static int __popc(unsigned x) { return __builtin_popcount(x); }
static int __ffs(unsigned x) { return __builtin_ffs(x); }
"""
RUN = r"""
extern "C" unsigned long operand_bytes() { return sizeof(Operands); }
struct Thread { const Operands* operands; int block, index; pthread_t id; };
static void* run_thread(void* given) {
  const Thread& thread = *(Thread*)given;
  threadIdx = {thread.index}, blockIdx = {thread.block};
  KERNEL(*thread.operands);
  return nullptr;
}
extern "C" void run(const Operands* operands, int grid, int threads) {
  gridDim = {grid};
  for (int b = 0; b < grid; b++) {
    pthread_barrier_init(&block, nullptr, threads);
    for (int w = 0; w < threads / 32; w++) pthread_barrier_init(&warps[w], nullptr, 32);
    static Thread all[1024];
    for (int t = 0; t < threads; t++) {
      all[t] = {operands, b, t};
      if (pthread_create(&all[t].id, nullptr, run_thread, &all[t])) abort();
    }
    for (int t = 0; t < threads; t++) pthread_join(all[t].id, nullptr);
  }
}
"""
CONVERSION = re.compile(r'asm\("cvt\.rn\.bf16x2\.f32.*?\);')


class CpuKernel:
    """CudaKernel, with one struct of parameters, `Operands`."""

    def __init__(self, file, name, defines, folder):
        source, library = folder / "kernel.cpp", folder / f"{name}{abs(hash(tuple(defines.items())))}.so"
        source.write_text(f'{SHIM}\n#include "{file}"\n{RUN}')
        macros = [f"-D{key}={value}" for key, value in (defines | {"KERNEL": name}).items()]
        command = ["g++", "-std=c++20", "-O0", "-w", "-shared", "-fPIC", "-pthread", *macros]
        subprocess.run([*command, "-o", str(library), str(source)], check=True)
        self._library = ctypes.CDLL(str(library))

    def launch(self, *, grid, block_threads, parameters):
        (operands,) = parameters
        assert len(operands) == self._library.operand_bytes()
        self._library.run(operands, grid, block_threads)


def has_compiler():
    return shutil.which("g++") is not None


def copy_sources(folder: Path) -> None:
    """Copy kernels/cuda/ into a folder, with the conversion to bfloat16 in C++."""
    for file in (resources.files("qerl.kernels") / "cuda").iterdir():
        text = CONVERSION.sub("d = to_bfloat16(high) << 16 | to_bfloat16(low);", file.read_text())
        (folder / file.name).write_text(text)


@contextlib.contextmanager
def on_cpu(module, folder: Path):
    """Inside, kernels that the module compiles run on the CPU; folder is for what is compiled."""
    copy_sources(folder)
    with mock.patch.object(
        module, "compiled", lambda file, name, _, defines: CpuKernel(file, name, defines, folder)
    ):
        yield
