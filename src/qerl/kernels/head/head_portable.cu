// What head_sample.cu computes for BF16 and FP8 heads, on any GPU since Ampere: mma.sync and cp.async.
//
// A CTA owns consecutive chunks of 64 rows of W. It takes WR of them at a time, one for each row of warps, against MT tokens, and fills a
// ring of stages by all its threads, which goes on over the ends of tiles. A warp multiplies a whole chunk by MT / WM tokens. Row 8 g + c
// of a chunk is line 8 c + g in shared memory, so that a lane has 8 neighboring rows of a token in its sums and a token's chunk is reduced
// in registers by three steps over lanes. In every tile k runs from 0 to the end: a row's numbers depend on that row alone.
//
// Compile-time: FORMAT (0 BF16, 1 FP8), MT tokens per tile, WR, WM, KB k per stage, STAGES, CTAS per multiprocessor, WIDTH (D), OUTPUT and
// BY_ROW as in head_sample.cu. If given: SCALE, SOFTCAP.
#define ROWS 8
#define COLUMNS 4
#include "async_copy.cuh"
#include "head_draw.cuh"
#include "launch.cuh"
#include "memory.cuh"
#include "mma.cuh"
#if FORMAT == 1
#include "fp8_codes.cuh"
#endif

#ifndef UNROLLED
#define UNROLLED 0
#endif
#if UNROLLED
#define UNROLL_TOKENS _Pragma("unroll")
#else
#define UNROLL_TOKENS _Pragma("unroll 1")
#endif
#define THREADS (WR * WM * 32)
#define NT (MT / 8 / WM)            // groups of 8 tokens of a warp
#define SPAN (NT % 2 ? 2 : 1)       // 16 k that are multiplied in a step: ldmatrix reads 8 tokens and 32 k, or 16 tokens and 16 k
#define STEPS (KB / 16 / SPAN)
#define LINE_K (FORMAT ? 128 : 64)  // k of a line of 128 bytes of W
#define W_LINES (WR * 64 * 128)     // bytes of all rows' lines of the same k
#define X_LINES (MT * 128)
#define X_STAGE (KB / 64 * X_LINES)
#define STAGE_BYTES (X_STAGE + KB / LINE_K * W_LINES)

struct Operands : Rows {
  const u8* weights;  // [V, D]
  const u16* hidden;  // bfloat16 [M, D]; for FP8 in the order of codes
};

// Where the eight pieces of 16 bytes of a line are: permuted, so that the lanes that read at once do not meet in a bank. A warp's quarter
// reads one piece each of eight lines (BF16: ldmatrix), or four of two neighboring ones (FP8).
__device__ __forceinline__ int piece_at(int piece, int line) { return piece ^ (FORMAT ? line % 2 * 4 | line % 8 / 2 : line % 8); }

