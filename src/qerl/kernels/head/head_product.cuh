// The products of head_sample.cu: acc[m, v] += sum_k x[m, k] W[v, k] for a warpgroup's 64 rows and MT tokens, from a ring of stages.
//
// BF16 rows are read by wgmma from shared memory. FP8 and NVFP4 codes are converted to bfloat16 in the registers of wgmma's first
// operand. FP8's scales, one for each 128 x 128, multiply the sums of 128 k.
#pragma once
#include "fp8_codes.cuh"
#include "head_types.cuh"

#if FORMAT == 2
// Decode this thread's part of a tile: 64 k of rows g and g + 8.
__device__ __forceinline__ void decode64(const u8* at, u32 (&a)[4][4]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const uint4 q = *(const uint4*)(at + warp * 512 + lane * 16);
  const uint2 scales = *(const uint2*)(at + 2048 + warp * 64 + lane / 4 * 8);
  const u32 words[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
  for (int j = 0; j < 4; j++) decode(words[j], scale_pair(scales, j, SCALE_TOP), a[j]);
}
#elif FORMAT == 1
__device__ __forceinline__ void decode64(const u8* at, int block, u32 (&a)[4][4]) {  // at: 64 rows of 128 bytes, swizzled
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4, piece = (block * 4 + lane % 4) ^ (row & 7);
  const uint4 low = *(const uint4*)(at + row * 128 + piece * 16), high = *(const uint4*)(at + (row + 8) * 128 + piece * 16);
  decode4(low.x, a[0][0], a[0][2]), decode4(high.x, a[0][1], a[0][3]);
  decode4(low.y, a[1][0], a[1][2]), decode4(high.y, a[1][1], a[1][3]);
  decode4(low.z, a[2][0], a[2][2]), decode4(high.z, a[2][1], a[2][3]);
  decode4(low.w, a[3][0], a[3][2]), decode4(high.w, a[3][1], a[3][3]);
}
#endif

// Add a stage's products (FP8: 128 k of it) to acc. The last ones may still be running on return.
__device__ __forceinline__ void multiply(float (&acc)[NT][4], const u8* w, u32 w_desc, u32 x_desc) {
#if FORMAT == 0
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < KB / 16; k++) wgmma(acc, w_desc + (k / 4 * 8192 + k % 4 * 32) / 16, x_desc + (k / 4 * MT * 128 + k % 4 * 32) / 16);
  wgmma_commit();
#else
  u32 a0[4][4], a1[4][4];  // wgmma reads one while the other is being filled
#pragma unroll
  for (int b = 0; b < (FORMAT == 1 ? 128 : KB) / 64; b++) {
    u32(&a)[4][4] = b % 2 ? a1 : a0;
#if FORMAT == 1
    decode64(w, b, a);
#else
    decode64(w + b * TILE_BYTES, a);
#endif
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < 4; j++) wgmma(acc, a[j], x_desc + (b * MT * 128 + j * 32) / 16);
    wgmma_commit();
    wgmma_wait<KB % 128 ? 0 : 1>();
  }
#endif
}

// Compute the sums over all k of 64 rows and MT tokens. A warpgroup without rows multiplies whatever is in shared memory.
__device__ __forceinline__ void consume(float (&acc)[NT][4], const Operands& e, const u8* generic, u32 smem0, u32 full0, int warp, int lane, int row64,
                                        u32& stage, u32& parity) {
  const int kblocks = e.D / KB;
  clear_sums(acc);
#if FORMAT == 1
  float part[NT][4];
  const float* scales = e.factors + (size_t)(min(row64 * 64, e.V - 1) / 128) * (e.D / 128);
  float next_scale = scales[0];
#else
  u32 before = 0;  // barrier of the stage whose last products may still be running
#endif
  for (int kb = 0; kb < kblocks; kb++) {
    const u32 offset = stage * STAGE_BYTES, w_at = offset + X_STAGE + warp / 4 * W_SEG;
    const u32 x_desc = __shfl_sync(ALL_LANES, ((smem0 + offset) >> 4) | (1u << 16), 0);  // the shuffle makes it uniform for the compiler
    const u32 w_desc = __shfl_sync(ALL_LANES, ((smem0 + w_at) >> 4) | (1u << 16), 0);
    mbar_wait(full0 + stage * 8, parity);
#if FORMAT == 1
#pragma unroll
    for (int b = 0; b < KB / 128; b++) {
      const float scale = next_scale;
      next_scale = scales[min(kb * (KB / 128) + b + 1, e.D / 128 - 1)];
      clear_sums(part);
      multiply(part, generic + w_at + b * 8192, w_desc, x_desc + b * MT * 256 / 16);
      wgmma_wait<0>();
      fence_sums(part);
      if (b == KB / 128 - 1 && lane == 0) mbar_arrive(full0 + (STAGES + stage) * 8);
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) acc[n][i] = fmaf(part[n][i], scale, acc[n][i]);
    }
#else
    multiply(acc, generic + w_at, w_desc, x_desc);
    wgmma_wait<1>();
    if (before && lane == 0) mbar_arrive(before);
    before = full0 + (STAGES + stage) * 8;
#endif
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
#if FORMAT != 1
  wgmma_wait<0>();
  fence_sums(acc);
  if (lane == 0) mbar_arrive(before);
#endif
}
