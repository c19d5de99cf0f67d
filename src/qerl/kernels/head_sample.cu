// The head's logits of M tokens, and from them either the logits or, for each 64 of the vocabulary, what a draw needs.
//
//   y[m, v] = inverse temperature * sum_k x[m, k] W[v, k]          score[m, v] = y[m, v] + gumbel(key[m], position[m], v)
//   partials[m, v / 64] = (best score, its v, its y, log sum exp y)
//
// A CTA owns consecutive tiles of 64 rows of W and takes WG of them at a time, one warpgroup each, against MT tokens; one
// warp keeps a ring of stages filled. Every tile's k runs from 0 to the end in one warpgroup, whatever MT, WG and KB
// are, and the 64 rows are reduced in an order that they do not change either: a row's numbers depend on that row alone.
// The sums leave wgmma's registers through shared memory, so that a lane then holds 8 neighbouring v of one token (4 of 8 tokens):
// Philox gives 4 words at a time, and only one step of the reduction crosses lanes.
//
// With SPLIT four more warps reduce a tile while the next is multiplied: decoding weights leaves the multiplying warps no
// time to wait for Philox. With many tokens shared memory has no room for that.
//
// Compile-time: FORMAT (0 BF16, 1 FP8, 2 NVFP4), MT tokens of a tile, WG warpgroups, KB k of a stage, STAGES, CTAS on a
// multiprocessor, DUMP tokens that are reduced together, SPLIT, GIVES what is written (0 a draw's partials, 1 the logits, 2 the
// partials of a draw of the v that the row's key is), REGISTERS that a multiplying thread takes from the copying warps, which
// are 4 then, or 0.
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define NT (MT / 8)
#if FORMAT == 0
#define W_SEG (KB * 128)
#elif FORMAT == 1
#define W_SEG (KB * 64)
#else
#define W_SEG (KB / 64 * 2304)
#endif
#define X_STAGE (MT * KB * 2)
#define STAGE_BYTES ((X_STAGE + WG * W_SEG + 1023) / 1024 * 1024)  // the swizzle repeats every 1024
#define STRIDE (SPLIT && MT > 32 ? MT + 8 : DUMP == 32 ? 40 : 20)  // words of a row of sums
#define COLUMNS (DUMP == 8 ? 8 : 16)  // tokens that a warp reduces at once
#define ROWS (COLUMNS / 2)             // v of a lane, of the 16 of a warp
#define SIDE_WARPS (REGISTERS ? 4 : SPLIT ? 5 : 1)
#define INFINITE __int_as_float(0x7F800000)

struct __align__(64) TensorMap { u8 bytes[128]; };
struct Draw {
  const long long* keys;
  const int* positions;
  const float* temperature;
  const float* factors;  // NVFP4: of each row; FP8: of each block of 128 x 128
  float4* partials;
  float* logits;
  int M, V, D, pad;
};

__device__ __forceinline__ u32 smem_u32(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void mbar_init(u32 bar, u32 count) { asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(bar), "r"(count)); }
__device__ __forceinline__ void mbar_expect(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void mbar_arrive(u32 bar) { asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(bar) : "memory"); }
__device__ __forceinline__ void mbar_wait(u32 bar, u32 parity) {
  asm volatile(
      "{\n.reg .pred p;\nL_%=: mbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n@p bra D_%=;\nbra L_%=;\nD_%=:\n}" ::"r"(bar),
      "r"(parity)
      : "memory");
}
__device__ __forceinline__ void load_line(u32 dst, const u8* src, u32 bytes, u32 bar, u64 policy) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(dst),
               "l"(src), "r"(bytes), "r"(bar), "l"(policy)
               : "memory");
}
__device__ __forceinline__ void load_box(u32 dst, const TensorMap* map, int k64, int row, u32 bar, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(
          dst),
      "l"(map), "r"(0), "r"(row), "r"(k64), "r"(bar), "l"(policy)
      : "memory");
}

// Keeps the compiler from moving what it does with the sums across the asynchronous products.
__device__ __forceinline__ void hold(float (&acc)[NT][4]) {
#pragma unroll
  for (int n = 0; n < NT; n++) asm volatile("" : "+f"(acc[n][0]), "+f"(acc[n][1]), "+f"(acc[n][2]), "+f"(acc[n][3])::"memory");
}

