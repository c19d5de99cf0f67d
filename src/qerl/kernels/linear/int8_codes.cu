// Rotation and rounding of the factors of int8_product (int8_product.py has the definition).
//
// rotate_rows    the first factor: a CTA of THREADS a row, VECTORS times 16 numbers a thread; the next row is on its way meanwhile
// rotate_weight  the second factor, from rows in bfloat16 (FORMAT -1) or from tiles of a FORMAT, along their rows n or ALONG_K; with
//                MAXIMA it only finds the largest numbers: a CTA for 128 n and 64 k
// place_lines    the adapter's bfloat16 part of the second factor
#if defined(FORMAT) && FORMAT >= 0
#define LOAD(p) __ldcs(p)
#include "tile_block.cuh"
#endif
#include "bfloat16.cuh"
#include "int8_layout.cuh"
#include "launch.cuh"
#include "warp.cuh"

// Multiply 64 neighbors, of which four lanes have 16 each, by Hadamard's matrix.
__device__ __forceinline__ void rotate(float (&f)[16]) {
#pragma unroll
  for (int half = 1; half < 16; half *= 2)
#pragma unroll
    for (int i = 0; i < 16; i++)
      if (!(i & half)) {
        const float a = f[i], b = f[i + half];
        f[i] = a + b, f[i + half] = a - b;
      }
#pragma unroll
  for (int lanes = 1; lanes < 4; lanes *= 2) {
    const float sign = threadIdx.x & lanes ? -1.f : 1.f;
#pragma unroll
    for (int i = 0; i < 16; i++) f[i] = fmaf(f[i], sign, __shfl_xor_sync(ALL_LANES, f[i], lanes));
  }
}
// The larger one, or NaN if either is.
__device__ __forceinline__ float larger(float a, float b) {
  float d;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
  return d;
}
// NaN if there was one before the rotation: each result is a sum of all.
__device__ __forceinline__ float largest_of(const float (&f)[16]) {
  float most = 0.f;
#pragma unroll
  for (int i = 0; i < 16; i++) most = fmaxf(most, fabsf(f[i]));
  return larger(most, fabsf(f[0]));
}
// Over so many neighboring lanes.
template <int LANES>
__device__ __forceinline__ float largest_in(float most) {
#pragma unroll
  for (int lanes = LANES / 2; lanes; lanes /= 2) most = larger(most, __shfl_xor_sync(ALL_LANES, most, lanes));
  return most;
}
__device__ __forceinline__ float inverse_of(float most) { return most > 0.f ? __fdiv_rn(127.f, most) : 0.f; }
// Added to 1.5 * 2^23, a number loses its fraction, and its last byte is the integer's.
__device__ __forceinline__ u32 rounded(const float* f, float inverse) {
  u32 v[4];
#pragma unroll
  for (int i = 0; i < 4; i++) v[i] = __float_as_uint(fmaf(f[i], inverse, 12582912.f));
  return __byte_perm(__byte_perm(v[0], v[1], 0x0040), __byte_perm(v[2], v[3], 0x0040), 0x5410);
}
__device__ __forceinline__ uint4 rounded(const float (&f)[16], float inverse) {
  return make_uint4(rounded(f + 0, inverse), rounded(f + 4, inverse), rounded(f + 8, inverse), rounded(f + 12, inverse));
}

#ifdef VECTORS
#define AHEAD (VECTORS < 3)  // there are registers for the next row

struct RawRow {
  uint4 v[VECTORS][2];
  __device__ __forceinline__ void load(const u16* x, int columns) {
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
      const int n = (i * THREADS + threadIdx.x) * 16;
#pragma unroll
      for (int j = 0; j < 2; j++) v[i][j] = n < columns ? *(const uint4*)(x + n + j * 8) : make_uint4(0, 0, 0, 0);
    }
  }
};

