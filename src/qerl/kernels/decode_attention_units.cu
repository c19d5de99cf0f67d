// The first half of decode_attention.cu: what a unit of work is, its copies to shared memory, its queries and fresh token.
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;

#define NT ((GROUP + 7) / 8)           // column tiles of 8 query heads
#define KT (H / 16)                    // tiles of H
#define ROW_BYTES (H * (FP8 ? 1 : 2))  // of a key
#define TILE 32                        // positions that are scored at once
#define SLOTS (CHUNK / 16)
#define FULL 0xFFFFFFFFu
#define EMPTY 0xFFFFFFFFu  // a word of the workspace that nobody has written yet
#define Q_FACTOR (FP8 ? 1.2676506002282294e30f : 1.f)  // 2^100
#define SUM_FACTOR (FP8 ? 1048576.f : 1.f)             // 2^20
#define WIDTH ((GROUP + 2) * KV_HEADS * H)

struct Parameters {
  const u16* qkv;       // [rows, (GROUP + 2) KV_HEADS, H]
  const float* angles;  // [positions, H]: cosines, sines
  u8 *k, *v;            // [pages, PAGE, KV_HEADS, H]
  float *k_scales, *v_scales;
  const int *positions, *tables;
  const float *q_norm, *k_norm;
  u16* out;         // [rows, GROUP KV_HEADS, H]
  u32* partials;    // [rows, KV_HEADS, max_chunks, 8 NT H] fp32, EMPTY before and after
  u32* maxima;      // [rows, KV_HEADS, max_chunks, 8 NT, 2]: largest score in log2, sum of weights; the same
  float eps, score_factor;
  int rows, table_width, max_chunks;
};

struct Stage {
  u8 k[TILE * ROW_BYTES], v[TILE * ROW_BYTES];
#if FP8
  float k_scales[TILE], v_scales[TILE];
#endif
};

__device__ __forceinline__ u32 smem_u32(const void* p) { return (u32)__cvta_generic_to_shared(p); }
// A cache is read once a step: it shall not push the workspace out of L2.
__device__ __forceinline__ void copy16(u32 dst, const void* src, unsigned long long policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "l"(policy) : "memory");
}
__device__ __forceinline__ void copy4(u32 dst, const void* src) { asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(dst), "l"(src) : "memory"); }
__device__ __forceinline__ void load4(u32 (&d)[4], u32 from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : "r"(from) : "memory");
}
__device__ __forceinline__ void load4_transposed(u32 (&d)[4], u32 from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : "r"(from) : "memory");
}
__device__ __forceinline__ u32 transpose8x8(u32 a) {
  u32 d;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a));
  return d;
}
__device__ __forceinline__ u32 pack2(float lo, float hi) {
  u32 d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
  return d;
}
__device__ __forceinline__ float low(u32 a) { return __uint_as_float(a << 16); }
__device__ __forceinline__ float high(u32 a) { return __uint_as_float(a & 0xFFFF0000u); }
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ void load_partial(const u32* p, u32 (&v)[4]) {
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "l"(p) : "memory");
}
__device__ __forceinline__ bool is_missing(const u32 (&v)[4]) { return v[0] == EMPTY || v[1] == EMPTY || v[2] == EMPTY || v[3] == EMPTY; }
__device__ __forceinline__ void await_partial(const u32* p, u32 (&v)[4]) {
  while (is_missing(v)) load_partial(p, v);
}
__device__ __forceinline__ void store_partial(u32* p, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
__device__ __forceinline__ u32 bits(float v) {  // never EMPTY, whatever NaN it is
  const u32 b = __float_as_uint(v);
  return b == EMPTY ? 0x7FFFFFFFu : b;
}
__device__ __forceinline__ void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// Bytes 0 and 2, and 1 and 3, of four E4M3 numbers as pairs of bfloat16.
__device__ __forceinline__ u32 even_pair(u32 w) { return ((w << 8) & 0x80008000u) | ((w << 4) & 0x07F007F0u); }
__device__ __forceinline__ u32 odd_pair(u32 w) { return (w & 0x80008000u) | ((w >> 4) & 0x07F007F0u); }

// Where a 16-byte piece of a tile's row lies: 8 rows' pieces of one column are in 8 different groups of banks.
__device__ __forceinline__ int place(int row, int piece) {
  return row * ROW_BYTES + ((piece ^ (ROW_BYTES == 64 ? row >> 1 & 3 : row & 7)) << 4);
}

__device__ __forceinline__ u32 e4m3(float x) {  // rounded to nearest even, saturating
  const u32 bits = __float_as_uint(x), sign = bits >> 24 & 0x80, size = bits & 0x7FFFFFFFu;
  if (size > 0x7F800000u) return 0x7F;
  if (size >= __float_as_uint(448.f)) return sign | 0x7E;
  if (size < __float_as_uint(0.015625f)) return sign | __float2int_rn(__uint_as_float(size) * 512.f);
  return sign | (((size + 0x7FFFF + (size >> 20 & 1)) >> 20) - 960);
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int i = 16; i; i /= 2) x += __shfl_xor_sync(FULL, x, i);
  return x;
}
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int i = 16; i; i /= 2) x = fmaxf(x, __shfl_xor_sync(FULL, x, i));
  return x;
}

