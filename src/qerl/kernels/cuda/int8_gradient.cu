// dx[t, k] = plus[t, k] + sum_n dy[t, n] f[n] W[n, k] on Hopper, by a product of 8-bit integers (int8_gradient.py has the definition).
//
// rotate_rows     rounds dy: a CTA of THREADS a row, VECTORS times 16 numbers a thread; the next row is on its way meanwhile
// rotate_columns  rounds f W, or with MAXIMA only finds the largest number of each column: a CTA for 128 n and 64 k
// int8_product    multiplies: tiles of 128 x 256, a warpgroup for each 64 rows, and a thread that keeps a ring of STAGES blocks of 128 n
//                 filled. The sums are exact, so their order does not matter.
#include "bfloat16.cuh"
#include "launch.cuh"
#include "mbarrier.cuh"
#include "warp.cuh"
#include "wgmma.cuh"

#define DEPTH 128  // n of a block: a line of the 128-byte swizzle
#define ROWS 128   // of dy in a tile
#define COLUMNS 256
#define GROUP 8  // tiles of rows that are taken together, so that L2 has what they share

// Codes lie in blocks of ROWS (of W, COLUMNS) lines x 128 n, by lines, then by n. A thread of wgmma gets every fourth pair of a line of
// sums; W's lines are in such an order that these are eight neighboring columns.
template <bool OF_WEIGHT>
__device__ __forceinline__ size_t place_of(int row, int n, int depth_blocks) {
  const int lines = OF_WEIGHT ? COLUMNS : ROWS;
  int line = row % lines;
  if (OF_WEIGHT) line = line / 32 * 32 + line % 8 / 2 * 8 + line % 32 / 8 * 2 + line % 2;
  const size_t block = (size_t)(row / lines) * depth_blocks + n / DEPTH;
  return block * (lines * DEPTH) + line * DEPTH + ((n % DEPTH / 16) ^ (line % 8)) * 16 + n % 16;
}

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
__device__ __forceinline__ float largest_of(const float (&f)[16]) {
  float most = 0.f;
#pragma unroll
  for (int i = 0; i < 16; i++) most = fmaxf(most, fabsf(f[i]));
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

extern "C" __global__ void __launch_bounds__(THREADS) rotate_rows(const u16* x, u8* codes, float* maxima, int rows, int columns, int x_stride, int depth_blocks) {
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
#pragma unroll
    for (int i = 0; i < VECTORS; i++) unpack(raw.v[i][0], f[i]), unpack(raw.v[i][1], f[i] + 8);
    if (AHEAD && row + gridDim.x < rows) raw.load(x + (size_t)(row + gridDim.x) * x_stride, columns);
#pragma unroll
    for (int i = 0; i < VECTORS; i++) rotate(f[i]), most = fmaxf(most, largest_of(f[i]));
    most = warp_max(most);
    if (threadIdx.x % 32 == 0) largest[parity][threadIdx.x / 32] = most;
    __syncthreads();  // the other of the two is written before the next one, and read by none
    const int warp = threadIdx.x % 32;
    most = warp_max(warp < THREADS / 32 ? largest[parity][warp] : 0.f);
    const float inverse = inverse_of(most);
    if (threadIdx.x == 0) maxima[row] = most;
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
      const int n = (i * THREADS + threadIdx.x) * 16;
      if (n < depth_blocks * DEPTH) *(uint4*)(codes + place_of<false>(row, n, depth_blocks)) = rounded(f[i], inverse);
    }
  }
}
#elif defined(MAXIMA)
// W's rows are n; a lane gets sixteen n of one k from shared memory.
extern "C" __global__ void __launch_bounds__(256) rotate_columns(const u16* w, const float* factors, u8* codes, float* maxima, int rows, int columns, int w_stride,
                                                                 int depth_blocks) {
  __shared__ u32 tile[DEPTH][39];  // each 32 n begin two banks later, so that no two lanes of a load meet
  __shared__ float factor[DEPTH];
  launch_dependents();
  grid_dependency_wait();
  const int first_n = blockIdx.x % depth_blocks * DEPTH, first_k = blockIdx.x / depth_blocks * 64;
#pragma unroll
  for (int i = 0; i < DEPTH * 8 / 256; i++) {
    const int unit = i * 256 + threadIdx.x, n = unit / 8, k = unit % 8 * 8;
    const bool exists = first_n + n < rows && first_k + k < columns;
    const uint4 v = exists ? *(const uint4*)(w + (size_t)(first_n + n) * w_stride + first_k + k) : make_uint4(0, 0, 0, 0);
    u32* to = &tile[n][k / 2 + n / 32 * 2];
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
  }
  if (threadIdx.x < DEPTH) factor[threadIdx.x] = first_n + threadIdx.x < rows ? factors[first_n + threadIdx.x] : 0.f;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 64 * DEPTH / 16 / 256; i++) {
    const int unit = i * 256 + threadIdx.x, n = unit % (DEPTH / 16) * 16, k = unit / (DEPTH / 16);
    float f[16];
#pragma unroll
    for (int j = 0; j < 16; j++) {
      const u32 pair = tile[n + j][k / 2 + n / 32 * 2];
      f[j] = (k % 2 ? high(pair) : low(pair)) * factor[n + j];
    }
    rotate(f);
    if (MAXIMA) {
      float most = largest_of(f);
#pragma unroll
      for (int lanes = 4; lanes; lanes /= 2) most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, lanes));
      if (n == 0 && first_k + k < columns) atomicMax((int*)maxima + first_k + k, __float_as_int(most));  // neither is negative
    } else if (first_k + k < columns) {
      *(uint4*)(codes + place_of<true>(first_k + k, first_n + n, depth_blocks)) = rounded(f, inverse_of(maxima[first_k + k]));
    }
  }
}
#else
#define SUMS4I(n) "+r"(d[n][0]), "+r"(d[n][1]), "+r"(d[n][2]), "+r"(d[n][3])
#define SUMS16I(n) SUMS4I(n), SUMS4I(n + 1), SUMS4I(n + 2), SUMS4I(n + 3)
#define SUMS64I(n) SUMS16I(n), SUMS16I(n + 4), SUMS16I(n + 8), SUMS16I(n + 12)
// d [64, 256] += a [64, 32] b [256, 32]^T of 8-bit integers in shared memory.
__device__ __forceinline__ void wgmma_int8(int (&d)[32][4], u32 a, u32 b) {
  asm volatile("{.reg .b64 a, b; mov.b64 a, {%128, %130}; mov.b64 b, {%129, %130}; "
               "wgmma.mma_async.sync.aligned.m64n256k32.s32.s8.s8 {" REGS120 ", " REGS8(12) "}, a, b, 1;}"
               : SUMS64I(0), SUMS64I(16)
               : "r"(a), "r"(b), DESC_HIGH);
}
__device__ __forceinline__ void fence_integers(int (&d)[32][4]) {
#pragma unroll
  for (int n = 0; n < 32; n++) asm volatile("" : "+r"(d[n][0]), "+r"(d[n][1]), "+r"(d[n][2]), "+r"(d[n][3])::"memory");
}

