// x[m, k] = bf16(h[m, k] / sqrt(mean_k(h[m]^2) + eps) * (weight[k] + noise[k])), or x = h; with TABLE noise[noise_rows[m], k]
// u[m, r] = bf16(scaling * sum_k x[m, k] a[r, k]); with SLOTS a = a[slots[m]], scaling = scalings[slots[m]]
//
// A cluster of CLUSTER CTAs computes ROW_TILES * 16 rows of a for TOKEN_TILES * 8 tokens. Its CTAs, and the WARPS of each, split k.
// A thread requests everything it needs at once and keeps it in registers: a and the norm's weight before griddepcontrol.wait (no
// kernel of a step writes them), h after it. Sums of squares and of products cross the cluster by stores that complete at the
// receiver's mbarrier, and are added in the order of k: no result depends on timing or on how many tokens there are. With 8 tokens
// per tile, 3584 k and 32 rows a CTA uses 80 registers per thread, 64 without the norm, and 13 KB of shared memory. So it can start,
// and load a, beside the previous GEMM, and the next GEMM can start beside it.
//
// With SLOTS a cluster is for one slot, and ends at once if no token of its tile has it. Every token has a slot, whose clusters write its x.
//
// Compile-time: NORM, TABLE, SLOTS, TOKEN_TILES, ROW_TILES (0: the norm alone), UNITS of 32 k per warp, WARPS, CLUSTER.
#include "lora_shrink.cuh"
#include "mbarrier.cuh"

#define TOKENS (TOKEN_TILES * 8)
#define ROWS (ROW_TILES * 16)
#define THREADS (WARPS * 32)
// CTAs per multiprocessor. This limits a thread to 64 registers (80 with the norm), where that spills almost nothing: the kernel can
// then start beside a GEMM.
#define MIN_CTAS (TOKEN_TILES == 1 && UNITS * (1 + NORM) <= 5 ? 4 - (NORM || SLOTS) : 1)

// Wait for the first and only phase, which other CTAs of the cluster complete.
__device__ __forceinline__ void mbar_wait_cluster(u32 bar) {
  asm volatile(
      "{\n.reg .pred p;\nL_%=: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], 0;\n@p bra D_%=;\nbra L_%=;\nD_%=:\n}" ::"r"(bar)
      : "memory");
}
// Send four numbers to CTA `rank` of the cluster. `local` and `bar` are addresses in this CTA; the receiver's are the same.
__device__ __forceinline__ void send(u32 rank, u32 local, u32 bar, float4 v) {
  u32 there, bar_there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(local), "r"(rank));
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(bar_there) : "r"(bar), "r"(rank));
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(there), "f"(v.x), "f"(v.y),
               "f"(v.z), "f"(v.w), "r"(bar_there)
               : "memory");
}
#if NORM
// weight + noise of the CTA's k. In registers they would leave no room for a CTA beside a GEMM's.
struct Weights {
  float sum[UNITS * WARPS * 32];
};

struct LoadedWeights {  // each thread's part, in registers until it is stored in shared memory
  uint4 weight[(UNITS + 3) / 4], noise[(UNITS + 3) / 4];
  __device__ __forceinline__ void load(const Operands& o, int first) {
#pragma unroll
    for (int i = 0; i < (UNITS + 3) / 4; i++) {
      const int k = min(first * 32 + (i * THREADS + (int)threadIdx.x) * 4, o.K - 4);
      weight[i] = load_constant(o.weight + k), noise[i] = o.noise && !TABLE ? load_constant(o.noise + k) : make_uint4(0, 0, 0, 0);
    }
  }
  __device__ __forceinline__ void store(Weights& w) const {
#pragma unroll
    for (int i = 0; i < (UNITS + 3) / 4; i++) {
      const int at = (i * THREADS + threadIdx.x) * 4;
      const float4 sum = add4(as_float4(weight[i]), as_float4(noise[i]));
      if (at < UNITS * WARPS * 32) *(float4*)&w.sum[at] = sum;
    }
  }
};

struct Squares {
  float of_warp[WARPS][TOKENS];
  float of_cta[CLUSTER][TOKENS];
};

