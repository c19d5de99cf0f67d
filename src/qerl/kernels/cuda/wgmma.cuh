// Hopper's warpgroup products: d [64, N] += a [64, 16] b [16, N] in bfloat16, with fp32 sums.
//
//   wgmma(d, a, desc)    d float[N / 8][4], which selects the width; a is u32[4] in registers, or the descriptor of a in shared memory
//
// Descriptors are given by their first word: the address / 16 and a leading offset of 1. The second word says: 128-byte swizzle, and
// GROUP_STRIDE.
#pragma once
#include "types.cuh"

#ifndef GROUP_STRIDE
#define GROUP_STRIDE 1024  // bytes from one group of 8 rows to the next
#endif
#define DESC_HIGH "n"(0x40000000 | GROUP_STRIDE / 16)

// The operand numbers of n sums, "%10, %11, ...", ten at a time: t is their leading digits.
#define REGS2(t) "%" #t "0, %" #t "1"
#define REGS4(t) REGS2(t) ", %" #t "2, %" #t "3"
#define REGS6(t) REGS4(t) ", %" #t "4, %" #t "5"
#define REGS8(t) REGS6(t) ", %" #t "6, %" #t "7"
#define REGS10(t) REGS8(t) ", %" #t "8, %" #t "9"
#define REGS20 REGS10() ", " REGS10(1)
#define REGS40 REGS20 ", " REGS10(2) ", " REGS10(3)
#define REGS60 REGS40 ", " REGS10(4) ", " REGS10(5)
#define REGS80 REGS60 ", " REGS10(6) ", " REGS10(7)
#define REGS100 REGS80 ", " REGS10(8) ", " REGS10(9)
#define REGS120 REGS100 ", " REGS10(10) ", " REGS10(11)

// The sums of so many columns, from column 8 n on.
#define SUMS8(n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define SUMS16(n) SUMS8(n), SUMS8(n + 1)
#define SUMS24(n) SUMS16(n), SUMS8(n + 2)
#define SUMS32(n) SUMS16(n), SUMS16(n + 2)
#define SUMS40(n) SUMS32(n), SUMS8(n + 4)
#define SUMS48(n) SUMS32(n), SUMS16(n + 4)
#define SUMS56(n) SUMS32(n), SUMS24(n + 4)
#define SUMS64(n) SUMS32(n), SUMS32(n + 4)
#define SUMS72(n) SUMS64(n), SUMS8(n + 8)
#define SUMS80(n) SUMS64(n), SUMS16(n + 8)
#define SUMS88(n) SUMS64(n), SUMS24(n + 8)
#define SUMS96(n) SUMS64(n), SUMS32(n + 8)
#define SUMS104(n) SUMS64(n), SUMS40(n + 8)
#define SUMS112(n) SUMS64(n), SUMS48(n + 8)
#define SUMS120(n) SUMS64(n), SUMS56(n + 8)
#define SUMS128(n) SUMS64(n), SUMS64(n + 8)
#define SUMS144(n) SUMS128(n), SUMS16(n + 16)
#define SUMS160(n) SUMS128(n), SUMS32(n + 16)
#define SUMS176(n) SUMS128(n), SUMS48(n + 16)
#define SUMS192(n) SUMS128(n), SUMS64(n + 16)
#define SUMS208(n) SUMS128(n), SUMS80(n + 16)
#define SUMS224(n) SUMS128(n), SUMS96(n + 16)
#define SUMS240(n) SUMS128(n), SUMS112(n + 16)
#define SUMS256(n) SUMS128(n), SUMS128(n + 16)

