// The head's logits of M tokens, and from them either the logits or, for each 64 of the vocabulary, what a sampled token needs:
//
//   y[m, v] = inverse temperature * logit(sum_k x[m, k] W[v, k])          score[m, v] = y[m, v] + gumbel(key[m], position[m], v)
//   partials[m, v / 64] = (best score, its v, its y, log sum exp y)
//
// A CTA owns consecutive tiles of 64 rows of W. It takes WG of them at a time, one per warpgroup, against MT tokens; one warp
// keeps a ring of stages filled. In every tile k runs from 0 to the end in one warpgroup, whatever MT, WG and KB are, and the order
// in which the 64 rows are reduced does not depend on them either: a row's numbers depend on that row alone. The sums go from
// wgmma's registers through shared memory, so that each lane then has 8 neighboring v of one token (4 of 8 tokens): Philox gives 4
// words at a time, and only one step of the reduction crosses lanes.
//
// With SPLIT four more warps reduce a tile while the next one is multiplied: decoding weights leaves the multiplying warps no time
// to wait for Philox. With many tokens shared memory is too small for that.
//
// Compile-time: FORMAT (0 BF16, 1 FP8, 2 NVFP4), MT tokens per tile, WG warpgroups, KB k per stage, STAGES, CTAS per multiprocessor,
// REDUCE tokens that are reduced together, SPLIT, OUTPUT (0 the partials of a sampled token, 1 the logits, 2 the partials of the
// token that the row's key names), BY_ROW (1: each token has its own temperature), REGISTERS per multiplying thread, taken from the then 4 copying warps, or 0. If given: SCALE, SOFTCAP
// (1: logits have one); a product is its logit otherwise.
#define COLUMNS (REDUCE == 8 ? 8 : 16)  // tokens that a warp reduces at once
#define ROWS (COLUMNS / 2)              // v of a lane, out of a warp's 16
#include "head_product.cuh"
#include "launch.cuh"

#define STRIDE (SPLIT && MT > 32 ? MT + 8 : REDUCE == 32 ? 40 : 20)  // words of a row of sums
#define SIDE_WARPS (REGISTERS ? 4 : SPLIT ? 5 : 1)

struct Scratch {
  float sums[WG * 4][16 * STRIDE];
  float4 bests[SPLIT ? 1 : WG][2][4][REDUCE];  // score, y, v, most
  float totals[SPLIT ? 1 : WG][2][4][REDUCE];
};

// The state with which a warp reduces its sums. `turn` selects the half of Scratch's results to use next.
struct Reducer {
  const Operands& e;
  Scratch& scratch;
  int group, warp, lane, turn;
  Scaling scaling;

  __device__ __forceinline__ void combine_warps(int column, int row64, int m) {
    const int warps = min(4, (e.V - row64 * 64) / 16);
    float4 b[4];
    float most = -INF, sum = 0.f;
#pragma unroll
    for (int w = 0; w < 4; w++) {
      b[w] = scratch.bests[group][turn % 2][w][column];
      if (w < warps) most = fmaxf(most, b[w].w);
    }
    Best best = {b[0].x, b[0].y, __float_as_int(b[0].z)};
#pragma unroll
    for (int w = 0; w < 4; w++) {
      if (w < warps) {
        best.update(b[w].x, b[w].y, __float_as_int(b[w].z));
        sum += scratch.totals[group][turn % 2][w][column] * __expf(b[w].w - most);
      }
    }
    e.partials[(size_t)m * ((e.V + 63) / 64) + row64] = make_float4(best.score, best.y, __int_as_float(best.v), most + logf(sum));
  }

