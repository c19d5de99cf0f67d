// o = softmax(q k^T / sqrt(H)) v for one token per row over a paged cache, including rotary embedding and cache write.
//
// The work is divided into units: (chunk of CHUNK positions, row, K/V head). A CTA is one warp. It takes every gridDim.x-th unit
// and processes its tiles of 32 positions. STAGES tiles are in flight (cp.async), also across the end of a unit; the first ones
// start before the previous kernel has ended. No warp waits for another warp's tile, and only k and v go through shared memory:
//
//   s^T [32, heads] = k [32, H] q^T        q in registers, heads padded to 8 or 16: columns of mma's second operand
//   o^T [H, heads] += v^T [H, 32] p^T      p^T is s^T's registers, transposed 8 x 8 at a time; online softmax
//
// Chunks are combined through a workspace (workspace.cuh): the unit of a row's last chunk waits for the row's other units, which all
// have lower indices, and adds them in their order.
//
// FP8: the bits (sign, exponent, mantissa) of an E4M3 number x, placed in a bfloat16, have the value x * 2^-120. So q and p are
// multiplied by 2^100, and the sums by 2^20.
//
// Compile-time: H head size, GROUP query heads per K/V head, KV_HEADS, PAGE positions per page, CHUNK, FP8, STAGES, CTAS per
// multiprocessor.
#include "decode_attention.cuh"
#include "mma.cuh"
#include "workspace.cuh"

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Write the new token to the cache and to its tile in shared memory, which has arrived. Set the tile's later values to zero.
__device__ __forceinline__ void write_new_token(const Parameters& p, const Unit& u, Stage& s, const CacheEntry& k, const CacheEntry& v, int slot) {
  const int lane = threadIdx.x, row = u.position % TILE, at = lane * 2 * ROW_BYTES / H, half = ROW_BYTES / 2;
  const size_t to = ((size_t)slot * KV_HEADS + u.head) * ROW_BYTES;
  if (lane < H / 4) {
    store_entry(k, p.k + to + at, p.k + to + at + half);
    store_entry(v, p.v + to + at, p.v + to + at + half);
    store_entry(k, s.k + swizzled(row, at / 16) + at % 16, s.k + swizzled(row, (at + half) / 16) + at % 16);
    store_entry(v, s.v + swizzled(row, at / 16) + at % 16, s.v + swizzled(row, (at + half) / 16) + at % 16);
  }
#if FP8
  if (lane == 0) {
    p.k_scales[(size_t)slot * KV_HEADS + u.head] = k.scale, p.v_scales[(size_t)slot * KV_HEADS + u.head] = v.scale;
    s.k_scales[row] = k.scale, s.v_scales[row] = v.scale;
  }
  if (lane > row) s.k_scales[lane] = s.v_scales[lane] = 0.f;
#endif
  constexpr int PIECES = ROW_BYTES / 16;
  for (int i = lane; i < (TILE - 1 - row) * PIECES; i += 32) *(uint4*)(s.v + swizzled(row + 1 + i / PIECES, i % PIECES)) = make_uint4(0, 0, 0, 0);
}

// Load the four elements of tile k along H that this lane has of a query head. FP8 uses the order of bytes 0, 2, 1, 3, like even_pair
// and odd_pair.
__device__ __forceinline__ void load_quad(const u16* head, int k, float (&x)[4]) {
  const int t = threadIdx.x % 4;
#if FP8
  const uint2 w = *(const uint2*)(head + 16 * k + 4 * t);
  x[0] = low(w.x), x[2] = high(w.x), x[1] = low(w.y), x[3] = high(w.y);
#else
  const u32 a = *(const u32*)(head + 16 * k + 2 * t), b = *(const u32*)(head + 16 * k + 8 + 2 * t);
  x[0] = low(a), x[1] = high(a), x[2] = low(b), x[3] = high(b);
#endif
}
__device__ __forceinline__ void load_quad(const float* from, int k, float (&x)[4]) {
  const int t = threadIdx.x % 4;
#if FP8
  const float4 w = *(const float4*)(from + 16 * k + 4 * t);
  x[0] = w.x, x[2] = w.y, x[1] = w.z, x[3] = w.w;
#else
  const float2 a = *(const float2*)(from + 16 * k + 2 * t), b = *(const float2*)(from + 16 * k + 8 + 2 * t);
  x[0] = a.x, x[1] = a.y, x[2] = b.x, x[3] = b.y;
#endif
}
__device__ __forceinline__ float round_to_bfloat16(float x) { return low(pack2(x, 0.f)); }