// This thread's share of the copies that fill a stage, and the next stage to fill.
struct Filler {
  static constexpr int W_PIECES = KB * (2 - FORMAT) / 16, X_PIECES = KB / 8, W_LANES = THREADS / W_PIECES, X_LANES = THREADS / X_PIECES;
  static constexpr int W_COPIES = WR * 64 / W_LANES, X_COPIES = (MT + X_LANES - 1) / X_LANES;
  static_assert(WR * 64 % W_LANES == 0 && THREADS % W_PIECES == 0 && THREADS % X_PIECES == 0, "whole copies");
  const Operands& e;
  const int end, token_tiles;  // of the CTA's chunks
  int row64, mt = 0, kb = 0;
  __device__ __forceinline__ Filler(const Operands& e, int begin, int end) : e(e), end(end), token_tiles((e.M + MT - 1) / MT), row64(begin) {}
  __device__ __forceinline__ void next() {
    if (++kb == WIDTH / KB) {
      kb = 0;
      if (++mt == token_tiles) mt = 0, row64 += WR;
    }
  }
  // Copies [from, to) of the W_COPIES. Rows past the last are not copied; whatever they give is not used.
  __device__ __forceinline__ void weights(u32 stage, int from, int to) const {
    const int piece = threadIdx.x % W_PIECES, first = threadIdx.x / W_PIECES, left = min(e.V, end * 64) - row64 * 64;
    const u8* source = e.weights + ((size_t)row64 * 64 * WIDTH + (size_t)kb * KB) * (2 - FORMAT) + piece * 16;
    const u32 target = stage + X_STAGE + piece / 8 * W_LINES;
#pragma unroll
    for (int i = 0; i < W_COPIES; i++) {
      const int line = i * W_LANES + first, row = line / 64 * 64 + line % 8 * 8 + line / 8 % 8;
      if (i >= from && i < to) copy_async_if(row < left, target + line * 128 + piece_at(piece % 8, line) * 16, source + (size_t)(u32)row * (WIDTH * (2 - FORMAT)));
    }
  }
  // Copies [from, to) of the X_COPIES.
  __device__ __forceinline__ void tokens(u32 stage, int from, int to) const {
    const int piece = threadIdx.x % X_PIECES, first = threadIdx.x / X_PIECES, left = row64 < end ? min(e.M - mt * MT, MT) : 0;
    const u16* source = e.hidden + (size_t)mt * MT * WIDTH + kb * KB + piece * 8;
    const u32 target = stage + piece / 8 * X_LINES;
#pragma unroll
    for (int i = 0; i < X_COPIES; i++) {
      const int m = i * X_LANES + first;
      if (i >= from && i < to) copy_async_if(m < left, target + m * 128 + ((piece ^ m) & 7) * 16, source + (size_t)(u32)m * WIDTH);
    }
  }
};

