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
struct Block {
  uint4 codes[2];
  float2 scales;
  __device__ __forceinline__ void load(const u8* tile, int block, int lane) {
#pragma unroll
    for (int i = 0; i < 2; i++) codes[i] = LOAD((const uint4*)(tile + block % 4 * 1024 + i * 512 + lane * 16));
    if (FORMAT == 2) scales = LOAD((const float2*)(tile + 4096));
  }
  // E4M3: sign, exponent and mantissa go to the top of a float, which is then the code's value * 2^-120.
  __device__ __forceinline__ float e4m3(u32 word, int byte) const {
    return __int_as_float((int)(word << (24 - 8 * byte)) >> 4 & 0x87F00000);
  }
  // An integer: 2^23 + its byte, whose sign bit is turned, as a float, - (2^23 + 128).
  __device__ __forceinline__ float int8(u32 word, int byte) const {
    return __fadd_rn(__uint_as_float(__byte_perm(word, 0x4B000000u, 0x7540 + byte)), -8388736.f);
  }
  __device__ __forceinline__ void decode16(int j, u32 constant, u32 (&a)[4]) const {
    const uint4 c = codes[j / 2];
    const u32 words[2] = {j % 2 ? c.z : c.x, j % 2 ? c.w : c.y};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const u32 word = FORMAT == 2 ? words[i / 2] : words[i / 2] ^ 0x80808080u;
      const int byte = i % 2 * 2;
      const float scale = i % 2 ? scales.y : scales.x;
      if (FORMAT == 2) a[i] = pack2(__fmul_rn(e4m3(word, byte), scale), __fmul_rn(e4m3(word, byte + 1), scale));
      else a[i] = pack2(int8(word, byte), int8(word, byte + 1));
    }
  }
};
__device__ __forceinline__ u32 decoding_constant(int lane) { return 0; }
#endif
