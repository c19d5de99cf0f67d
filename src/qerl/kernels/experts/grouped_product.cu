// y[s, n] = alpha[e, n] * sum_k x[row(s), k] W[e, n, k] + bias[e, n], or the SwiGLU of it, for the sorted rows s of each expert e; with
// adapters plus sum_r u[s, r] B[e, n, r] (expert_shrink.cu).
//
// Weights are in the tiles of nvfp4_decode.py, one expert after the other. `plan` (moe_route.cu) lists items: up to MT rows of one
// expert. A unit of work is an item and a tile of RT rows of W, over all k. The grid is fixed; a CTA takes every gridDim-th unit, and its
// ring of stages runs on from one unit to the next. No sum is split, so the bits of a row do not depend on the other rows.
//
// A warp decodes R16 blocks of 16 rows of W into the registers of mma.sync's first operand; 8 rows of x are the second, and groups of 8
// that an item does not have are left out.
//
// Compile-time: MT, WR warps, R16, KB k per stage, STAGES, CTAS per multiprocessor, SWIGLU (0 none, 1 plain, 2 clamped), GATHER (x has
// a row per token, else one per sorted row), EARLY (the plan is older than the previous kernel: read weights before that ends). If given: RANK of the adapters, a multiple of 4,
// and ORDER of B's rows (0: that of the tiles; 1: all of gate, then all of up; 2: gate 0, up 0, gate 1, ...).
#define FORMAT 0  // NVFP4
#define WM 1
#include "grouped_epilogue.cuh"
#include "launch.cuh"
#include "memory.cuh"
#include "tile_product.cuh"

#define NO_ROW 0xFFFFFFFFu

