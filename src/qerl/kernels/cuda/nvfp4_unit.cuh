// Units of work of nvfp4_decode.cu, and its instruction-level helpers.
#pragma once
#include "nvfp4_codes.cuh"
#include "stage.cuh"
#include "workspace.cuh"

#define RT (WG * 64)
#define W_SEG (KB / 64 * TILE_BYTES)

// The row tile, token tile and k block of a unit.
struct Position {
  int rt, mt, kb;
  __device__ __forceinline__ Position(int unit, int kblocks, int token_tiles) {
    const int tile = unit / kblocks;
    kb = unit - tile * kblocks, rt = tile / token_tiles, mt = tile - rt * token_tiles;
  }
  __device__ __forceinline__ void next(int kblocks, int token_tiles) {
    if (++kb == kblocks) {
      kb = 0;
      if (++mt == token_tiles) mt = 0, rt++;
    }
  }
};

// Add four partial sums that have arrived, and clear their words.
__device__ __forceinline__ void take_partial(u32* from, const u32 (&v)[4], float (&sum)[4]) {
  clear_partial(from);
#pragma unroll
  for (int i = 0; i < 4; i++) sum[i] += __uint_as_float(v[i]);
}

__device__ __forceinline__ void decode64(uint4 q, uint2 sc, u32 top, int first, u32 (*a)[4]) {
  const u32 words[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
  for (int j = first; j < first + GROUP; j++) decode(words[j], scale_pair(sc, j, top), a[j - first]);
}