// Load the row's query heads as mma's second operand: normed, rotated, rounded.
__device__ __forceinline__ void load_queries(const Parameters& p, const Unit& u, u32 (&q)[NT][KT][2]) {
  const float* angle = p.angles + (size_t)u.position * H;
#pragma unroll
  for (int n = 0; n < NT; n++) {
    const int head = min(n * 8 + (int)threadIdx.x / 4, GROUP - 1);
    const u16* from = p.qkv + (size_t)u.row * WIDTH + (u.head * GROUP + head) * H;
    float x[KT][4];
#pragma unroll
    for (int k = 0; k < KT; k++) load_quad(from, k, x[k]);
    if (p.q_norm) {
      float sum = 0.f;
#pragma unroll
      for (int k = 0; k < KT; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) sum += x[k][i] * x[k][i];
      sum += __shfl_xor_sync(ALL_LANES, sum, 1), sum += __shfl_xor_sync(ALL_LANES, sum, 2);
      const float inverse = rsqrtf(sum / H + p.eps);
#pragma unroll
      for (int k = 0; k < KT; k++) {
        float w[4];
        load_quad(p.q_norm, k, w);
#pragma unroll
        for (int i = 0; i < 4; i++) x[k][i] = round_to_bfloat16(x[k][i] * inverse * w[i]);
      }
    }
#pragma unroll
    for (int k = 0; k < KT / 2; k++) {
      float c[4], s[4];
      load_quad(angle, k, c), load_quad(angle + H / 2, k, s);
#pragma unroll
      for (int i = 0; i < 4; i++) rotate_pair(x[k][i], x[k + KT / 2][i], c[i], s[i]);
    }
#pragma unroll
    for (int k = 0; k < KT; k++)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        q[n][k][j] = pack2(x[k][2 * j], x[k][2 * j + 1]);
        if (FP8) q[n][k][j] = pack2(low(q[n][k][j]) * Q_FACTOR, high(q[n][k][j]) * Q_FACTOR);
      }
  }
}

// Compute s^T of a tile in log2, with -inf from position `length` on. Its halves are independent, which hides the products' latency.
__device__ __forceinline__ void score(const Parameters& p, const Stage& s, const u32 (&q)[NT][KT][2], int length, float (&x)[2][NT][4]) {
  const int lane = threadIdx.x, g = lane / 4;
  u32 w[2][ROW_BYTES / 32][4];  // all loads first, to pay their latency once
#pragma unroll
  for (int h = 0; h < 2; h++)
#pragma unroll
    for (int k = 0; k < ROW_BYTES / 32; k++) ldmatrix_x4(w[h][k], smem_u32(s.k) + swizzled(h * 16 + lane % 16, 2 * k + lane / 16));
#pragma unroll
  for (int h = 0; h < 2; h++)
#pragma unroll
    for (int n = 0; n < NT; n++) x[h][n][0] = x[h][n][1] = x[h][n][2] = x[h][n][3] = 0.f;
#pragma unroll
  for (int k = 0; k < KT; k++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
#if FP8
      const u32 top = w[h][k / 2][k % 2 * 2], bottom = w[h][k / 2][k % 2 * 2 + 1];
      const u32 a[4] = {even_pair(top), even_pair(bottom), odd_pair(top), odd_pair(bottom)};
#else
      const u32(&a)[4] = w[h][k];
#endif
#pragma unroll
      for (int n = 0; n < NT; n++) mma(x[h][n], a[0], a[1], a[2], a[3], q[n][k][0], q[n][k][1]);
    }
#pragma unroll
  for (int h = 0; h < 2; h++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int at = h * 16 + half * 8 + g;
      float factor = p.score_factor * SUM_FACTOR;
#if FP8
      factor *= s.k_scales[at];
#endif
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int j = half * 2; j < half * 2 + 2; j++) x[h][n][j] = at < length ? x[h][n][j] * factor : -INF;
    }
}

// The online softmax of a unit, for this lane's two heads of each tile of heads. o is not yet divided by sum.
struct Softmax {
  float o[KT][NT][4];
  float2 largest[NT], sum[NT];  // sum has this lane's share until `finish`
};

