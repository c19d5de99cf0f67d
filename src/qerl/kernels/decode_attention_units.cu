// The first half of decode_attention.cu: what a unit of work is, its copies to shared memory, its queries and fresh token.
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;

#define THREADS 128
#define NT ((GROUP + 7) / 8)  // column tiles of a row
#define MEMBERS (4 / NT)      // rows that a shared unit serves at once
#define COLUMNS (8 * NT * MEMBERS)
#define ROW_BYTES (H * (FP8 ? 1 : 2))  // of a key
#define PT (CHUNK / 64)                // position tiles of a warp
#define OT (H / 64)                    // tiles of H of a warp
#define Q_BYTES (COLUMNS * 2 * (H > CHUNK ? H : CHUNK))
#define FULL 0xFFFFFFFFu
#define EMPTY 0xFFFFFFFFu  // a word of the workspace that nobody has written yet
#define Q_FACTOR (FP8 ? 1.2676506002282294e30f : 1.f)  // 2^100
#define SUM_FACTOR (FP8 ? 1048576.f : 1.f)             // 2^20

struct Parameters {
  const u16* qkv;       // [rows, (GROUP + 2) KV_HEADS, H]
  const float* angles;  // [positions, H]: cosines, sines
  u8 *k, *v;            // [pages, PAGE, KV_HEADS, H]
  float *k_scales, *v_scales;
  const int *positions, *leaders, *shared, *tables;
  const float *q_norm, *k_norm;
  u16* out;         // [rows, GROUP KV_HEADS, H]
  u32* partials;    // [rows, KV_HEADS, max_chunks, 8 NT H] fp32, EMPTY before and after
  u32* maxima;      // [rows, KV_HEADS, max_chunks, 8 NT, 2]: largest score in log2, sum of weights; the same
  float eps, score_factor;
  int rows, table_width, max_chunks;
};

struct __align__(64) TensorMap {
  u8 bytes[128];
};

struct Unit {
  int row, chunk, head, position;
  int tokens;  // that earlier steps put into the chunk
  int fresh;   // the place in the chunk of this step's token, or -1
  int shared;
  int slots[CHUNK / 16];  // where in the cache the chunk's positions 16 i to 16 i + 15 begin
  __device__ __forceinline__ int padded() const { return (tokens + (fresh >= 0) + 15) / 16 * 16; }
};

struct Shared {
  u8 k[CHUNK * ROW_BYTES], v[CHUNK * ROW_BYTES];  // from a multiple of 1024, as the swizzle wants
  u8 qp[Q_BYTES];                                 // q, and once it is used p
#if FP8
  float k_scales[CHUNK], v_scales[CHUNK];
#endif
  float maxima[4][COLUMNS], sums[4][COLUMNS];
  unsigned long long k_full, v_full;
  Unit units[4];
  int ends[MAX_ROWS];  // units of the rows up to this one, K/V heads not counted
  u16 members[MAX_ROWS];
  int num_members, warp_units[4];
};