  // Reduce REDUCE columns of the sums of 4 warps: each warp reduces its own 16 rows, then one warp combines the 4 results.
  __device__ __forceinline__ void reduce(const float* sums, int row64, int m0) {
    const int v0 = row64 * 64 + warp * 16, part = lane / COLUMNS;
    if (v0 < e.V) {
#pragma unroll 1
      for (int c = 0; c < REDUCE; c += COLUMNS) {
        const int column = c + lane % COLUMNS, m = m0 + column, v = v0 + part * ROWS;
        const bool is_used = m < e.M;
        float l[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; i++) l[i] = logit(e, sums[(part * ROWS + i) * STRIDE + column]);
#if OUTPUT == 1
        if (is_used) {
          float4* to = (float4*)(e.logits + (size_t)m * e.V + v);
#pragma unroll
          for (int i = 0; i < ROWS; i += 4) to[i / 4] = make_float4(l[i], l[i + 1], l[i + 2], l[i + 3]);
        }
#else
        Best best;
        float most, sum;
#if BY_ROW
        const Scaling scaling = scaling_of(is_used ? e.temperatures[m] : 0.f);
#endif
        reduce_rows(l, v, true, is_used ? e.keys[m] : 0, is_used ? e.positions[m] : 0, scaling, best, most, sum);
        if (part == 0 && is_used) {
          scratch.bests[group][turn % 2][warp][column] = make_float4(best.score, best.y, __int_as_float(best.v), most);
          scratch.totals[group][turn % 2][warp][column] = sum;
        }
#endif
      }
    }
#if OUTPUT != 1
    asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory");
    if (warp == turn % 4 && lane < REDUCE && m0 + lane < e.M) combine_warps(lane, row64, m0 + lane);
    turn++;
#endif
  }
};

__device__ __forceinline__ void write_sums(const float (*acc)[4], float* sums, int columns, int lane, float factor0, float factor1) {
  float* at = sums + lane / 4 * STRIDE + 2 * (lane % 4);
#pragma unroll
  for (int j = 0; j < columns / 8; j++) {
    *(float2*)(at + j * 8) = make_float2(acc[j][0] * factor0, acc[j][1] * factor0);
    *(float2*)(at + 8 * STRIDE + j * 8) = make_float2(acc[j][2] * factor1, acc[j][3] * factor1);
  }
}

__device__ __forceinline__ void load_weights(const TensorMap* map, const u8* tiles, const Operands& e, int row64, int valid, int kb, u32 base, u32 bar,
                                             u64 policy) {
  mbar_expect(bar, valid * W_SEG + X_STAGE);
#pragma unroll
  for (int s = 0; s < WG; s++) {
    if (s < valid) {
#if FORMAT == 2
      copy_bulk(base + X_STAGE + s * W_SEG, tiles + ((size_t)(row64 + s) * (e.D / 64) + kb * (KB / 64)) * TILE_BYTES, W_SEG, bar, policy);
#else
      copy_box(base + X_STAGE + s * W_SEG, map, kb * (W_SEG / 8192), (row64 + s) * 64, bar, policy);
#endif
    }
  }
}

__device__ __forceinline__ void produce(const TensorMap* w_map, const TensorMap* x_map, const u8* tiles, const Operands& e, int r0, int r1, u32 smem0,
                                        u32 full0) {
  const int token_tiles = (e.M + MT - 1) / MT, kblocks = e.D / KB;
  u64 stream = l2_evict_first();
  const u64 keep = l2_evict_last();
  if (token_tiles > 1) stream = l2_evict_normal();
  // The weights of the first stages do not depend on the previous kernel.
  const int pre = min(STAGES, kblocks);
  if (r0 < r1)
    for (int i = 0; i < pre; i++) load_weights(w_map, tiles, e, r0, min(WG, r1 - r0), i, smem0 + i * STAGE_BYTES, full0 + i * 8, stream);
  grid_dependency_wait();
  u32 stage = 0, parity = 1;
  int count = 0;
  for (int r = r0; r < r1; r += WG)
    for (int mt = 0; mt < token_tiles; mt++)
      for (int kb = 0; kb < kblocks; kb++, count++) {
        const u32 base = smem0 + stage * STAGE_BYTES, bar = full0 + stage * 8;
        if (count >= pre) {
          mbar_wait(bar + STAGES * 8, parity);
          load_weights(w_map, tiles, e, r, min(WG, r1 - r), kb, base, bar, stream);
        }
        copy_box(base, x_map, kb * (KB / 64), mt * MT, bar, keep);
        if (++stage == STAGES) stage = 0, parity ^= 1;
      }
}

