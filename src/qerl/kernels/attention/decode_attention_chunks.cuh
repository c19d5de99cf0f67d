// The online softmax of a unit, and the sum of a row's chunks through the workspace.
#pragma once
#include "decode_attention.cuh"
#include "workspace.cuh"

#define LOG2_E 1.4426950408889634f

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

#if GATED
__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.f, 1.f + exp2_fast(-LOG2_E * x)); }
#endif

// The online softmax of a unit, for this lane's two heads of each tile of heads and all or one of the tiles of H. o is not yet
// divided by sum.
template <int TILES>
struct SoftmaxOf {
  float o[TILES][NT][4];
  float2 largest[NT], sum[NT];  // sum has this lane's share until `finish`
};
typedef SoftmaxOf<KT> Softmax;

__device__ __forceinline__ void clear(Softmax& f) {
#pragma unroll
  for (int n = 0; n < NT; n++) {
    f.largest[n] = make_float2(-INF, -INF), f.sum[n] = make_float2(0.f, 0.f);
#pragma unroll
    for (int i = 0; i < KT; i++) f.o[i][n][0] = f.o[i][n][1] = f.o[i][n][2] = f.o[i][n][3] = 0.f;
  }
}

template <int TILES>
__device__ __forceinline__ void scale(SoftmaxOf<TILES>& f, int n, float a, float b) {
#pragma unroll
  for (int i = 0; i < TILES; i++) f.o[i][n][0] *= a, f.o[i][n][1] *= b, f.o[i][n][2] *= a, f.o[i][n][3] *= b;
  f.sum[n].x *= a, f.sum[n].y *= b;
}

// The index of the row's first chunk in the workspace.
__device__ __forceinline__ size_t workspace_index(const Parameters& p, int row, int head) { return ((size_t)row * KV_HEADS + head) * p.max_chunks; }

// The largest scores and sums of a chunk. With FEW_ROWS there is a copy for each tile of H, which is added up by itself.
#define MAXIMA_COPIES (FEW_ROWS ? KT : 1)
__device__ __forceinline__ u32* maxima_of(const Parameters& p, size_t chunk, int copy) { return p.maxima + (chunk * MAXIMA_COPIES + copy) * (16 * NT); }

// Store this unit's softmax in the workspace, for those who add up the row's chunks.
__device__ __forceinline__ void store_chunk(const Parameters& p, const Unit& u, const Softmax& f) {
  const int lane = threadIdx.x, t = lane % 4;
  const size_t at = workspace_index(p, u.row, u.head) + u.place();
  u32* to = p.partials + at * (8 * NT * H) + lane * 4;
#pragma unroll
  for (int n = 0; n < NT; n++) {
    if (n * 8 + 2 * t >= GROUP) continue;
#pragma unroll
    for (int copy = 0; copy < MAXIMA_COPIES; copy += 8)
      if (lane < 4 * (MAXIMA_COPIES - copy))
        store_partial(maxima_of(p, at, copy + lane / 4) + n * 16 + 4 * t, f.largest[n].x, f.sum[n].x, f.largest[n].y, f.sum[n].y);
#pragma unroll
    for (int i = 0; i < KT; i++) store_partial(to + (i * NT + n) * 128, f.o[i][n]);
  }
}

#if !FEW_ROWS
// Add the results of the row's earlier chunks and clear their words.
__device__ __forceinline__ void add_chunks(const Parameters& p, const Unit& u, Softmax& f) {
  const int lane = threadIdx.x, t = lane % 4, others = u.place();
  const size_t first = workspace_index(p, u.row, u.head);
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
    f.largest[n] = m;
    constexpr int BATCH = H == 256 ? 1 : NT == 1 ? 3 : 2;  // chunks whose loads are in flight together
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
#endif

#if SINKS
// Add the heads' sinks to the sums: logits of the softmax that have no value.
template <int TILES>
__device__ __forceinline__ void add_sinks(const Parameters& p, int kv_head, SoftmaxOf<TILES>& f) {
  const float* sinks = p.sinks + kv_head * GROUP;
#pragma unroll
  for (int n = 0; n < NT; n++) {
    const int head = n * 8 + threadIdx.x % 4 * 2;
    const float2 sink = make_float2(sinks[min(head, GROUP - 1)] * LOG2_E, sinks[min(head + 1, GROUP - 1)] * LOG2_E);
    const float2 m = make_float2(fmaxf(f.largest[n].x, sink.x), fmaxf(f.largest[n].y, sink.y));
    scale(f, n, exp2_fast(f.largest[n].x - m.x), exp2_fast(f.largest[n].y - m.y));
    f.sum[n].x += exp2_fast(sink.x - m.x), f.sum[n].y += exp2_fast(sink.y - m.y);
  }
}
#endif