__device__ __forceinline__ u32 smem_u32(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void init(u32 bar, int count) { asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(bar), "r"(count)); }
__device__ __forceinline__ void wait(u32 bar, u32 parity) {
  asm volatile("{\n.reg .pred p;\nL_%=: mbarrier.test_wait.parity.shared.b64 p, [%0], %1;\n@p bra D_%=;\nbra L_%=;\nD_%=:\n}" ::"r"(bar), "r"(parity) : "memory");
}
#if TMA
__device__ __forceinline__ void expect(u32 bar, u32 bytes) { asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory"); }
__device__ __forceinline__ void copy_box(u32 dst, const TensorMap* map, int slot, int column64, u32 bar) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(dst), "l"(map), "r"(0), "r"(slot), "r"(column64), "r"(bar) : "memory");
}
#else
__device__ __forceinline__ void copy16(u32 dst, const void* src) { asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst), "l"(src) : "memory"); }
__device__ __forceinline__ void arrive_when_copied(u32 bar) { asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(bar) : "memory"); }
#endif
__device__ __forceinline__ void load4(u32 (&d)[4], u32 from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : "r"(from));
}
__device__ __forceinline__ void load4_transposed(u32 (&d)[4], u32 from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : "r"(from));
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
__device__ __forceinline__ void await_partial(const u32* p, u32 (&v)[4]) {
  while (v[0] == EMPTY || v[1] == EMPTY || v[2] == EMPTY || v[3] == EMPTY) load_partial(p, v);
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

// Where a 16-byte piece lies: 8 rows' pieces of one column are in 8 different groups of banks. The same as TMA's
// swizzle of 128 bytes; rows of 256 bytes are two such halves, 16 rows each.
template <int BYTES>
__device__ __forceinline__ int place(int row, int piece) {
  if (BYTES == 256) return row / 16 * 4096 + piece / 8 * 2048 + row % 16 * 128 + ((piece ^ row) % 8 << 4);
  return row * BYTES + ((piece ^ (BYTES == 64 ? row >> 1 & 3 : row & 7)) << 4);
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

// A row's units: all its chunks if it is its own leader, which also reads the shared ones when its sample has ended.
__device__ __forceinline__ int count_units(const Parameters& p, int row) {
  const int position = p.positions[row], shared = p.shared[row] / CHUNK;
  const int first = p.leaders[row] == row ? 0 : shared;
  return max(position < 0 ? shared : position / CHUNK + 1, shared) - first;
}

__device__ __forceinline__ void list_units(const Parameters& p, Shared& s) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int before = 0;
  for (int row0 = 0; row0 < p.rows; row0 += THREADS) {
    const int row = row0 + threadIdx.x;
    int units = row < p.rows ? count_units(p, row) : 0;
#pragma unroll
    for (int i = 1; i < 32; i *= 2) {
      const int other = __shfl_up_sync(FULL, units, i);
      if (lane >= i) units += other;
    }
    if (lane == 31) s.warp_units[warp] = units;
    __syncthreads();
    for (int w = 0; w < 4; w++) {
      if (w < warp) units += s.warp_units[w];
    }
    if (row < p.rows) s.ends[row] = before + units;
    for (int w = 0; w < 4; w++) before += s.warp_units[w];
    __syncthreads();
  }
}

// A warp finds a unit for all.
__device__ __forceinline__ void find_unit(const Parameters& p, Shared& s, int turn) {
  Unit& u = s.units[turn % 4];
  const int index = blockIdx.x + turn * gridDim.x, n = index / KV_HEADS, lane = threadIdx.x % 32;
  if (n >= s.ends[p.rows - 1]) return;
  int row = 0, end = p.rows - 1;
  while (row < end) {
    const int middle = (row + end) / 2;
    if (s.ends[middle] > n) end = middle;
    else row = middle + 1;
  }
  const int shared = p.shared[row] / CHUNK, position = p.positions[row];
  const bool leads = p.leaders[row] == row;
  const int chunk = n - (row ? s.ends[row - 1] : 0) + (leads ? 0 : shared), older = position - chunk * CHUNK;
  const bool is_shared = leads && chunk < shared;
  const int length = is_shared ? CHUNK : min(CHUNK, older + 1), at = chunk * CHUNK + lane * 16;
  if (lane * 16 < length) u.slots[lane] = p.tables[(size_t)row * p.table_width + at / PAGE] * PAGE + at % PAGE;
  if (lane == 0) {
    u.row = row, u.chunk = chunk, u.head = index - n * KV_HEADS, u.position = position;
    u.tokens = is_shared ? CHUNK : min(CHUNK, older), u.fresh = !is_shared && older < CHUNK ? older : -1;
    u.shared = is_shared;
  }
}

// Starts copying the chunk's keys or values, whole groups of 16 positions.
__device__ __forceinline__ void fetch(const Unit& u, u8* to, const u8* from, const TensorMap* map, u32 full) {
  const int padded = u.padded();
#if TMA
  // a warp's lanes start their copies one after the other, so every warp starts some
  const int lane = threadIdx.x % 32, box = threadIdx.x / 32 + 4 * lane;
  if (threadIdx.x == 0) expect(full, padded * ROW_BYTES);
  if (lane < CHUNK / 64 && box * 16 < padded) copy_box(smem_u32(to) + box * 16 * ROW_BYTES, map, u.slots[box], u.head * (ROW_BYTES / 128), full);
#else
  constexpr int PIECES = ROW_BYTES / 16, ROWS = THREADS / PIECES;
  const int piece = threadIdx.x % PIECES;
  from += u.head * ROW_BYTES + piece * 16;
#pragma unroll
  for (int row0 = 0; row0 < CHUNK; row0 += ROWS) {
    const int row = row0 + threadIdx.x / PIECES;
    if (row < padded) copy16(smem_u32(to) + place<ROW_BYTES>(row, piece), from + (size_t)(u.slots[row / 16] + row % 16) * (KV_HEADS * ROW_BYTES));
  }
  arrive_when_copied(full);
#endif
}

// A warp's head: lane l has elements 2 l, 2 l + 1 (first) and those H / 2 further (second).
struct Head {
  u32 first, second;
};

__device__ __forceinline__ Head load_head(const u16* from) {
  const int lane = threadIdx.x % 32;
  if (lane >= H / 4) return {0, 0};
  return {*(const u32*)(from + 2 * lane), *(const u32*)(from + H / 2 + 2 * lane)};
}

__device__ __forceinline__ Head normed(Head x, const float* weight, float eps) {
  const int at = 2 * (threadIdx.x % (H / 4));
  const float a = low(x.first), b = high(x.first), c = low(x.second), d = high(x.second);
  const float inverse = rsqrtf(warp_sum(a * a + b * b + c * c + d * d) / H + eps);
  const float2 w0 = *(const float2*)(weight + at), w1 = *(const float2*)(weight + H / 2 + at);
  return {pack2(a * inverse * w0.x, b * inverse * w0.y), pack2(c * inverse * w1.x, d * inverse * w1.y)};
}

struct Angle {
  float2 cosine, sine;
};

__device__ __forceinline__ Angle load_angle(const Parameters& p, int position) {
  const float* from = p.angles + (size_t)max(position, 0) * H + 2 * (threadIdx.x % (H / 4));
  return {*(const float2*)from, *(const float2*)(from + H / 2)};
}

__device__ __forceinline__ Head rotated(Head x, const Angle& angle) {
  const float2 c = angle.cosine, s = angle.sine;
  const float x0 = low(x.first), x1 = high(x.first), y0 = low(x.second), y1 = high(x.second);
  return {pack2(fmaf(y0, -s.x, __fmul_rn(x0, c.x)), fmaf(y1, -s.y, __fmul_rn(x1, c.y))),
          pack2(fmaf(x0, s.x, __fmul_rn(y0, c.x)), fmaf(x1, s.y, __fmul_rn(y1, c.y)))};
}

__device__ __forceinline__ void put_query(Shared& s, int column, Head q) {
  const int lane = threadIdx.x % 32;
  if (lane >= H / 4) return;
#if FP8  // a word of four keys is read as bytes 0, 2, then 1, 3: k of mma is 2 t, 2 t + 1, then 8 more
  const int k = lane / 2 % 4 * 2 + lane % 2, piece = lane / 8 * 2;
  const u32 words[2] = {q.first, q.second};
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const u32 even = __float_as_uint(low(words[i]) * Q_FACTOR), odd = __float_as_uint(high(words[i]) * Q_FACTOR);
    *(u16*)(s.qp + place<2 * H>(column, piece + i * (H / 16)) + 2 * k) = even >> 16;
    *(u16*)(s.qp + place<2 * H>(column, piece + i * (H / 16) + 1) + 2 * k) = odd >> 16;
  }
#else
  *(u32*)(s.qp + place<2 * H>(column, lane / 4) + lane % 4 * 4) = q.first;
  *(u32*)(s.qp + place<2 * H>(column, H / 16 + lane / 4) + lane % 4 * 4) = q.second;
#endif
}

