// o = softmax(q k^T / sqrt(H)) v for one token per row over a paged cache, including rotary embedding and cache write.
//
// The work is divided into units: (chunk of CHUNK positions, row, K/V head), in the order of decode_attention_units.cuh. A CTA is one
// warp. It takes every gridDim.x-th unit and processes its tiles of 32 positions. STAGES tiles are in flight (cp.async), also across
// the end of a unit; the first ones start before the previous kernel has ended. No warp waits for another warp's tile, and only k and v
// go through shared memory:
//
//   s^T [32, heads] = k [32, H] q^T        q in registers, heads padded to 8 or 16: columns of mma's second operand
//   o^T [H, heads] += v^T [H, 32] p^T      p^T is s^T's registers, transposed 8 x 8 at a time; online softmax
//
// Chunks are combined through a workspace (workspace.cuh): the unit of a row's last chunk waits for the row's other units, which all
// have lower indices, and adds them in their order. With FEW_ROWS (up to 32) one warp a row would be long at it, so each 16 elements of
// H are added up by another CTA, after its units: the same sums in the same order.
//
// FP8: products in half precision, which has all E4M3 numbers, and those of bfloat16 from 6e-5 to 65,504. p times the scale of a value is
// multiplied by 2^10: of a head of values the largest may be from 1e-4 to 28,000.
//
// Compile-time: H head size, GROUP query heads per K/V head, KV_HEADS, PAGE positions per page, CHUNK, FP8, STAGES, CTAS per
// multiprocessor. If given: FEW_ROWS (1: at most 32 rows); VARIABLE (1: chunks have as many positions as p.chunk says); ROTARY
// elements of a head that are rotated, 0 or a multiple of 32; INTERLEAVED (1: elements 2 j and 2 j + 1 are rotated together, not j and
// j + ROTARY / 2); WINDOW, SOFTCAP, SINKS, GATED (1: there is one). A window skips whole chunks, tiles and groups of 16 positions, and
// masks what is left before it.
#include "decode_attention_chunks.cuh"
#include "decode_attention_query.cuh"
#include "decode_attention_rows.cuh"
#include "decode_attention_tile.cuh"
#include "decode_attention_units.cuh"

__device__ __forceinline__ void clear_values(Stage& s, int from, int to) {
  constexpr int PER_ROW = ROW_BYTES / 16;
  for (int i = threadIdx.x; i < (to - from) * PER_ROW; i += 32) *(uint4*)(s.v + swizzled(from + i / PER_ROW, i % PER_ROW)) = make_uint4(0, 0, 0, 0);
}

#if WINDOW
// Set the values before the window to zero: they may not have been copied, and 0 times what lay there need not be 0.
__device__ __forceinline__ void clear_before(Stage& s, int rows) {
#if FP8
  if (threadIdx.x < rows) s.k_scales[threadIdx.x] = s.v_scales[threadIdx.x] = 0.f;
#endif
  clear_values(s, 0, rows);
}
#endif

// Write the new token to the cache and to its tile in shared memory, which has arrived. Set the tile's later values to zero.
__device__ __forceinline__ void write_new_token(const Parameters& p, const Unit& u, Stage& s, const CacheEntry& k, const CacheEntry& v, int slot) {
  const int lane = threadIdx.x, row = u.position % TILE;
  const auto in_tile = [row](int byte) { return swizzled(row, byte / 16) + byte % 16; };
  write_cache(p, u.head, slot, k, v);
  store_entry(k, s.k, in_tile), store_entry(v, s.v, in_tile);
#if FP8
  if (lane == 0) s.k_scales[row] = k.scale, s.v_scales[row] = v.scale;
  if (lane > row) s.k_scales[lane] = s.v_scales[lane] = 0.f;
#endif
  clear_values(s, row + 1, TILE);
}

// Two neighboring elements of a query head's o, times the sigmoid of the head's gate if there is one.
__device__ __forceinline__ u32 gated(const Parameters& p, const Unit& u, int head, int element, u32 pair) {
#if GATED
  const u32 gate = *(const u32*)(p.qkv + (size_t)u.row * WIDTH + (u.head * GROUP + head) * Q_WIDTH + H + element);
  return pack2(low(pair) * sigmoid(low(gate)), high(pair) * sigmoid(high(gate)));
#else
  return pair;
#endif
}

