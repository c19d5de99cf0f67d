// y[m, n] = alpha[n] * sum_k x[m, k] W[n, k] + sum_r u[m, r] B[n, r] + bias[n] + residual[m, n], or silu(gate) * up of it: what
// nvfp4_decode.cu computes, from the same tiles or those of NF4, FP8 and INT8, on any GPU since Ampere.
//
// A warp decodes R16 blocks of 16 rows of W straight into the registers of mma.sync's first operand; 8 tokens of x are the second. WR
// warps take different rows of a tile, WM warps different tokens (and decode the same rows). All threads fill a ring of stages by
// cp.async. All units (row tile, token tile, k block) are divided evenly among the CTAs, in order. Of the CTAs that share a tile each
// but the one with its first k writes its sums to the workspace, and that one adds them in the order of k: the result does not depend
// on timing. It waits for CTAs that started before it, and all CTAs are on the device at once.
//
// Compile-time: MT tokens per tile, WR, WM, R16, KB k per stage, STAGES, CTAS per multiprocessor, RANK of the adapter or 0, SWIGLU,
// FORMAT of the tiles.
#define GIVEN_U 1
#include "launch.cuh"
#include "memory.cuh"
#include "packed_epilogue.cuh"
#include "position.cuh"
#include "tile_product.cuh"

#define PIECE (NT > 8 && NT % 4 == 0 ? 4 : NT % 8 ? NT % 6 ? NT : 6 : 8)  // groups of 8 tokens that are finished together
#define SLOT (WR * WM * R16 * NT * 128)  // words of a tile's sums

// The same number, from which the compiler prepares nothing ahead of a loop: registers are scarce there.
__device__ __forceinline__ int fresh(int v) {
  asm volatile("" : "+r"(v));
  return v;
}

// This thread's share of the copies that fill a stage: pieces of 16 bytes, of W one after the other; of x, whose stage has lines of 64 k
// of a token, one piece of each of several lines.
struct Filler {
  static constexpr int SEGMENTS = RT / 64, LINES = THREADS / 8, K64 = KB / 64;
  static constexpr bool SHORT = LINES % MT == 0;  // the threads take all tokens of several k at once, else of one k
  const u8* w;
  const u16* x;
  const int M, N, K, kblocks, token_tiles;
  Position at;  // of the next unit
  __device__ __forceinline__ Filler(const u8* w, const u16* x, int unit, int M, int N, int K)
      : w(w), x(x), M(M), N(N), K(K), kblocks(K / KB), token_tiles((M + MT - 1) / MT), at(unit, K / KB, (M + MT - 1) / MT) {}
  __device__ __forceinline__ void weights(u32 stage, const Position& at) const {
    const size_t row = (size_t)(fresh(K) / 64) * TILE_BYTES;
    const u8* from = w + (size_t)(at.rt * SEGMENTS) * row + (size_t)at.kb * W_SEG + threadIdx.x * 16;
    const u32 to = stage + X_STAGE + threadIdx.x * 16;
#pragma unroll
    for (int s = 0; s < SEGMENTS; s++, from += row)
      if (SEGMENTS == 1 || at.rt * SEGMENTS + s < N / 64) copy_segment(to, s, from);
  }
  // The eight pieces of a line are permuted by the token, so that ldmatrix reads eight tokens without conflicts. Nothing is copied for
  // tokens past the last, whose sums are not stored.
  __device__ __forceinline__ void tokens(u32 stage) const {
    const int K = fresh(this->K);
    const int line = threadIdx.x / 8, token = SHORT ? line % MT : line, k64 = SHORT ? line / MT : 0, left = M - at.mt * MT - token;
    const u16* from = x + (size_t)(at.mt * MT + token) * K + at.kb * KB + k64 * 64 + threadIdx.x % 8 * 8;
    const u32 to = stage + line * 128 + ((line ^ threadIdx.x) & 7) * 16;
    if (SHORT) {
      constexpr int STEP = SHORT ? LINES / MT : 1;
      if (left <= 0) return;
#pragma unroll
      for (int k = 0; k < K64; k += STEP)
        if (k + STEP <= K64 || k + k64 < K64) copy_async(to + k * MT * 128, from + k * 64);
    } else {
      const u32 step = LINES * K;
#pragma unroll
      for (int i = 0; i < MT; i += LINES, from += step)
        if ((i + LINES <= MT || i + token < MT) && i < left) {
#pragma unroll
          for (int k = 0; k < K64; k++) copy_async(to + (k * MT + i) * 128, from + k * 64);
        }
    }
  }
  __device__ __forceinline__ void next() { at.next(kblocks, token_tiles); }
};