#define A_BYTES (ROWS * DEPTH)
#define B_BYTES (COLUMNS * DEPTH)
#define STAGE_BYTES (A_BYTES + B_BYTES)

struct Operands {
  const u8 *a, *b;
  const float *a_maxima, *b_maxima;  // of the rotated numbers, which are 8 times too large
  const u16* plus;  // may be y, or null
  u16* y;
  int rows, columns, depth_blocks, stride;
};

struct TilePlace {
  int m, n;
  __device__ __forceinline__ TilePlace(const Operands& o, int tile) {
    const int tiles_m = (o.rows + ROWS - 1) / ROWS, tiles_n = (o.columns + COLUMNS - 1) / COLUMNS;
    const int group = tile / (GROUP * tiles_n), first = group * GROUP, size = min(tiles_m - first, GROUP), place = tile % (GROUP * tiles_n);
    m = first + place % size, n = place / size;
  }
};
__device__ __forceinline__ int num_tiles(const Operands& o) { return ((o.rows + ROWS - 1) / ROWS) * ((o.columns + COLUMNS - 1) / COLUMNS); }

__device__ __forceinline__ void produce(const Operands& o, u32 smem0, u32 full0) {
  const u64 policy = l2_evict_normal();
  u32 stage = smem0, bar = full0, parity = 1;
  for (int tile = blockIdx.x; tile < num_tiles(o); tile += gridDim.x) {
    const TilePlace at(o, tile);
    const u8* a = o.a + (size_t)at.m * o.depth_blocks * A_BYTES;
    const u8* b = o.b + (size_t)at.n * o.depth_blocks * B_BYTES;
#pragma unroll 1
    for (int block = 0; block < o.depth_blocks; block++) {
      mbar_wait(bar + STAGES * 8, parity);
      mbar_expect(bar, STAGE_BYTES);
      copy_bulk(stage, a + (size_t)block * A_BYTES, A_BYTES, bar, policy);
      copy_bulk(stage + A_BYTES, b + (size_t)block * B_BYTES, B_BYTES, bar, policy);
      stage += STAGE_BYTES, bar += 8;
      if (bar == full0 + STAGES * 8) stage = smem0, bar = full0, parity ^= 1;
    }
  }
}