__device__ __forceinline__ void clear(Softmax& f) {
#pragma unroll
  for (int n = 0; n < NT; n++) {
    f.largest[n] = make_float2(-INF, -INF), f.sum[n] = make_float2(0.f, 0.f);
#pragma unroll
    for (int i = 0; i < KT; i++) f.o[i][n][0] = f.o[i][n][1] = f.o[i][n][2] = f.o[i][n][3] = 0.f;
  }
}

__device__ __forceinline__ void scale(Softmax& f, int n, float a, float b) {
#pragma unroll
  for (int i = 0; i < KT; i++) f.o[i][n][0] *= a, f.o[i][n][1] *= b, f.o[i][n][2] *= a, f.o[i][n][3] *= b;
  f.sum[n].x *= a, f.sum[n].y *= b;
}

// Compute p of a tile as mma's second operand; update the largest score and the sum.
__device__ __forceinline__ void softmax_weights(const Stage& s, const float (&x)[2][NT][4], Softmax& f, u32 (&b)[NT][4]) {
#pragma unroll
  for (int n = 0; n < NT; n++) {
    float2 m = make_float2(fmaxf(fmaxf(x[0][n][0], x[0][n][2]), fmaxf(x[1][n][0], x[1][n][2])),
                           fmaxf(fmaxf(x[0][n][1], x[0][n][3]), fmaxf(x[1][n][1], x[1][n][3])));
#pragma unroll
    for (int i = 4; i < 32; i *= 2) m.x = fmaxf(m.x, __shfl_xor_sync(ALL_LANES, m.x, i)), m.y = fmaxf(m.y, __shfl_xor_sync(ALL_LANES, m.y, i));
    if (__any_sync(ALL_LANES, m.x > f.largest[n].x || m.y > f.largest[n].y)) {
      const float2 old = f.largest[n];
      f.largest[n] = make_float2(fmaxf(m.x, old.x), fmaxf(m.y, old.y));
      scale(f, n, exp2_fast(old.x - f.largest[n].x), exp2_fast(old.y - f.largest[n].y));
    }
#pragma unroll
    for (int part = 0; part < 4; part++) {
      float v = exp2_fast(x[part / 2][n][part % 2 * 2] - f.largest[n].x), w = exp2_fast(x[part / 2][n][part % 2 * 2 + 1] - f.largest[n].y);
      f.sum[n].x += v, f.sum[n].y += w;
#if FP8
      const float factor = s.v_scales[part * 8 + threadIdx.x / 4] * Q_FACTOR;
      v *= factor, w *= factor;
#endif
      b[n][part] = transpose8x8(pack2(v, w));
    }
  }
}

// o^T += v^T p^T of a tile.
__device__ __forceinline__ void add_values(const Stage& s, const u32 (&b)[NT][4], Softmax& f) {
  const int lane = threadIdx.x;
#pragma unroll
  for (int h = 0; h < 2; h++) {
#if FP8  // a column of pairs of bytes becomes rows g (even elements of H) and g + 8 (odd)
#pragma unroll
    for (int i = 0; i < KT; i += 2) {
      u32 w[4];
      ldmatrix_x4_transposed(w, smem_u32(s.v) + swizzled(h * 16 + lane % 16, i + lane / 16));
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const u32 a[4] = {even_pair(w[2 * j]), odd_pair(w[2 * j]), even_pair(w[2 * j + 1]), odd_pair(w[2 * j + 1])};
#pragma unroll
        for (int n = 0; n < NT; n++) mma(f.o[i + j][n], a[0], a[1], a[2], a[3], b[n][2 * h], b[n][2 * h + 1]);
      }
    }
#else
#pragma unroll
    for (int i = 0; i < KT; i++) {
      u32 a[4];
      ldmatrix_x4_transposed(a, smem_u32(s.v) + swizzled(h * 16 + lane / 16 * 8 + lane % 8, 2 * i + lane / 8 % 2));
#pragma unroll
      for (int n = 0; n < NT; n++) mma(f.o[i][n], a[0], a[1], a[2], a[3], b[n][2 * h], b[n][2 * h + 1]);
    }
#endif
  }
}

// The index of the row's first chunk in the workspace.
__device__ __forceinline__ size_t workspace_index(const Parameters& p, const Unit& u) { return ((size_t)u.row * KV_HEADS + u.head) * p.max_chunks; }

