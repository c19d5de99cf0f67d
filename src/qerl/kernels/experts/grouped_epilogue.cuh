// The operands of the grouped products, and their end: y = alpha * sums + bias + u B^T, or the SwiGLU of it, from the sums of 16 rows of W and
// 8 sorted rows of x, as mma.sync and a warp of wgmma leave them: rows g and g + 8, of 2 t and 2 t + 1.
//
// Compile-time: SWIGLU (0 none, 1 plain, 2 clamped). If given: RANK of the adapters, a multiple of 4, and ORDER of B's rows (0: that of the
// tiles; 1: all of gate, then all of up; 2: gate 0, up 0, gate 1, ...).
#pragma once
#include "bfloat16.cuh"
#include "mma.cuh"

#ifndef RANK
#define RANK 0
#endif

struct Operands {
#ifdef X_MAP
  TensorMap x_map;  // of the sorted rows
#endif
  const u8* w;
  const float* alpha;
  const float* bias;  // or null
  const u16* x;
  u16* y;
  const u32* plan;  // number of items, then each: expert | rows << 8 | first sorted row << 16
  const u16* rows;  // the token of each sorted row
  int N, K;
  float swiglu_alpha, swiglu_limit;
#if RANK
  const u16* b;  // [E or 1, N, RANK]
  const float* u;
  int b_stride;  // elements from one expert's B to the next one's; 0: all have the same
#endif
};

struct Item {
  int expert, count, first;
  __device__ __forceinline__ Item(u32 word) : expert(word & 255), count(word >> 8 & 255), first(word >> 16) {}
};

__device__ __forceinline__ float activated(float gate, float up, const Operands& o) {
#if SWIGLU == 2
  gate = fminf(gate, o.swiglu_limit), up = fminf(fmaxf(up, -o.swiglu_limit), o.swiglu_limit) + 1.f;
  return up * __fdividef(gate, 1.f + __expf(-o.swiglu_alpha * gate));
#else
  return up * __fdividef(gate, 1.f + __expf(-gate));
#endif
}

#if RANK
// B's row of a row of the tiles, whose blocks of 16 have 8 of gate and 8 of up.
__device__ __forceinline__ int adapter_row(int row, int N) {
#if ORDER == 0
  return row;
#else
  const int feature = row / 16 * 8 + row % 8, is_up = row / 8 % 2;
  return ORDER == 1 ? is_up * (N / 2) + feature : 2 * feature + is_up;
#endif
}

// Add the adapters' part of 16 rows of W and 8 sorted rows: v as mma.sync leaves it.
__device__ __forceinline__ void add_adapter(const Operands& o, const Item& item, int row, int n, float (&v)[4]) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const u16* b = o.b + (size_t)item.expert * o.b_stride;
  const uint2* upper = (const uint2*)(b + (size_t)adapter_row(row + g, o.N) * RANK);
  const uint2* lower = (const uint2*)(b + (size_t)adapter_row(row + 8 + g, o.N) * RANK);
  const int last = item.count - 1, m = n * 8 + 2 * t;
  const float4* left = (const float4*)(o.u + (size_t)(item.first + min(m, last)) * RANK);
  const float4* right = (const float4*)(o.u + (size_t)(item.first + min(m + 1, last)) * RANK);
#pragma unroll
  for (int q = 0; q < RANK / 4; q++) {
    const uint2 high_row = __ldg(upper + q), low_row = __ldg(lower + q);
    const float4 a = left[q], c = right[q];
    const float h[4] = {low(high_row.x), high(high_row.x), low(high_row.y), high(high_row.y)};
    const float l[4] = {low(low_row.x), high(low_row.x), low(low_row.y), high(low_row.y)};
    v[0] += a.x * h[0] + a.y * h[1] + a.z * h[2] + a.w * h[3], v[1] += c.x * h[0] + c.y * h[1] + c.z * h[2] + c.w * h[3];
    v[2] += a.x * l[0] + a.y * l[1] + a.z * l[2] + a.w * l[3], v[3] += c.x * l[0] + c.y * l[1] + c.z * l[2] + c.w * l[3];
  }
}
#endif

// Finish and store group n of 8 rows of an item, for 16 rows of W from `row` on.
__device__ __forceinline__ void finish_group(const Operands& o, const Item& item, int row, int n, float (&v)[4], const float (&alpha)[2],
                                             const float (&bias)[2], int g, int t) {
#pragma unroll
  for (int i = 0; i < 4; i++) v[i] = fmaf(v[i], alpha[i / 2], bias[i / 2]);
#if RANK
  add_adapter(o, item, row, n, v);
#endif
  const int m = n * 8 + g;
  const size_t s = item.first + m;
#if SWIGLU
  const u32 pair = transpose8x8(pack2(activated(v[0], v[2], o), activated(v[1], v[3], o)));
  if (m < item.count) *(u32*)(o.y + s * (o.N / 2) + row / 2 + 2 * t) = pair;
#else
  const u32 upper = transpose8x8(pack2(v[0], v[1])), lower = transpose8x8(pack2(v[2], v[3]));
  u16* y = o.y + s * o.N + row + 2 * t;
  if (m < item.count) *(u32*)y = upper, *(u32*)(y + 8) = lower;
#endif
}
