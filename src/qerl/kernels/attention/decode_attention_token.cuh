// The key and value of the step's new token: normed, rotated, in the cache's format.
#pragma once
#include "decode_attention.cuh"
#include "fp8_codes.cuh"

// One head spread over the warp. Lane l has, of each i < PIECES, two neighboring elements at first_at(l + 32 i) and two at
// second_at(l + 32 i): those that are rotated together (of each two if INTERLEAVED), or else none that are rotated.
#define PIECES ((H + 127) / 128)
#define LAST_LANE (H / 4)  // lanes from here on have no elements
struct Head {
  u32 first[PIECES], second[PIECES];
};

__device__ __forceinline__ int first_at(int pair) { return ROTARY == H || pair < ROTARY / 4 ? 2 * pair : ROTARY / 2 + 2 * pair; }
__device__ __forceinline__ int second_at(int pair) {
  return first_at(pair) + (ROTARY == H || pair < ROTARY / 4 ? ROTARY / 2 : (H - ROTARY) / 2);
}

__device__ __forceinline__ Head load_head(const u16* from) {
  const int lane = threadIdx.x;
  Head x = {};
  if (lane >= LAST_LANE) return x;
#pragma unroll
  for (int i = 0; i < PIECES; i++)
    x.first[i] = *(const u32*)(from + first_at(lane + 32 * i)), x.second[i] = *(const u32*)(from + second_at(lane + 32 * i));
  return x;
}

__device__ __forceinline__ void rotate_pair(float& x, float& y, float cosine, float sine) {
  const float x0 = x;
  x = fmaf(y, -sine, __fmul_rn(x, cosine)), y = fmaf(x0, sine, __fmul_rn(y, cosine));
}

__device__ __forceinline__ Head rms_norm(const Head& x, const float* weight, float eps) {
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < PIECES; i++) {
    const float a = low(x.first[i]), b = high(x.first[i]), c = low(x.second[i]), d = high(x.second[i]);
    sum += a * a + b * b + c * c + d * d;
  }
  const float inverse = rsqrtf(warp_sum(sum) / H + eps);
  Head y;
#pragma unroll
  for (int i = 0; i < PIECES; i++) {
    const int pair = threadIdx.x % LAST_LANE + 32 * i;
    const float2 w0 = *(const float2*)(weight + first_at(pair)), w1 = *(const float2*)(weight + second_at(pair));
    y.first[i] = pack2(low(x.first[i]) * inverse * w0.x, high(x.first[i]) * inverse * w0.y);
    y.second[i] = pack2(low(x.second[i]) * inverse * w1.x, high(x.second[i]) * inverse * w1.y);
  }
  return y;
}

__device__ __forceinline__ Head rotate(const Parameters& p, Head x, int position) {
#pragma unroll
  for (int i = 0; i < PIECES; i++) {
    const int pair = threadIdx.x % LAST_LANE + 32 * i;
    if (pair >= ROTARY / 4) break;
#if INTERLEAVED
    const float *a0 = p.angles + (size_t)position * ROTARY + pair, *a1 = a0 + ROTARY / 4;
    float x0 = low(x.first[i]), y0 = high(x.first[i]), x1 = low(x.second[i]), y1 = high(x.second[i]);
    rotate_pair(x0, y0, a0[0], a0[ROTARY / 2]), rotate_pair(x1, y1, a1[0], a1[ROTARY / 2]);
    x.first[i] = pack2(x0, y0), x.second[i] = pack2(x1, y1);
#else
    const float* angle = p.angles + (size_t)position * ROTARY + 2 * pair;
    const float2 c = *(const float2*)angle, s = *(const float2*)(angle + ROTARY / 2);
    float x0 = low(x.first[i]), x1 = high(x.first[i]), y0 = low(x.second[i]), y1 = high(x.second[i]);
    rotate_pair(x0, y0, c.x, s.x), rotate_pair(x1, y1, c.y, s.y);
    x.first[i] = pack2(x0, x1), x.second[i] = pack2(y0, y1);
#endif
  }
  return x;
}

// The new token's key or value in the cache's format.
struct CacheEntry {
  u32 first[PIECES], second[PIECES];
  float scale;
};

__device__ __forceinline__ CacheEntry to_cache_format(const Head& x) {
  CacheEntry y;
#if FP8
  float absmax = 0.f;
#pragma unroll
  for (int i = 0; i < PIECES; i++)
    absmax = fmaxf(absmax, fmaxf(fmaxf(fabsf(low(x.first[i])), fabsf(high(x.first[i]))), fmaxf(fabsf(low(x.second[i])), fabsf(high(x.second[i])))));
  absmax = warp_max(absmax);
  y.scale = absmax > 0.f ? __fdiv_rn(absmax, 448.f) : 1.f;
#pragma unroll
  for (int i = 0; i < PIECES; i++) {
    y.first[i] = e4m3(__fdiv_rn(low(x.first[i]), y.scale)) | e4m3(__fdiv_rn(high(x.first[i]), y.scale)) << 8;
    y.second[i] = e4m3(__fdiv_rn(low(x.second[i]), y.scale)) | e4m3(__fdiv_rn(high(x.second[i]), y.scale)) << 8;
  }
#else
#pragma unroll
  for (int i = 0; i < PIECES; i++) y.first[i] = x.first[i], y.second[i] = x.second[i];
  y.scale = 1.f;
#endif
  return y;
}

// Write a head to a row of bytes; `at` maps a byte's place in the head to its place in the row.
template <class At>
__device__ __forceinline__ void store_entry(const CacheEntry& x, u8* row, At at) {
  const int lane = threadIdx.x;
  if (lane >= LAST_LANE) return;
#pragma unroll
  for (int i = 0; i < PIECES; i++) {
    u8* first = row + at(first_at(lane + 32 * i) * (ROW_BYTES / H));
    u8* second = row + at(second_at(lane + 32 * i) * (ROW_BYTES / H));
#if FP8
    *(u16*)first = x.first[i], *(u16*)second = x.second[i];
#else
    *(u32*)first = x.first[i], *(u32*)second = x.second[i];
#endif
  }
}

// The new token's key and value as the cache stores them.
__device__ __forceinline__ void load_new_token(const Parameters& p, int row, int head, int position, CacheEntry& k, CacheEntry& v) {
  const u16* from = p.qkv + (size_t)row * WIDTH + GROUP * KV_HEADS * Q_WIDTH + head * H;
  const Head key = load_head(from), value = load_head(from + KV_HEADS * H);
  k = to_cache_format(rotate(p, p.k_norm ? rms_norm(key, p.k_norm, p.eps) : key, position)), v = to_cache_format(value);
}

// Write the new token's key and value to a slot of the cache.
__device__ __forceinline__ void write_cache(const Parameters& p, int head, size_t slot, const CacheEntry& k, const CacheEntry& v) {
  const size_t to = (slot * KV_HEADS + head) * ROW_BYTES;
  const auto same = [](int byte) { return byte; };
  store_entry(k, p.k + to, same), store_entry(v, p.v + to, same);
#if FP8
  if (threadIdx.x == 0) p.k_scales[scale_index(slot, head)] = k.scale, p.v_scales[scale_index(slot, head)] = v.scale;
#endif
}
