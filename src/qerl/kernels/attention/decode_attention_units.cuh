// The units of work in their order: by the chunk's place in its row, then by row, then by head. Rows that have no such chunk are not
// counted, so CTAs that take every n-th unit get the same number of units, however much the rows' lengths differ.
#pragma once
#include "decode_attention.cuh"

#if FEW_ROWS  // at most one row a lane: all places are searched at once
// The chunks of this lane's row, and the number of all units.
struct Place {
  int chunks, units;
};

__device__ __forceinline__ Place first_place(const Parameters& p, const Rows& rows) {
  const int lane = threadIdx.x, position = lane < p.rows ? rows.positions[lane] : -1;
  Place at;
  at.chunks = at.units = position < 0 ? 0 : last_place(p, rows, position) / CHUNK + 1;
#pragma unroll
  for (int i = 16; i; i /= 2) at.units += __shfl_sync(ALL_LANES, at.units, lane ^ i);
  at.units *= KV_HEADS;
  return at;
}

// The row of the n-th lane for which `has` holds; there are more than n.
__device__ __forceinline__ int nth_row(bool has, int n) {
  const u32 lanes = __ballot_sync(ALL_LANES, has);
  return __ffs(__ballot_sync(ALL_LANES, has && __popc(lanes & ((1u << threadIdx.x) - 1)) == n)) - 1;
}

// Set the chunk's place in its row, the row and the head of the unit of this index. Return false if there are no more.
__device__ __forceinline__ bool locate(const Parameters& p, const Rows& rows, Place& at, int index, int& place, int& row, int& head) {
  if (index >= at.units) return false;
  int first = 0;
  for (int place0 = 0;; place0 += 32) {
    int before = 0;  // units of the places before this lane's
    for (int row0 = 0; row0 < p.rows; row0 += 8)
#pragma unroll
      for (int i = 0; i < 8; i++) before += min(__shfl_sync(ALL_LANES, at.chunks, row0 + i), place0 + (int)threadIdx.x);
    before *= KV_HEADS;
    const int found = __popc(__ballot_sync(ALL_LANES, before <= index));
    if (found) place = place0 + found - 1, first = __shfl_sync(ALL_LANES, before, found - 1);
    if (found < 32) break;
  }
  const int n = (index - first) / KV_HEADS;
  head = index - first - n * KV_HEADS, row = nth_row(at.chunks > place, n);
  return true;
}
#else
// A place, the index of its first unit, and the number of rows that have it: no more than have the place before. All lanes of a warp
// have the same one.
struct Place {
  int place, first, rows;
};

__device__ __forceinline__ bool has_place(const Parameters& p, const Rows& rows, int row, int place) {
  return row < p.rows && last_place(p, rows, rows.positions[row]) >= place * rows.chunk;
}

__device__ __forceinline__ int count_with(const Parameters& p, const Rows& rows, int place) {
  int count = 0;
  for (int row0 = 0; row0 < p.rows; row0 += 32) count += __popc(__ballot_sync(ALL_LANES, has_place(p, rows, row0 + threadIdx.x, place)));
  return count;
}

__device__ __forceinline__ Place first_place(const Parameters& p, const Rows& rows) { return Place{0, 0, count_with(p, rows, 0)}; }

// The n-th row that has this place; there are more than n.
__device__ __forceinline__ int nth_row(const Parameters& p, const Rows& rows, int place, int n) {
  const int lane = threadIdx.x;
  for (int row0 = 0;; row0 += 32) {
    const bool has = has_place(p, rows, row0 + lane, place);
    const u32 lanes = __ballot_sync(ALL_LANES, has);
    const int count = __popc(lanes);
    if (n < count) return row0 + __ffs(__ballot_sync(ALL_LANES, has && __popc(lanes & ((1u << lane) - 1)) == n)) - 1;
    n -= count;
  }
}

// Set the chunk's place in its row, the row and the head of the unit of this index. Return false if there are no more.
__device__ __forceinline__ bool locate(const Parameters& p, const Rows& rows, Place& at, int index, int& place, int& row, int& head) {
  while (at.rows && index >= at.first + at.rows * KV_HEADS) at.first += at.rows * KV_HEADS, at.rows = count_with(p, rows, ++at.place);
  if (!at.rows) return false;
  const int n = (index - at.first) / KV_HEADS;
  place = at.place, head = index - at.first - n * KV_HEADS, row = at.rows == p.rows ? n : nth_row(p, rows, at.place, n);
  return true;
}
#endif

// Return the unit of this index, without tiles if there are no more. `at` moves on to its place, which is the one of the call before or
// a later one. A row's last chunk has its highest index.
__device__ __forceinline__ Unit find_unit(const Parameters& p, const Rows& rows, Place& at, int index) {
  Unit u;
  u.index = index, u.tiles = u.slot = 0;
#if VARIABLE
  u.size = rows.chunk;
#endif
  if (!locate(p, rows, at, index, u.chunk, u.row, u.head)) return u;
  u.position = rows.positions[u.row];
#if WINDOW
  const int first = first_seen(p, u.position);
  u.order = u.chunk, u.chunk += first / u.size, u.start = u.order ? 0 : first % u.size;
#endif
  u.tiles = (u.length() + TILE - 1) / TILE;
  const int from = u.chunk * u.size + (threadIdx.x % SLOTS) * 16;
  if (threadIdx.x < SLOTS && from <= u.position) u.slot = p.tables[(size_t)u.row * p.table_width + from / PAGE] * PAGE + from % PAGE;
  return u;
}