// Compute 1 / sqrt(mean(h^2) + eps) of this lane's tokens. Every CTA of the cluster gets every CTA's sums.
__device__ __forceinline__ void inverse_norms(float (&inverse)[TOKEN_TILES], const uint4 (&h)[UNITS][TOKEN_TILES][2], Squares& s, u32 bar, u32 rank,
                                              const Operands& o) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int n = 0; n < TOKEN_TILES; n++) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < UNITS; i++) {
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const float4 v = as_float4(h[i][n][j]);
        sum = fmaf(v.x, v.x, sum), sum = fmaf(v.y, v.y, sum), sum = fmaf(v.z, v.z, sum), sum = fmaf(v.w, v.w, sum);
      }
    }
    sum = sum4(sum);
    if (t == 0) s.of_warp[warp][n * 8 + g] = sum;
  }
  __syncthreads();
  if (threadIdx.x < CLUSTER * TOKENS / 4) {
    const int to = threadIdx.x / (TOKENS / 4), at = threadIdx.x % (TOKENS / 4) * 4;
    float4 sum = *(const float4*)&s.of_warp[0][at];
#pragma unroll
    for (int w = 1; w < WARPS; w++) sum = add4(sum, *(const float4*)&s.of_warp[w][at]);
    send(to, smem_u32(&s.of_cta[rank][at]), bar, sum);
  }
  mbar_wait_cluster(bar);
#pragma unroll
  for (int n = 0; n < TOKEN_TILES; n++) {
    float sum = 0.f;
#pragma unroll
    for (int c = 0; c < CLUSTER; c += 4) sum += s.of_cta[c + t][n * 8 + g];
    inverse[n] = rsqrtf(sum4(sum) / o.K + o.eps);
  }
}
#endif

#if ROW_TILES > 0
struct Products {
  float of_warp[WARPS][TOKENS][ROWS + 4];  // 4 more, so that the lanes of a warp write to different banks
  float of_cta[CLUSTER][TOKENS * ROWS / CLUSTER];
};