// i0 to i5: the operand numbers after those of the sums.
#define DEFINE_WGMMA(N, REGS, i0, i1, i2, i3, i4, i5)                                                                    \
  __device__ __forceinline__ void wgmma(float (&d)[N / 8][4], const u32 (&a)[4], u32 desc) {                             \
    asm volatile("{.reg .b64 b; mov.b64 b, {%" #i4 ", %" #i5 "}; "                                                       \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" REGS "}, "                                 \
                 "{%" #i0 ", %" #i1 ", %" #i2 ", %" #i3 "}, b, 1, 1, 1, 0;}"                                             \
                 : SUMS##N(0)                                                                                            \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(desc), DESC_HIGH);                                    \
  }                                                                                                                      \
  __device__ __forceinline__ void wgmma(float (&d)[N / 8][4], u32 a, u32 desc) {                                         \
    asm volatile("{.reg .b64 a, b; mov.b64 a, {%" #i0 ", %" #i2 "}; mov.b64 b, {%" #i1 ", %" #i2 "}; "                   \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" REGS "}, a, b, 1, 1, 1, 0, 0;}"            \
                 : SUMS##N(0)                                                                                            \
                 : "r"(a), "r"(desc), DESC_HIGH);                                                                        \
  }
DEFINE_WGMMA(8, REGS4(), 4, 5, 6, 7, 8, 9)
DEFINE_WGMMA(16, REGS8(), 8, 9, 10, 11, 12, 13)
DEFINE_WGMMA(24, REGS10() ", " REGS2(1), 12, 13, 14, 15, 16, 17)
DEFINE_WGMMA(32, REGS10() ", " REGS6(1), 16, 17, 18, 19, 20, 21)
DEFINE_WGMMA(40, REGS20, 20, 21, 22, 23, 24, 25)
DEFINE_WGMMA(48, REGS20 ", " REGS4(2), 24, 25, 26, 27, 28, 29)
DEFINE_WGMMA(56, REGS20 ", " REGS8(2), 28, 29, 30, 31, 32, 33)
DEFINE_WGMMA(64, REGS20 ", " REGS10(2) ", " REGS2(3), 32, 33, 34, 35, 36, 37)
DEFINE_WGMMA(72, REGS20 ", " REGS10(2) ", " REGS6(3), 36, 37, 38, 39, 40, 41)
DEFINE_WGMMA(80, REGS40, 40, 41, 42, 43, 44, 45)
DEFINE_WGMMA(88, REGS40 ", " REGS4(4), 44, 45, 46, 47, 48, 49)
DEFINE_WGMMA(96, REGS40 ", " REGS8(4), 48, 49, 50, 51, 52, 53)
DEFINE_WGMMA(104, REGS40 ", " REGS10(4) ", " REGS2(5), 52, 53, 54, 55, 56, 57)
DEFINE_WGMMA(112, REGS40 ", " REGS10(4) ", " REGS6(5), 56, 57, 58, 59, 60, 61)
DEFINE_WGMMA(120, REGS60, 60, 61, 62, 63, 64, 65)
DEFINE_WGMMA(128, REGS60 ", " REGS4(6), 64, 65, 66, 67, 68, 69)
DEFINE_WGMMA(144, REGS60 ", " REGS10(6) ", " REGS2(7), 72, 73, 74, 75, 76, 77)
DEFINE_WGMMA(160, REGS80, 80, 81, 82, 83, 84, 85)
DEFINE_WGMMA(176, REGS80 ", " REGS8(8), 88, 89, 90, 91, 92, 93)
DEFINE_WGMMA(192, REGS80 ", " REGS10(8) ", " REGS6(9), 96, 97, 98, 99, 100, 101)
DEFINE_WGMMA(208, REGS100 ", " REGS4(10), 104, 105, 106, 107, 108, 109)
DEFINE_WGMMA(224, REGS100 ", " REGS10(10) ", " REGS2(11), 112, 113, 114, 115, 116, 117)
DEFINE_WGMMA(240, REGS120, 120, 121, 122, 123, 124, 125)
DEFINE_WGMMA(256, REGS120 ", " REGS8(12), 128, 129, 130, 131, 132, 133)

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;"); }
// Wait until at most PENDING committed groups are still running.
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Keep the compiler from moving accesses to the sums across the asynchronous products.
template <int TILES>
__device__ __forceinline__ void fence_sums(float (&d)[TILES][4]) {
#pragma unroll
  for (int n = 0; n < TILES; n++) asm volatile("" : "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])::"memory");
}
template <int TILES>
__device__ __forceinline__ void clear_sums(float (&d)[TILES][4]) {
#pragma unroll
  for (int n = 0; n < TILES; n++) d[n][0] = d[n][1] = d[n][2] = d[n][3] = 0.f;
  fence_sums(d);
}