// Use the sums of the warp's chunk. What is not wanted is computed and not stored: all warps take the same way, so that the compiler need
// not gather lanes ahead of every shuffle.
struct Finisher {
  // Of the lane's two tokens, m and m + 1.
  struct Draws {
    u64 keys[2];
    int positions[2];
  };
  const Operands& e;
  Scaling scaling;
  int lane;
  __device__ __forceinline__ Finisher(const Operands& e) : e(e), scaling{1.f, 0.f}, lane(threadIdx.x % 32) {
#if OUTPUT != 1 && !BY_ROW
    scaling = scaling_of(*e.temperatures);
#endif
  }
  // The lane's two tokens, m and m + 1, of a group of 8.
  __device__ __forceinline__ void pair(const float (&acc)[4][4], int row64, int m, bool is_wanted, const Draws& draws) const {
    const int v = row64 * 64 + lane / 4 * 8;
#pragma unroll
    for (int j = 0; j < 2; j++) {
      float l[8];
#pragma unroll
      for (int i = 0; i < 8; i++) l[i] = logit(e, acc[i / 2][i % 2 * 2 + j]);
#if OUTPUT == 1
      float4* to = (float4*)(e.logits + (size_t)(m + j) * e.V + v);
      if (is_wanted && m + j < e.M && v < e.V) to[0] = make_float4(l[0], l[1], l[2], l[3]), to[1] = make_float4(l[4], l[5], l[6], l[7]);
#else
      Best best;
      float most, sum;
#if BY_ROW
      const Scaling scaling = scaling_of(e.temperatures[min(m + j, e.M - 1)]);  // ahead of time the widest tile spills
#endif
      reduce_rows(l, v, v < e.V, draws.keys[j], draws.positions[j], scaling, best, most, sum);
      if (is_wanted && lane / 4 == j && m + j < e.M) e.partials[(size_t)(m + j) * ((e.V + 63) / 64) + row64] = make_float4(best.score, best.y, __int_as_float(best.v), most + logf(sum));
#endif
    }
  }
  __device__ __forceinline__ void ask(int m, Draws& draws) const {
#if OUTPUT != 1
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const int row = min(m + j, e.M - 1);
      draws.keys[j] = e.keys[row], draws.positions[j] = e.positions[row];
    }
#endif
  }
  // NT groups of 8 tokens from m0 on. One after the other passes through the first group's registers: this code for each of them would be
  // many times as long as all else, and instructions have to be fetched.
  __device__ __forceinline__ void operator()(float (&acc)[4][NT][4], int row64, int m0, bool is_wanted) const {
    Draws draws;
    ask(m0 + lane % 4 * 2, draws);
    UNROLL_TOKENS
    for (int n = 0; n < NT; n++) {
      const int m = m0 + n * 8 + lane % 4 * 2;
      Draws next;
      ask(m + 8, next);  // while these are reduced
      float group[4][4];
#pragma unroll
      for (int i = 0; i < 16; i++) group[i / 4][i % 4] = acc[i / 4][0][i % 4];
      pair(group, row64, m, is_wanted, draws);
#pragma unroll
      for (int j = 0; j + 1 < NT; j++)
#pragma unroll
        for (int i = 0; i < 16; i++) acc[i / 4][j][i % 4] = acc[i / 4][j + 1][i % 4];
      draws = next;
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, CTAS) head_portable(const __grid_constant__ Operands e) {
  extern __shared__ __align__(128) u8 raw[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, wr = warp % WR, wm = warp / WR, chunks = (e.V + 63) / 64;
  const int r0 = (int)((long long)chunks * blockIdx.x / gridDim.x), r1 = (int)((long long)chunks * (blockIdx.x + 1) / gridDim.x);
  launch_dependents();
  const u32 smem0 = smem_u32(raw), smem1 = smem0 + STAGES * STAGE_BYTES;
  u32 here = smem0, there = smem0;  // the stage to multiply, and the next one to fill

  Filler filler(e, r0, r1);
  {
    Filler ahead = filler;  // the weights of the first stages do not depend on the previous kernel
#pragma unroll 1
    for (int i = 0; i < STAGES - 1; i++, there += STAGE_BYTES, ahead.next()) ahead.weights(there, 0, Filler::W_COPIES);
    there = smem0;
  }
  grid_dependency_wait();
#pragma unroll 1
  for (int i = 0; i < STAGES - 1; i++, there += STAGE_BYTES, filler.next()) filler.tokens(there, 0, Filler::X_COPIES), commit_copies();
  const Finisher finish(e);

  const u32 my_tokens = (wm * NT * 8 + lane % 8 + (SPAN == 1 ? lane / 16 * 8 : 0)) * 128;
  const u32 my_x = ((SPAN == 1 ? lane / 8 % 2 : lane / 8) ^ lane & 7) * 16;
  auto load_tokens = [&](u32 (&b)[NT * SPAN / 2][4], u32 stage, int step) {
    const u32 from = stage + my_tokens + (my_x ^ step % (4 / SPAN) * SPAN * 32) + step * SPAN / 4 * X_LINES;
#pragma unroll
    for (int i = 0; i < NT * SPAN / 2; i++) ldmatrix_x4(b[i], from + i * (2 / SPAN) * 1024);
  };
#if FORMAT == 0
  const u32 my_rows = X_STAGE + (wr * 64 + lane % 16) * 128, my_w = piece_at(lane / 16, lane) * 16;
  u32 a[2][SPAN][4][4];  // of this step and of the next one
  auto load_weights = [&](u32 (&a)[SPAN][4][4], u32 stage, int step) {
#pragma unroll
    for (int s = 0; s < SPAN; s++) {
      const int k16 = step * SPAN + s;
#pragma unroll
      for (int r = 0; r < 4; r++) ldmatrix_x4(a[s][r], stage + my_rows + (my_w ^ k16 % 4 * 32) + k16 / 4 * W_LINES + r * 2048);
    }
  };
#else
  const u8* my_rows = raw + X_STAGE + (wr * 64 + lane / 4) * 128;
  uint4 codes[4][2];  // of 64 k
  auto load_codes = [&](u32 stage, int k64) {
    const u8* from = my_rows + (stage - smem0) + k64 / 2 * W_LINES + piece_at(k64 % 2 * 4 + lane % 4, lane / 4) * 16;
#pragma unroll
    for (int i = 0; i < 8; i++) codes[i / 2][i % 2] = *(const uint4*)(from + i * 1024);
  };
#endif
  u32 b[2][NT * SPAN / 2][4];
  wait_copies<STAGES - 2>();
  __syncthreads();
  load_tokens(b[0], here, 0);
#if FORMAT == 0
  load_weights(a[0], here, 0);
#else
  load_codes(here, 0);
#endif
#pragma unroll 1
  for (int row64 = r0; row64 < r1; row64 += WR) {
#pragma unroll 1
    for (int m0 = 0; m0 < e.M; m0 += MT) {
      float acc[4][NT][4] = {};
#if FORMAT == 1
      const float* scales = e.factors + (size_t)(min(row64 + wr, chunks - 1) / 2) * (WIDTH / 128);
      float next_scale = scales[0];
#endif
#pragma unroll 1
      for (int kb = 0; kb < WIDTH / KB; kb++) {
#if FORMAT == 1
        const float scale = next_scale;
        next_scale = scales[min(kb + 1, WIDTH / 128 - 1)];
        float part[4][NT][4] = {};
#else
        float(&part)[4][NT][4] = acc;
#endif
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
#if FORMAT == 1
          u32 now[SPAN][4][4];
#pragma unroll
          for (int i = 0; i < SPAN * 4; i++) {
            const int j = step * SPAN % 4 + i / 4;
            decode4(word_of(codes[i % 4][0], j), now[i / 4][i % 4][0], now[i / 4][i % 4][2]);
            decode4(word_of(codes[i % 4][1], j), now[i / 4][i % 4][1], now[i / 4][i % 4][3]);
          }
#else
          u32(&now)[SPAN][4][4] = a[step % 2];
#endif
          filler.weights(there, step * Filler::W_COPIES / STEPS, (step + 1) * Filler::W_COPIES / STEPS);
          filler.tokens(there, step * Filler::X_COPIES / STEPS, (step + 1) * Filler::X_COPIES / STEPS);
          if (step == STEPS - 1) {  // the next stage is ready, and all threads have read this one
            commit_copies();
            filler.next();
            there = there + STAGE_BYTES == smem1 ? smem0 : there + STAGE_BYTES;
            here = here + STAGE_BYTES == smem1 ? smem0 : here + STAGE_BYTES;
            wait_copies<STAGES - 2>();
            __syncthreads();
          }
          const int following = (step + 1) % STEPS;  // what is read after the last unit is not used
          load_tokens(b[(step + 1) % 2], here, following);
#if FORMAT == 0
          load_weights(a[(step + 1) % 2], here, following);
#else
          if (following * SPAN % 4 == 0) load_codes(here, following * SPAN / 4);
#endif
#pragma unroll
          for (int s = 0; s < SPAN; s++)
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
              for (int r = 0; r < 4; r++) {
                const u32* operand = SPAN == 2 ? b[step % 2][n] + 2 * s : b[step % 2][n / 2] + n % 2 * 2;
                mma(part[r][n], now[s][r][0], now[s][r][1], now[s][r][2], now[s][r][3], operand[0], operand[1]);
              }
        }
#if FORMAT == 1
#pragma unroll
        for (int i = 0; i < NT * 16; i++) acc[i / (NT * 4)][i / 4 % NT][i % 4] = fmaf(part[i / (NT * 4)][i / 4 % NT][i % 4], scale, acc[i / (NT * 4)][i / 4 % NT][i % 4]);
#endif
      }
      finish(acc, row64 + wr, m0 + wm * NT * 8, row64 + wr < r1);
    }
  }
}
