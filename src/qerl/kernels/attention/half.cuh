// Pairs of numbers in half precision, and E4M3 numbers as such pairs.
#pragma once
#include "types.cuh"

__device__ __forceinline__ u32 pack_half(float low, float high) {
  u32 d;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}

// unpack_e4m3: bytes 0 and 2 (even) and 1 and 3 (odd) of four E4M3 numbers as pairs, each times E4M3_FACTOR.
// unpack_e4m3_fast: bytes 0 and 1, and 2 and 3; if E4M3_ALTERNATES, which takes fewer instructions there, even and odd ones.
#if __CUDA_ARCH__ >= 890
#define E4M3_FACTOR 1.f
#define E4M3_ALTERNATES 0
__device__ __forceinline__ void unpack_e4m3_fast(u32 w, u32& first, u32& second) {
  asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.rn.f16x2.e4m3x2 %0, a; cvt.rn.f16x2.e4m3x2 %1, b;}" : "=r"(first), "=r"(second) : "r"(w));
}
__device__ __forceinline__ void unpack_e4m3(u32 w, u32& even, u32& odd) { unpack_e4m3_fast(__byte_perm(w, 0, 0x3120), even, odd); }
#else  // the sign, and exponent and mantissa in their places
#define E4M3_FACTOR 0.00390625f  // 2^-8
#define E4M3_ALTERNATES 1
__device__ __forceinline__ void unpack_e4m3(u32 w, u32& even, u32& odd) {
  even = ((w << 8) & 0x80008000u) | ((w << 7) & 0x3F803F80u), odd = (w & 0x80008000u) | ((w >> 1) & 0x3F803F80u);
}
__device__ __forceinline__ void unpack_e4m3_fast(u32 w, u32& first, u32& second) { unpack_e4m3(w, first, second); }
#endif
