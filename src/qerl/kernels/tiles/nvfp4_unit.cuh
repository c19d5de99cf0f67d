// Units of work of nvfp4_decode.cu, and its instruction-level helpers.
#pragma once
#include "nvfp4_codes.cuh"
#include "position.cuh"
#include "stage.cuh"
#include "workspace.cuh"

#define RT (WG * 64)
#define W_SEG (KB / 64 * TILE_BYTES)

__device__ __forceinline__ void decode64(uint4 q, uint2 sc, u32 top, int first, u32 (*a)[4]) {
  const u32 words[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
  for (int j = first; j < first + GROUP; j++) decode(words[j], scale_pair(sc, j, top), a[j - first]);
}
