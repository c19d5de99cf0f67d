// y[m, n] = alpha[n] * sum_k x[m, k] W[n, k] + sum_r u[m, r] B[n, r] + bias[n] + residual[m, n], or silu(gate) * up of it: what
// nvfp4_decode.cu computes, from the same tiles or those of NF4, FP8 and INT8, on any GPU since Ampere.
//
// A warp decodes R16 blocks of 16 rows of W straight into the registers of mma.sync's first operand; 8 tokens of x are the second. WR
// warps take different rows of a tile, WM warps different tokens (and decode the same rows). All threads fill a ring of stages by
// cp.async. All units (row tile, token tile, k block) are divided evenly among the CTAs, in order. Of the CTAs that share a tile each
// but the one with its first k writes its sums to the workspace, and that one adds them in the order of k: the result does not depend
// on timing. It waits for CTAs that started before it alone, so CTAs may start one after the other.
//
// Compile-time: MT tokens per tile, WR, WM, R16, KB k per stage, STAGES, CTAS per multiprocessor, RANK of the adapter or 0, SWIGLU,
// FORMAT of the tiles; GIVEN_U: u is an input, else made here (portable_shrink.cuh), with U_WORDS of each of its buffers; LATE_WAIT: u
// comes from the launch before, which let this one start once all else was there, so that both run beside each other.
#ifndef GIVEN_U
#define GIVEN_U 1
#endif
#ifndef LATE_WAIT
#define LATE_WAIT 0
#endif
#define EARLY_LOADS 1
#include "launch.cuh"
#include "memory.cuh"
#include "packed_epilogue.cuh"
#include "portable_shrink.cuh"
#include "position.cuh"
#include "tile_product.cuh"

#define PIECE ((NT > 8 || R16 > 2) && NT % 4 == 0 ? 4 : NT % 8 ? NT % 6 ? NT : 6 : 8)  // groups of 8 tokens that are finished together
#define SLOT (WR * WM * R16 * NT * 128)  // words of a tile's sums
#define SPAN (NT % 2 ? 2 : 1)  // 16 k that are multiplied in a step: ldmatrix reads 8 tokens and 32 k, or 16 tokens and 16 k
#define STEPS (KB / 16 / SPAN)
#define FEW (R16 * NT <= 4)  // a step has few products: codes are read a tile ahead
// Of the copies into a stage; each part begins with instructions that only keep it behind loads. Where memory is the limit they begin at once.
#define PARTS (FORMAT == 0 && R16 * NT <= 2 ? 1 : STEPS < 4 ? STEPS : 4)

// The same number, from which the compiler prepares nothing ahead of a loop: registers are scarce there.
__device__ __forceinline__ int fresh(int v) {
  asm volatile("" : "+r"(v));
  return v;
}