// This thread's share of the copies that fill a stage: pieces of 16 bytes, of W one after the other; of x, whose stage has lines of 64 k
// of a row, one piece of each of several lines.
struct Filler {
  static constexpr int SEGMENTS = RT / 64, LINES = THREADS / 8, K64 = KB / 64;
  static constexpr bool SHORT = LINES % MT == 0;  // the threads take all rows of several k at once, else of one k
  static constexpr int MINE = SHORT ? 1 : (MT + LINES - 1) / LINES;
  const Operands& o;
  const int row_tiles, kblocks;
  int unit, kb, segments;
  const u8* w;
  u32 x_row[MINE];
  __device__ __forceinline__ Filler(const Operands& o, int unit) : o(o), row_tiles((o.N + RT - 1) / RT), kblocks(o.K / KB), unit(unit), kb(0) {}
  __device__ __forceinline__ void aim() {
    const Item item(o.plan[1 + unit / row_tiles]);
    const int rt = unit % row_tiles, line = threadIdx.x / 8;
    const size_t tile_row = (size_t)item.expert * (o.N / 64) + rt * SEGMENTS;
    segments = min(SEGMENTS, o.N / 64 - rt * SEGMENTS);
    w = o.w + tile_row * (o.K / 64) * TILE_BYTES + threadIdx.x * 16;
#pragma unroll
    for (int i = 0; i < MINE; i++) {
      const int token = SHORT ? line % MT : line + i * LINES, s = item.first + token;
      x_row[i] = token < item.count ? (u32)(GATHER ? o.rows[s] : s) * o.K + threadIdx.x % 8 * 8 : NO_ROW;
    }
  }
  __device__ __forceinline__ void weights(u32 stage) const {
    const u8* from = w + (size_t)kb * W_SEG;
    const size_t row = (size_t)(o.K / 64) * TILE_BYTES;
    const u32 to = stage + X_STAGE + threadIdx.x * 16;
#pragma unroll
    for (int s = 0; s < SEGMENTS; s++, from += row)
      if (SEGMENTS == 1 || s < segments) copy_segment(to, s, from);
  }
  // The eight pieces of a line are permuted by the row, so that ldmatrix reads eight rows without conflicts.
  __device__ __forceinline__ void tokens(u32 stage) const {
    const int line = threadIdx.x / 8, k64 = SHORT ? line / MT : 0;
    const u32 to = stage + line * 128 + ((line ^ threadIdx.x) & 7) * 16;
    const u16* x = o.x + kb * KB + k64 * 64;
    if (SHORT) {
      constexpr int STEP = SHORT ? LINES / MT : 1;
      if (x_row[0] == NO_ROW) return;
#pragma unroll
      for (int k = 0; k < K64; k += STEP)
        if (k + STEP <= K64 || k + k64 < K64) copy_async(to + k * MT * 128, x + x_row[0] + k * 64);
    } else {
#pragma unroll
      for (int i = 0; i < MINE; i++)
        if (x_row[i] != NO_ROW) {
#pragma unroll
          for (int k = 0; k < K64; k++) copy_async(to + (k * MT + i * LINES) * 128, x + x_row[i] + k * 64);
        }
    }
  }
  __device__ __forceinline__ void next(int units) {
    if (++kb == kblocks) {
      kb = 0, unit += gridDim.x;
      if (unit < units) aim();
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, CTAS) grouped_product(const __grid_constant__ Operands o) {
  extern __shared__ __align__(128) u8 raw[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const u32 smem0 = smem_u32(raw), smem1 = smem0 + STAGES * STAGE_BYTES;
  u32 here = smem0, there = smem0;  // the stage to multiply, and the next one to fill

  if (!EARLY) grid_dependency_wait();
  Filler filler(o, blockIdx.x);
  const int row_tiles = filler.row_tiles, kblocks = filler.kblocks, units = o.plan[0] * row_tiles;
  if (filler.unit < units) filler.aim();
  if (EARLY) {
    Filler ahead = filler;
#pragma unroll 1
    for (int i = 0; i < STAGES - 1 && ahead.unit < units; i++, there += STAGE_BYTES) {
      ahead.weights(there);
      ahead.next(units);
    }
    there = smem0;
    grid_dependency_wait();
  }
  launch_dependents();  // all of the next kernel's CTAs start after the wait above
#pragma unroll 1
  for (int i = 0; i < STAGES - 1; i++, there += STAGE_BYTES) {
    if (filler.unit < units) {
      if (!EARLY) filler.weights(there);
      filler.tokens(there);
      filler.next(units);
    }
    commit_copies();
  }

  const u32 constant = decoding_constant(lane);
  const u32 my_rows = lane % 8 * 128;
  const u32 my_k[2] = {(u32)((lane / 8 ^ lane) & 7) * 16, (u32)(((4 + lane / 8) ^ lane) & 7) * 16};
  Block block[R16];  // the codes that are decoded next
  auto load = [&](u32 stage, int k64) {
#pragma unroll
    for (int r = 0; r < R16; r++) block[r].load(raw + (stage - smem0) + X_STAGE + (warp * R16 + r) / 4 * W_SEG + k64 * TILE_BYTES, warp * R16 + r, lane);
  };
  wait_copies<STAGES - 2>();
  __syncthreads();
  load(here, 0);
#pragma unroll 1
  for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const Item item(o.plan[1 + unit / row_tiles]);
    const int row0 = unit % row_tiles * RT + warp * (R16 * 16), groups = (item.count + 7) / 8;
    float alpha[R16][2], bias[R16][2];
#pragma unroll
    for (int r = 0; r < R16; r++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int row = row0 + r * 16 + i * 8 + g;
        alpha[r][i] = row < o.N ? o.alpha[item.expert * o.N + row] : 0.f;
        bias[r][i] = o.bias && row < o.N ? o.bias[item.expert * o.N + row] : 0.f;
      }
    float acc[R16][NT][4];
#pragma unroll
    for (int i = 0; i < R16 * NT * 4; i++) acc[i / (NT * 4)][i / 4 % NT][i % 4] = 0.f;
#pragma unroll 1
    for (int kb = 0; kb < kblocks; kb++) {
      const u32 x_stage = here + my_rows;
      here = here + STAGE_BYTES == smem1 ? smem0 : here + STAGE_BYTES;
#pragma unroll
      for (int k64 = 0; k64 < KB / 64; k64++) {
        Block present[R16];
#pragma unroll
        for (int r = 0; r < R16; r++) present[r] = block[r];
        if (k64 + 1 < KB / 64) load(x_stage - my_rows, k64 + 1);
#pragma unroll
        for (int half = 0; half < 2; half++) {
          u32 a[R16][2][4];
          decode_blocks(present, half, constant, a);
          if (k64 == KB / 64 - 1 && half == 1) {  // the next stage, and copies into the previous one, before this one's last products
            wait_copies<STAGES - 3>();
            __syncthreads();
            load(here, 0);  // what is read after the last unit is not used
            if (filler.unit < units) {
              filler.weights(there);
              filler.tokens(there);
              filler.next(units);
            }
            commit_copies();
            there = there + STAGE_BYTES == smem1 ? smem0 : there + STAGE_BYTES;
          }
#pragma unroll
          for (int n = 0; n < NT; n++)
            if (n == 0 || n < groups) {
              u32 b[4];
              ldmatrix_x4(b, x_stage + (k64 * MT + n * 8) * 128 + my_k[half]);
              multiply(acc, n, a, b);
            }
        }
      }
    }
#pragma unroll
    for (int r = 0; r < R16; r++) {
      const int row = row0 + r * 16;
      if (row >= o.N) continue;
#pragma unroll
      for (int n = 0; n < NT; n++)
        if (n < groups) {
          finish_group(o, item, row, n, acc[r][n], alpha[r], bias[r], g, t);
        }
    }
  }
}