// Store the output of all tiles of H, or of one from `first` on.
template <int TILES>
__device__ __forceinline__ void store_output(const Parameters& p, const Unit& u, const SoftmaxOf<TILES>& f, int first = 0) {
  const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
  u16* to = p.out + ((size_t)u.row * KV_HEADS + u.head) * GROUP * H;
#pragma unroll
  for (int n = 0; n < NT; n++) {
    const float a = SUM_FACTOR / f.sum[n].x, b = SUM_FACTOR / f.sum[n].y;
#pragma unroll
    for (int i = 0; i < TILES; i++) {
      const float* v = f.o[i][n];
#if FP8  // rows g and g + 8 are neighbors in H
      const int head = n * 8 + 2 * t, at = (first + i) * 16 + 2 * g;
      if (head < GROUP) *(u32*)(to + head * H + at) = gated(p, u, head, at, pack2(v[0] * a, v[2] * a));
      if (head + 1 < GROUP) *(u32*)(to + (head + 1) * H + at) = gated(p, u, head + 1, at, pack2(v[1] * b, v[3] * b));
#else
      const int head = n * 8 + g, at = (first + i) * 16 + 2 * t;
      const u32 top = transpose8x8(pack2(v[0] * a, v[1] * b)), bottom = transpose8x8(pack2(v[2] * a, v[3] * b));
      if (head < GROUP) *(u32*)(to + head * H + at) = gated(p, u, head, at, top), *(u32*)(to + head * H + at + 8) = gated(p, u, head, at + 8, bottom);
#endif
    }
  }
}

__device__ __forceinline__ void finish(const Parameters& p, const Unit& u, Softmax& f) {
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int i = 4; i < 32; i *= 2) f.sum[n].x += __shfl_xor_sync(ALL_LANES, f.sum[n].x, i), f.sum[n].y += __shfl_xor_sync(ALL_LANES, f.sum[n].y, i);
#if FEW_ROWS
  if (u.place() || !u.is_last()) return store_chunk(p, u, f);
#else
  if (!u.is_last()) return store_chunk(p, u, f);
  if (u.place()) add_chunks(p, u, f);
#endif
#if SINKS
  add_sinks(p, u.head, f);
#endif
  store_output(p, u, f);
}

#if FEW_ROWS
// Finish the rows of several chunks: each tile of 16 along H by itself. CTAs that have no unit, or the fewest, are the first to do so.
__device__ __forceinline__ void finish_rows(const Parameters& p, const Place& at, float4* weights) {
  const bool is_long = at.chunks > 1;
  const int count = __popc(__ballot_sync(ALL_LANES, is_long)) * (KV_HEADS * KT);
#pragma unroll 1
  for (int i = gridDim.x - 1 - blockIdx.x; i < count; i += gridDim.x) {
    Unit u;
    u.head = i / KT % KV_HEADS, u.row = nth_row(is_long, i / (KT * KV_HEADS));
    SoftmaxOf<1> f;
    add_tile(p, u.row, u.head, i % KT, __shfl_sync(ALL_LANES, at.chunks, u.row), weights, f);
#if SINKS
    add_sinks(p, u.head, f);
#endif
    store_output(p, u, f, i % KT);
  }
}
#endif

extern "C" __global__ void __launch_bounds__(32, CTAS) decode_attention(const __grid_constant__ Parameters p) {
  extern __shared__ __align__(512) u8 raw[];
  Stage* stages = (Stage*)raw;
  const u32 first_stage = own_register(smem_u32(raw));
  int* positions = (int*)(raw + STAGES * sizeof(Stage));
  launch_dependents();
  const int lane = threadIdx.x;
  for (int row = lane; row < p.rows; row += 32) positions[row] = p.positions[row];
  __syncwarp();
  const Rows rows(p, positions);
  Place at = first_place(p, rows);
  Unit u = find_unit(p, rows, at, blockIdx.x), ahead = u, later = u;
  Place later_at = at;
  int ahead_tile = ahead.first_tile(), stage = 0;
  if (u.tiles) later = find_unit(p, rows, later_at, u.index + gridDim.x);
  // Start copying the next tile into a free stage.
  auto fetch_ahead = [&](int to) {
    if (ahead.tiles) {
      fetch(p, ahead, ahead_tile, first_stage + to * (u32)sizeof(Stage));
      if (++ahead_tile == ahead.tiles) {
        ahead = later, ahead_tile = ahead.first_tile();
        if (ahead.tiles) later = find_unit(p, rows, later_at, ahead.index + gridDim.x);
      }
    }
    commit_copies();
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
    for (int tile = u.first_tile(); tile < u.tiles; tile++) {
      wait_copies<STAGES - 1>();
      __syncwarp();
      Stage& s = stages[stage];
      const u32 at = first_stage + stage * (u32)sizeof(Stage);
#if WINDOW
      if (tile == u.first_tile() && u.start % TILE) {
        clear_before(s, u.start % TILE);
        __syncwarp();
      }
#endif
      if (tile == u.tiles - 1 && u.is_last()) {
        write_new_token(p, u, s, new_k, new_v, __shfl_sync(ALL_LANES, u.slot, u.position % u.size / 16) + u.position % 16);
        __syncwarp();
      }
      float x[2][NT][4];
      u32 b[NT][2 * HALVES];
      score(p, s, at, q, u.start - tile * TILE, u.length() - tile * TILE, x);
      softmax_weights(s, x, f, b);
      add_values(at + TILE * ROW_BYTES, b, f);
      __syncwarp();
      fetch_ahead(stage);
      stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
    finish(p, u, f);
    u = find_unit(p, rows, at, u.index + gridDim.x);
  }
#if FEW_ROWS
  finish_rows(p, at, (float4*)raw);
#endif
}
