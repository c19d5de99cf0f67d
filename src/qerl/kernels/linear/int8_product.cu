// y = (scales times the product of 8-bit integers) + u b^T on Hopper (int8_product.py has the definition). Compile-time: SWIGLU.
//
// Tiles of 128 x 256: a warpgroup for each 64 rows, and a thread that keeps a ring of STAGES blocks filled (int8_layout.cuh). The sums of
// integers are exact, so their order does not matter; then they become floats, onto which the adapter's part in bfloat16 is added.
#include "bfloat16.cuh"
#include "gate.cuh"
#include "int8_layout.cuh"
#include "launch.cuh"
#include "mbarrier.cuh"
#include "warp.cuh"
#include "wgmma.cuh"

#define GROUP 8  // tiles of rows that are taken together, so that L2 has what they share
#define A_BYTES (ROWS * DEPTH)
#define B_BYTES (COLUMNS * DEPTH)
#define STAGE_BYTES (A_BYTES + B_BYTES)
#define TILE_FEATURES (SWIGLU ? COLUMNS / 2 : COLUMNS)  // columns of y in a tile

#define SUMS4I(n) "+r"(d[n][0]), "+r"(d[n][1]), "+r"(d[n][2]), "+r"(d[n][3])
#define SUMS16I(n) SUMS4I(n), SUMS4I(n + 1), SUMS4I(n + 2), SUMS4I(n + 3)
#define SUMS64I(n) SUMS16I(n), SUMS16I(n + 4), SUMS16I(n + 8), SUMS16I(n + 12)
// d [64, 256] += a [64, 32] b [256, 32]^T of 8-bit integers in shared memory.
__device__ __forceinline__ void wgmma(int (&d)[32][4], u32 a, u32 b) {
  asm volatile("{.reg .b64 a, b; mov.b64 a, {%128, %130}; mov.b64 b, {%129, %130}; "
               "wgmma.mma_async.sync.aligned.m64n256k32.s32.s8.s8 {" REGS120 ", " REGS8(12) "}, a, b, 1;}"
               : SUMS64I(0), SUMS64I(16)
               : "r"(a), "r"(b), DESC_HIGH);
}
__device__ __forceinline__ void fence_sums(int (&d)[32][4]) {
#pragma unroll
  for (int n = 0; n < 32; n++) asm volatile("" : "+r"(d[n][0]), "+r"(d[n][1]), "+r"(d[n][2]), "+r"(d[n][3])::"memory");
}

struct Operands {
  const u8 *a, *b, *u, *b_lines;
  const float *a_maxima, *b_maxima;  // of the rotated numbers, which are 8 times too large
  u16 *y, *gate;                     // gate: of SWIGLU
  int rows, columns, num_blocks, u_blocks, stride;
};

struct TilePlace {
  int m, n;
  __device__ __forceinline__ TilePlace(const Operands& o, int tile) {
    const int tiles_m = (o.rows + ROWS - 1) / ROWS, tiles_n = (o.columns + TILE_FEATURES - 1) / TILE_FEATURES;
    const int group = tile / (GROUP * tiles_n), first = group * GROUP, size = min(tiles_m - first, GROUP), place = tile % (GROUP * tiles_n);
    m = first + place % size, n = place / size;
  }
};
__device__ __forceinline__ int num_tiles(const Operands& o) {
  return ((o.rows + ROWS - 1) / ROWS) * ((o.columns + TILE_FEATURES - 1) / TILE_FEATURES);
}

// The ring of stages in shared memory, and the barriers behind it: those of filled stages, then those of free ones.
struct Ring {
  u32 first, stage, bar, parity;
  __device__ __forceinline__ Ring(u32 smem, u32 parity) : first(smem), stage(smem), bar(smem + STAGES * STAGE_BYTES), parity(parity) {}
  __device__ __forceinline__ u32 free_bar() const { return bar + STAGES * 8; }
  __device__ __forceinline__ void advance() {
    stage += STAGE_BYTES, bar += 8;
    if (bar == first + STAGES * (STAGE_BYTES + 8)) stage = first, bar = first + STAGES * STAGE_BYTES, parity ^= 1;
  }
};

__device__ __forceinline__ void produce(const Operands& o, u32 smem) {
  const u64 policy = l2_evict_normal();
  Ring ring(smem, 1);
  for (int tile = blockIdx.x; tile < num_tiles(o); tile += gridDim.x) {
    const TilePlace at(o, tile);
    const u8 *a = o.a + (size_t)at.m * o.num_blocks * A_BYTES, *b = o.b + (size_t)at.n * o.num_blocks * B_BYTES;
    const u8 *u = o.u + (size_t)at.m * o.u_blocks * A_BYTES, *b_lines = o.b_lines + (size_t)at.n * o.u_blocks * B_BYTES;
#pragma unroll 1
    for (int block = 0; block < o.num_blocks + o.u_blocks; block++, ring.advance()) {
      if (block == o.num_blocks) a = u, b = b_lines;
      mbar_wait(ring.free_bar(), ring.parity);
      mbar_expect(ring.bar, STAGE_BYTES);
      copy_bulk(ring.stage, a, A_BYTES, ring.bar, policy);
      copy_bulk(ring.stage + A_BYTES, b, B_BYTES, ring.bar, policy);
      a += A_BYTES, b += B_BYTES;
    }
  }
}