// Add the sums of the warps, then of the CTAs. Each CTA writes an equal share of the cluster's tile of u.
__device__ __forceinline__ void reduce(const float (&acc)[TOKEN_TILES][ROW_TILES][4], Products& s, u32 bar, u32 rank, int m0, int row0, int slot,
                                       const Operands& o) {
  constexpr int SHARE = TOKENS * ROWS / CLUSTER;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int n = 0; n < TOKEN_TILES; n++)
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
      for (int i = 0; i < 4; i++) s.of_warp[warp][n * 8 + 2 * t + i % 2][r * 16 + g + i / 2 * 8] = acc[n][r][i];
  __syncthreads();
  for (int at = threadIdx.x * 4; at < TOKENS * ROWS; at += THREADS * 4) {
    float4 sum = *(const float4*)&s.of_warp[0][at / ROWS][at % ROWS];
#pragma unroll
    for (int w = 1; w < WARPS; w++) sum = add4(sum, *(const float4*)&s.of_warp[w][at / ROWS][at % ROWS]);
    send(at / SHARE, smem_u32(&s.of_cta[rank][at % SHARE]), bar, sum);
  }
  mbar_wait_cluster(bar);
  for (int i = threadIdx.x; i < SHARE; i += THREADS) {
    float sum = 0.f;
#pragma unroll
    for (int c = 0; c < CLUSTER; c++) sum += s.of_cta[c][i];
    const int at = rank * SHARE + i, m = m0 + at / ROWS, row = row0 + at % ROWS;
    if (is_own(o, m, slot) && row < o.rows) o.u[(size_t)m * o.u_stride + row] = (u16)pack2(scaling_of(o, slot) * sum, 0.f);
  }
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, MIN_CTAS) shrink(const __grid_constant__ Operands o) {
  __shared__ __align__(8) u64 bars[2];
  const u32 square_bar = smem_u32(&bars[0]), product_bar = smem_u32(&bars[1]);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const u32 rank = blockIdx.x % CLUSTER;
  const int row_tiles = ROW_TILES ? (o.rows + ROWS - 1) / (ROWS + !ROW_TILES) : 1, tile = blockIdx.x / CLUSTER;
#if SLOTS
  const int token_tiles = (o.M + TOKENS - 1) / TOKENS, slot = tile / (row_tiles * token_tiles);
  const int row_tile = tile % row_tiles, m0 = tile / row_tiles % token_tiles * TOKENS;
  if (!has_slot(o, slot, m0, TOKENS)) return;  // all CTAs of the cluster
#else
  const int slot = 0, row_tile = tile % row_tiles, m0 = tile / row_tiles * TOKENS;
#endif
  if (threadIdx.x == 0) {
    mbar_init(square_bar, 1), mbar_expect(square_bar, CLUSTER * TOKENS * 4);
    mbar_init(product_bar, 1), mbar_expect(product_bar, TOKENS * ROWS * 4);
    mbar_init_fence();
  }
  launch_dependents();
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");

  // Loads past an end are clamped to valid addresses: past k, x is set to 0; past the tokens or rows, the product is not used.
  const int units = o.K / 32, first = units * rank / CLUSTER, end = units * (rank + 1) / CLUSTER;
  int k[UNITS];
#pragma unroll
  for (int i = 0; i < UNITS; i++) k[i] = min(first + i * WARPS + warp, units - 1) * 32 + t * 8;
#if ROW_TILES > 0
  const int row0 = row_tile * ROWS;
  uint4 a[UNITS][ROW_TILES][2];
#pragma unroll
  for (int i = 0; i < UNITS; i++)
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
      for (int j = 0; j < 2; j++) a[i][r][j] = load_constant(o.a + (size_t)(slot * o.rows + min(row0 + r * 16 + j * 8 + g, o.rows - 1)) * o.K + k[i]);
#endif
#if NORM
  LoadedWeights loaded;
  loaded.load(o, first);
#endif
#if TABLE
  int noise_row[TOKEN_TILES];
#pragma unroll
  for (int n = 0; n < TOKEN_TILES; n++) noise_row[n] = __ldg(o.noise_rows + min(m0 + n * 8 + g, o.M - 1));
#endif
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
  grid_dependency_wait();

  uint4 h[UNITS][TOKEN_TILES][1 + NORM];  // eight k; with NORM in fp32, then x overwrites the first half
#pragma unroll
  for (int i = 0; i < UNITS; i++)
#pragma unroll
    for (int n = 0; n < TOKEN_TILES; n++)
#pragma unroll
      for (int j = 0; j < 1 + NORM; j++)
        h[i][n][j] = load_activation((const uint4*)o.h + ((size_t)min(m0 + n * 8 + g, o.M - 1) * o.h_stride + k[i]) / 8 * (1 + NORM) + j);
#pragma unroll
  for (int i = 0; i < UNITS; i++)
    if (first + i * WARPS + warp >= end)
#pragma unroll
      for (int n = 0; n < TOKEN_TILES; n++)
#pragma unroll
        for (int j = 0; j < 1 + NORM; j++) h[i][n][j] = make_uint4(0, 0, 0, 0);
#if NORM
  __shared__ __align__(16) Weights weights;
  __shared__ __align__(16) Squares squares;
  loaded.store(weights);
  float inverse[TOKEN_TILES];
  inverse_norms(inverse, h, squares, square_bar, rank, o);
#pragma unroll
  for (int i = 0; i < UNITS; i++) {
    float shared[8];
#pragma unroll
    for (int j = 0; j < 8; j += 4) *(float4*)&shared[j] = *(const float4*)&weights.sum[(i * WARPS + warp) * 32 + t * 8 + j];
#pragma unroll
    for (int n = 0; n < TOKEN_TILES; n++) {
#if TABLE
      const float* noise = o.noise + (size_t)noise_row[n] * o.K + k[i];
      float w[8];
#pragma unroll
      for (int j = 0; j < 8; j += 4) *(float4*)&w[j] = add4(*(const float4*)&shared[j], as_float4(load_constant(noise + j)));
#else
      const float(&w)[8] = shared;
#endif
      const float4 a = as_float4(h[i][n][0]), b = as_float4(h[i][n][1]);
      h[i][n][0] = make_uint4(pack2(a.x * inverse[n] * w[0], a.y * inverse[n] * w[1]), pack2(a.z * inverse[n] * w[2], a.w * inverse[n] * w[3]),
                              pack2(b.x * inverse[n] * w[4], b.y * inverse[n] * w[5]), pack2(b.z * inverse[n] * w[6], b.w * inverse[n] * w[7]));
      const int unit = first + i * WARPS + warp, m = m0 + n * 8 + g;
      if (unit % row_tiles == row_tile && unit < end && is_own(o, m, slot)) *(uint4*)(o.x + (size_t)m * o.x_stride + k[i]) = h[i][n][0];
    }
  }
#else
  if (o.x) {
#pragma unroll
    for (int i = 0; i < UNITS; i++)
#pragma unroll
      for (int n = 0; n < TOKEN_TILES; n++) {
        const int unit = first + i * WARPS + warp, m = m0 + n * 8 + g;
        if (unit % row_tiles == row_tile && unit < end && is_own(o, m, slot)) *(uint4*)(o.x + (size_t)m * o.x_stride + k[i]) = h[i][n][0];
      }
  }
#endif
#if ROW_TILES > 0
  __shared__ __align__(16) Products products;
  float acc[TOKEN_TILES][ROW_TILES][4] = {};
#pragma unroll
  for (int i = 0; i < UNITS; i++)
#pragma unroll
    for (int n = 0; n < TOKEN_TILES; n++)
#pragma unroll
      for (int r = 0; r < ROW_TILES; r++) multiply_unit(acc[n][r], acc[n][r], a[i][r][0], a[i][r][1], h[i][n][0]);
  reduce(acc, products, product_bar, rank, m0, row0, slot, o);
#endif
}
