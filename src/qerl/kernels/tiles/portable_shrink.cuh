// u[m, r] = bf16(scaling * sum_k x[m, k] a[r, k]): the LoRA adapter's first half, made by the CTAs of portable_product.cu on their way.
//
// An item is 16 rows of a, 8 * GROUPS tokens and SLICE_K of k; all warps of the first CTAs, one for each SM, share the items. A warp has
// asked for a of its first item before griddepcontrol.wait; it stores each item's sums in `partials` while the CTA's first stages arrive.
// When the others' sums have come too, each warp adds some of them over k and stores u, two bf16 in a word, which the epilogue waits for.
// All this is ahead of the CTA's units: units between the two, or a branch in their loop, cost more (dev/log/portable.md). Words are their own
// flags (workspace.cuh). The first CTAs are on the device at once, and all CTAs wait for these alone: a CTA that starts where the kernel
// before still has shared memory can leave gaps that are too small for a neighbor, which then starts only when others have ended. Whoever
// adds a sum clears its word. u is read by many CTAs, so there are two buffers, used in turns: a launch clears the one that the previous
// launch used. The slices and the order of their sum depend on K alone, so a token's u does not depend on the others.
//
// Compile-time: RANK, GIVEN_U: u is an input, U_WORDS of a buffer, SLICE_K.
#pragma once
#include "memory.cuh"
#include "packed_epilogue.cuh"
#include "shrink_unit.cuh"

#define MAKES_U (RANK > 0 && !GIVEN_U)
#define GROUPS (MT > 32 ? MT % 32 ? 2 : 4 : 1)
#define MAKERS ((gridDim.x + CTAS - 1) / CTAS)  // the first CTAs, at most one for each SM

struct LowRank {
  const u16* a;   // [rows, K]
  u32* partials;  // [rows / 16, groups of 8 tokens, slices, 128] fp32 in the order of a warp's lanes
  u32* u;         // given: [M, rows] bf16; else two buffers of U_WORDS, each [tokens, rows] of whole tiles of tokens
  u32* turns;     // the buffer that this launch uses, and how many CTAs have read that
  float scaling;
  int rows;
};

#if MAKES_U
// The warp's number among those that make u; a number past all items, where it makes none.
__device__ __forceinline__ int maker_warp() { return blockIdx.x < MAKERS ? threadIdx.x / 32 * MAKERS + blockIdx.x : 0x7FFFFFFF; }

// A warp's items. A lane's 8 k of each 32 are neighbors; both operands have the same order of k.
struct Slices {
  static constexpr int UNITS = SLICE_K / 32, AT_ONCE = UNITS / GROUPS;
  uint4 a[UNITS][2];
  int item, row0, m0, slice, units;  // the next item, and where it lies

  __device__ __forceinline__ Slices() : item(maker_warp()) {}
  __device__ __forceinline__ static int slices(int K) { return (K + SLICE_K - 1) / SLICE_K; }
  __device__ __forceinline__ static int all(const LowRank& l, int tokens, int K) { return slices(K) * (tokens / (8 * GROUPS)) * (l.rows / 16); }
  // Find the item and ask for its a.
  __device__ __forceinline__ void load(const LowRank& l, int tokens, int K) {
    if (item >= all(l, tokens, K)) return;
    const int lane = threadIdx.x % 32, tile = item / slices(K), groups = tokens / (8 * GROUPS);
    slice = item - tile * slices(K), row0 = tile / groups * 16, m0 = tile % groups * (8 * GROUPS), units = min(UNITS, K / 32 - slice * UNITS);
    const u16* top = l.a + (size_t)(row0 + lane / 4) * K + slice * SLICE_K + lane % 4 * 8;
#pragma unroll
    for (int j = 0; j < UNITS; j++)
#pragma unroll
      for (int i = 0; i < 2; i++) a[j][i] = load_constant(top + (size_t)(i * 8) * K + min(j, units - 1) * 32);
  }
  // Multiply the warp's items; tokens past the last are the last.
  __device__ __forceinline__ void multiply(const LowRank& l, const u16* x, int M, int tokens, int K) {
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    while (item < all(l, tokens, K)) {
      float acc[2][GROUPS][4] = {};
      const u16* from[GROUPS];
#pragma unroll
      for (int n = 0; n < GROUPS; n++) from[n] = x + (size_t)min(m0 + n * 8 + lane / 4, M - 1) * K + slice * SLICE_K + lane % 4 * 8;
#pragma unroll
      for (int j0 = 0; j0 < UNITS; j0 += AT_ONCE) {
        uint4 v[AT_ONCE][GROUPS];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++)
#pragma unroll
          for (int n = 0; n < GROUPS; n++) v[j][n] = load_activation(from[n] + min(j0 + j, units - 1) * 32);
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
          if (j0 + j >= units) break;  // the same for all lanes
          const uint4 top = a[j0 + j][0], bottom = a[j0 + j][1];
#pragma unroll
          for (int n = 0; n < GROUPS; n++) multiply_unit(acc[0][n], acc[1][n], top, bottom, v[j][n]);
        }
      }
      u32* to = l.partials + (((size_t)(row0 / 16) * (tokens / 8) + m0 / 8) * slices(K) + slice) * 128 + lane * 4;
#pragma unroll
      for (int n = 0; n < GROUPS; n++)
        store_partial(to + (size_t)n * slices(K) * 128, acc[0][n][0] + acc[1][n][0], acc[0][n][1] + acc[1][n][1], acc[0][n][2] + acc[1][n][2],
                      acc[0][n][3] + acc[1][n][3]);
      item += MAKERS * (blockDim.x / 32);
      load(l, tokens, K);
    }
  }
};

