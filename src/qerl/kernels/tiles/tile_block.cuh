// A lane's codes and scales of 16 rows and 64 k of a tile, and their decoding to the first operand of mma.sync (tile_layout.py has the
// layouts). Compile-time: FORMAT of the tiles: 0 NVFP4, 1 NF4, 2 FP8, 3 INT8.
//
// `constant` is what a lane keeps in a register for decoding. Of NVFP4 it is SCALE_TOP: a LOP3 takes only one immediate. Of NF4 it is
// level lane % 16: a shuffle among 16 lanes is the look-up, and takes the low four bits of any word as its index.
#pragma once
#include "bfloat16.cuh"
#include "types.cuh"
#ifndef LOAD
#define LOAD(p) (*(p))
#endif

#if FORMAT == 0
#include "nvfp4_codes.cuh"
struct Block {
  uint4 codes;
  uint2 scales;
  __device__ __forceinline__ void load(const u8* tile, int block, int lane) {
    codes = LOAD((const uint4*)(tile + block % 4 * 512 + lane * 16)), scales = LOAD((const uint2*)(tile + 2048 + block % 4 * 64 + lane / 4 * 8));
  }
  __device__ __forceinline__ void decode16(int j, u32 constant, u32 (&a)[4]) const {
    const u32 words[4] = {codes.x, codes.y, codes.z, codes.w};
    decode(words[j], scale_pair(scales, j, constant), a);
  }
};
__device__ __forceinline__ u32 decoding_constant(int lane) {
  u32 top;
  asm volatile("or.b32 %0, %1, 0x70007000;" : "=r"(top) : "r"(gridDim.y - 1));
  return top;
}

#elif FORMAT == 1
#define TILE_BYTES 2304
__constant__ float LEVELS[16] = {-1.0f,
                                 -0.6961928009986877f,
                                 -0.5250730514526367f,
                                 -0.39491748809814453f,
                                 -0.28444138169288635f,
                                 -0.18477343022823334f,
                                 -0.09105003625154495f,
                                 0.0f,
                                 0.07958029955625534f,
                                 0.16093020141124725f,
                                 0.24611230194568634f,
                                 0.33791524171829224f,
                                 0.44070982933044434f,
                                 0.5626170039176941f,
                                 0.7229568362236023f,
                                 1.0f};
struct Block {
  uint4 codes;
  float2 scales;
  __device__ __forceinline__ void load(const u8* tile, int block, int lane) {
    codes = LOAD((const uint4*)(tile + block % 4 * 512 + lane * 16)), scales = LOAD((const float2*)(tile + 2048 + block % 4 * 64 + lane / 4 * 8));
  }
  __device__ __forceinline__ void decode16(int j, u32 constant, u32 (&a)[4]) const {
    const u32 words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float scale = i % 2 ? scales.y : scales.x;
      float v[2];
#pragma unroll
      for (int k = 0; k < 2; k++) v[k] = __fmul_rn(__uint_as_float(__shfl_sync(~0u, constant, words[j] >> (8 * i + 4 * k), 16)), scale);
      a[i] = pack2(v[0], v[1]);
    }
  }
};
__device__ __forceinline__ u32 decoding_constant(int lane) { return __float_as_uint(LEVELS[lane % 16]); }

#else
#define TILE_BYTES (FORMAT == 2 ? 4112 : 4096)
#if __CUDA_ARCH__ >= 890
#define HAS_E4M3 1
// Two codes, in the word's low half.
__device__ __forceinline__ void e4m3_pair(u32 word, float* v) {
  asm("{.reg .b16 c, h0, h1; .reg .b32 h; cvt.u16.u32 c, %2; cvt.rn.f16x2.e4m3x2 h, c; mov.b32 {h0, h1}, h; cvt.f32.f16 %0, h0; cvt.f32.f16 %1, h1;}"
      : "=f"(v[0]), "=f"(v[1])
      : "r"(word));
}
#else
#define HAS_E4M3 0
// Sign, exponent and mantissa go to the top of a float, which is then the code's value * 2^-120.
__device__ __forceinline__ float e4m3(u32 word, int byte) { return __int_as_float((int)(word << (24 - 8 * byte)) >> 4 & 0x87F00000); }
#endif
// Two integers in bfloat16, given 0x43 and its byte of each. A byte's low 7 bits make 128 + low7; its sign bit makes -128 or -256.
__device__ __forceinline__ u32 int8_pair(u32 v) { return add_pairs(v & 0xFF7FFF7Fu, v & 0x00800080u | 0xC300C300u); }

struct Block {
  uint4 codes[2];
  float2 scales;
  __device__ __forceinline__ void load(const u8* tile, int block, int lane) {
#pragma unroll
    for (int i = 0; i < 2; i++) codes[i] = LOAD((const uint4*)(tile + block % 4 * 1024 + i * 512 + lane * 16));
    if (FORMAT == 2) scales = LOAD((const float2*)(tile + 4096));
  }
  // Four numbers of a word as two pairs in bfloat16.
  __device__ __forceinline__ void decode4(u32 word, float2 scales, u32& first, u32& second) const {
#if FORMAT == 3
    first = int8_pair(__byte_perm(word, 0x43434343u, 0x4140)), second = int8_pair(__byte_perm(word, 0x43434343u, 0x4342));
#elif HAS_E4M3
    float v[4];
    e4m3_pair(word, v), e4m3_pair(word >> 16, v + 2);
    first = pack2(__fmul_rn(v[0], scales.x), __fmul_rn(v[1], scales.x)), second = pack2(__fmul_rn(v[2], scales.y), __fmul_rn(v[3], scales.y));
#else
    first = pack2(__fmul_rn(e4m3(word, 0), scales.x), __fmul_rn(e4m3(word, 1), scales.x));
    second = pack2(__fmul_rn(e4m3(word, 2), scales.y), __fmul_rn(e4m3(word, 3), scales.y));
#endif
  }
  __device__ __forceinline__ void decode16(int j, u32 constant, u32 (&a)[4]) const {
    const uint4 c = codes[j / 2];
    float2 own = scales;
    if (FORMAT == 2 && HAS_E4M3) own.x = __fmul_rn(own.x, 0x1p-120f), own.y = __fmul_rn(own.y, 0x1p-120f);
    decode4(j % 2 ? c.z : c.x, own, a[0], a[1]);
    decode4(j % 2 ? c.w : c.y, own, a[2], a[3]);
  }
};
__device__ __forceinline__ u32 decoding_constant(int lane) { return 0; }
#endif
