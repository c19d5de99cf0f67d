"""Hopper's barriers, bulk copies and warpgroup products for cuda_on_cpu.py.

A copy lands when a thread waits, one copy for each turn, so that a missing wait reads old memory. Products
are made at once: memory that is filled again too early is not shown.
"""

import re
import struct

from kernels import cuda_on_cpu

BARRIERS = r"""
#pragma once
#include "memory.cuh"
#include <deque>
#include <functional>
struct __align__(64) TensorMap {
  const u16* from;
  int rows, columns, box_rows, box_columns;
  u8 rest[104];
};
struct Mbarrier { u8 count, pending, phase; int bytes; };
static std::deque<std::function<void()>> copies;
static Mbarrier& mbarrier(u32 bar) { return *(Mbarrier*)(dynamic_memory + bar); }
static void mbar_init(u32 bar, u32 count) { mbarrier(bar) = {(u8)count, (u8)count, 0, 0}; }
static void mbar_init_fence() {}
static void mbar_check(Mbarrier& b) {
  if (b.pending == 0 && b.bytes == 0) b.pending = b.count, b.phase ^= 1;
}
static void mbar_arrive(u32 bar) {
  Mbarrier& b = mbarrier(bar);
  if (b.pending == 0) abort();
  b.pending--, mbar_check(b);
}
static void mbar_expect(u32 bar, u32 bytes) { mbarrier(bar).bytes += bytes, mbar_arrive(bar); }
static void mbar_wait(u32 bar, u32 parity) {
  for (long turns = 0; mbarrier(bar).phase == (parity & 1); turns++) {
    if (turns > 1000000) abort();
    if (!copies.empty()) copies.front()(), copies.pop_front();
    else yield();
  }
}
static void land(u32 bar, u32 bytes) { mbarrier(bar).bytes -= bytes, mbar_check(mbarrier(bar)); }
static void copy_bulk(u32 dst, const u8* src, u32 bytes, u32 bar, u64) {
  if (dst % 16 || (u64)src % 16 || bytes % 16) abort();
  copies.push_back([=] { memcpy(dynamic_memory + dst, src, bytes), land(bar, bytes); });
}
static u32 swizzled(u32 at) { return at ^ (at >> 7 & 7) << 4; }
static void copy_box(u32 dst, const TensorMap* map, int k64, int row, u32 bar, u64) {
  const TensorMap m = *map;
  if (dst % 1024) abort();
  copies.push_back([=] {
    for (int k = 0; k < m.box_columns / 64; k++)
      for (int r = 0; r < m.box_rows; r++)
        for (int i = 0; i < 64; i++) {
          const int from_row = row + r, column = (k64 + k) * 64 + i;
          const u16 v = from_row < m.rows && column < m.columns ? m.from[from_row * m.columns + column] : 0;
          memcpy(dynamic_memory + swizzled(dst + (k * m.box_rows + r) * 128 + i * 2), &v, 2);
        }
    land(bar, m.box_rows * m.box_columns * 2);
  });
}
"""
PRODUCTS = r"""
#pragma once
#include "mma.cuh"
static void wgmma_fence() {}
static void wgmma_commit() {}
template <int PENDING> static void wgmma_wait() {}
template <int N> static void fence_sums(float (&d)[N][4]) {}
template <int N> static void clear_sums(float (&d)[N][4]) { memset(d, 0, sizeof(d)); }
template <int N>
static void wgmma(float (&d)[N][4], const u32 (&a)[4], u32 desc) {
  const int warp = publish(a, 4), lane = threadIdx.x % 32;
  const u32 from = (desc & 0x3FFF) * 16;
  for (int n = 0; n < N; n++)
    for (int e = 0; e < 4; e++) {
      const int row = lane / 4 + e / 2 * 8, column = lane % 4 * 2 + e % 2;
      for (int k = 0; k < 16; k++) {
        u16 b;
        memcpy(&b, dynamic_memory + swizzled(from + n * GROUP_STRIDE + column * 128 + k * 2), 2);
        const u32 v = half_of(words[warp][row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], k % 2);
        d[n][e] += bits<float>(v << 16) * bits<float>((u32)b << 16);
      }
    }
  warps[warp].wait();
}
"""
MEMORY = r"""
#pragma once
#include "types.cuh"
static u32 smem_u32(const void* p) { return (u32)__cvta_generic_to_shared(p); }
static u64 l2_evict_first() { return 0; }
static u64 l2_evict_last() { return 0; }
static u32 __funnelshift_l(u32 low, u32 high, int by) { return high << by | low >> (32 - by); }
static u32 __funnelshift_r(u32 low, u32 high, int by) { return low >> by | high << (32 - by); }
#define __fdividef(x, y) ((x) / (y))
#define __ldg(from) (*(from))
"""
SCALED = """
  const float s = bits<float>(FACTOR);
  return to_bfloat16(bits<float>(a << 16) * s) | to_bfloat16(bits<float>(a & 0xFFFF0000u) * s) << 16;
"""
FACTORS = {"l": "b << 16", "h": "b & 0xFFFF0000u"}
SCALING = re.compile(r'u32 d;\s*asm\("\{\.reg \.b16 l, h; .*?\{(\w), \w\}; " MUL_PAIRS.*?\);\s*return d;')
CONSTANT = re.compile(r'asm volatile\("or\.b32.*?\);')


def copy_sources(folder):
    """As cuda_on_cpu.copy_sources, with what Hopper adds."""
    cuda_on_cpu.copy_sources(folder)
    for name, text in {"mbarrier.cuh": BARRIERS, "wgmma.cuh": PRODUCTS, "memory.cuh": MEMORY}.items():
        (folder / name).write_text(text)
    codes, block = (folder / name for name in ("nvfp4_codes.cuh", "tile_block.cuh"))
    text, count = SCALING.subn(lambda m: SCALED.replace("FACTOR", FACTORS[m[1]]), codes.read_text())
    assert count == 2
    codes.write_text(text)
    text, count = CONSTANT.subn("top = SCALE_TOP;", block.read_text())
    assert count == 1
    block.write_text(text)


def tensor_map(x_MK, rows, columns):
    """As nvrtc.tensor_map."""
    return struct.pack("Q4i", x_MK.data_ptr(), *x_MK.shape, rows, columns).ljust(128, b"\0")
