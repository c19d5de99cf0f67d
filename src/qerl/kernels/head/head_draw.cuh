// From the logits of some rows of the head: what a sampled token needs, for head_sample.cu and head_portable.cu.
//
// The includer defines ROWS, the neighboring v of one token that a lane has, and COLUMNS, the tokens of a warp's 32 lanes: lanes
// whose numbers are equal modulo COLUMNS have v of the same token. OUTPUT, BY_ROW, SCALE and SOFTCAP are those of head_sample.cu.
#pragma once
#include "logit.cuh"
#include "types.cuh"

#ifndef BY_ROW
#define BY_ROW 0
#endif
#ifndef SCALE
#define SCALE 0
#endif
#ifndef SOFTCAP
#define SOFTCAP 0
#endif

struct Rows {
  const long long* keys;
  const int* positions;
  const float* temperatures;  // one, or with BY_ROW of each token
  const float* factors;  // NVFP4: of each row; FP8: of each block of 128 x 128
  float4* partials;
  float* logits;
  int M, V, D, pad;
#if SCALE || SOFTCAP
  float scale, softcap;
#endif
};

// Philox 4x32-10 (Salmon et al., SC 2011) of the counter (quad, position, 0, 0): the words of v = 4 quad, ..., 4 quad + 3.
__device__ __forceinline__ void philox(u32 quad, u32 position, u32 key0, u32 key1, u32 (&words)[4]) {
  u32 c0 = quad, c1 = position, c2 = 0, c3 = 0;
#pragma unroll
  for (int i = 0; i < 10; i++) {
    const u64 p0 = (u64)c0 * 0xD2511F53u, p1 = (u64)c2 * 0xCD9E8D57u;
    c0 = (u32)(p1 >> 32) ^ c1 ^ key0, c1 = (u32)p1, c2 = (u32)(p0 >> 32) ^ c3 ^ key1, c3 = (u32)p0;
    key0 += 0x9E3779B9u, key1 += 0xBB67AE85u;
  }
  words[0] = c0, words[1] = c1, words[2] = c2, words[3] = c3;
}
// Of numbers that are not subnormal.
__device__ __forceinline__ float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// log2 of E = -log(1 - u), u = (bits + 1/2) / 2^32. A small u uses a series, because 1 - u would lose its last bits.
__device__ __forceinline__ float log2_exponential(u32 bits) {
  const bool is_small = bits < (1u << 28);
  const float a = fmaf((float)(is_small ? bits : ~bits), 0x1p-32f, 0x1p-33f);
  float series = fmaf(a, 1.f / 6, 1.f / 5);
  series = fmaf(a, series, 1.f / 4), series = fmaf(a, series, 1.f / 3), series = fmaf(a, series, 1.f / 2);
  return log2_fast(is_small ? fmaf(a * a, series, a) : -0.693147181f * log2_fast(a));
}

__device__ __forceinline__ float logit(const Rows& e, float product) {
#if SCALE
  product *= e.scale;
#endif
#if SOFTCAP
  product = capped_logit(product, e.softcap);
#endif
  return product;
}

// What a temperature makes of logits and Gumbel noise: (1 / temperature, 1), or (1, 0) for temperature 0.
struct Scaling {
  float inverse, noise;
};
__device__ __forceinline__ Scaling scaling_of(float temperature) {
  return temperature > 0.f ? Scaling{1.f / temperature, 1.f} : Scaling{1.f, 0.f};
}

struct Best {
  float score, y;
  int v;
  __device__ __forceinline__ void update(float other, float other_y, int other_v) {
    if (other > score || (other == score && other_v < v)) score = other, y = other_y, v = other_v;
  }
};

// Reduce a warp's rows of one token, ROWS of them in this lane from v on: all of them if is_there, else none. Numbers are added by fours,
// then pairs of fours, then pairs of those, however many lanes share them.
__device__ __forceinline__ void reduce_rows(const float (&l)[ROWS], int v, bool is_there, u64 key, int position, Scaling scaling, Best& best, float& most,
                                            float& sum) {
  float y[ROWS], fours[ROWS / 4];
  most = -INF;
#pragma unroll
  for (int i = 0; i < ROWS; i++) y[i] = l[i] * scaling.inverse, most = fmaxf(most, y[i]);
  if (!is_there) most = -INF;
#pragma unroll
  for (int step = COLUMNS; step < 32; step *= 2) most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, step));
  const float log2e = 1.44269504f, base = -most * log2e;
#pragma unroll
  for (int q = 0; q < ROWS / 4; q++) {
    fours[q] = 0.f;
#pragma unroll
    for (int i = 4 * q; i < 4 * q + 4; i++) fours[q] += exp2_fast(fmaf(y[i], log2e, base)) + y[i] * 0.f;  // NaN if y is not finite
  }
  sum = ROWS == 8 ? fours[0] + fours[ROWS / 4 - 1] : fours[0];
  if (!is_there) sum = 0.f;
  best.score = -INF, best.y = y[0], best.v = v;
#pragma unroll
  for (int i = 0; i < ROWS; i += 4) {
#if OUTPUT == 0
    u32 words[4];
    philox((v + i) / 4, position, (u32)key, (u32)(key >> 32), words);
#endif
#pragma unroll
    for (int j = 0; j < 4; j++) {
#if OUTPUT == 0
      const float score = fmaf(log2_exponential(words[j]), -0.693147181f * scaling.noise, y[i + j]);
#else
      const float score = v + i + j == (int)key ? 0.f : -INF;
#endif
      if (score > best.score) best.score = score, best.y = y[i + j], best.v = v + i + j;
    }
  }
  if (!is_there) best.score = -INF;
#pragma unroll
  for (int step = COLUMNS; step < 32; step *= 2) {
    sum += __shfl_xor_sync(ALL_LANES, sum, step);
    const float score = __shfl_xor_sync(ALL_LANES, best.score, step), other_y = __shfl_xor_sync(ALL_LANES, best.y, step);
    best.update(score, other_y, __shfl_xor_sync(ALL_LANES, best.v, step));
  }
}