// Add the slices of four sums, s0 + lane % 16 and every sixteenth after it, as they arrive. The lanes of each half get the whole sum.
__device__ __forceinline__ void add_slices(u32* from, int slices, float (&sum)[4]) {
  constexpr int BATCH = 5;  // loads in flight
  const int lane = threadIdx.x % 16;
#pragma unroll 1
  for (int s0 = 0; s0 < slices; s0 += 16 * BATCH) {
    u32 v[BATCH][4];
    bool missing;
    do {
      missing = false;
#pragma unroll
      for (int j = 0; j < BATCH; j++) load_relaxed(from + min(s0 + j * 16 + lane, slices - 1) * 128, v[j]);
#pragma unroll
      for (int j = 0; j < BATCH; j++) missing |= is_missing(v[j]);
    } while (missing);
    __syncwarp();  // every lane has read the last slice
#pragma unroll
    for (int j = 0; j < BATCH; j++)
      if (s0 + j * 16 + lane < slices) take_partial(from + (s0 + j * 16 + lane) * 128, v[j], sum);
  }
#pragma unroll
  for (int step = 8; step; step /= 2)
#pragma unroll
    for (int i = 0; i < 4; i++) sum[i] += __shfl_xor_sync(ALL_LANES, sum[i], step);
}

// Make this warp's part of u, and clear the CTA's part of the other buffer. A half of the warp has row g (+ 8) of tokens 2t and 2t + 1, the
// other half the neighboring row; both together make two rows of a word.
__device__ __forceinline__ void add_up_u(const LowRank& l, u32 turn, int tokens, int K) {
  const int lane = threadIdx.x % 32, slices = Slices::slices(K), all = l.rows / 16 * (tokens / 8) * 16;
  u32 *u = l.u + turn * U_WORDS, *other_u = l.u + (turn ^ 1) * U_WORDS;
#pragma unroll 1
  for (int i = maker_warp(); i < all; i += MAKERS * (blockDim.x / 32)) {
    const int block = i / 16, g = i / 4 % 4 * 2, t = i % 4;
    float sum[4] = {}, next[4];
    add_slices(l.partials + (size_t)block * slices * 128 + (g + lane / 16) * 16 + t * 4, slices, sum);
#pragma unroll
    for (int j = 0; j < 4; j++) next[j] = __shfl_xor_sync(ALL_LANES, sum[j], 16);
    const int token = block % (tokens / 8) * 8 + 2 * t + lane % 2, row = block / (tokens / 8) * 16 + g + lane / 2 % 2 * 8;
    const float low = lane & 2 ? lane & 1 ? sum[3] : sum[2] : lane & 1 ? sum[1] : sum[0];
    const float high = lane & 2 ? lane & 1 ? next[3] : next[2] : lane & 1 ? next[1] : next[0];
    if (lane < 4) store_relaxed(u + ((size_t)token * l.rows + row) / 2, pack2(l.scaling * low, l.scaling * high));  // never EMPTY: a NaN is 0x7FFF
  }
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < U_WORDS / 4; i += gridDim.x * blockDim.x) clear_partial(other_u + 4 * i);
}

// What a CTA does for u, in the order of its calls.
struct Shrink {
  const LowRank& l;
  const int tokens, K;  // whole tiles of tokens
  u32 turn;
  Slices slices;
  __device__ __forceinline__ Shrink(const LowRank& l, int tokens, int K) : l(l), tokens(tokens), K(K), turn(0) { slices.load(l, tokens, K); }
  // After griddepcontrol.wait. The barrier tells the turn to all threads without shared memory, of which tiles may leave none.
  __device__ __forceinline__ void multiply(const u16* x, int M) {
    const u32 read = threadIdx.x ? 0 : load_relaxed(l.turns);
    slices.multiply(l, x, M, tokens, K);
    turn = __syncthreads_or(read);
  }
  __device__ __forceinline__ void add() { add_up_u(l, turn, tokens, K); }
  __device__ __forceinline__ const u32* u() const { return l.u + turn * U_WORDS; }
  // The last CTA advances the turn: all have read it.
  __device__ __forceinline__ void end() const {
    if (threadIdx.x) return;
    u32 before;
    asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(l.turns + 1) : "memory");
    if (before == gridDim.x - 1) store_relaxed(l.turns, turn ^ 1, 0);
  }
};
#else
struct Shrink {
  const LowRank& l;
  __device__ __forceinline__ Shrink(const LowRank& l, int, int) : l(l) {}
  __device__ __forceinline__ void multiply(const u16*, int) {}
  __device__ __forceinline__ void add() {}
  __device__ __forceinline__ const u32* u() const { return l.u; }
  __device__ __forceinline__ void end() const {}
};
#endif