// Multiply so many blocks of the ring, of integers or of bfloat16.
template <typename T>
__device__ __forceinline__ void multiply(Ring& ring, int num_blocks, T (&d)[32][4]) {
  u32 before = 0;  // barrier of the stage whose last products may still be running
  fence_sums(d);
#pragma unroll 1
  for (int block = 0; block < num_blocks; block++, ring.advance()) {
    mbar_wait(ring.bar, ring.parity);
    const u32 first = __shfl_sync(ALL_LANES, (ring.stage + threadIdx.x / 128 * (64 * DEPTH)) >> 4 | 1u << 16, 0);
    const u32 second = __shfl_sync(ALL_LANES, (ring.stage + A_BYTES) >> 4 | 1u << 16, 0);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < DEPTH / 32; k++) wgmma(d, first + k * 2, second + k * 2);
    wgmma_commit();
    wgmma_wait<1>();
    if (before && threadIdx.x % 32 == 0) mbar_arrive(before);
    before = ring.free_bar();
  }
  wgmma_wait<0>();
  fence_sums(d);
  if (before && threadIdx.x % 32 == 0) mbar_arrive(before);
}

// A thread has rows g and g + 8 of its warp's 16, and of each 32 columns 8 neighbors.
__device__ __forceinline__ int row_of(const TilePlace& at, int half) { return at.m * ROWS + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + half * 8; }

__device__ __forceinline__ void scale(const Operands& o, const TilePlace& at, const int (&d)[32][4], float (&f)[32][4]) {
  float of_row[2];
#pragma unroll
  for (int half = 0; half < 2; half++) of_row[half] = row_of(at, half) < o.rows ? o.a_maxima[row_of(at, half)] * (1.f / (127.f * 127.f * 64.f)) : 0.f;
  const float4* of_columns = (const float4*)(o.b_maxima + at.n * COLUMNS + threadIdx.x % 4 * 8);
#pragma unroll
  for (int j = 0; j < 16; j++) {
    const float4 v = of_columns[j / 2 * 8 + j % 2];
    const float s[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 8; i++) f[j * 2 + i / 4][i % 4] = (float)d[j * 2 + i / 4][i % 4] * (of_row[i % 4 / 2] * s[i / 4 * 2 + i % 2]);
  }
}

__device__ __forceinline__ void gather(const float (&f)[32][4], int j, int half, float (&eight)[8]) {
#pragma unroll
  for (int i = 0; i < 8; i++) eight[i] = f[j * 4 + i / 2][half * 2 + i % 2];
}

__device__ __forceinline__ void store(const Operands& o, const TilePlace& at, const float (&f)[32][4]) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int row = row_of(at, half);
    if (row >= o.rows) continue;
#pragma unroll
    for (int j = 0; j < TILE_FEATURES / 32; j++) {
      const int column = at.n * TILE_FEATURES + j * 32 + threadIdx.x % 4 * 8;
      if (column >= o.columns) continue;
      float v[8];
      gather(f, j, half, v);
#if SWIGLU
      float up[8];
      gather(f, j + TILE_FEATURES / 32, half, up);
#pragma unroll
      for (int i = 0; i < 8; i++) v[i] = divisor(v[i]);
      __stcs((uint4*)(o.gate + (size_t)row * o.columns + column), pack(v));
#pragma unroll
      for (int i = 0; i < 8; i++) v[i] = v[i] * sigmoid(v[i]) * up[i];
#endif
      *(uint4*)(o.y + (size_t)row * o.stride + column) = pack(v);
    }
  }
}

extern "C" __global__ void __launch_bounds__(384, 1) int8_product(const __grid_constant__ Operands o) {
  extern __shared__ __align__(128) u8 memory[];
  const u32 smem = (smem_u32(memory) + 1023) & ~1023u;
  if (threadIdx.x == 0) {
    const u32 bars = smem + STAGES * STAGE_BYTES;
    for (int i = 0; i < STAGES; i++) mbar_init(bars + i * 8, 1), mbar_init(bars + (STAGES + i) * 8, 8);
    mbar_init_fence();
  }
  __syncthreads();
  grid_dependency_wait();
  launch_dependents();
  if (threadIdx.x >= 256) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 256) produce(o, smem);
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
  Ring ring(smem, 0);
#pragma unroll 1
  for (int tile = blockIdx.x; tile < num_tiles(o); tile += gridDim.x) {
    const TilePlace at(o, tile);
    int d[32][4];
#pragma unroll
    for (int n = 0; n < 32; n++) d[n][0] = d[n][1] = d[n][2] = d[n][3] = 0;
    multiply(ring, o.num_blocks, d);
    float f[32][4];
    scale(o, at, d, f);
    multiply(ring, o.u_blocks, f);
    store(o, at, f);
  }
}