// The step's own key or value, into the cache and into the copy of the chunk.
__device__ __forceinline__ void put_fresh(Head x, const Unit& u, int slot, u8* copy, u8* cache, float* copy_scales, float* scales) {
  const int lane = threadIdx.x % 32;
  cache += ((size_t)slot * KV_HEADS + u.head) * ROW_BYTES;
#if FP8
  const float a = low(x.first), b = high(x.first), c = low(x.second), d = high(x.second);
  const float largest = warp_max(fmaxf(fmaxf(fabsf(a), fabsf(b)), fmaxf(fabsf(c), fabsf(d))));
  const float scale = largest > 0.f ? __fdiv_rn(largest, 448.f) : 1.f;
  if (lane == 0) *copy_scales = scale, scales[(size_t)slot * KV_HEADS + u.head] = scale;
  const u16 first = e4m3(__fdiv_rn(a, scale)) | e4m3(__fdiv_rn(b, scale)) << 8;
  const u16 second = e4m3(__fdiv_rn(c, scale)) | e4m3(__fdiv_rn(d, scale)) << 8;
  typedef u16 Word;
#else
  const u32 first = x.first, second = x.second;
  typedef u32 Word;
#endif
  if (lane >= H / 4) return;
  const int at = lane * sizeof(Word), half = ROW_BYTES / 2;
  *(Word*)(copy + place<ROW_BYTES>(u.fresh, at / 16) + at % 16) = first;
  *(Word*)(copy + place<ROW_BYTES>(u.fresh, (at + half) / 16) + at % 16) = second;
  *(Word*)(cache + at) = first, *(Word*)(cache + at + half) = second;
}

