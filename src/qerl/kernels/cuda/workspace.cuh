// Partial results that CTAs pass to each other through global memory. Each word is its own flag: it is EMPTY before it is
// written, and whoever reads it makes it EMPTY again. This saves the fence, the atomic and the second trip to L2 of a counter.
#pragma once
#include "memory.cuh"

#define EMPTY 0xFFFFFFFFu

// The bits of a float, never EMPTY: a NaN with EMPTY's bits becomes another NaN.
__device__ __forceinline__ u32 non_empty_bits(float v) {
  const u32 bits = __float_as_uint(v);
  return bits == EMPTY ? 0x7FFFFFFFu : bits;
}
__device__ __forceinline__ bool is_missing(const u32 (&v)[4]) { return v[0] == EMPTY || v[1] == EMPTY || v[2] == EMPTY || v[3] == EMPTY; }
__device__ __forceinline__ bool is_missing(const u32 (&v)[2]) { return v[0] == EMPTY || v[1] == EMPTY; }

__device__ __forceinline__ void store_partial(u32* to, float a, float b, float c, float d) {
  store_relaxed(to, non_empty_bits(a), non_empty_bits(b), non_empty_bits(c), non_empty_bits(d));
}
__device__ __forceinline__ void store_partial(u32* to, const float (&sum)[4]) { store_partial(to, sum[0], sum[1], sum[2], sum[3]); }
__device__ __forceinline__ void clear_partial(u32* p) { store_relaxed(p, EMPTY, EMPTY, EMPTY, EMPTY); }

// Add four partial sums that have arrived, and clear their words.
__device__ __forceinline__ void take_partial(u32* from, const u32 (&v)[4], float (&sum)[4]) {
  clear_partial(from);
#pragma unroll
  for (int i = 0; i < 4; i++) sum[i] += __uint_as_float(v[i]);
}
