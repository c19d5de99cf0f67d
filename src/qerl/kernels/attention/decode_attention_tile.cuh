// The arithmetic of a tile: scores, weights, and their products with the values.
#pragma once
#include "decode_attention_chunks.cuh"
#include "mma.cuh"

__device__ __forceinline__ void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if FP8
  mma_half(d, a[0], a[1], a[2], a[3], b0, b1);
#else
  mma(d, a[0], a[1], a[2], a[3], b0, b1);
#endif
}

// cap tanh(s / cap) in log2 = cap - 2 cap / (e^(2 s / cap) + 1), to 2^-21 of the cap.
__device__ __forceinline__ float capped(const Parameters& p, float x) {
#if SOFTCAP
  return p.softcap - __fdividef(2.f * p.softcap, exp2_fast(x) + 1.f);
#else
  return x;
#endif
}

// Compute s^T of a tile in log2, with -inf before position `start` and from position `length` on. Its halves are independent, which
// hides the products' latency; a tile of one half has two sums instead.
__device__ __forceinline__ void score(const Parameters& p, const Stage& s, u32 at_k, const u32 (&q)[NT][KT][2], int start, int length, float (&x)[2][NT][4]) {
  constexpr int LOADS = ROW_BYTES / 32, BATCH = LOADS == 16 ? 8 : LOADS;  // as many as there are registers for
  const int lane = threadIdx.x, g = lane / 4;
#pragma unroll
  for (int h = 0; h < 2; h++)
#pragma unroll
    for (int n = 0; n < NT; n++) x[h][n][0] = x[h][n][1] = x[h][n][2] = x[h][n][3] = 0.f;
#pragma unroll
  for (int k0 = 0; k0 < LOADS; k0 += BATCH) {
    u32 w[HALVES][BATCH][4];  // all loads first, to pay their latency once
#pragma unroll
    for (int h = 0; h < HALVES; h++)
#pragma unroll
      for (int k = 0; k < BATCH; k++) ldmatrix_x4(w[h][k], (at_k + swizzled(lane % 16, lane / 16) ^ (k0 + k) << 5) + h * 16 * ROW_BYTES);
#pragma unroll
    for (int i = 0; i < BATCH * KT / LOADS; i++)
#pragma unroll
      for (int h = 0; h < HALVES; h++) {
        const int k = k0 * (KT / LOADS) + i;
#if FP8
        u32 a[4];
        unpack_e4m3_fast(w[h][i / 2][i % 2 * 2], a[0], a[2]), unpack_e4m3_fast(w[h][i / 2][i % 2 * 2 + 1], a[1], a[3]);
#else
        const u32(&a)[4] = w[h][i];
#endif
#pragma unroll
        for (int n = 0; n < NT; n++) multiply(x[HALVES == 2 ? h : k % 2][n], a, q[n][k][0], q[n][k][1]);
      }
  }
#pragma unroll
  for (int h = 0; h < HALVES; h++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int at = h * 16 + half * 8 + g;
      float factor = p.score_factor * SCORE_FACTOR;
#if FP8
      factor *= s.k_scales[at];
#endif
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int j = half * 2; j < half * 2 + 2; j++) {
          if (HALVES == 1) x[0][n][j] += x[1][n][j];
          x[h][n][j] = at < length && (!WINDOW || at >= start) ? capped(p, x[h][n][j] * factor) : -INF;
        }
    }
}

// Compute p of a tile as mma's second operand; update the largest score and the sum.
__device__ __forceinline__ void softmax_weights(const Stage& s, const float (&x)[2][NT][4], Softmax& f, u32 (&b)[NT][2 * HALVES]) {
#pragma unroll
  for (int n = 0; n < NT; n++) {
    float2 m = make_float2(fmaxf(x[0][n][0], x[0][n][2]), fmaxf(x[0][n][1], x[0][n][3]));
    if (HALVES == 2) m = make_float2(fmaxf(m.x, fmaxf(x[1][n][0], x[1][n][2])), fmaxf(m.y, fmaxf(x[1][n][1], x[1][n][3])));
#pragma unroll
    for (int i = 4; i < 32; i *= 2) m.x = fmaxf(m.x, __shfl_xor_sync(ALL_LANES, m.x, i)), m.y = fmaxf(m.y, __shfl_xor_sync(ALL_LANES, m.y, i));
    if (__any_sync(ALL_LANES, m.x > f.largest[n].x || m.y > f.largest[n].y)) {
      const float2 old = f.largest[n];
      f.largest[n] = make_float2(fmaxf(m.x, old.x), fmaxf(m.y, old.y));
      scale(f, n, exp2_fast(old.x - f.largest[n].x), exp2_fast(old.y - f.largest[n].y));
    }
#pragma unroll
    for (int part = 0; part < 2 * HALVES; part++) {
      float v = exp2_fast(x[part / 2][n][part % 2 * 2] - f.largest[n].x), w = exp2_fast(x[part / 2][n][part % 2 * 2 + 1] - f.largest[n].y);
      f.sum[n].x += v, f.sum[n].y += w;
#if FP8
      const float factor = s.v_scales[part * 8 + threadIdx.x / 4] * WEIGHT_FACTOR;
      b[n][part] = transpose8x8(pack_half(v * factor, w * factor));
#else
      b[n][part] = transpose8x8(pack2(v, w));
#endif
    }
  }
}

// o^T += v^T p^T of a tile.
__device__ __forceinline__ void add_values(u32 at_v, const u32 (&b)[NT][2 * HALVES], Softmax& f) {
  const int lane = threadIdx.x;
#pragma unroll
  for (int h = 0; h < HALVES; h++) {
#if FP8  // a column of pairs of bytes becomes rows g (even elements of H) and g + 8 (odd)
#pragma unroll
    for (int i = 0; i < KT; i += 2) {
      u32 w[4];
      ldmatrix_x4_transposed(w, (at_v + swizzled(lane % 16, lane / 16) ^ i << 4) + h * 16 * ROW_BYTES);
#pragma unroll
      for (int j = 0; j < 2; j++) {
        u32 a[4];
        unpack_e4m3(w[2 * j], a[0], a[1]), unpack_e4m3(w[2 * j + 1], a[2], a[3]);
#pragma unroll
        for (int n = 0; n < NT; n++) multiply(f.o[i + j][n], a, b[n][2 * h], b[n][2 * h + 1]);
      }
    }
#else
#pragma unroll
    for (int i = 0; i < KT; i++) {
      u32 a[4];
      ldmatrix_x4_transposed(a, (at_v + swizzled(lane / 16 * 8 + lane % 8, lane / 8 % 2) ^ i << 5) + h * 16 * ROW_BYTES);
#pragma unroll
      for (int n = 0; n < NT; n++) multiply(f.o[i][n], a, b[n][2 * h], b[n][2 * h + 1]);
    }
#endif
  }
}