// The adapter's part u of the rows, of `rank` columns, is stored behind them in blocks of 64 columns.
extern "C" __global__ void __launch_bounds__(THREADS) rotate_rows(const u16* x, const u16* u, u8* codes, u8* u_lines, float* maxima, int rows, int columns,
                                                                  int x_stride, int num_blocks, int rank, int u_stride, int u_blocks) {
  __shared__ float largest[2][THREADS / 32];
  launch_dependents();
  grid_dependency_wait();
  RawRow raw;
  if (AHEAD) raw.load(x + (size_t)blockIdx.x * x_stride, columns);
  int parity = 0;
#pragma unroll 1
  for (int row = blockIdx.x; row < rows; row += gridDim.x, parity ^= 1) {
    float f[VECTORS][16], most = 0.f;
    if (!AHEAD) raw.load(x + (size_t)row * x_stride, columns);
    const u16* own_u = u + (size_t)row * u_stride;
    if (threadIdx.x * 8 < rank) asm volatile("prefetch.global.L1 [%0];" ::"l"(own_u + threadIdx.x * 8));  // read at the end
#pragma unroll
    for (int i = 0; i < VECTORS; i++) unpack(raw.v[i][0], f[i]), unpack(raw.v[i][1], f[i] + 8);
    if (AHEAD && row + gridDim.x < rows) raw.load(x + (size_t)(row + gridDim.x) * x_stride, columns);
#pragma unroll
    for (int i = 0; i < VECTORS; i++) rotate(f[i]), most = larger(most, largest_of(f[i]));
    most = largest_in<32>(most);
    if (threadIdx.x % 32 == 0) largest[parity][threadIdx.x / 32] = most;
    __syncthreads();  // the other of the two is written before the next one, and read by none
    const int warp = threadIdx.x % 32;
    most = largest_in<32>(warp < THREADS / 32 ? largest[parity][warp] : 0.f);
    const float inverse = inverse_of(most);
    if (threadIdx.x == 0) maxima[row] = most;
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
      const int n = (i * THREADS + threadIdx.x) * 16;
      if (n < num_blocks * DEPTH) *(uint4*)(codes + place_of<false>(row, n, num_blocks)) = rounded(f[i], inverse);
    }
#pragma unroll 1
    for (int r = threadIdx.x * 8; r < u_blocks * (DEPTH / 2); r += THREADS * 8)
      *(uint4*)(u_lines + place_of<false>(row, r * 2, u_blocks)) = r < rank ? *(const uint4*)(own_u + r) : make_uint4(0, 0, 0, 0);
  }
}
#elif defined(FORMAT)
// Places in shared memory such that no two lanes of a load meet in a bank.
#define PAIRS 39  // from one n to the next
#define PLACE(n, k) ((n) * PAIRS + (n) / 32 * 2 + (k) / 2)
#define FACTOR_PLACE(n) ((n) + (n) / 32 * 4)

// The n of a CTA: 128 neighbors, or of tiles where gate and up take turns (IN_TURNS), 64 of gate and the same 64 of up.
struct Rows {
  int first, features;
  __device__ __forceinline__ int n_of(int i) const {
    if (!IN_TURNS) return first * 128 + i;
    return i < 64 ? first * 64 + i : features + first * 64 + i - 64;
  }
  __device__ __forceinline__ int tile_row_of(int i) const {
    if (!IN_TURNS) return first * 128 + i;
    return first * 128 + i % 64 / 8 * 16 + i / 64 * 8 + i % 8;
  }
};

#if FORMAT < 0
__device__ __forceinline__ void fill(u32* tile, const u8* w, const Rows& own, int first_k, int rows, int columns, int stride) {
#pragma unroll
  for (int i = 0; i < 128 * 8 / 256; i++) {
    const int unit = i * 256 + threadIdx.x, row = unit / 8, k = unit % 8 * 8, n = own.n_of(row);
    const bool exists = n < rows && first_k + k < columns;
    const uint4 v = exists ? *(const uint4*)((const u16*)w + (size_t)n * stride + first_k + k) : make_uint4(0, 0, 0, 0);
    u32* to = tile + PLACE(row, k);
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
  }
}
#else
__device__ __forceinline__ void fill(u32* tile, const u8* w, const Rows& own, int first_k, int rows, int columns, int) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row_tile = own.first * 2 + warp / 4;
  const bool exists = row_tile * 64 < rows;
  Block block;
  if (exists) block.load(w + ((size_t)row_tile * (columns / 64) + first_k / 64) * TILE_BYTES, warp % 4, lane);
  const u32 constant = decoding_constant(lane);
  const int row = (IN_TURNS ? warp * 8 : warp * 16) + lane / 4;
  u32 *upper = tile + PLACE(row, lane % 4 * 2), *lower = tile + PLACE(row + (IN_TURNS ? 64 : 8), lane % 4 * 2);
