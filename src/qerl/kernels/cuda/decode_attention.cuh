// Shared by decode_attention.cu and decode_attention_write.cu: parameters, units of work, copies to shared memory, and the
// key and value of the step's new token. decode_attention.cu lists the compile-time constants.
#pragma once
#include "bfloat16.cuh"
#include "launch.cuh"
#include "memory.cuh"
#include "warp.cuh"

#define NT ((GROUP + 7) / 8)           // tiles of 8 query heads
#define KT (H / 16)                    // tiles of 16 along H
#define ROW_BYTES (H * (FP8 ? 1 : 2))  // one key
#define TILE 32                        // positions scored at once
#define SLOTS (CHUNK / 16)
#define Q_FACTOR (FP8 ? 1.2676506002282294e30f : 1.f)  // 2^100
#define SUM_FACTOR (FP8 ? 1048576.f : 1.f)             // 2^20
#define WIDTH ((GROUP + 2) * KV_HEADS * H)             // one row of qkv

struct Parameters {
  const u16* qkv;       // [rows, (GROUP + 2) KV_HEADS, H]
  const float* angles;  // [positions, H]: cosines, then sines
  u8 *k, *v;            // [pages, PAGE, KV_HEADS, H]
  float *k_scales, *v_scales;
  const int *positions, *tables;
  const float *q_norm, *k_norm;
  u16* out;         // [rows, GROUP KV_HEADS, H]
  u32* partials;    // [rows, KV_HEADS, max_chunks, 8 NT H] fp32; all words are EMPTY before and after a launch
  u32* maxima;      // [rows, KV_HEADS, max_chunks, 8 NT, 2]: largest score in log2, sum of weights; EMPTY likewise
  float eps, score_factor;
  int rows, table_width, max_chunks;
};

struct Stage {
  u8 k[TILE * ROW_BYTES], v[TILE * ROW_BYTES];
#if FP8
  float k_scales[TILE], v_scales[TILE];
#endif
};

// The cache is read once per step, so it should not evict the workspace from L2.
__device__ __forceinline__ void copy16(u32 dst, const void* src, u64 policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "l"(policy) : "memory");
}
__device__ __forceinline__ void copy4(u32 dst, const void* src) { asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(dst), "l"(src) : "memory"); }
// Bytes 0 and 2 (even), or 1 and 3 (odd), of four E4M3 numbers as two bfloat16, each * 2^-120.
__device__ __forceinline__ u32 even_pair(u32 w) { return ((w << 8) & 0x80008000u) | ((w << 4) & 0x07F007F0u); }
__device__ __forceinline__ u32 odd_pair(u32 w) { return (w & 0x80008000u) | ((w >> 4) & 0x07F007F0u); }

// The swizzled offset of a 16-byte piece of a tile's row: the pieces of 8 rows in one column use 8 different groups of banks.
__device__ __forceinline__ int swizzled(int row, int piece) {
  return row * ROW_BYTES + ((piece ^ (ROW_BYTES == 64 ? row >> 1 & 3 : row & 7)) << 4);
}

__device__ __forceinline__ u32 e4m3(float x) {  // round to nearest even, saturate
  const u32 bits = __float_as_uint(x), sign = bits >> 24 & 0x80, magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return 0x7F;
  if (magnitude >= __float_as_uint(448.f)) return sign | 0x7E;
  if (magnitude < __float_as_uint(0.015625f)) return sign | __float2int_rn(__uint_as_float(magnitude) * 512.f);
  return sign | (((magnitude + 0x7FFFF + (magnitude >> 20 & 1)) >> 20) - 960);
}

// One chunk of one row and K/V head. `slot`: lane i has the cache slot of the chunk's position 16 i.
struct Unit {
  int index, row, chunk, head, position, tiles, slot;
  __device__ __forceinline__ int length() const { return min(CHUNK, position + 1 - chunk * CHUNK); }
  __device__ __forceinline__ bool is_last() const { return position - chunk * CHUNK < CHUNK; }
};

// Return the first unit at or after this index, in steps of the grid, that has positions. Units are ordered by chunk, so a row's
// last chunk has its highest index.
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

// Start copying a tile's keys and values, in whole groups of 16 positions.
__device__ __forceinline__ void fetch(const Parameters& p, const Unit& u, int tile, Stage& to, unsigned long long policy) {
  constexpr int PIECES = ROW_BYTES / 16, ROWS = 32 / PIECES;
  const int lane = threadIdx.x, piece = lane % PIECES;
#pragma unroll
  for (int half = 0; half < TILE / 16; half++) {
    const int slot = __shfl_sync(ALL_LANES, u.slot, tile * (TILE / 16) + half);
    if (tile * TILE + half * 16 >= u.length()) break;
    const size_t from = ((size_t)slot * KV_HEADS + u.head) * ROW_BYTES + piece * 16;
#pragma unroll
    for (int row0 = 0; row0 < 16; row0 += ROWS) {
      const int row = row0 + lane / PIECES, to_row = half * 16 + row;
      const size_t at = from + (size_t)row * (KV_HEADS * ROW_BYTES);
      copy16(smem_u32(to.k) + swizzled(to_row, piece), p.k + at, policy);
      copy16(smem_u32(to.v) + swizzled(to_row, piece), p.v + at, policy);
    }
#if FP8
    const size_t at = (size_t)(slot + lane % 16) * KV_HEADS + u.head;
    copy4(smem_u32((lane < 16 ? to.k_scales : to.v_scales) + half * 16 + lane % 16), (lane < 16 ? p.k_scales : p.v_scales) + at);
#endif
  }
}

