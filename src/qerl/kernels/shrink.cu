// x[m, k] = bf16(h[m, k] / sqrt(mean_k(h[m]^2) + eps) * (weight[k] + noise[k])), or x = h; with TABLE noise[noise_rows[m], k]
// u[m, r] = bf16(scaling * sum_k x[m, k] a[r, k])
//
// A cluster of CLUSTER CTAs holds ROW_TILES * 16 rows of a and TOKEN_TILES * 8 tokens; its CTAs, and the WARPS of each, share k.
// Everything a thread needs is asked for at once and stays in its registers: a and the norm's weight before
// griddepcontrol.wait (no kernel of a step writes them), h after it. Sums of squares and of products cross the cluster by
// stores that count themselves in at the receiver's mbarrier, and are added in the order of k: no result depends on timing,
// nor on how many tokens there are. With 8 tokens a tile, 3584 k and 32 rows a CTA has 80 registers a thread, 64 without
// the norm, and 13 KB of shared memory: it may start, and fetch a, beside the GEMM ahead of it, and the GEMM behind it starts
// beside this kernel.
//
// Compile-time: NORM, TABLE, TOKEN_TILES, ROW_TILES (0: the norm alone), UNITS of 32 k a warp, WARPS, CLUSTER.
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define TOKENS (TOKEN_TILES * 8)
#define ROWS (ROW_TILES * 16)
#define THREADS (WARPS * 32)
// Held to 64 registers a thread, or 80 with the norm, where that spills next to none, it starts beside a GEMM.
#define AT_ONCE (TOKEN_TILES == 1 && UNITS * (1 + NORM) <= 5 ? 4 - NORM : 1)

struct Operands {
  const void* h;        // [M, K], in fp32 with NORM
  const float* weight;  // [K]
  const float* noise;   // [K] or null; with TABLE [.., K]
  const int* noise_rows;  // [M] with TABLE
  const u16* a;         // [rows, K]
  u16* x;               // [M, K]
  u16* u;               // [M, rows]
  int M, K, rows;
  float eps, scaling;
};

__device__ __forceinline__ u32 smem_u32(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ uint4 load_frozen(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
__device__ __forceinline__ uint4 load_written(const void* p) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void mbar_expect(u32 bar, u32 bytes) {
  asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(bar) : "memory");
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void mbar_wait(u32 bar) {  // for its first and only phase
  asm volatile(
      "{\n.reg .pred p;\nL_%=: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], 0;\n@p bra D_%=;\nbra L_%=;\nD_%=:\n}" ::"r"(bar)
      : "memory");
}
// Four numbers into the CTA `rank` of the cluster, where `local` and `bar` would lie in this one.
__device__ __forceinline__ void send(u32 rank, u32 local, u32 bar, float4 v) {
  u32 there, bar_there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(local), "r"(rank));
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(bar_there) : "r"(bar), "r"(rank));
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(there), "f"(v.x), "f"(v.y),
               "f"(v.z), "f"(v.w), "r"(bar_there)
               : "memory");
}
__device__ __forceinline__ float low(u32 v) { return __uint_as_float(v << 16); }
__device__ __forceinline__ float high(u32 v) { return __uint_as_float(v & 0xFFFF0000u); }
__device__ __forceinline__ u32 pack2(float lo, float hi) {
  u32 d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
  return d;
}
__device__ __forceinline__ void mma(float* d, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ float4 add4(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }
__device__ __forceinline__ float4 as_float4(uint4 v) {
  return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w));
}
__device__ __forceinline__ float sum4(float v) {  // over the four lanes of a row
  v += __shfl_xor_sync(0xFFFFFFFFu, v, 1);
  return v + __shfl_xor_sync(0xFFFFFFFFu, v, 2);
}

#if NORM
// weight + noise of the CTA's k. In the registers of all who need them they would cost a CTA its place beside a GEMM's.
struct Weights {
  float sum[UNITS * WARPS * 32];
};

