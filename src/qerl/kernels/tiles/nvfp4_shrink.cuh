// u[m, r] = bf16(scaling * sum_k x[m, k] a[r, k]): the LoRA adapter's first half, computed beside the product that adds u B^T at its end.
//
// nvfp4_decode.cu multiplies a as it multiplies the weight. An item is RT rows of a, the tokens of a tile and SLICE_K of k. The items
// are divided among the CTAs. Each CTA computes its own before its units, from stages that contain x alone, and stores the sums in
// `partials`. One more warp of each CTA adds the slices in the order of k and stores two bf16 of u per word. Words are their own flags
// (workspace.cuh), so all CTAs must be on the device at once. Whoever adds a partial sum clears its word. u is read by many CTAs, so
// there are two buffers, used in turns: a launch clears the one that the previous launch used. At 64 tokens the four products of a
// 7B layer take 3 us more than with a given u; 15 us more when an extra warp computed u with mma.sync, for which the tensor cores
// only have time between wgmma's (H200).
//
// x, u, partials and turns are accessed only after griddepcontrol.wait (a full stage implies the producer's wait); a may be read before
// it, because no kernel of a step writes it.
#pragma once
#include "bfloat16.cuh"
#include "launch.cuh"
#include "nvfp4_unit.cuh"

#define WIDE (MT > 128 || WG > 2)  // multiplying warps take over registers of the last warpgroup, whose warps copy stages and add up or copy u
#define SHRINK_WARPS (RANK && !GIVEN_U ? 1 : 0)  // GIVEN_U: u is an input, [M, rows] bf16
#define FEW_REGISTERS (SHRINK_WARPS ? 56 : U_BYTES ? 40 : 24)
// A multiplying thread's: 168 x 384 (WG 2) or 128 x 512 (WG 3) registers in all, less those of the last warpgroup.
#define MANY_REGISTERS (((WG == 2 ? 504 : 512) - FEW_REGISTERS) / WG / 8 * 8)
static_assert(!WIDE || (CTAS == 1 && (WG == 2 || WG == 3)), "setmaxnreg: one CTA of two or three multiplying warpgroups");
#define SLICE_K (KB < 256 ? KB : 256)

struct LowRank {
  const u16* a;   // [rows, K]
  u32* partials;  // [slices, rows / 16, tokens / 8, 128] fp32 in the order of a warp's lanes; tokens padded to whole tiles
  u32* u;         // two buffers of U_WORDS, each [tokens, rows] bf16
  u32* turns;     // the buffer that this launch uses, and how many warps have read that
  float scaling;
  int rows;
};

#if SHRINK_WARPS
__device__ __forceinline__ u32 load_a(const u16* p) {
  u32 v;
  asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
}
__device__ __forceinline__ int all_slices(const LowRank& l, int token_tiles, int K) { return K / SLICE_K * token_tiles * ((l.rows + RT - 1) / RT); }
// The number of this CTA's items.
__device__ __forceinline__ int own_slices(const LowRank& l, int token_tiles, int K) {
  const int all = all_slices(l, token_tiles, K);
  return (all + gridDim.x - 1 - blockIdx.x) / gridDim.x;
}
// The position in x of this CTA's item i. `slice` gets the index of its SLICE_K; rt is its rows of a.
__device__ __forceinline__ Position slice_position(int i, int token_tiles, int K, int* slice = nullptr) {
  Position at(blockIdx.x + i * gridDim.x, K / SLICE_K, token_tiles);
  if (slice) *slice = at.kb;
  at.kb /= KB / SLICE_K;
  return at;
}

// 16 rows of a in the register layout of wgmma's first operand.
struct Rows {
  u32 at[SLICE_K / 16][4];
  __device__ __forceinline__ void load(const LowRank& l, int row0, int slice, int K) {
    const u16* top = l.a + (size_t)(min(row0, l.rows - 16) + threadIdx.x % 32 / 4) * K + slice * SLICE_K + threadIdx.x % 4 * 2;
#pragma unroll
    for (int j = 0; j < SLICE_K / 16; j++)
#pragma unroll
      for (int i = 0; i < 4; i++) at[j][i] = load_a(top + (size_t)(i % 2 * 8) * K + j * 16 + i / 2 * 8);
  }
};

// Compute the CTA's items, before its units. Return the number of stages they took, after griddepcontrol.wait.
__device__ __forceinline__ int compute_slices(const LowRank& l, int token_tiles, u32 smem0, u32 full0, int K) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, own = own_slices(l, token_tiles, K);
  int slice;
  Position at = slice_position(0, token_tiles, K, &slice);
  Rows a;
  if (own) a.load(l, at.rt * RT + warp * 16, slice, K);
  grid_dependency_wait();