extern "C" __global__ void __launch_bounds__((WG * 4 + SIDE_WARPS) * 32, CTAS)
head_sample(const __grid_constant__ TensorMap w_map, const __grid_constant__ TensorMap x_map, const u8* __restrict__ tiles,
            const __grid_constant__ Operands e) {
  extern __shared__ u8 raw[];
  const u32 smem0 = (smem_u32(raw) + 1023) & ~1023u;
  const u32 full0 = smem0 + STAGES * STAGE_BYTES, filled = full0 + 2 * STAGES * 8, drained = filled + 8;
  u8* generic = raw + (smem0 - smem_u32(raw));
  Scratch& scratch = *(Scratch*)(generic + STAGES * STAGE_BYTES + (STAGES + 1) * 16);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int rows = (e.V + 63) / 64;
  const int r0 = (int)((long long)rows * blockIdx.x / gridDim.x), r1 = (int)((long long)rows * (blockIdx.x + 1) / gridDim.x);
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) mbar_init(full0 + i * 8, 1), mbar_init(full0 + (STAGES + i) * 8, WG * 4);
    mbar_init(filled, WG * 4), mbar_init(drained, 4);
    mbar_init_fence();
  }
  __syncthreads();
  launch_dependents();
  if (warp >= WG * 4 + (SPLIT ? 4 : 0)) {
#if REGISTERS
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
#endif
    if (threadIdx.x == (WG * 4 + (SPLIT ? 4 : 0)) * 32) produce(&w_map, &x_map, tiles, e, r0, r1, smem0, full0);
  } else {
#if REGISTERS
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
#endif
    grid_dependency_wait();
    Reducer reducer = {e, scratch, SPLIT ? 0 : warp / 4, warp % 4, lane, 0, {1.f, 0.f}};
#if OUTPUT != 1 && !BY_ROW
    reducer.scaling = scaling_of(*e.temperatures);
#endif
#if SPLIT
    if (warp >= WG * 4) {
      u32 parity = 0;
      for (int r = r0; r < r1; r += WG)
        for (int m0 = 0; m0 < e.M; m0 += MT, parity ^= 1) {
          mbar_wait(filled, parity);
          for (int group = 0; group < min(WG, r1 - r); group++)
#pragma unroll 1
            for (int d = 0; d < MT; d += REDUCE) reducer.reduce(scratch.sums[group * 4 + warp % 4] + d, r + group, m0 + d);
          __syncwarp();
          if (lane == 0) mbar_arrive(drained);
        }
      return;
    }
    u32 free_parity = 1;
#endif
    u32 stage = 0, parity = 0;
    for (int r = r0; r < r1; r += WG) {
      const int row64 = r + warp / 4;
      for (int m0 = 0; m0 < e.M; m0 += MT) {
        float acc[NT][4], factor0 = 1.f, factor1 = 1.f;
#if FORMAT == 2
        const float* factors = e.factors + row64 * 64 + warp % 4 * 16 + lane / 4;
        if (row64 < r1) factor0 = factors[0], factor1 = factors[8];
#endif
        consume(acc, e, generic, smem0, full0, warp, lane, row64, stage, parity);
#if SPLIT
        mbar_wait(drained, free_parity);
        free_parity ^= 1;
        write_sums(acc, scratch.sums[warp], MT, lane, factor0, factor1);
        __syncwarp();
        if (lane == 0) mbar_arrive(filled);
#else
        if (row64 >= r1) continue;
#pragma unroll
        for (int d = 0; d < MT / REDUCE; d++) {
          write_sums(acc + d * (REDUCE / 8), scratch.sums[warp], REDUCE, lane, factor0, factor1);
          __syncwarp();
          reducer.reduce(scratch.sums[warp], row64, m0 + d * REDUCE);
          __syncwarp();
        }
#endif
      }
    }
  }
}
