// The sum of a row's chunks with FEW_ROWS: of one tile of 16 elements of H and all heads of a K/V head, by one warp.
#pragma once
#include "decode_attention_chunks.cuh"

#if FEW_ROWS
#define TOGETHER 32                      // chunks whose maxima are loaded together; `weights` has room for 4 TOGETHER
#define SUM_BATCH (NT == 1 ? 32 : 16)    // likewise, whose o is
#define CHUNK_WORDS (8 * NT * H)
#define MAXIMA_WORDS (MAXIMA_COPIES * 16 * NT)

// Wait for the largest score and the sum of this lane's two heads in every 8th of TOGETHER chunks from c0 on.
__device__ __forceinline__ void wait_maxima(const u32* maxima, int c0, int chunks, bool has_heads, u32 (&x)[TOGETHER / 8][4]) {
  const int g = threadIdx.x / 4;
  for (bool missing = true; missing; missing = __any_sync(ALL_LANES, missing)) {
    missing = false;
#pragma unroll
    for (int j = 0; j < TOGETHER / 8; j++) {
      const int c = c0 + 8 * j + g;
      if (has_heads && c < chunks) {
        load_relaxed(maxima + (size_t)c * MAXIMA_WORDS, x[j]);
      } else {
        x[j][0] = x[j][2] = __float_as_uint(-INF), x[j][1] = x[j][3] = 0;
      }
    }
#pragma unroll
    for (int j = 0; j < TOGETHER / 8; j++) missing |= is_missing(x[j]);
    if (missing) __nanosleep(40);  // leave the memory to those who are computing
  }
}

// Add up to SUM_BATCH chunks of one tile of heads, and clear their words.
__device__ __forceinline__ void add_batch(u32* partials, int chunks, const float4* weights, SoftmaxOf<1>& f, int n) {
  u32 v[SUM_BATCH][4];
#pragma unroll
  for (int j = 0; j < SUM_BATCH; j++)
    if (j < chunks) load_relaxed(partials + j * CHUNK_WORDS, v[j]);
#pragma unroll
  for (int j = 0; j < SUM_BATCH; j++) {
    if (j >= chunks) break;
    const float4 w = weights[j * 4];
    while (is_missing(v[j])) load_relaxed(partials + j * CHUNK_WORDS, v[j]);
    clear_partial(partials + j * CHUNK_WORDS);
    f.sum[n].x = fmaf(w.x, w.y, f.sum[n].x), f.sum[n].y = fmaf(w.z, w.w, f.sum[n].y);
#pragma unroll
    for (int e = 0; e < 4; e++) f.o[0][n][e] = fmaf(e % 2 ? w.z : w.x, __uint_as_float(v[j][e]), f.o[0][n][e]);
  }
}

// Add the row's chunks: the last one first, the others in order. Clear their words.
__device__ __forceinline__ void add_tile(const Parameters& p, int row, int head, int tile, int chunks, float4* weights, SoftmaxOf<1>& f) {
  const int lane = threadIdx.x, g = lane / 4, t = lane % 4, others = chunks - 1;
  const size_t first = workspace_index(p, row, head);
#pragma unroll
  for (int n = 0; n < NT; n++) {
    const bool has_heads = n * 8 + 2 * t < GROUP;
    u32* maxima = maxima_of(p, first, tile) + n * 16 + 4 * t;
    u32* partials = p.partials + first * CHUNK_WORDS + (tile * NT + n) * 128 + lane * 4;
    u32 x[TOGETHER / 8][4], last[4] = {}, v_last[4] = {};
    float2 m = make_float2(-INF, -INF);
    for (int c0 = 0; c0 < chunks; c0 += TOGETHER) {
      wait_maxima(maxima, c0, chunks, has_heads, x);
#pragma unroll
      for (int j = 0; j < TOGETHER / 8; j++) m.x = fmaxf(m.x, __uint_as_float(x[j][0])), m.y = fmaxf(m.y, __uint_as_float(x[j][2]));
    }
#pragma unroll
    for (int i = 4; i < 32; i *= 2) m.x = fmaxf(m.x, __shfl_xor_sync(ALL_LANES, m.x, i)), m.y = fmaxf(m.y, __shfl_xor_sync(ALL_LANES, m.y, i));
    u32* at_last = partials + (size_t)others * CHUNK_WORDS;
    if (has_heads) load_relaxed(maxima + (size_t)others * MAXIMA_WORDS, last), load_relaxed(at_last, v_last);
    f.largest[n] = m;
#pragma unroll 1
    for (int c0 = 0; c0 < others; c0 += TOGETHER) {
      if (chunks > TOGETHER) wait_maxima(maxima, c0, chunks, has_heads, x);
#pragma unroll
      for (int j = 0; j < TOGETHER / 8; j++)
        weights[(8 * j + g) * 4 + t] = make_float4(exp2_fast(__uint_as_float(x[j][0]) - m.x), __uint_as_float(x[j][1]), exp2_fast(__uint_as_float(x[j][2]) - m.y),
                                                   __uint_as_float(x[j][3]));
      __syncwarp();
      if (has_heads) {
        if (c0 == 0) {
          while (is_missing(last)) load_relaxed(maxima + (size_t)others * MAXIMA_WORDS, last);
          while (is_missing(v_last)) load_relaxed(at_last, v_last);
          clear_partial(at_last);
          f.sum[n] = make_float2(__uint_as_float(last[1]), __uint_as_float(last[3]));
#pragma unroll
          for (int e = 0; e < 4; e++) f.o[0][n][e] = __uint_as_float(v_last[e]);
          scale(f, n, exp2_fast(__uint_as_float(last[0]) - m.x), exp2_fast(__uint_as_float(last[2]) - m.y));
        }
        for (int b0 = 0; b0 < TOGETHER && c0 + b0 < others; b0 += SUM_BATCH)
          add_batch(partials + (size_t)(c0 + b0) * CHUNK_WORDS, others - c0 - b0, weights + b0 * 4 + t, f, n);
      }
      __syncwarp();  // every lane has read the weights, and the maxima
    }
    if (has_heads)
      for (int c = g; c < chunks; c += 8) clear_partial(maxima + (size_t)c * MAXIMA_WORDS);
  }
}
#endif
