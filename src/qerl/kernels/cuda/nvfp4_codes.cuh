// Conversion of NVFP4 codes and block scales to bfloat16 (nvfp4_decode.py has the layout).
#pragma once
#include "types.cuh"

#define TILE_BYTES 2304  // 64 rows x 64 k

// Before Hopper there is no bfloat16 product, only one with an addition; adding -0 changes no number.
#if __CUDA_ARCH__ >= 900
#define MUL_PAIRS "mul.rn.bf16x2 %0, %1, s;"
#else
#define MUL_PAIRS ".reg .b32 z; mov.b32 z, 0x80008000; fma.rn.bf16x2 %0, %1, s, z;"
#endif
__device__ __forceinline__ u32 mul_lo(u32 a, u32 b) {  // both halves by the low half of b, in one HMUL2
  u32 d;
  asm("{.reg .b16 l, h; .reg .b32 s; mov.b32 {l, h}, %2; mov.b32 s, {l, l}; " MUL_PAIRS "}" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
__device__ __forceinline__ u32 mul_hi(u32 a, u32 b) {
  u32 d;
  asm("{.reg .b16 l, h; .reg .b32 s; mov.b32 {l, h}, %2; mov.b32 s, {h, h}; " MUL_PAIRS "}" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

#define SCALE_TOP 0x70007000u
// The scales of rows g and g + 8 for block j of a tile's four. `top` is SCALE_TOP, in a register or as an immediate.
__device__ __forceinline__ u32 scale_pair(uint2 scales, int j, u32 top) {
  u32 v = j < 2 ? scales.x : scales.y;
  if (j & 1) v = __funnelshift_l(v, v, 8);
  return (v & 0x0FF00FF0u) | top;
}

// A word has 4 codes in each half: a[0] and a[2] belong to row g, a[1] and a[3] to row g + 8.
__device__ __forceinline__ void decode(u32 w, u32 s, u32* a) {
  const u32 m = 0x81C081C0u;
  a[0] = mul_lo(w & m, s);
  a[1] = mul_hi((w * 64u) & m, s);
  a[2] = mul_lo(__funnelshift_r(w, w, 4) & m, s);
  a[3] = mul_hi(((w * 4u) ^ (w >> 6)) & m, s);
}
