// Reductions over the lanes of a warp; every lane gets the result.
#pragma once
#include "types.cuh"

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int i = 16; i; i /= 2) x += __shfl_xor_sync(ALL_LANES, x, i);
  return x;
}
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int i = 16; i; i /= 2) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, i));
  return x;
}
