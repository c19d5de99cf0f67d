// The query heads of a row as mma's second operand.
#pragma once
#include "decode_attention_token.cuh"

#define AFTER_0 (FP8 && E4M3_ALTERNATES ? 2 : 1)  // the places of the second and the third of a lane's four elements
#define BEFORE_3 (3 - AFTER_0)

// Load the four elements of tile k along H that this lane has of a query head. FP8 uses the order of unpack_e4m3_fast.
__device__ __forceinline__ void load_quad(const u16* head, int k, float (&x)[4]) {
  const int t = threadIdx.x % 4;
#if FP8
  const uint2 w = *(const uint2*)(head + 16 * k + 4 * t);
  x[0] = low(w.x), x[AFTER_0] = high(w.x), x[BEFORE_3] = low(w.y), x[3] = high(w.y);
#else
  const u32 a = *(const u32*)(head + 16 * k + 2 * t), b = *(const u32*)(head + 16 * k + 8 + 2 * t);
  x[0] = low(a), x[1] = high(a), x[2] = low(b), x[3] = high(b);
#endif
}
__device__ __forceinline__ void load_quad(const float* from, int k, float (&x)[4]) {
  const int t = threadIdx.x % 4;
#if FP8
  const float4 w = *(const float4*)(from + 16 * k + 4 * t);
  x[0] = w.x, x[AFTER_0] = w.y, x[BEFORE_3] = w.z, x[3] = w.w;
#else
  const float2 a = *(const float2*)(from + 16 * k + 2 * t), b = *(const float2*)(from + 16 * k + 8 + 2 * t);
  x[0] = a.x, x[1] = a.y, x[2] = b.x, x[3] = b.y;
#endif
}
__device__ __forceinline__ float round_to_bfloat16(float x) { return low(pack2(x, 0.f)); }

// Load the row's query heads as mma's second operand: normed, rotated, rounded.
__device__ __forceinline__ void load_queries(const Parameters& p, const Unit& u, u32 (&q)[NT][KT][2]) {
  const float* angle = p.angles + (size_t)u.position * ROTARY;
#pragma unroll
  for (int n = 0; n < NT; n++) {
    const int head = min(n * 8 + (int)threadIdx.x / 4, GROUP - 1);
    const u16* from = p.qkv + (size_t)u.row * WIDTH + (u.head * GROUP + head) * Q_WIDTH;
    float x[KT][4];
#pragma unroll
    for (int k = 0; k < KT; k++) load_quad(from, k, x[k]);
    if (p.q_norm) {
      float sum = 0.f;
#pragma unroll
      for (int k = 0; k < KT; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) sum += x[k][i] * x[k][i];
      sum += __shfl_xor_sync(ALL_LANES, sum, 1), sum += __shfl_xor_sync(ALL_LANES, sum, 2);
      const float inverse = rsqrtf(sum / H + p.eps);
#pragma unroll
      for (int k = 0; k < KT; k++) {
        float w[4];
        load_quad(p.q_norm, k, w);
#pragma unroll
        for (int i = 0; i < 4; i++) x[k][i] = round_to_bfloat16(x[k][i] * inverse * w[i]);
      }
    }
#if INTERLEAVED
#pragma unroll
    for (int k = 0; k < ROTARY / 16; k++) {
      constexpr int NEXT = FP8 ? 1 : 4;  // pairs to the lane's second pair
      const float* at = angle + 8 * k + (FP8 ? 2 : 1) * (threadIdx.x % 4);
      rotate_pair(x[k][0], x[k][AFTER_0], at[0], at[ROTARY / 2]);
      rotate_pair(x[k][BEFORE_3], x[k][3], at[NEXT], at[ROTARY / 2 + NEXT]);
    }
#else
#pragma unroll
    for (int k = 0; k < ROTARY / 32; k++) {
      float c[4], s[4];
      load_quad(angle, k, c), load_quad(angle + ROTARY / 2, k, s);
#pragma unroll
      for (int i = 0; i < 4; i++) rotate_pair(x[k][i], x[k + ROTARY / 32][i], c[i], s[i]);
    }
#endif
#pragma unroll
    for (int k = 0; k < KT; k++)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        q[n][k][j] = pack2(x[k][2 * j], x[k][2 * j + 1]);
        if (FP8) q[n][k][j] = pack_half(low(q[n][k][j]), high(q[n][k][j]));
      }
  }
}