extern "C" __global__ void __launch_bounds__(THREADS, CTAS)
portable_product(const u8* __restrict__ w, const u16* __restrict__ x, const __grid_constant__ Epilogue e, const u32* __restrict__ u_MR, u32* workspace,
                 int M, int N, int K) {
  extern __shared__ __align__(128) u8 raw[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, wr = warp % WR, wm = warp / WR;
  const int kblocks = K / KB, token_tiles = (M + MT - 1) / MT;
  const int units = ((N + RT - 1) / RT) * token_tiles * kblocks;
  const int parts = gridDim.x, part = parts - 1 - blockIdx.x;  // a later CTA takes earlier units
  const int u0 = (u32)units * part / parts, u1 = (u32)units * (part + 1) / parts;
  launch_dependents();
  const u32 smem0 = smem_u32(raw), smem1 = smem0 + STAGES * STAGE_BYTES;
  u32 here = smem0, there = smem0;  // the stage to multiply, and the next one to fill

  Filler filler(w, x, u0, M, N, K);
  {
    Position at = filler.at;  // the weights of the first stages do not depend on the previous kernel
#pragma unroll 1
    for (int i = 0; i < STAGES - 1 && u0 + i < u1; i++, there += STAGE_BYTES, at.next(kblocks, token_tiles)) filler.weights(there, at);
    there = smem0;
  }
  grid_dependency_wait();
#pragma unroll 1
  for (int i = 0; i < STAGES - 1; i++, there += STAGE_BYTES) {
    if (u0 + i < u1) {
      filler.tokens(there);
      filler.next();
    }
    commit_copies();
  }

  const u32 constant = decoding_constant(lane);
  const u32 my_tokens = (wm * NT * 8 + lane % 8) * 128;
  const u32 my_k[2] = {(u32)((lane / 8 ^ lane) & 7) * 16, (u32)(((4 + lane / 8) ^ lane) & 7) * 16};
  Block block[R16];  // the codes that are decoded next
  auto load = [&](u32 stage, int k64) {
#pragma unroll
    for (int r = 0; r < R16; r++) block[r].load(raw + (stage - smem0) + X_STAGE + (wr * R16 + r) / 4 * W_SEG + k64 * TILE_BYTES, wr * R16 + r, lane);
  };
  wait_copies<STAGES - 2>();
  __syncthreads();
  load(here, 0);
#pragma unroll 1
  for (int u = u0; u < u1;) {
    const int tile = u / kblocks, first_u = tile * kblocks, begin = u, end = min(u1, first_u + kblocks);
    const int row0 = tile / token_tiles * RT + wr * (R16 * 16), m0 = tile % token_tiles * MT + wm * (NT * 8);
    float acc[R16][NT][4];
#pragma unroll
    for (int i = 0; i < R16 * NT * 4; i++) acc[i / (NT * 4)][i / 4 % NT][i % 4] = 0.f;
#pragma unroll 1
    for (; u < end; u++) {
      const u32 x_stage = here + my_tokens;
      here = here + STAGE_BYTES == smem1 ? smem0 : here + STAGE_BYTES;
#pragma unroll
      for (int k64 = 0; k64 < KB / 64; k64++) {
        Block present[R16];
#pragma unroll
        for (int r = 0; r < R16; r++) present[r] = block[r];
        if (k64 + 1 < KB / 64) load(x_stage - my_tokens, k64 + 1);
#pragma unroll
        for (int half = 0; half < 2; half++) {
          u32 a[R16][2][4];
          decode_blocks(present, half, constant, a);
          if (k64 == KB / 64 - 1 && half == 1) {  // the next stage, and copies into the previous one, before this one's last products
            wait_copies<STAGES - 3>();
            __syncthreads();
            load(here, 0);  // what is read after the last unit is not used
            if (u + STAGES - 1 < u1) {
              filler.weights(there, filler.at);
              filler.tokens(there);
              filler.next();
            }
            commit_copies();
            there = there + STAGE_BYTES == smem1 ? smem0 : there + STAGE_BYTES;
          }
#pragma unroll
          for (int n = 0; n < NT; n++) {
            u32 b[4];
            ldmatrix_x4(b, x_stage + (k64 * MT + n * 8) * 128 + my_k[half]);
            multiply(acc, n, a, b);
          }
        }
      }
    }
#pragma unroll
    for (int r = 0; r < R16; r++) {
      u32* slot = workspace + (size_t)part * SLOT + (warp * R16 + r) * (NT * 128) + lane * 4;
      const int row = row0 + r * 16;
      if (begin > first_u) {
#pragma unroll
        for (int n = 0; n < NT; n++) store_partial(slot + n * 128, acc[r][n]);
      } else {
        if (end < first_u + kblocks) add_partials(acc[r], slot + SLOT, SLOT, ((u32)(first_u + kblocks) * parts - 1) / (u32)units - part);
        if (row < N) {
          const float alpha0 = e.alpha[row + g], alpha1 = e.alpha[row + g + 8];
#pragma unroll
          for (int n = 0; n < NT; n += PIECE) finish<PIECE>(*(float(*)[PIECE][4])acc[r][n], e, u_MR, alpha0, alpha1, row, m0 + n * 8, g, t);
        }
      }
    }
  }
}
