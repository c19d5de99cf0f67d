// u[s, r] = scaling * sum_k x[row(s), k] A[e, r, k] for the sorted rows s of each expert e: the first product of the experts' adapters.
//
// `plan` (moe_route.cu) lists items: rows of one expert. A CTA takes every gridDim-th item; a warp makes four r of one row, always in the
// same order of k, so that the bits of a row do not depend on the other rows.
//
// Compile-time: RANK, a multiple of 4; GATHER (x has a row per token, else one per sorted row).
#include "bfloat16.cuh"
#include "launch.cuh"
#include "warp.cuh"

#define WARPS 8

struct Operands {
  const u16* a;  // [E or 1, RANK, K]
  const u16* x;
  float* u;         // [sorted rows, RANK]
  const u32* plan;  // number of items, then each: expert | rows << 8 | first sorted row << 16
  const u16* rows;  // the token of each sorted row
  int K, a_stride;  // elements from one expert's A to the next one's; 0: all have the same
  float scaling;
};

extern "C" __global__ void __launch_bounds__(32 * WARPS, 2) expert_shrink(const __grid_constant__ Operands o) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  grid_dependency_wait();
  launch_dependents();  // after the wait: the kernel after the next reads the plan early
  const int items = o.plan[0];
#pragma unroll 1
  for (int i = blockIdx.x; i < items; i += gridDim.x) {
    const u32 word = o.plan[1 + i];
    const int expert = word & 255, count = word >> 8 & 255, first = word >> 16;
#pragma unroll 1
    for (int job = warp; job < count * (RANK / 4); job += WARPS) {
      const int s = first + job / (RANK / 4), r = job % (RANK / 4) * 4;
      const u16* x = o.x + (size_t)(GATHER ? o.rows[s] : s) * o.K;
      const u16* a = o.a + (size_t)expert * o.a_stride + (size_t)r * o.K;
      float sums[4] = {};
#pragma unroll 2
      for (int k = lane * 8; k < o.K; k += 256) {
        uint4 rows[4];
#pragma unroll
        for (int j = 0; j < 4; j++) rows[j] = *(const uint4*)(a + (size_t)j * o.K + k);
        float v[8], w[8];
        unpack(*(const uint4*)(x + k), v);
#pragma unroll
        for (int j = 0; j < 4; j++) {
          unpack(rows[j], w);
#pragma unroll
          for (int e = 0; e < 8; e++) sums[j] = fmaf(v[e], w[e], sums[j]);
        }
      }
#pragma unroll
      for (int j = 0; j < 4; j++) sums[j] = o.scaling * warp_sum(sums[j]);
      if (lane == 0) *(float4*)(o.u + (size_t)s * RANK + r) = make_float4(sums[0], sums[1], sums[2], sums[3]);
    }
  }
}
