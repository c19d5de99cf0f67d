// out[n, k], the operand in bfloat16, from tiles of 64 rows x 64 k (tile_layout.py has the layouts). Compile-time: FORMAT of the tiles;
// FACTORS (NVFP4 alone): each row is multiplied by a power of two.
//
// A warp decodes 16 rows of a tile as the products do: lane 4 g + t then has, for rows g and g + 8, pairs of neighboring k in 8 chunks of
// 8. Four lanes exchange them until each has whole chunks, so that a store writes 64 consecutive bytes of a row.
#define LOAD(p) __ldcs(p)
#ifndef FACTORS
#define FACTORS 0
#endif
#include "bfloat16.cuh"
#include "launch.cuh"
#include "tile_block.cuh"

#define PLAIN_FACTOR 0x49004900u  // 2^19, twice

// NVFP4's decoded pairs are 2^-19 of the operand's. factor: two bfloat16.
__device__ __forceinline__ u32 finished(u32 a, u32 factor) {
#if FORMAT != 0
  return a;
#else
  u32 d;
#if __CUDA_ARCH__ >= 900
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(factor));
#else  // no product alone before Hopper; adding -0 changes no number
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(factor), "r"(0x80008000u));
#endif
  return d;
#endif
}

// Before: lane t of four has word t of each of four chunks. After: it has all words of chunk t.
__device__ __forceinline__ void transpose(u32 (&w)[4], int t) {
  const bool odd = t & 1, upper = t & 2;
  u32 a = __shfl_xor_sync(~0u, odd ? w[0] : w[1], 1), b = __shfl_xor_sync(~0u, odd ? w[2] : w[3], 1);
  if (odd) w[0] = a, w[2] = b;
  else w[1] = a, w[3] = b;
  a = __shfl_xor_sync(~0u, upper ? w[0] : w[2], 2), b = __shfl_xor_sync(~0u, upper ? w[1] : w[3], 2);
  if (upper) w[0] = a, w[1] = b;
  else w[2] = a, w[3] = b;
}

// Row g of the i-th 16 rows is written to row i * step + g + first, and row g + 8 to i * step + g + second. A negative `first` or
// `second` skips those rows. After every `units` of 16 rows, which are one weight's, `jump` more rows are left out. With `chosen`, the
// i-th weight written, of `weight_tiles` rows of tiles, is weight chosen[i].
extern "C" __global__ void __launch_bounds__(256) tile_unpack(const u8* __restrict__ tiles, u16* __restrict__ out, int columns,
                                                               int row_stride, int step, int first, int second, int units, int jump,
                                                               const int* __restrict__ chosen, int weight_tiles
#if FACTORS
                                                               ,
                                                               const float* __restrict__ factors  // of the tiles' rows, times 2^19
#endif
) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int pairs = (columns + 1) / 2, row_tile = blockIdx.x / pairs, k_tile = blockIdx.x % pairs * 2 + warp / 4;
  if (k_tile >= columns) return;
  int source = row_tile;
  if (chosen) {
    grid_dependency_wait();
    source = chosen[row_tile / weight_tiles] * weight_tiles + row_tile % weight_tiles;
  }
  const u8* tile = tiles + ((size_t)source * columns + k_tile) * TILE_BYTES;
  Block block;
  block.load(tile, warp % 4, lane);
  const u32 constant = decoding_constant(lane);
  launch_dependents();
  grid_dependency_wait();
  const int unit = row_tile * 4 + warp % 4;
  const long long row = (long long)unit * step + unit / units * jump + g;
  u16* target = out + k_tile * 64 + t * 8;
#if FACTORS
  const int place = (source * 4 + warp % 4) * 16;
  const float upper = factors[place + g], lower = factors[place + 8 + g];
  const u32 factor[2] = {pack2(upper, upper), pack2(lower, lower)};
#else
  const u32 factor[2] = {PLAIN_FACTOR, PLAIN_FACTOR};
#endif
#pragma unroll
  for (int s = 0; s < 2; s++) {
    u32 even[4], odd[4];
    block.decode16(2 * s, constant, even);
    block.decode16(2 * s + 1, constant, odd);
#pragma unroll
    for (int i = 0; i < 4; i++) even[i] = finished(even[i], factor[i % 2]), odd[i] = finished(odd[i], factor[i % 2]);
    u32 top[4] = {even[0], even[2], odd[0], odd[2]}, bottom[4] = {even[1], even[3], odd[1], odd[3]};
    transpose(top, t);
    transpose(bottom, t);
    if (first >= 0) *(uint4*)(target + (row + first) * row_stride + 32 * s) = make_uint4(top[0], top[1], top[2], top[3]);
    if (second >= 0) *(uint4*)(target + (row + second) * row_stride + 32 * s) = make_uint4(bottom[0], bottom[1], bottom[2], bottom[3]);
  }
}