// This thread's share of the copies that fill a stage: pieces of 16 bytes. Of W the threads are divided among the segments; of x, whose stage
// has lines of 64 k of a token, a thread takes one piece of each of several lines. They are copied in PARTS parts, between the products of
// the stage before, and without branches: copies in one go after the barrier kept all warps from multiplying at once (dev/log/portable.md).
struct Filler {
  static constexpr int SEGMENTS = RT / 64, EACH = THREADS / SEGMENTS, PIECES = W_SEG / 16, LINES = THREADS / 8, K64 = KB / 64;
  static constexpr bool SHORT = LINES % MT == 0;  // the threads take all tokens of several k at once, else of one k
  static constexpr int K_STEP = SHORT ? LINES / MT : 1, X_K = (K64 + K_STEP - 1) / K_STEP, X_TOKENS = SHORT ? 1 : (MT + LINES - 1) / LINES;
  static constexpr int W_COPIES = (PIECES + EACH - 1) / EACH, X_COPIES = X_K * X_TOKENS;
  const u8* w;
  const u16* x;
  const int M, N, K, kblocks, token_tiles;
  Position at;  // of the next unit
  __device__ __forceinline__ Filler(const u8* w, const u16* x, int unit, int M, int N, int K)
      : w(w), x(x), M(M), N(N), K(K), kblocks(K / KB), token_tiles((M + MT - 1) / MT), at(unit, K / KB, (M + MT - 1) / MT) {}
  // Copies [from, to) of the W_COPIES.
  __device__ __forceinline__ void weights(u32 stage, const Position& at, bool is_wanted, int from, int to) const {
    const int segment = threadIdx.x / EACH, piece = threadIdx.x % EACH, tile = at.rt * SEGMENTS + segment;
    const u8* source = w + (size_t)tile * ((size_t)(fresh(K) / 64) * TILE_BYTES) + (size_t)at.kb * W_SEG + piece * 16;
    const u32 target = own_register(stage) + X_STAGE + (segment * PIECES + piece) * 16;
    const bool is_there = is_wanted && (SEGMENTS == 1 || tile < N / 64);
    const u64 policy = once_policy();
#pragma unroll
    for (int i = 0; i < W_COPIES; i++)
      if (i >= from && i < to) copy_async_once_if((i + 1) * EACH <= PIECES ? is_there : is_there && i * EACH + piece < PIECES, target + i * EACH * 16, source + i * EACH * 16, policy);
  }
  // Copies [from, to) of the X_COPIES. The eight pieces of a line are permuted by the token, so that ldmatrix reads eight tokens without
  // conflicts. Nothing is copied for tokens past the last, whose sums are not stored.
  __device__ __forceinline__ void tokens(u32 stage, bool is_wanted, int from, int to) const {
    const int K = fresh(this->K);
    const int line = threadIdx.x / 8, token = SHORT ? line % MT : line, k64 = SHORT ? line / MT : 0, left = is_wanted ? M - at.mt * MT - token : 0;
    const u16* source = x + (size_t)(at.mt * MT + token) * K + at.kb * KB + k64 * 64 + threadIdx.x % 8 * 8;
    const u32 target = stage + line * 128 + ((line ^ threadIdx.x) & 7) * 16;
#pragma unroll
    for (int i = 0; i < X_COPIES; i++) {
      const int k = i % X_K * K_STEP, m = i / X_K * LINES;
      if (i >= from && i < to)
        copy_async_if(m < left && (k + K_STEP <= K64 || k + k64 < K64) && (m + LINES <= MT || SHORT || m + token < MT), target + (k * MT + m) * 128, source + (size_t)(u32)(m * K) + k * 64);
    }
  }
  __device__ __forceinline__ void next() { at.next(kblocks, token_tiles); }
};

extern "C" __global__ void __launch_bounds__(THREADS, CTAS)
portable_product(const u8* __restrict__ w, const u16* __restrict__ x, const __grid_constant__ Epilogue e, const __grid_constant__ LowRank l,
                 u32* workspace, int M, int N, int K) {
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
    for (int i = 0; i < STAGES - 1; i++, there += STAGE_BYTES, at.next(kblocks, token_tiles)) filler.weights(there, at, u0 + i < u1, 0, Filler::W_COPIES);
    there = smem0;
  }
  Shrink shrink(l, token_tiles * MT, K);
  if (!LATE_WAIT) grid_dependency_wait();
#pragma unroll 1
  for (int i = 0; i < STAGES - 1; i++, there += STAGE_BYTES) {
    filler.tokens(there, u0 + i < u1, 0, Filler::X_COPIES);
    filler.next();
    commit_copies();
  }
  shrink.multiply(x, M);

  const u32 constant = decoding_constant(lane);
  const u32 my_tokens = lane % 8 * 128 + wm * NT * 1024 + (SPAN == 1 ? lane / 16 * 1024 : 0);
  const u32 my_k = ((SPAN == 1 ? lane / 8 % 2 : lane / 8) ^ lane & 7) * 16;
  Block block[R16];  // the codes that are decoded next
  auto load_codes = [&](u32 stage, int k64) {
#pragma unroll
    for (int r = 0; r < R16; r++) block[r].load(raw + (stage - smem0) + X_STAGE + (wr * R16 + r) / 4 * W_SEG + k64 * TILE_BYTES, wr * R16 + r, lane);
  };
  u32 b[2][NT * SPAN / 2 + NT * SPAN % 2][4];  // of this step and of the next one
  auto load_tokens = [&](u32 (&b)[NT * SPAN / 2 + NT * SPAN % 2][4], u32 stage, int step) {
    const u32 from = stage + my_tokens + (my_k ^ step % (4 / SPAN) * SPAN * 32) + step * SPAN / 4 * MT * 128;
#pragma unroll
    for (int i = 0; i < NT * SPAN / 2; i++) ldmatrix_x4(b[i], from + i * (2 / SPAN) * 1024);
  };
  wait_copies<STAGES - 2>();
  __syncthreads();
  shrink.add();
  load_codes(here, 0);
  load_tokens(b[0], here, 0);
