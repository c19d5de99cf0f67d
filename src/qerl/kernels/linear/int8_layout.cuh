// The places of the factors of int8_product: blocks of ROWS lines (of the second factor, COLUMNS) x DEPTH bytes, by lines, then along the
// sum. A byte is an integer, and behind those, in blocks of their own, two are a bfloat16.
#pragma once
#include "types.cuh"

#define DEPTH 128  // a line of the 128-byte swizzle
#define ROWS 128   // of the first factor in a tile
#define COLUMNS 256

// A thread of wgmma gets every fourth pair of a line of sums; the second factor's lines are in such an order that these are eight
// neighboring columns.
template <bool IS_SECOND>
__device__ __forceinline__ size_t place_of(int row, int byte, int num_blocks) {
  const int lines = IS_SECOND ? COLUMNS : ROWS;
  int line = row % lines;
  if (IS_SECOND) line = line / 32 * 32 + line % 8 / 2 * 8 + line % 32 / 8 * 2 + line % 2;
  const size_t block = (size_t)(row / lines) * num_blocks + byte / DEPTH;
  return block * (lines * DEPTH) + line * DEPTH + ((byte % DEPTH / 16) ^ (line % 8)) * 16 + byte % 16;
}

// The column of an output. Of gate | up (features: the width of each, else 0) a tile has 128 of gate, then the same of up.
__device__ __forceinline__ int column_of(int n, int features) {
  if (features == 0) return n;
  const int feature = n < features ? n : n - features;
  return feature / 128 * COLUMNS + (n < features ? 0 : 128) + feature % 128;
}