// A row's chunk and K/V head; lane i knows where in the cache the chunk's positions 16 i to 16 i + 15 begin.
struct Unit {
  int index, row, chunk, head, position, tiles, slot;
  __device__ __forceinline__ int length() const { return min(CHUNK, position + 1 - chunk * CHUNK); }
  __device__ __forceinline__ bool is_last() const { return position - chunk * CHUNK < CHUNK; }
};

// The first unit from this index on, by steps of the grid, that has positions; chunk by chunk, so that a row's last is its highest.
__device__ __forceinline__ Unit find_unit(const Parameters& p, const int* positions, int index, int units) {
  Unit u;
  u.tiles = u.slot = 0;
  for (; index < units; index += gridDim.x) {
    const int n = index / KV_HEADS;
    u.chunk = n / p.rows, u.row = n - u.chunk * p.rows, u.head = index - n * KV_HEADS, u.position = positions[u.row];
    if (u.chunk * CHUNK > u.position) continue;
    u.tiles = (u.length() + TILE - 1) / TILE;
    const int at = u.chunk * CHUNK + (threadIdx.x % SLOTS) * 16;
    if (threadIdx.x < SLOTS && at <= u.position) u.slot = p.tables[(size_t)u.row * p.table_width + at / PAGE] * PAGE + at % PAGE;
    break;
  }
  u.index = index;
  return u;
}

// Starts copying a tile's keys and values, whole groups of 16 positions.
__device__ __forceinline__ void fetch(const Parameters& p, const Unit& u, int tile, Stage& to, unsigned long long policy) {
  constexpr int PIECES = ROW_BYTES / 16, ROWS = 32 / PIECES;
  const int lane = threadIdx.x, piece = lane % PIECES;
#pragma unroll
  for (int half = 0; half < TILE / 16; half++) {
    const int slot = __shfl_sync(FULL, u.slot, tile * (TILE / 16) + half);
    if (tile * TILE + half * 16 >= u.length()) break;
    const size_t from = ((size_t)slot * KV_HEADS + u.head) * ROW_BYTES + piece * 16;
#pragma unroll
    for (int row0 = 0; row0 < 16; row0 += ROWS) {
      const int row = row0 + lane / PIECES, to_row = half * 16 + row;
      const size_t at = from + (size_t)row * (KV_HEADS * ROW_BYTES);
      copy16(smem_u32(to.k) + place(to_row, piece), p.k + at, policy);
      copy16(smem_u32(to.v) + place(to_row, piece), p.v + at, policy);
    }
#if FP8
    const size_t at = (size_t)(slot + lane % 16) * KV_HEADS + u.head;
    copy4(smem_u32((lane < 16 ? to.k_scales : to.v_scales) + half * 16 + lane % 16), (lane < 16 ? p.k_scales : p.v_scales) + at);
#endif
  }
}

// A head over the warp: lane l has elements 2 l, 2 l + 1 (first) and those H / 2 further (second).
struct Head {
  u32 first, second;
};

__device__ __forceinline__ Head load_head(const u16* from) {
  const int lane = threadIdx.x;
  if (lane >= H / 4) return {0, 0};
  return {*(const u32*)(from + 2 * lane), *(const u32*)(from + H / 2 + 2 * lane)};
}

