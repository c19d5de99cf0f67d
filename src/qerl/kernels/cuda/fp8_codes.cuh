// E4M3 codes: from fp32, and to bfloat16 as head_sample.cu and head_portable.cu read them.
#pragma once
#include "types.cuh"

__device__ __forceinline__ u32 e4m3(float x) {  // round to nearest even, saturate
  const u32 bits = __float_as_uint(x), sign = bits >> 24 & 0x80, magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return 0x7F;
  if (magnitude >= __float_as_uint(448.f)) return sign | 0x7E;
  if (magnitude < __float_as_uint(0.015625f)) return sign | __float2int_rn(__uint_as_float(magnitude) * 512.f);
  return sign | (((magnitude + 0x7FFFF + (magnitude >> 20 & 1)) >> 20) - 960);
}

__device__ __forceinline__ u32 times_2_120(u32 x) {  // exact, also for subnormal x
  u32 y;
#if __CUDA_ARCH__ >= 900
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(x), "r"(0x7B807B80u));
#else  // plus -0
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(x), "r"(0x7B807B80u), "r"(0x80008000u));
#endif
  return y;
}
// Decode 4 codes of one row: bytes 0 and 2 (even), 1 and 3 (odd). head_sample.py reorders x to match.
__device__ __forceinline__ void decode4(u32 w, u32& even, u32& odd) {
  odd = times_2_120(((w >> 4) & 0x07F007F0u) | (w & 0x80008000u));
  even = times_2_120(((w << 4) & 0x07F007F0u) | ((w << 8) & 0x80008000u));
}
__device__ __forceinline__ u32 word_of(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