// Store this unit's softmax in the workspace, for the unit of the row's last chunk.
__device__ __forceinline__ void store_chunk(const Parameters& p, const Unit& u, const Softmax& f) {
  const int lane = threadIdx.x, t = lane % 4;
  const size_t at = workspace_index(p, u) + u.chunk;
  u32* to = p.partials + at * (8 * NT * H) + lane * 4;
#pragma unroll
  for (int n = 0; n < NT; n++) {
    if (n * 8 + 2 * t >= GROUP) continue;
    if (lane < 4) store_partial(p.maxima + at * (16 * NT) + n * 16 + 4 * t, f.largest[n].x, f.sum[n].x, f.largest[n].y, f.sum[n].y);
#pragma unroll
    for (int i = 0; i < KT; i++) store_partial(to + (i * NT + n) * 128, f.o[i][n]);
  }
}

// Add the results of the row's earlier chunks and clear their words.
__device__ __forceinline__ void add_chunks(const Parameters& p, const Unit& u, Softmax& f) {
  const int lane = threadIdx.x, t = lane % 4, others = u.chunk;
  const size_t first = workspace_index(p, u);
#pragma unroll
  for (int n = 0; n < NT; n++) {
    if (n * 8 + 2 * t >= GROUP) continue;
    u32* maxima = p.maxima + first * (16 * NT) + n * 16 + 4 * t;
    u32* partials = p.partials + first * (8 * NT * H) + n * 128 + lane * 4;
    float2 m = f.largest[n];
    for (int c0 = 0; c0 < others; c0 += 8) {
      u32 x[8][4];
      bool missing;
      do {  // reload all words if one is missing: reloading one by one costs a trip to L2 each
        missing = false;
#pragma unroll
        for (int j = 0; j < 8; j++) load_relaxed(maxima + min(c0 + j, others - 1) * (16 * NT), x[j]);
#pragma unroll
        for (int j = 0; j < 8; j++) missing |= is_missing(x[j]);
      } while (missing);
#pragma unroll
      for (int j = 0; j < 8; j++) {
        m.x = fmaxf(m.x, __uint_as_float(x[j][0])), m.y = fmaxf(m.y, __uint_as_float(x[j][2]));
      }
    }
    scale(f, n, exp2_fast(f.largest[n].x - m.x), exp2_fast(f.largest[n].y - m.y));
    constexpr int BATCH = NT == 1 ? 3 : 2;  // chunks whose loads are in flight together
    for (int c0 = 0; c0 < others; c0 += BATCH) {
      u32 x[BATCH][4], v[BATCH][KT][4];
#pragma unroll
      for (int j = 0; j < BATCH; j++) {
        const int c = min(c0 + j, others - 1);
        load_relaxed(maxima + c * (16 * NT), x[j]);
#pragma unroll
        for (int i = 0; i < KT; i++) load_relaxed(partials + (size_t)c * (8 * NT * H) + i * (NT * 128), v[j][i]);
      }
#pragma unroll
      for (int j = 0; j < BATCH; j++) {
        if (c0 + j >= others) break;
        const float a = exp2_fast(__uint_as_float(x[j][0]) - m.x), b = exp2_fast(__uint_as_float(x[j][2]) - m.y);
        f.sum[n].x = fmaf(a, __uint_as_float(x[j][1]), f.sum[n].x), f.sum[n].y = fmaf(b, __uint_as_float(x[j][3]), f.sum[n].y);
#pragma unroll
        for (int i = 0; i < KT; i++) {
          u32* at = partials + (size_t)(c0 + j) * (8 * NT * H) + i * (NT * 128);
          while (is_missing(v[j][i])) load_relaxed(at, v[j][i]);
          clear_partial(at);
#pragma unroll
          for (int e = 0; e < 4; e++) f.o[i][n][e] = fmaf(e % 2 ? b : a, __uint_as_float(v[j][i][e]), f.o[i][n][e]);
        }
      }
    }
  }
  __syncwarp();  // every lane has read the maxima
  for (int i = lane; i < others * NT * 4; i += 32) clear_partial(p.maxima + first * (16 * NT) + i * 4);
}