__device__ __forceinline__ void turn(float& x, float& y, float cosine, float sine) {
  const float x0 = x;
  x = fmaf(y, -sine, __fmul_rn(x, cosine)), y = fmaf(x0, sine, __fmul_rn(y, cosine));
}

__device__ __forceinline__ Head normed(Head x, const float* weight, float eps) {
  const int at = 2 * (threadIdx.x % (H / 4));
  const float a = low(x.first), b = high(x.first), c = low(x.second), d = high(x.second);
  const float inverse = rsqrtf(warp_sum(a * a + b * b + c * c + d * d) / H + eps);
  const float2 w0 = *(const float2*)(weight + at), w1 = *(const float2*)(weight + H / 2 + at);
  return {pack2(a * inverse * w0.x, b * inverse * w0.y), pack2(c * inverse * w1.x, d * inverse * w1.y)};
}

__device__ __forceinline__ Head rotated(const Parameters& p, Head x, int position) {
  const float* angle = p.angles + (size_t)position * H + 2 * (threadIdx.x % (H / 4));
  const float2 c = *(const float2*)angle, s = *(const float2*)(angle + H / 2);
  float x0 = low(x.first), x1 = high(x.first), y0 = low(x.second), y1 = high(x.second);
  turn(x0, y0, c.x, s.x), turn(x1, y1, c.y, s.y);
  return {pack2(x0, x1), pack2(y0, y1)};
}

// The step's own key or value as it is stored.
struct Stored {
  u32 first, second;
  float scale;
};

__device__ __forceinline__ Stored stored(Head x) {
#if FP8
  const float a = low(x.first), b = high(x.first), c = low(x.second), d = high(x.second);
  const float largest = warp_max(fmaxf(fmaxf(fabsf(a), fabsf(b)), fmaxf(fabsf(c), fabsf(d))));
  const float scale = largest > 0.f ? __fdiv_rn(largest, 448.f) : 1.f;
  return {e4m3(__fdiv_rn(a, scale)) | e4m3(__fdiv_rn(b, scale)) << 8, e4m3(__fdiv_rn(c, scale)) | e4m3(__fdiv_rn(d, scale)) << 8, scale};
#else
  return {x.first, x.second, 1.f};
#endif
}

__device__ __forceinline__ void put(const Stored& x, u8* first, u8* second) {
#if FP8
  *(u16*)first = x.first, *(u16*)second = x.second;
#else
  *(u32*)first = x.first, *(u32*)second = x.second;
#endif
}

// The step's own token into the cache, and into the tile, which has arrived; zeros for the values after it.
__device__ __forceinline__ void put_fresh(const Parameters& p, const Unit& u, Stage& s, const Stored& k, const Stored& v, int slot) {
  const int lane = threadIdx.x, fresh = u.position % TILE, at = lane * 2 * ROW_BYTES / H, half = ROW_BYTES / 2;
  const size_t to = ((size_t)slot * KV_HEADS + u.head) * ROW_BYTES;
  if (lane < H / 4) {
    put(k, p.k + to + at, p.k + to + at + half);
    put(v, p.v + to + at, p.v + to + at + half);
    put(k, s.k + place(fresh, at / 16) + at % 16, s.k + place(fresh, (at + half) / 16) + at % 16);
    put(v, s.v + place(fresh, at / 16) + at % 16, s.v + place(fresh, (at + half) / 16) + at % 16);
  }
#if FP8
  if (lane == 0) {
    p.k_scales[(size_t)slot * KV_HEADS + u.head] = k.scale, p.v_scales[(size_t)slot * KV_HEADS + u.head] = v.scale;
    s.k_scales[fresh] = k.scale, s.v_scales[fresh] = v.scale;
  }
  if (lane > fresh) s.k_scales[lane] = s.v_scales[lane] = 0.f;
#endif
  constexpr int PIECES = ROW_BYTES / 16;
  for (int i = lane; i < (TILE - 1 - fresh) * PIECES; i += 32) *(uint4*)(s.v + place(fresh + 1 + i / PIECES, i % PIECES)) = make_uint4(0, 0, 0, 0);
}