#pragma unroll 1
  for (int i = 0; i < own; i++) {
    if (i) {
      at = slice_position(i, token_tiles, K, &slice);
      a.load(l, at.rt * RT + warp * 16, slice, K);
    }
    const u32 bar = full0 + i % STAGES * 8, x = smem0 + i % STAGES * STAGE_BYTES + slice % (KB / SLICE_K) * (SLICE_K / 64) * (MT * 128);
    mbar_wait(bar, i / STAGES & 1);
    const int row0 = at.rt * RT + warp * 16;
    if (at.rt * RT + warp / 4 * 64 < l.rows) {  // the same for all four warps of a warpgroup
      float acc[NT][4];
      clear_sums(acc);
      const u32 desc = __shfl_sync(ALL_LANES, (x >> 4) | (1u << 16), 0);
      wgmma_fence();
#pragma unroll
      for (int j = 0; j < SLICE_K / 16; j++) wgmma(acc, a.at[j], desc + (j / 4 * (MT * 128) + j % 4 * 32) / 16);
      wgmma_commit();
      wgmma_wait<0>();
      fence_sums(acc);
      u32* to = l.partials + ((size_t)(slice * (l.rows / 16) + row0 / 16) * token_tiles + at.mt) * (NT * 128) + lane * 4;
      if (row0 < l.rows)
#pragma unroll
        for (int n = 0; n < NT; n++) store_partial(to + n * 128, acc[n]);
    }
    __syncwarp();
    if (lane == 0) mbar_arrive(bar + STAGES * 8);
  }
  return own;
}

#define IN_FLIGHT (WIDE ? 8 : 14 * WG)  // slices loaded together; WIDE: the warp has FEW_REGISTERS

// Add a row's slices for two tokens in the order of k, as they arrive.
__device__ __forceinline__ void add_slices(u32* from, size_t stride, int slices, float& low, float& high) {
  low = high = 0.f;
#pragma unroll 1
  for (int s0 = 0; s0 < slices; s0 += IN_FLIGHT) {
    u32 v[IN_FLIGHT][2];
    bool missing;
    do {
      missing = false;
#pragma unroll
      for (int i = 0; i < IN_FLIGHT; i++) load_relaxed(from + min(s0 + i, slices - 1) * stride, v[i]);
#pragma unroll
      for (int i = 0; i < IN_FLIGHT; i++) missing |= is_missing(v[i]);
    } while (missing);
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; i++) {
      if (s0 + i < slices) {
        store_relaxed(from + (s0 + i) * stride, EMPTY, EMPTY);
        low += __uint_as_float(v[i][0]), high += __uint_as_float(v[i][1]);
      }
    }
  }
}

// Add the slices of u and store u: the work of the warp after the producer. Return u. It passes the turn to the CTA's other warps through
// the shared word `turn_at` and the barrier `turn_ready`, unless they have u in shared memory.
__device__ __forceinline__ const u32* reduce_u(const LowRank& l, int parts, int token_tiles, u32 turn_at, u32 turn_ready, int K) {
  const int lane = threadIdx.x % 32, groups = token_tiles * NT;
  grid_dependency_wait();
  const u32 turn = load_relaxed(l.turns);
  if (!U_BYTES && lane == 0) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(turn_at), "r"(turn) : "memory");
    mbar_arrive(turn_ready);
  }
  __syncwarp();
  u32 *u = l.u + turn * U_WORDS, *previous_u = l.u + (turn ^ 1) * U_WORDS;
#pragma unroll 1
  for (int i = blockIdx.x * 32 + lane; i < l.rows * groups * 4; i += parts * 32) {  // a pair of words of a slice
    float low, high;
    add_slices(l.partials + 2 * i, (size_t)l.rows * groups * 8, K / SLICE_K, low, high);
    // This lane has row g (+ 8) of tokens 2t and 2t + 1, lane ^ 8 the neighboring row. Each makes a word for one of the two tokens.
    const int g = i / 8 % 8, t = i / 2 % 4, row = i / 64 / groups * 16 + i % 2 * 8 + g, token = i / 64 % groups * 8 + 2 * t + g % 2;
    const float own = l.scaling * (g % 2 ? high : low), other = __shfl_xor_sync(ALL_LANES, l.scaling * (g % 2 ? low : high), 8);
    const u32 word = g % 2 ? pack2(other, own) : pack2(own, other);  // never EMPTY: a NaN becomes 0x7FFF
    store_relaxed(u + (token * l.rows + row) / 2, word);
  }
  for (int i = blockIdx.x * 32 + lane; i < U_WORDS / 4; i += parts * 32) clear_partial(previous_u + 4 * i);
  if (lane == 0) {
    u32 before;  // the last warp advances the turn: all warps have read it, because what each adds depends on it
    asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(l.turns + 1), "r"(1 + (turn >> 1)) : "memory");
    if (before == parts - 1) store_relaxed(l.turns, turn ^ 1, 0);
  }
  return u;
}
#else
__device__ __forceinline__ const u32* reduce_u(const LowRank& l, int, int, u32, u32, int) { return l.u; }
__device__ __forceinline__ int own_slices(const LowRank&, int, int) { return 0; }
__device__ __forceinline__ Position slice_position(int, int token_tiles, int) { return Position(0, 1, token_tiles); }
__device__ __forceinline__ int compute_slices(const LowRank&, int, u32, u32, int) {
  grid_dependency_wait();
  return 0;
}
#endif

#if RANK > 0
// Return the u of this launch, once a warp of the CTA has read the turn.
__device__ __forceinline__ const u32* current_u(const LowRank& l, u32 turn_at, u32 turn_ready) {
  u32 turn = 0;
#if !GIVEN_U
  mbar_wait(turn_ready, 0);
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(turn) : "r"(turn_at) : "memory");
#endif
  return l.u + turn * U_WORDS;
}
#else
__device__ __forceinline__ const u32* current_u(const LowRank&, u32, u32) { return nullptr; }
#endif