#pragma unroll
  for (int s = 0; s < 4; s++) {
    u32 a[4] = {};
    if (exists) block.decode16(s, constant, a);
#pragma unroll
    for (int i = 0; i < 4; i++) (i % 2 ? lower : upper)[s * 8 + i / 2 * 4] = a[i];
  }
}
#endif

extern "C" __global__ void __launch_bounds__(256) rotate_weight(const u8* w, const float* factors, u8* codes, float* maxima, int rows, int columns, int w_stride,
                                                                int features) {
  __shared__ u32 tile[PLACE(128, 0)];
  __shared__ __align__(16) float factor[FACTOR_PLACE(128)];
  launch_dependents();
  grid_dependency_wait();
  const int row_blocks = (rows + 127) / 128, first_k = blockIdx.x / row_blocks * 64;
  const Rows own{(int)(blockIdx.x % row_blocks), features};
  fill(tile, w, own, first_k, rows, columns, w_stride);
  if (threadIdx.x < 128) {
    const int n = own.n_of(threadIdx.x);
    factor[FACTOR_PLACE(threadIdx.x)] = n < rows ? factors[FORMAT < 0 ? n : own.tile_row_of(threadIdx.x)] : 0.f;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int unit = i * 256 + threadIdx.x;
    float f[16];
#if ALONG_K
    const int row = unit / 4, k = unit % 4 * 16, n = own.n_of(row), num_blocks = (columns + DEPTH - 1) / DEPTH;
    const u32* from = tile + PLACE(row, k);
    const float own_factor = factor[FACTOR_PLACE(row)];
#pragma unroll
    for (int j = 0; j < 16; j += 2) f[j] = __fmul_rn(low(from[j / 2]), own_factor), f[j + 1] = __fmul_rn(high(from[j / 2]), own_factor);
    const bool exists = n < rows;
    const int line = column_of(n, features), byte = first_k + k;
#else
    const int row = unit % 8 * 16, k = unit / 8, num_blocks = row_blocks;
    const u32* from = tile + PLACE(row, k);
    const float4* factors4 = (const float4*)(factor + FACTOR_PLACE(row));
    const u32 shift = k % 2 ? 0 : 16;
#pragma unroll
    for (int j = 0; j < 16; j += 4) {
      const float4 own = factors4[j / 4];
      const float of[4] = {own.x, own.y, own.z, own.w};
#pragma unroll
      for (int i = 0; i < 4; i++) f[j + i] = __fmul_rn(high(from[(j + i) * PAIRS] << shift), of[i]);
    }
    const bool exists = first_k + k < columns;
    const int line = first_k + k, byte = own.n_of(row);
#endif
    rotate(f);
    if (MAXIMA) {
      const float most = largest_in<ALONG_K ? 4 : 8>(largest_of(f));
      if (exists && threadIdx.x % (ALONG_K ? 4 : 8) == 0) atomicMax((int*)maxima + line, __float_as_int(most));  // none is negative
    } else if (exists) {
      u8* to = codes + place_of<true>(line, byte, num_blocks);
      *(uint4*)to = rounded(f, inverse_of(maxima[line]));
      if (ALONG_K && byte + 64 >= columns && columns % DEPTH)  // the other half of the last block
        *(uint4*)(codes + place_of<true>(line, byte + 64, num_blocks)) = make_uint4(0, 0, 0, 0);
    }
  }
}
#else
// x[line, r], at line * line_stride + r * r_stride, times the line's factor if there are any; a thread has eight r.
extern "C" __global__ void __launch_bounds__(256) place_lines(const u16* x, const float* factors, u8* to, int lines, int rank, int line_stride, int r_stride,
                                                              int num_blocks, int features) {
  launch_dependents();
  grid_dependency_wait();
  const int line_blocks = (lines + 255) / 256, line = blockIdx.x % line_blocks * 256 + threadIdx.x, r = blockIdx.x / line_blocks * 8;
  if (line >= lines) return;
  const float factor = factors ? factors[line] : 1.f;
  float f[8];
#pragma unroll
  for (int i = 0; i < 8; i++) f[i] = r + i < rank ? low(x[(size_t)line * line_stride + (size_t)(r + i) * r_stride]) * factor : 0.f;
  *(uint4*)(to + place_of<true>(column_of(line, features), r * 2, num_blocks)) = pack(f);
}
#endif