#pragma unroll 1
  for (int u = u0; u < u1;) {
    const int begin = u, end = min(u1, (u / kblocks + 1) * kblocks);
#pragma unroll
    for (int r = lane; r < R16 * 16; r += 32) {  // what the end of the tile reads comes from memory: 0.5 us for each of two waits
      const int row = u / kblocks / token_tiles * RT + wr * (R16 * 16) + r;
      if (row < N) {
        prefetch(e.alpha + row);
#pragma unroll
        for (int k = 0; k < RANK; k += 64) prefetch(e.lora_b + (size_t)row * RANK + k);
      }
    }
    float acc[R16][NT][4];
#pragma unroll
    for (int i = 0; i < R16 * NT * 4; i++) acc[i / (NT * 4)][i / 4 % NT][i % 4] = 0.f;
#pragma unroll 1
    for (; u < end; u++) {
      const bool is_wanted = u + STAGES - 1 < u1;
      Block present[R16];
#pragma unroll
      for (int step = 0; step < STEPS; step++) {
        constexpr int EACH64 = 4 / SPAN;  // steps of 64 k
        if (step % EACH64 == 0) {
#pragma unroll
          for (int r = 0; r < R16; r++) present[r] = block[r];
        }
        u32 a[R16][SPAN][4];
#pragma unroll
        for (int r = 0; r < R16; r++)
#pragma unroll
          for (int i = 0; i < SPAN; i++) present[r].decode16(step % EACH64 * SPAN + i, constant, a[r][i]);
        constexpr int W = Filler::W_COPIES, X = Filler::X_COPIES;
        const int from = (step * PARTS + STEPS - 1) / STEPS, to = ((step + 1) * PARTS + STEPS - 1) / STEPS;
        filler.weights(there, filler.at, is_wanted, from * W / PARTS, to * W / PARTS);
        filler.tokens(there, is_wanted, from * X / PARTS, to * X / PARTS);
        if (step == STEPS - 1) {  // the next stage is ready, and all threads have read this one
          commit_copies();
          filler.next();
          there = there + STAGE_BYTES == smem1 ? smem0 : there + STAGE_BYTES;
          here = here + STAGE_BYTES == smem1 ? smem0 : here + STAGE_BYTES;
          wait_copies<STAGES - 2>();
          __syncthreads();
          load_codes(here, 0);  // what is read after the last unit is not used
          load_tokens(b[(step + 1) % 2], here, 0);
        } else {
          if (step % EACH64 == (FEW ? 0 : EACH64 - 1) && step / EACH64 + 1 < KB / 64) load_codes(here, step / EACH64 + 1);
          load_tokens(b[(step + 1) % 2], here, step + 1);
        }
#pragma unroll
        for (int i = 0; i < SPAN; i++)
#pragma unroll
          for (int n = 0; n < NT; n++)
#pragma unroll
            for (int r = 0; r < R16; r++) {
              const u32* operand = SPAN == 2 ? b[step % 2][n] + 2 * i : b[step % 2][n / 2] + n % 2 * 2;
              mma(acc[r][n], a[r][i][0], a[r][i][1], a[r][i][2], a[r][i][3], operand[0], operand[1]);
            }
      }
    }
    if (LATE_WAIT) grid_dependency_wait();
    const int tile = (FEW ? begin : fresh(begin)) / kblocks, first_u = tile * kblocks;  // after the loop, if that needs the registers
    const int row0 = tile / token_tiles * RT + wr * (R16 * 16), m0 = tile % token_tiles * MT + wm * (NT * 8);
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
          const float alpha0 = load_early(e.alpha + row + g), alpha1 = load_early(e.alpha + row + g + 8);
#pragma unroll
          for (int n = 0; n < NT; n += PIECE) finish<PIECE>(*(float(*)[PIECE][4])acc[r][n], e, shrink.u(), alpha0, alpha1, row, m0 + n * 8, g, t);
        }
      }
    }
  }
  shrink.end();
}