// One head spread over the warp: lane l has elements 2 l and 2 l + 1 (first), and those H / 2 further on (second).
struct Head {
  u32 first, second;
};

__device__ __forceinline__ Head load_head(const u16* from) {
  const int lane = threadIdx.x;
  if (lane >= H / 4) return {0, 0};
  return {*(const u32*)(from + 2 * lane), *(const u32*)(from + H / 2 + 2 * lane)};
}

__device__ __forceinline__ void rotate_pair(float& x, float& y, float cosine, float sine) {
  const float x0 = x;
  x = fmaf(y, -sine, __fmul_rn(x, cosine)), y = fmaf(x0, sine, __fmul_rn(y, cosine));
}

__device__ __forceinline__ Head rms_norm(Head x, const float* weight, float eps) {
  const int at = 2 * (threadIdx.x % (H / 4));
  const float a = low(x.first), b = high(x.first), c = low(x.second), d = high(x.second);
  const float inverse = rsqrtf(warp_sum(a * a + b * b + c * c + d * d) / H + eps);
  const float2 w0 = *(const float2*)(weight + at), w1 = *(const float2*)(weight + H / 2 + at);
  return {pack2(a * inverse * w0.x, b * inverse * w0.y), pack2(c * inverse * w1.x, d * inverse * w1.y)};
}

__device__ __forceinline__ Head rotate(const Parameters& p, Head x, int position) {
  const float* angle = p.angles + (size_t)position * H + 2 * (threadIdx.x % (H / 4));
  const float2 c = *(const float2*)angle, s = *(const float2*)(angle + H / 2);
  float x0 = low(x.first), x1 = high(x.first), y0 = low(x.second), y1 = high(x.second);
  rotate_pair(x0, y0, c.x, s.x), rotate_pair(x1, y1, c.y, s.y);
  return {pack2(x0, x1), pack2(y0, y1)};
}

// The new token's key or value in the cache's format.
struct CacheEntry {
  u32 first, second;
  float scale;
};

__device__ __forceinline__ CacheEntry to_cache_format(Head x) {
#if FP8
  const float a = low(x.first), b = high(x.first), c = low(x.second), d = high(x.second);
  const float absmax = warp_max(fmaxf(fmaxf(fabsf(a), fabsf(b)), fmaxf(fabsf(c), fabsf(d))));
  const float scale = absmax > 0.f ? __fdiv_rn(absmax, 448.f) : 1.f;
  return {e4m3(__fdiv_rn(a, scale)) | e4m3(__fdiv_rn(b, scale)) << 8, e4m3(__fdiv_rn(c, scale)) | e4m3(__fdiv_rn(d, scale)) << 8, scale};
#else
  return {x.first, x.second, 1.f};
#endif
}

__device__ __forceinline__ void store_entry(const CacheEntry& x, u8* first, u8* second) {
#if FP8
  *(u16*)first = x.first, *(u16*)second = x.second;
#else
  *(u32*)first = x.first, *(u32*)second = x.second;
#endif
}

// The new token's key and value as the cache stores them.
__device__ __forceinline__ void load_new_token(const Parameters& p, int row, int head, int position, CacheEntry& k, CacheEntry& v) {
  const u16* from = p.qkv + (size_t)row * WIDTH + (GROUP * KV_HEADS + head) * H;
  const Head key = load_head(from), value = load_head(from + KV_HEADS * H);
  k = to_cache_format(rotate(p, p.k_norm ? rms_norm(key, p.k_norm, p.eps) : key, position)), v = to_cache_format(value);
}

// Write the new token's key and value to a slot of the cache.
__device__ __forceinline__ void write_cache(const Parameters& p, int head, size_t slot, const CacheEntry& k, const CacheEntry& v) {
  const int lane = threadIdx.x;
  const size_t to = (slot * KV_HEADS + head) * ROW_BYTES + lane * 2 * ROW_BYTES / H, half = ROW_BYTES / 2;
  if (lane < H / 4) store_entry(k, p.k + to, p.k + to + half), store_entry(v, p.v + to, p.v + to + half);
#if FP8
  if (lane == 0) p.k_scales[slot * KV_HEADS + head] = k.scale, p.v_scales[slot * KV_HEADS + head] = v.scale;
#endif
}
