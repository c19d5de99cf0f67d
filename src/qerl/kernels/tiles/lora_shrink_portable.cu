// lora_shrink.cu without clusters: from Ampere on, in the same order of sums, so the same bits.
//
// `norm_rows` makes x, a CTA for each token; `shrink` makes u of x. A tile of u has CLUSTER CTAs, which split k. Each adds the sums of its
// warps and stores them in `partials`; the CTA that arrives last adds them in the order of k. No CTA waits for another, so any
// number of them may run at once, and no result depends on which is last.
//
// Compile-time: TABLE, SLOTS (as lora_shrink.cu), TOKEN_TILES, ROW_TILES, UNITS of 32 k per warp, WARPS, CLUSTER.
#include "lora_shrink.cuh"

#define TOKENS (TOKEN_TILES * 8)
#define ROWS (ROW_TILES * 16)
#define THREADS (WARPS * 32)
#define NORM_THREADS (CLUSTER * WARPS * 4)
#define EARLY_WEIGHT (UNITS <= 4)  // load the weight before h; more of it does not fit a thread's registers

__device__ __forceinline__ float4 load4(const float* p) { return as_float4(load_constant(p)); }
// weight + noise of four k. With TABLE the noise is a row of the table.
__device__ __forceinline__ float4 weight4(const Operands& o, const float* noise, int k) {
  return add4(load4(o.weight + k), noise ? load4(noise + k) : make_float4(0.f, 0.f, 0.f, 0.f));
}

// Four lanes do what four lanes of a warp of lora_shrink.cu do for one token: CTA `rank` and warp `warp` of its cluster.
extern "C" __global__ void __launch_bounds__(NORM_THREADS) norm_rows(const __grid_constant__ Operands o) {
  __shared__ __align__(16) float of_warp[CLUSTER][WARPS];
  const int share = threadIdx.x / 4, rank = share / WARPS, warp = share % WARPS, t = threadIdx.x % 4, m = blockIdx.x;
  const int units = o.K / 32, first = units * rank / CLUSTER, end = units * (rank + 1) / CLUSTER;
  launch_dependents();
  int k[UNITS];
#pragma unroll
  for (int i = 0; i < UNITS; i++) k[i] = min(first + i * WARPS + warp, units - 1) * 32 + t * 8;
#if TABLE
  const float* noise = o.noise + (size_t)__ldg(o.noise_rows + m) * o.K;
#else
  const float* noise = o.noise;
#endif
#if EARLY_WEIGHT
  float4 w[UNITS][2];
#pragma unroll
  for (int i = 0; i < UNITS; i++)
#pragma unroll
    for (int j = 0; j < 2; j++) w[i][j] = weight4(o, noise, k[i] + j * 4);
#endif
  grid_dependency_wait();
  float4 h[UNITS][2];
#pragma unroll
  for (int i = 0; i < UNITS; i++)
#pragma unroll
    for (int j = 0; j < 2; j++) h[i][j] = as_float4(load_activation((const float*)o.h + (size_t)m * o.h_stride + k[i] + j * 4));
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < UNITS; i++) {
    if (first + i * WARPS + warp >= end) break;
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const float4 v = h[i][j];
      sum = fmaf(v.x, v.x, sum), sum = fmaf(v.y, v.y, sum), sum = fmaf(v.z, v.z, sum), sum = fmaf(v.w, v.w, sum);
    }
  }
  sum = sum4(sum);
  if (t == 0) of_warp[rank][warp] = sum;
  __syncthreads();
  sum = 0.f;
#pragma unroll
  for (int c = 0; c < CLUSTER; c += 4) {
    float of_cta = of_warp[c + t][0];
#pragma unroll
    for (int i = 1; i < WARPS; i++) of_cta += of_warp[c + t][i];
    sum += of_cta;
  }
  const float inverse = rsqrtf(sum4(sum) / o.K + o.eps);
#pragma unroll
  for (int i = 0; i < UNITS; i++) {
    if (first + i * WARPS + warp >= end) break;
#if EARLY_WEIGHT
    const float4 v = w[i][0], z = w[i][1];
#else
    const float4 v = weight4(o, noise, k[i]), z = weight4(o, noise, k[i] + 4);
#endif
    const float4 a = h[i][0], b = h[i][1];
    *(uint4*)(o.x + (size_t)m * o.x_stride + k[i]) =
        make_uint4(pack2(a.x * inverse * v.x, a.y * inverse * v.y), pack2(a.z * inverse * v.z, a.w * inverse * v.w),
                   pack2(b.x * inverse * z.x, b.y * inverse * z.y), pack2(b.z * inverse * z.z, b.w * inverse * z.w));
  }
}

// Count this CTA's arrival; true for the last of the tile, which then sees what the others have stored and sets the count back.
__device__ __forceinline__ bool is_last_to_arrive(u32* turn) {
  __shared__ u32 arrived;
  __syncthreads();  // what all threads have stored is ordered before thread 0's release
  if (threadIdx.x == 0) {
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(arrived) : "l"(turn) : "memory");
    if (arrived == CLUSTER - 1) asm volatile("st.relaxed.gpu.global.u32 [%0], 0;" ::"l"(turn) : "memory");
  }
  __syncthreads();
  return arrived == CLUSTER - 1;
}

