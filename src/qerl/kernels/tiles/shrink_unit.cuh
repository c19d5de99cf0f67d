// What the kernels that make u load and multiply at a time: 16 rows of a, 8 tokens and 32 k, of which a lane's 8 are neighbors in both.
#pragma once
#include "mma.cuh"

__device__ __forceinline__ uint4 load_constant(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
__device__ __forceinline__ uint4 load_activation(const void* p) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
// Add the products of each half of the k to a sum, which may be the same.
__device__ __forceinline__ void multiply_unit(float (&first)[4], float (&second)[4], uint4 top, uint4 bottom, uint4 x) {
  mma(first, top.x, bottom.x, top.y, bottom.y, x.x, x.y);
  mma(second, top.z, bottom.z, top.w, bottom.w, x.z, x.w);
}