// A unit's own row, loaded while the unit before is computed: the warp's query heads, the new value or key, and
// the scales of one position.
#define ROUNDS ((GROUP + 3) / 4)
#define WIDTH ((GROUP + 2) * KV_HEADS * H)
struct Own {
  Head q[ROUNDS], fresh;
  Angle angle;
  float k_scale, v_scale;
};

__device__ __forceinline__ Own load_own(const Parameters& p, const Unit& u) {
  Own own;
  const int warp = threadIdx.x / 32;
  const u16* from = p.qkv + (size_t)u.row * WIDTH;
#pragma unroll
  for (int i = 0; i < ROUNDS; i++) own.q[i] = load_head(from + (u.head * GROUP + min(i * 4 + warp, GROUP - 1)) * H);
  own.fresh = load_head(from + (GROUP * KV_HEADS + u.head + (warp == 2 ? KV_HEADS : 0)) * H);
  own.angle = load_angle(p, u.position);
#if FP8
  own.k_scale = own.v_scale = 0.f;
  if (threadIdx.x < u.tokens) {
    const size_t at = (size_t)(u.slots[threadIdx.x / 16] + threadIdx.x % 16) * KV_HEADS + u.head;
    own.k_scale = p.k_scales[at], own.v_scale = p.v_scales[at];
  }
#endif
  return own;
}

__device__ __forceinline__ void put_own(const Parameters& p, Shared& s, const Unit& u, const Own& own) {
  const int warp = threadIdx.x / 32;
#if FP8
  if (threadIdx.x != u.fresh) s.k_scales[threadIdx.x] = own.k_scale, s.v_scales[threadIdx.x] = own.v_scale;
#endif
  if (u.shared) return;
#pragma unroll
  for (int i = 0; i < ROUNDS; i++) {
    const Head q = p.q_norm ? normed(own.q[i], p.q_norm, p.eps) : own.q[i];
    put_query(s, min(i * 4 + warp, GROUP - 1), rotated(q, own.angle));
  }
}

// The step's own token into the chunk, which has arrived, and into the cache; zeros for the values after it.
__device__ __forceinline__ void put_fresh_token(const Parameters& p, Shared& s, const Unit& u, const Own& own) {
  const int warp = threadIdx.x / 32, slot = u.slots[u.fresh / 16] + u.fresh % 16;
  float *k_copy = nullptr, *v_copy = nullptr;
#if FP8
  k_copy = s.k_scales + u.fresh, v_copy = s.v_scales + u.fresh;
#endif
  if (warp == 2) {
    put_fresh(own.fresh, u, slot, s.v, p.v, v_copy, p.v_scales);
  } else if (warp == 3) {
    const Head k = p.k_norm ? normed(own.fresh, p.k_norm, p.eps) : own.fresh;
    put_fresh(rotated(k, own.angle), u, slot, s.k, p.k, k_copy, p.k_scales);
  } else {
    constexpr int PIECES = ROW_BYTES / 16;
    const int pieces = (u.padded() - u.fresh - 1) * PIECES;
    for (int i = threadIdx.x; i < pieces; i += 64) *(uint4*)(s.v + place<ROW_BYTES>(u.fresh + 1 + i / PIECES, i % PIECES)) = make_uint4(0, 0, 0, 0);
  }
#if TMA  // the next copy to these places must come after
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// The queries of `count` members of a shared unit.
__device__ __forceinline__ void put_members(const Parameters& p, Shared& s, const Unit& u, int begin, int count) {
  const int warp = threadIdx.x / 32, last = max(count * GROUP - 1, 0);
  Head q[MEMBERS * ROUNDS];
  Angle angle[MEMBERS * ROUNDS];
#pragma unroll
  for (int i = 0; i < MEMBERS * ROUNDS; i++) {
    const int at = min(i * 4 + warp, last), row = count ? s.members[begin + at / GROUP] : u.row;
    q[i] = load_head(p.qkv + (size_t)row * WIDTH + (u.head * GROUP + at % GROUP) * H);
    angle[i] = load_angle(p, p.positions[row]);
  }
#pragma unroll
  for (int i = 0; i < MEMBERS * ROUNDS; i++) {
    const int at = min(i * 4 + warp, last);
    if (p.q_norm) q[i] = normed(q[i], p.q_norm, p.eps);
    put_query(s, at / GROUP * (NT * 8) + at % GROUP, rotated(q[i], angle[i]));
  }
}