// Philox 4x32-10 (Salmon et al., SC 2011) of the counter (quad, position, 0, 0): the words of v = 4 quad, ..., 4 quad + 3.
__device__ __forceinline__ void philox(u32 quad, u32 position, u32 key0, u32 key1, u32 (&words)[4]) {
  u32 c0 = quad, c1 = position, c2 = 0, c3 = 0;
#pragma unroll
  for (int i = 0; i < 10; i++) {
    const u64 p0 = (u64)c0 * 0xD2511F53u, p1 = (u64)c2 * 0xCD9E8D57u;
    c0 = (u32)(p1 >> 32) ^ c1 ^ key0, c1 = (u32)p1, c2 = (u32)(p0 >> 32) ^ c3 ^ key1, c3 = (u32)p0;
    key0 += 0x9E3779B9u, key1 += 0xBB67AE85u;
  }
  words[0] = c0, words[1] = c1, words[2] = c2, words[3] = c3;
}
__device__ __forceinline__ float log2_fast(float v) {
  float d;
  asm("lg2.approx.f32 %0, %1;" : "=f"(d) : "f"(v));
  return d;
}
__device__ __forceinline__ float exp2_fast(float v) {
  float d;
  asm("ex2.approx.f32 %0, %1;" : "=f"(d) : "f"(v));
  return d;
}
// log2 of E = -log(1 - u), u = (bits + 1/2) / 2^32: by a series where 1 - u would have lost u's last bits.
__device__ __forceinline__ float log2_exponential(u32 bits) {
  const bool is_small = bits < (1u << 28);
  const float a = fmaf((float)(is_small ? bits : ~bits), 0x1p-32f, 0x1p-33f);
  float series = fmaf(a, 1.f / 6, 1.f / 5);
  series = fmaf(a, series, 1.f / 4), series = fmaf(a, series, 1.f / 3), series = fmaf(a, series, 1.f / 2);
  return log2_fast(is_small ? fmaf(a * a, series, a) : -0.693147181f * log2_fast(a));
}

struct Best {
  float score, y;
  int v;
  __device__ __forceinline__ void take(float other, float other_y, int other_v) {
    if (other > score || (other == score && other_v < v)) score = other, y = other_y, v = other_v;
  }
};

// The 16 rows of a warp and one token, ROWS of them in this lane. Sums go by fours, pairs of them, pairs of those,
// however many lanes share them.
__device__ __forceinline__ void reduce_rows(const float (&l)[ROWS], int v, u64 key, int position, float inverse, float noise, Best& best,
                                            float& most, float& sum) {
  float y[ROWS], fours[ROWS / 4];
  most = -INFINITE;
#pragma unroll
  for (int i = 0; i < ROWS; i++) y[i] = l[i] * inverse, most = fmaxf(most, y[i]);
#pragma unroll
  for (int step = COLUMNS; step < 32; step *= 2) most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, step));
  const float log2e = 1.44269504f, base = -most * log2e;
#pragma unroll
  for (int q = 0; q < ROWS / 4; q++) {
    fours[q] = 0.f;
#pragma unroll
    for (int i = 4 * q; i < 4 * q + 4; i++) fours[q] += exp2_fast(fmaf(y[i], log2e, base)) + y[i] * 0.f;  // NaN if y is not finite
  }
  sum = ROWS == 8 ? fours[0] + fours[ROWS / 4 - 1] : fours[0];
  best.score = -INFINITE, best.y = y[0], best.v = v;
#pragma unroll
  for (int i = 0; i < ROWS; i += 4) {
#if GIVES == 0
    u32 words[4];
    philox((v + i) / 4, position, (u32)key, (u32)(key >> 32), words);
#endif
#pragma unroll
    for (int j = 0; j < 4; j++) {
#if GIVES == 0
      const float score = fmaf(log2_exponential(words[j]), -0.693147181f * noise, y[i + j]);
#else
      const float score = v + i + j == (int)key ? 0.f : -INFINITE;
#endif
      if (score > best.score) best.score = score, best.y = y[i + j], best.v = v + i + j;
    }
  }
#pragma unroll
  for (int step = COLUMNS; step < 32; step *= 2) {
    sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
    const float score = __shfl_xor_sync(0xFFFFFFFFu, best.score, step), other_y = __shfl_xor_sync(0xFFFFFFFFu, best.y, step);
    best.take(score, other_y, __shfl_xor_sync(0xFFFFFFFFu, best.v, step));
  }
}

struct Scratch {
  float sums[WG * 4][16 * STRIDE];
  float4 bests[SPLIT ? 1 : WG][2][4][DUMP];  // score, y, v, most
  float totals[SPLIT ? 1 : WG][2][4][DUMP];
};

// What the draws of a warp have in common, and which of the two halves of Scratch's results is next.
struct Reducer {
  const Draw& e;
  Scratch& scratch;
  int group, warp, lane, turn;
  float inverse, noise;

  __device__ __forceinline__ void join_warps(int column, int row64, int m) {
    const int warps = min(4, (e.V - row64 * 64) / 16);
    float4 b[4];
    float most = -INFINITE, sum = 0.f;
#pragma unroll
    for (int w = 0; w < 4; w++) {
      b[w] = scratch.bests[group][turn % 2][w][column];
      if (w < warps) most = fmaxf(most, b[w].w);
    }
    Best best = {b[0].x, b[0].y, __float_as_int(b[0].z)};
#pragma unroll
    for (int w = 0; w < 4; w++) {
      if (w < warps) {
        best.take(b[w].x, b[w].y, __float_as_int(b[w].z));
        sum += scratch.totals[group][turn % 2][w][column] * __expf(b[w].w - most);
      }
    }
    e.partials[(size_t)m * ((e.V + 63) / 64) + row64] = make_float4(best.score, best.y, __int_as_float(best.v), most + logf(sum));
  }

