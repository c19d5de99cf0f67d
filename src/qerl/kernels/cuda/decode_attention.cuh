// Shared by decode_attention.cu and decode_attention_write.cu: parameters, units of work, copies to shared memory.
// decode_attention.cu lists the compile-time constants.
#pragma once
#include "async_copy.cuh"
#include "bfloat16.cuh"
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

#define NT ((GROUP + 7) / 8)               // tiles of 8 query heads
#define KT (H / 16)                        // tiles of 16 along H
#define ROW_BYTES (H * (FP8 ? 1 : 2))      // one key
#define TILE (ROW_BYTES == 512 ? 16 : 32)  // positions scored at once
#define HALVES (TILE / 16)
#define SLOTS (CHUNK / 16)
#define Q_FACTOR (FP8 ? 1.2676506002282294e30f : 1.f)  // 2^100
#define SUM_FACTOR (FP8 ? 1048576.f : 1.f)             // 2^20
#define Q_WIDTH (H * (1 + GATED))                      // one query head, with its gate
#define WIDTH ((GROUP * (1 + GATED) + 2) * KV_HEADS * H)  // one row of qkv

struct Parameters {
  const u16* qkv;       // [rows, (GROUP + 2) KV_HEADS, H]; if GATED, each query head is followed by its gate
  const float* angles;  // [positions, ROTARY]: cosines, then sines
  u8 *k, *v;            // [pages, PAGE, KV_HEADS, H]
  float *k_scales, *v_scales;
  const int *positions, *tables;
  const float *q_norm, *k_norm;
  u16* out;         // [rows, GROUP KV_HEADS, H]
  u32* partials;    // [rows, KV_HEADS, max_chunks, 8 NT H] fp32; all words are EMPTY before and after a launch
  u32* maxima;      // [rows, KV_HEADS, max_chunks, MAXIMA_COPIES, 8 NT, 2]: largest score in log2, sum of weights; EMPTY likewise
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

// Bytes 0 and 2 (even), or 1 and 3 (odd), of four E4M3 numbers as two bfloat16, each * 2^-120.
__device__ __forceinline__ u32 even_pair(u32 w) { return ((w << 8) & 0x80008000u) | ((w << 4) & 0x07F007F0u); }
__device__ __forceinline__ u32 odd_pair(u32 w) { return (w & 0x80008000u) | ((w >> 4) & 0x07F007F0u); }

// The swizzled offset of a 16-byte piece of a tile's row: the pieces of 8 rows in one column use 8 different groups of banks.
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

// A row's position counted from the first chunk that it sees.
__device__ __forceinline__ int last_place(const Parameters& p, int position) { return position - first_seen(p, position) / CHUNK * CHUNK; }

// One chunk of one row and K/V head. `slot`: lane i has the cache slot of the chunk's position 16 i. `order`: the chunk's place
// among those that the row sees. `start`: the first position of the chunk that the row sees.
struct Unit {
  int index, row, chunk, head, position, tiles, slot;
#if WINDOW
  int order, start;
#else
  static constexpr int start = 0;
#endif
  __device__ __forceinline__ int length() const { return min(CHUNK, position + 1 - chunk * CHUNK); }
  __device__ __forceinline__ bool is_last() const { return position - chunk * CHUNK < CHUNK; }
  __device__ __forceinline__ int first_tile() const { return start / TILE; }
  __device__ __forceinline__ int place() const {
#if WINDOW
    return order;
#else
    return chunk;
#endif
  }
};

// Start copying a tile's keys and values, in whole groups of 16 positions of which the row sees one.
__device__ __forceinline__ void fetch(const Parameters& p, const Unit& u, int tile, Stage& to) {
  constexpr int PIECES = ROW_BYTES / 16, ROWS = 32 / PIECES;
  const int lane = threadIdx.x, piece = lane % PIECES;
  const u32 to_k = own_register(smem_u32(to.k)), to_v = to_k + TILE * ROW_BYTES;
  const u64 policy = once_policy();
#pragma unroll
  for (int half = 0; half < HALVES; half++) {
    const int slot = __shfl_sync(ALL_LANES, u.slot, tile * HALVES + half);
    if (tile * TILE + half * 16 >= u.length()) break;
#if WINDOW
    if (tile * TILE + half * 16 + 16 <= u.start) continue;
#endif
    const size_t from = ((size_t)slot * KV_HEADS + u.head) * ROW_BYTES + piece * 16;
#pragma unroll(ROW_BYTES == 512 ? 4 : 16)  // more would spill
    for (int row0 = 0; row0 < 16; row0 += ROWS) {
      const int row = row0 + lane / PIECES, to_row = half * 16 + row;
      const size_t at = from + (size_t)row * (KV_HEADS * ROW_BYTES);
      copy_async_once(to_k + swizzled(to_row, piece), p.k + at, policy);
      copy_async_once(to_v + swizzled(to_row, piece), p.v + at, policy);
    }
#if FP8
    const size_t at = (size_t)(slot + lane % 16) * KV_HEADS + u.head;
    copy_async_4(smem_u32((lane < 16 ? to.k_scales : to.v_scales) + half * 16 + lane % 16), (lane < 16 ? p.k_scales : p.v_scales) + at);
#endif
  }
}
