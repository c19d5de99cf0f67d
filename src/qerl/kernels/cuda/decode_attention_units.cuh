// The units of work in their order: by the chunk's place in its row, then by row, then by head. Rows that have no such chunk are not
// counted, so CTAs that take every n-th unit get the same number of units, however much the rows' lengths differ.
#pragma once
#include "decode_attention.cuh"

// A place, the index of its first unit, and the number of rows that have it: no more than have the place before. All lanes of a warp
// have the same one.
struct Place {
  int place, first, rows;
};

__device__ __forceinline__ bool has_place(const Parameters& p, const int* positions, int row, int place) {
  return row < p.rows && last_place(p, positions[row]) >= place * CHUNK;
}

__device__ __forceinline__ int rows_with(const Parameters& p, const int* positions, int place) {
  int rows = 0;
  for (int row0 = 0; row0 < p.rows; row0 += 32) rows += __popc(__ballot_sync(ALL_LANES, has_place(p, positions, row0 + threadIdx.x, place)));
  return rows;
}

__device__ __forceinline__ Place first_place(const Parameters& p, const int* positions) { return Place{0, 0, rows_with(p, positions, 0)}; }

// The n-th row that has this place; there are more than n.
__device__ __forceinline__ int nth_row(const Parameters& p, const int* positions, int place, int n) {
  const int lane = threadIdx.x;
  for (int row0 = 0;; row0 += 32) {
    const bool has = has_place(p, positions, row0 + lane, place);
    const u32 lanes = __ballot_sync(ALL_LANES, has);
    const int count = __popc(lanes);
    if (n < count) return row0 + __ffs(__ballot_sync(ALL_LANES, has && __popc(lanes & ((1u << lane) - 1)) == n)) - 1;
    n -= count;
  }
}

// Return the unit of this index, without tiles if there are no more. `at` moves on to its place, which is the one of the call before or
// a later one. A row's last chunk has its highest index.
__device__ __forceinline__ Unit find_unit(const Parameters& p, const int* positions, Place& at, int index) {
  Unit u;
  u.index = index, u.tiles = u.slot = 0;
  while (at.rows && index >= at.first + at.rows * KV_HEADS) at.first += at.rows * KV_HEADS, at.rows = rows_with(p, positions, ++at.place);
  if (!at.rows) return u;
  const int n = (index - at.first) / KV_HEADS;
  u.head = index - at.first - n * KV_HEADS, u.row = at.rows == p.rows ? n : nth_row(p, positions, at.place, n);
  u.chunk = at.place, u.position = positions[u.row];
#if WINDOW
  const int first = first_seen(p, u.position);
  u.order = u.chunk, u.chunk += first / CHUNK, u.start = u.order ? 0 : first % CHUNK;
#endif
  u.tiles = (u.length() + TILE - 1) / TILE;
  const int from = u.chunk * CHUNK + (threadIdx.x % SLOTS) * 16;
  if (threadIdx.x < SLOTS && from <= u.position) u.slot = p.tables[(size_t)u.row * p.table_width + from / PAGE] * PAGE + from % PAGE;
  return u;
}
