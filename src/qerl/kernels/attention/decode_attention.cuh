// Shared by decode_attention.cu and decode_attention_write.cu: parameters, units of work, copies to shared memory.
// decode_attention.cu lists the compile-time constants.
#pragma once
#include "async_copy.cuh"
#include "bfloat16.cuh"
#include "half.cuh"
#include "launch.cuh"
#include "memory.cuh"
#include "warp.cuh"

#ifndef ROTARY
#define ROTARY H
#endif
#ifndef INTERLEAVED
#define INTERLEAVED 0
#endif
#ifndef WINDOW
#define WINDOW 0
#endif
#ifndef SOFTCAP
#define SOFTCAP 0
#endif
#ifndef SINKS
#define SINKS 0
#endif
#ifndef GATED
#define GATED 0
#endif
#ifndef FEW_ROWS
#define FEW_ROWS 0
#endif
#ifndef VARIABLE
#define VARIABLE 0
#endif

#define NT ((GROUP + 7) / 8)               // tiles of 8 query heads
#define KT (H / 16)                        // tiles of 16 along H
#define ROW_BYTES (H * (FP8 ? 1 : 2))      // one key
#define TILE (ROW_BYTES == 512 ? 16 : 32)  // positions scored at once
#define HALVES (TILE / 16)
#define SLOTS (CHUNK / 16)
#define SCORE_FACTOR (FP8 ? 1.f / E4M3_FACTOR : 1.f)
#define WEIGHT_FACTOR 1024.f  // of weights times FP8's scales, which are small
#define SUM_FACTOR (FP8 ? 1.f / (WEIGHT_FACTOR * E4M3_FACTOR) : 1.f)
#define Q_WIDTH (H * (1 + GATED))                      // one query head, with its gate
#define WIDTH ((GROUP * (1 + GATED) + 2) * KV_HEADS * H)  // one row of qkv

struct Parameters {
  const u16* qkv;       // [rows, (GROUP + 2) KV_HEADS, H]; if GATED, each query head is followed by its gate
  const float* angles;  // [positions, ROTARY]: cosines, then sines
  u8 *k, *v;            // [pages, PAGE, KV_HEADS, H]
  float *k_scales, *v_scales;  // [pages, KV_HEADS, PAGE]
  const int *positions, *tables;
  const float *q_norm, *k_norm;
  u16* out;         // [rows, GROUP KV_HEADS, H]
  u32* partials;    // [rows, KV_HEADS, max_chunks, 8 NT H] fp32; all words are EMPTY before and after a launch
  u32* maxima;      // [rows, KV_HEADS, max_chunks, MAXIMA_COPIES, 8 NT, 2]: largest score in log2, sum of weights; EMPTY likewise
  const int* chunk;  // if VARIABLE, the positions of a chunk: a multiple of TILE, at most CHUNK
  float eps, score_factor;  // of s in log2; with a soft cap, of 2 s / cap in log2
  int rows, table_width, max_chunks;
#if WINDOW || SOFTCAP || SINKS
  int window;          // positions that a query sees, its own included
  float softcap;       // in log2
  const float* sinks;  // [GROUP KV_HEADS]
#endif
};

struct Stage {
  u8 k[TILE * ROW_BYTES], v[TILE * ROW_BYTES];
#if FP8
  float k_scales[TILE], v_scales[TILE];
#endif
};

// The swizzled offset of a 16-byte piece of a tile's row: the pieces of 8 rows in one column use 8 different groups of banks. As tiles
// are aligned to rows, the address of piece ^ x is that of the piece ^ (x << 4).
__device__ __forceinline__ int swizzled(int row, int piece) {
  return row * ROW_BYTES + ((piece ^ (ROW_BYTES == 64 ? row >> 1 & 3 : row & 7)) << 4);
}

// The first position that a query at this one sees.
__device__ __forceinline__ int first_seen(const Parameters& p, int position) {
#if WINDOW
  return max(position + 1 - p.window, 0);
#else
  return 0;
#endif
}

// The newest position of each row, in shared memory, and the positions of a chunk.
struct Rows {
  const int* positions;
#if VARIABLE
  int chunk;
#else
  static constexpr int chunk = CHUNK;
#endif
  __device__ __forceinline__ Rows(const Parameters& p, const int* positions) : positions(positions) {
#if VARIABLE
    chunk = *p.chunk;
#endif
  }
};

// A row's position counted from the first chunk that it sees.
__device__ __forceinline__ int last_place(const Parameters& p, const Rows& rows, int position) {
  return position - first_seen(p, position) / rows.chunk * rows.chunk;
}

// One chunk of one row and K/V head. `slot`: lane i has the cache slot of the chunk's position 16 i. `order`: the chunk's place
// among those that the row sees. `start`: the first position of the chunk that the row sees.
struct Unit {
  int index, row, chunk, head, position, tiles, slot;
#if VARIABLE
  int size;  // positions of a chunk
#else
  static constexpr int size = CHUNK;
#endif
#if WINDOW
  int order, start;
#else
  static constexpr int start = 0;
#endif
  __device__ __forceinline__ int length() const { return min(size, position + 1 - chunk * size); }
  __device__ __forceinline__ bool is_last() const { return position - chunk * size < size; }
  __device__ __forceinline__ int first_tile() const { return start / TILE; }
  __device__ __forceinline__ int place() const {
#if WINDOW
    return order;
#else
    return chunk;
#endif
  }
};

// Where the scale of a slot's head is; those of 16 slots from a multiple of 16 on are neighbors.
__device__ __forceinline__ size_t scale_index(size_t slot, int head) { return (slot - slot % PAGE) * KV_HEADS + head * PAGE + slot % PAGE; }

// Start copying a tile's keys and values to a stage, whose address is in the lane's own register, in whole groups of 16 positions of
// which the row sees one.
__device__ __forceinline__ void fetch(const Parameters& p, const Unit& u, int tile, u32 to_k) {
  constexpr int PIECES = ROW_BYTES / 16, ROWS = 32 / PIECES, STRIDE = KV_HEADS * ROW_BYTES;
  const int lane = threadIdx.x, piece = lane % PIECES;
  const u32 to_v = to_k + TILE * ROW_BYTES;
  const u64 policy = once_policy();
  int slots[HALVES];
#pragma unroll
  for (int half = 0; half < HALVES; half++) slots[half] = __shfl_sync(ALL_LANES, u.slot, tile * HALVES + half);
#pragma unroll
  for (int half = 0; half < HALVES; half++) {
    const int slot = slots[half];
    if (tile * TILE + half * 16 >= u.length()) break;
#if WINDOW
    if (tile * TILE + half * 16 + 16 <= u.start) continue;
#endif
    const size_t from = ((size_t)slot * KV_HEADS + u.head) * ROW_BYTES + lane / PIECES * STRIDE + piece * 16;
    const u8 *k = p.k + from, *v = p.v + from;
#pragma unroll
    for (int row0 = 0; row0 < 16; row0 += ROWS) {
      const int to = swizzled(half * 16 + row0 + lane / PIECES, piece);
      copy_async_once(to_k + to, k + row0 * STRIDE, policy);
      copy_async_once(to_v + to, v + row0 * STRIDE, policy);
    }
#if FP8
    const float* scales = (lane < 4 ? p.k_scales : p.v_scales) + scale_index(slot, u.head) + lane % 4 * 4;
    copy_async_once_if(lane < 8, to_v + TILE * ROW_BYTES + (lane / 4 * TILE + half * 16 + lane % 4 * 4) * 4, scales, policy);
#endif
  }
}