__device__ __forceinline__ void store_output(const Parameters& p, const Unit& u, const Softmax& f) {
  const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
  u16* to = p.out + ((size_t)u.row * KV_HEADS + u.head) * GROUP * H;
#pragma unroll
  for (int n = 0; n < NT; n++) {
    const float a = SUM_FACTOR / f.sum[n].x, b = SUM_FACTOR / f.sum[n].y;
#pragma unroll
    for (int i = 0; i < KT; i++) {
      const float* v = f.o[i][n];
#if FP8  // rows g and g + 8 are neighbors in H
      if (n * 8 + 2 * t < GROUP) *(u32*)(to + (n * 8 + 2 * t) * H + i * 16 + 2 * g) = pack2(v[0] * a, v[2] * a);
      if (n * 8 + 2 * t + 1 < GROUP) *(u32*)(to + (n * 8 + 2 * t + 1) * H + i * 16 + 2 * g) = pack2(v[1] * b, v[3] * b);
#else
      const u32 top = transpose8x8(pack2(v[0] * a, v[1] * b)), bottom = transpose8x8(pack2(v[2] * a, v[3] * b));
      if (n * 8 + g < GROUP) *(u32*)(to + (n * 8 + g) * H + i * 16 + 2 * t) = top, *(u32*)(to + (n * 8 + g) * H + i * 16 + 8 + 2 * t) = bottom;
#endif
    }
  }
}

__device__ __forceinline__ void finish(const Parameters& p, const Unit& u, Softmax& f) {
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int i = 4; i < 32; i *= 2) f.sum[n].x += __shfl_xor_sync(ALL_LANES, f.sum[n].x, i), f.sum[n].y += __shfl_xor_sync(ALL_LANES, f.sum[n].y, i);
  if (!u.is_last()) {
    store_chunk(p, u, f);
  } else {
    if (u.chunk) add_chunks(p, u, f);
    store_output(p, u, f);
  }
}

extern "C" __global__ void __launch_bounds__(32, CTAS) decode_attention(const __grid_constant__ Parameters p) {
  extern __shared__ __align__(128) u8 raw[];
  Stage* stages = (Stage*)raw;
  int* positions = (int*)(raw + STAGES * sizeof(Stage));
  launch_dependents();
  const u64 policy = l2_evict_first();
  const int lane = threadIdx.x;
  int longest = -1;
  for (int row = lane; row < p.rows; row += 32) positions[row] = p.positions[row], longest = max(longest, positions[row]);
  longest = __reduce_max_sync(ALL_LANES, longest);
  __syncwarp();
  const int units = (longest / CHUNK + (longest >= 0)) * p.rows * KV_HEADS;
  Unit u = find_unit(p, positions, blockIdx.x, units), ahead = u, later = u;
  int ahead_tile = 0, stage = 0;
  if (u.tiles) later = find_unit(p, positions, u.index + gridDim.x, units);
  // Start copying the next tile into a free stage.
  auto fetch_ahead = [&](int to) {
    if (ahead.tiles) {
      fetch(p, ahead, ahead_tile, stages[to], policy);
      if (++ahead_tile == ahead.tiles) {
        ahead = later, ahead_tile = 0;
        if (ahead.tiles) later = find_unit(p, positions, ahead.index + gridDim.x, units);
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
#pragma unroll 1
  for (int i = 0; i < STAGES; i++) fetch_ahead(i);
  grid_dependency_wait();  // everything read so far was written by earlier steps
  for (int row = blockIdx.x; row < p.rows; row += gridDim.x)
    if (positions[row] < 0)
      for (int i = lane; i < GROUP * KV_HEADS * H / 2; i += 32) ((u32*)p.out)[row * (GROUP * KV_HEADS * H / 2) + i] = 0;
#pragma unroll 1
  while (u.tiles) {
    u32 q[NT][KT][2];
    load_queries(p, u, q);
    CacheEntry new_k = {}, new_v = {};
    if (u.is_last()) load_new_token(p, u.row, u.head, u.position, new_k, new_v);
    Softmax f;
    clear(f);
#pragma unroll 1
    for (int tile = 0; tile < u.tiles; tile++) {
      asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 1) : "memory");
      __syncwarp();
      Stage& s = stages[stage];
      if (tile == u.tiles - 1 && u.is_last()) {
        write_new_token(p, u, s, new_k, new_v, __shfl_sync(ALL_LANES, u.slot, u.position % CHUNK / 16) + u.position % 16);
        __syncwarp();
      }
      float x[2][NT][4];
      u32 b[NT][4];
      score(p, s, q, u.length() - tile * TILE, x);
      softmax_weights(s, x, f, b);
      add_values(s, b, f);
      __syncwarp();
      fetch_ahead(stage);
      stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
    finish(p, u, f);
    u = find_unit(p, positions, u.index + gridDim.x, units);
  }
}