struct LoadedWeights {  // each thread's part on its way to shared memory
  uint4 weight[(UNITS + 3) / 4], noise[(UNITS + 3) / 4];
  __device__ __forceinline__ void load(const Operands& o, int first) {
#pragma unroll
    for (int i = 0; i < (UNITS + 3) / 4; i++) {
      const int k = min(first * 32 + (i * THREADS + (int)threadIdx.x) * 4, o.K - 4);
      weight[i] = load_frozen(o.weight + k), noise[i] = o.noise && !TABLE ? load_frozen(o.noise + k) : make_uint4(0, 0, 0, 0);
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

// 1 / sqrt(mean(h^2) + eps) of this lane's tokens; every CTA of the cluster gets every CTA's sums.
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
  mbar_wait(bar);
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
  float of_warp[WARPS][TOKENS][ROWS + 4];  // 4 more: the lanes of a warp then write to different banks
  float of_cta[CLUSTER][TOKENS * ROWS / CLUSTER];
};

// Adds what the warps and then the CTAs have; each CTA writes an equal share of the cluster's tile of u.
__device__ __forceinline__ void reduce(const float (&acc)[TOKEN_TILES][ROW_TILES][4], Products& s, u32 bar, u32 rank, int m0, int row0, const Operands& o) {
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
  mbar_wait(bar);
  for (int i = threadIdx.x; i < SHARE; i += THREADS) {
    float sum = 0.f;
#pragma unroll
    for (int c = 0; c < CLUSTER; c++) sum += s.of_cta[c][i];
    const int at = rank * SHARE + i, m = m0 + at / ROWS, row = row0 + at % ROWS;
    if (m < o.M && row < o.rows) o.u[(size_t)m * o.rows + row] = (u16)pack2(o.scaling * sum, 0.f);
  }
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, AT_ONCE) shrink(const __grid_constant__ Operands o) {
  __shared__ __align__(8) u64 bars[2];
  const u32 square_bar = smem_u32(&bars[0]), product_bar = smem_u32(&bars[1]);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const u32 rank = blockIdx.x % CLUSTER;
  const int row_tiles = ROW_TILES ? (o.rows + ROWS - 1) / (ROWS + !ROW_TILES) : 1, tile = blockIdx.x / CLUSTER;
  const int row_tile = tile % row_tiles, m0 = tile / row_tiles * TOKENS;
  if (threadIdx.x == 0) {
    mbar_expect(square_bar, CLUSTER * TOKENS * 4);
    mbar_expect(product_bar, TOKENS * ROWS * 4);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");

  // Loads beyond an end read something that is there: past k its x becomes 0, past the tokens or rows the product is not used.
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
      for (int j = 0; j < 2; j++) a[i][r][j] = load_frozen(o.a + (size_t)min(row0 + r * 16 + j * 8 + g, o.rows - 1) * o.K + k[i]);
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
  asm volatile("griddepcontrol.wait;" ::: "memory");

  uint4 h[UNITS][TOKEN_TILES][1 + NORM];  // eight k; with NORM in fp32, until x takes the first half of the place
#pragma unroll
  for (int i = 0; i < UNITS; i++)
#pragma unroll
    for (int n = 0; n < TOKEN_TILES; n++)
#pragma unroll
      for (int j = 0; j < 1 + NORM; j++)
        h[i][n][j] = load_written((const uint4*)o.h + ((size_t)min(m0 + n * 8 + g, o.M - 1) * o.K + k[i]) / 8 * (1 + NORM) + j);
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
    float of_all[8];
#pragma unroll
    for (int j = 0; j < 8; j += 4) *(float4*)&of_all[j] = *(const float4*)&weights.sum[(i * WARPS + warp) * 32 + t * 8 + j];
#pragma unroll
    for (int n = 0; n < TOKEN_TILES; n++) {
#if TABLE
      const float* noise = o.noise + (size_t)noise_row[n] * o.K + k[i];
      float w[8];
#pragma unroll
      for (int j = 0; j < 8; j += 4) *(float4*)&w[j] = add4(*(const float4*)&of_all[j], as_float4(load_frozen(noise + j)));
#else
      const float(&w)[8] = of_all;
#endif
      const float4 a = as_float4(h[i][n][0]), b = as_float4(h[i][n][1]);
      h[i][n][0] = make_uint4(pack2(a.x * inverse[n] * w[0], a.y * inverse[n] * w[1]), pack2(a.z * inverse[n] * w[2], a.w * inverse[n] * w[3]),
                              pack2(b.x * inverse[n] * w[4], b.y * inverse[n] * w[5]), pack2(b.z * inverse[n] * w[6], b.w * inverse[n] * w[7]));
      const int unit = first + i * WARPS + warp, m = m0 + n * 8 + g;
      if (unit % row_tiles == row_tile && unit < end && m < o.M) *(uint4*)(o.x + (size_t)m * o.K + k[i]) = h[i][n][0];
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
      for (int r = 0; r < ROW_TILES; r++) {
        const uint4 top = a[i][r][0], bottom = a[i][r][1];
        const uint4 x = h[i][n][0];
        mma(acc[n][r], top.x, bottom.x, top.y, bottom.y, x.x, x.y);
        mma(acc[n][r], top.z, bottom.z, top.w, bottom.w, x.z, x.w);
      }
  reduce(acc, products, product_bar, rank, m0, row0, o);
#endif
}

// h[m] = table[tokens[m]] in fp32, the token brought into [0, vocabulary): rows that are not in use hold anything.
extern "C" __global__ void __launch_bounds__(256) embed(const int* tokens, const uint2* table, float4* h, int vocabulary, int pieces) {
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  const size_t token = min(max(((const volatile int*)tokens)[blockIdx.x], 0), vocabulary - 1);
  for (int i = threadIdx.x; i < pieces; i += 256) {
    const uint2 v = table[token * pieces + i];
    h[(size_t)blockIdx.x * pieces + i] = make_float4(low(v.x), high(v.x), low(v.y), high(v.y));
  }
}