// Add the sums of the warps, then of the tile's CTAs, and write u.
__device__ __forceinline__ void reduce(const float (&acc)[TOKEN_TILES][ROW_TILES][4], float* partials, u32* turn, int rank, int m0, int row0,
                                       int slot, const Operands& o) {
  __shared__ __align__(16) float of_warp[WARPS][TOKENS][ROWS + 4];  // 4 more, so that the lanes of a warp write to different banks
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int n = 0; n < TOKEN_TILES; n++)
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
      for (int i = 0; i < 4; i++) of_warp[warp][n * 8 + 2 * t + i % 2][r * 16 + g + i / 2 * 8] = acc[n][r][i];
  __syncthreads();
  for (int at = threadIdx.x * 4; at < TOKENS * ROWS; at += THREADS * 4) {
    float4 sum = *(const float4*)&of_warp[0][at / ROWS][at % ROWS];
#pragma unroll
    for (int w = 1; w < WARPS; w++) sum = add4(sum, *(const float4*)&of_warp[w][at / ROWS][at % ROWS]);
    __stcg((float4*)(partials + rank * (TOKENS * ROWS) + at), sum);
  }
  if (!is_last_to_arrive(turn)) return;
  for (int at = threadIdx.x * 4; at < TOKENS * ROWS; at += THREADS * 4) {
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int c = 0; c < CLUSTER; c++) sum = add4(sum, __ldcg((const float4*)(partials + c * (TOKENS * ROWS) + at)));
    const int m = m0 + at / ROWS, row = row0 + at % ROWS;
    const float scaling = scaling_of(o, slot);
    if (is_own(o, m, slot) && row < o.rows)
      *(uint2*)(o.u + (size_t)m * o.u_stride + row) =
          make_uint2(pack2(scaling * sum.x, scaling * sum.y), pack2(scaling * sum.z, scaling * sum.w));
  }
}

// partials: [tiles of all slots, CLUSTER, TOKENS, ROWS]; turns: [tiles of all slots], zeros before and after a launch.
extern "C" __global__ void __launch_bounds__(THREADS, 1) shrink(const __grid_constant__ Operands o, float* partials, u32* turns) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int rank = blockIdx.x % CLUSTER, tile = blockIdx.x / CLUSTER, row_tiles = (o.rows + ROWS - 1) / ROWS;
#if SLOTS
  const int token_tiles = (o.M + TOKENS - 1) / TOKENS, slot = tile / (row_tiles * token_tiles);
  const int row_tile = tile % row_tiles, m0 = tile / row_tiles % token_tiles * TOKENS, row0 = row_tile * ROWS;
  if (!has_slot(o, slot, m0, TOKENS)) return;  // all CTAs of the tile
#else
  const int slot = 0, row_tile = tile % row_tiles, m0 = tile / row_tiles * TOKENS, row0 = row_tile * ROWS;
#endif
  // Loads past an end are clamped to valid addresses: past k, x is set to 0; past the tokens or rows, the product is not used.
  const int units = o.K / 32, first = units * rank / CLUSTER, end = units * (rank + 1) / CLUSTER;
  int k[UNITS];
#pragma unroll
  for (int i = 0; i < UNITS; i++) k[i] = min(first + i * WARPS + warp, units - 1) * 32 + t * 8;
  uint4 a[UNITS][ROW_TILES][2];
#pragma unroll
  for (int i = 0; i < UNITS; i++)
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
      for (int j = 0; j < 2; j++) a[i][r][j] = load_constant(o.a + (size_t)(slot * o.rows + min(row0 + r * 16 + j * 8 + g, o.rows - 1)) * o.K + k[i]);
  grid_dependency_wait();
  launch_dependents();  // after the wait: a product that reads u late (portable_product.cu) then knows that x is there
  uint4 x[UNITS][TOKEN_TILES];  // eight k
#pragma unroll
  for (int i = 0; i < UNITS; i++)
#pragma unroll
    for (int n = 0; n < TOKEN_TILES; n++) x[i][n] = load_activation((const u16*)o.h + (size_t)min(m0 + n * 8 + g, o.M - 1) * o.h_stride + k[i]);
  float acc[TOKEN_TILES][ROW_TILES][4] = {};
#pragma unroll
  for (int i = 0; i < UNITS; i++) {
    const int unit = first + i * WARPS + warp;
    if (unit >= end) break;  // the same for all lanes
#pragma unroll
    for (int n = 0; n < TOKEN_TILES; n++) {
      const uint4 v = x[i][n];
      const int m = m0 + n * 8 + g;
      if (o.x && unit % row_tiles == row_tile && is_own(o, m, slot)) *(uint4*)(o.x + (size_t)m * o.x_stride + k[i]) = v;
#pragma unroll
      for (int r = 0; r < ROW_TILES; r++) multiply_unit(acc[n][r], acc[n][r], a[i][r][0], a[i][r][1], v);
    }
  }
  reduce(acc, partials + (size_t)tile * (CLUSTER * TOKENS * ROWS), turns + tile, rank, m0, row0, slot, o);
}