// A thread has rows g and g + 8 of its warp's 16, and of each 32 columns 8 neighbors.
__device__ __forceinline__ void finish(const Operands& o, const TilePlace& at, const int (&d)[32][4]) {
  const int lane = threadIdx.x % 32, first = at.n * COLUMNS + lane % 4 * 8;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int row = at.m * ROWS + threadIdx.x / 32 * 16 + lane / 4 + half * 8;
    if (row >= o.rows) continue;
    uint4 plus[8];
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const bool exists = o.plus && first + j * 32 < o.columns;
      plus[j] = exists ? *(const uint4*)(o.plus + (size_t)row * o.stride + first + j * 32) : make_uint4(0, 0, 0, 0);
    }
    const float scale = o.a_maxima[row] * (1.f / (127.f * 127.f * 64.f));
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const int column = first + j * 32;
      if (column >= o.columns) continue;
      const size_t place = (size_t)row * o.stride + column;
      const float4 s0 = *(const float4*)(o.b_maxima + column), s1 = *(const float4*)(o.b_maxima + column + 4);
      const float s[8] = {s0.x, s0.y, s0.z, s0.w, s1.x, s1.y, s1.z, s1.w};
      float f[8];
      unpack(plus[j], f);
#pragma unroll
      for (int i = 0; i < 8; i++) f[i] += (float)d[j * 4 + i / 2][half * 2 + i % 2] * (scale * s[i]);
      *(uint4*)(o.y + place) = pack(f);
    }
  }
}

extern "C" __global__ void __launch_bounds__(384, 1) int8_product(const __grid_constant__ Operands o) {
  extern __shared__ __align__(128) u8 memory[];
  const u32 smem0 = (smem_u32(memory) + 1023) & ~1023u, full0 = smem0 + STAGES * STAGE_BYTES;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) mbar_init(full0 + i * 8, 1), mbar_init(full0 + (STAGES + i) * 8, 8);
    mbar_init_fence();
  }
  __syncthreads();
  grid_dependency_wait();
  launch_dependents();
  if (threadIdx.x >= 256) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 256) produce(o, smem0, full0);
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
  u32 stage = smem0, bar = full0, parity = 0;
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int tile = blockIdx.x; tile < num_tiles(o); tile += gridDim.x) {
    int d[32][4];
#pragma unroll
    for (int n = 0; n < 32; n++) d[n][0] = d[n][1] = d[n][2] = d[n][3] = 0;
    fence_integers(d);
    u32 before = 0;  // barrier of the stage whose last products may still be running
#pragma unroll 1
    for (int block = 0; block < o.depth_blocks; block++) {
      mbar_wait(bar, parity);
      const u32 first = __shfl_sync(ALL_LANES, (stage + threadIdx.x / 128 * (64 * DEPTH)) >> 4 | 1u << 16, 0);
      const u32 second = __shfl_sync(ALL_LANES, (stage + A_BYTES) >> 4 | 1u << 16, 0);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < DEPTH / 32; k++) wgmma_int8(d, first + k * 2, second + k * 2);
      wgmma_commit();
      wgmma_wait<1>();
      if (before && lane == 0) mbar_arrive(before);
      before = bar + STAGES * 8;
      stage += STAGE_BYTES, bar += 8;
      if (bar == full0 + STAGES * 8) stage = smem0, bar = full0, parity ^= 1;
    }
    wgmma_wait<0>();
    fence_integers(d);
    if (lane == 0) mbar_arrive(before);
    finish(o, TilePlace(o, tile), d);
  }
}
#endif