  // DUMP columns of the sums of 4 warps: each reduces its own 16 rows, one of them then joins the 4 results.
  __device__ __forceinline__ void reduce(const float* sums, int row64, int m0) {
    const int v0 = row64 * 64 + warp * 16, part = lane / COLUMNS;
    if (v0 < e.V) {
#pragma unroll 1
      for (int c = 0; c < DUMP; c += COLUMNS) {
        const int column = c + lane % COLUMNS, m = m0 + column, v = v0 + part * ROWS;
        const bool is_used = m < e.M;
        float l[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; i++) l[i] = sums[(part * ROWS + i) * STRIDE + column];
#if GIVES == 1
        if (is_used) {
          float4* to = (float4*)(e.logits + (size_t)m * e.V + v);
#pragma unroll
          for (int i = 0; i < ROWS; i += 4) to[i / 4] = make_float4(l[i], l[i + 1], l[i + 2], l[i + 3]);
        }
#else
        Best best;
        float most, sum;
        reduce_rows(l, v, is_used ? e.keys[m] : 0, is_used ? e.positions[m] : 0, inverse, noise, best, most, sum);
        if (part == 0 && is_used) {
          scratch.bests[group][turn % 2][warp][column] = make_float4(best.score, best.y, __int_as_float(best.v), most);
          scratch.totals[group][turn % 2][warp][column] = sum;
        }
#endif
      }
    }
#if GIVES != 1
    asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory");
    if (warp == turn % 4 && lane < DUMP && m0 + lane < e.M) join_warps(lane, row64, m0 + lane);
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

__device__ __forceinline__ void load_weights(const TensorMap* map, const u8* tiles, const Draw& e, int row64, int valid, int kb, u32 base, u32 bar,
                                             u64 policy) {
  mbar_expect(bar, valid * W_SEG + X_STAGE);
#pragma unroll
  for (int s = 0; s < WG; s++) {
    if (s < valid) {
#if FORMAT == 2
      load_line(base + X_STAGE + s * W_SEG, tiles + ((size_t)(row64 + s) * (e.D / 64) + kb * (KB / 64)) * 2304, W_SEG, bar, policy);
#else
      load_box(base + X_STAGE + s * W_SEG, map, kb * (W_SEG / 8192), (row64 + s) * 64, bar, policy);
#endif
    }
  }
}

__device__ __forceinline__ void produce(const TensorMap* w_map, const TensorMap* x_map, const u8* tiles, const Draw& e, int r0, int r1, u32 smem0,
                                        u32 full0) {
  u64 stream, keep;
  const int token_tiles = (e.M + MT - 1) / MT, kblocks = e.D / KB;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(stream));
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(keep));
  if (token_tiles > 1) asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(stream));
  // the weights of the first stages do not depend on the kernel before
  const int pre = min(STAGES, kblocks);
  if (r0 < r1)
    for (int i = 0; i < pre; i++) load_weights(w_map, tiles, e, r0, min(WG, r1 - r0), i, smem0 + i * STAGE_BYTES, full0 + i * 8, stream);
  asm volatile("griddepcontrol.wait;" ::: "memory");
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
        load_box(base, x_map, kb * (KB / 64), mt * MT, bar, keep);
        if (++stage == STAGES) stage = 0, parity ^= 1;
      }
}

// PRODUCT

extern "C" __global__ void __launch_bounds__((WG * 4 + SIDE_WARPS) * 32, CTAS)
head_sample(const __grid_constant__ TensorMap w_map, const __grid_constant__ TensorMap x_map, const u8* __restrict__ tiles,
            const __grid_constant__ Draw e) {
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
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  asm volatile("griddepcontrol.launch_dependents;");
  if (warp >= WG * 4 + (SPLIT ? 4 : 0)) {
#if REGISTERS
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
#endif
    if (threadIdx.x == (WG * 4 + (SPLIT ? 4 : 0)) * 32) produce(&w_map, &x_map, tiles, e, r0, r1, smem0, full0);
  } else {
#if REGISTERS
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
#endif
    asm volatile("griddepcontrol.wait;" ::: "memory");
    Reducer reducer = {e, scratch, SPLIT ? 0 : warp / 4, warp % 4, lane, 0, 1.f, 0.f};
#if GIVES != 1
    const float temperature = *e.temperature;
    if (temperature > 0.f) reducer.inverse = 1.f / temperature, reducer.noise = 1.f;
#endif
#if SPLIT
    if (warp >= WG * 4) {
      u32 parity = 0;
      for (int r = r0; r < r1; r += WG)
        for (int m0 = 0; m0 < e.M; m0 += MT, parity ^= 1) {
          mbar_wait(filled, parity);
          for (int group = 0; group < min(WG, r1 - r); group++)
#pragma unroll 1
            for (int d = 0; d < MT; d += DUMP) reducer.reduce(scratch.sums[group * 4 + warp % 4] + d, r + group, m0 + d);
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
        for (int d = 0; d < MT / DUMP; d++) {
          write_sums(acc + d * (DUMP / 8), scratch.sums[warp], DUMP, lane, factor0, factor1);
          __syncwarp();
          reducer.reduce(scratch.sums[warp], row64, m0 + d * DUMP);
          __syncwarp();
        }
#endif
      }
    }
  }
}
