// Norm and rotation of the heads of queries and keys, from the columns of one product, and their gradients (head_norm.py).
//
// One CTA per row. LANES threads have a head: each 8 elements of its first half and the 8 that rotate with them. Results are rounded
// after the norm and after the rotation, and sums have the order of rms_norm.cu, so the bits are those of the kernels one by one.
#include "bfloat16.cuh"
#include "launch.cuh"
#include "types.cuh"

#define HALF (HEAD / 2)
#define LANES (HEAD / 16)
#define GROUPS (THREADS / LANES)

struct Operands {
  const u16* x;              // q | k | v of each row
  const float *cosine, *sine;  // [rows, HEAD], every angle twice; the sine is negative in the first half
  const float *q_weight, *k_weight;
  float* inverse;  // [rows, query heads + key heads]
  u16 *q, *k;
  const u16 *dq, *dk, *dv;
  u16* dx;  // q | k | v of each row
  int q_heads, k_heads, v_heads, x_stride;
  float eps;
};

struct Pair {
  float a[8], b[8];
};

__device__ __forceinline__ Pair load(const u16* from) {
  Pair p;
  unpack(*(const uint4*)from, p.a), unpack(*(const uint4*)(from + HALF), p.b);
  return p;
}
__device__ __forceinline__ void store(u16* to, const Pair& p) { *(uint4*)to = pack(p.a), *(uint4*)(to + HALF) = pack(p.b); }
__device__ __forceinline__ void round(Pair& p) { unpack(pack(p.a), p.a), unpack(pack(p.b), p.b); }
__device__ __forceinline__ void load_floats(const float* from, float* f) {
  *(float4*)f = *(const float4*)from, *(float4*)(f + 4) = *(const float4*)(from + 4);
}
__device__ __forceinline__ float head_sum(float x) {
#pragma unroll
  for (int i = LANES / 2; i; i /= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, i);
  return x;
}
// p rotated; direction -1 is the inverse.
__device__ __forceinline__ Pair rotated(const Pair& p, const float* c, const float* s) {
  Pair y;
#pragma unroll
  for (int i = 0; i < 8; i++) y.a[i] = p.a[i] * c[i] - p.b[i] * s[i], y.b[i] = p.b[i] * c[i] + p.a[i] * s[i];
  return y;
}
__device__ __forceinline__ void load_angles(const Operands& o, int at, float direction, float* c, float* s) {
  load_floats(o.cosine + (size_t)blockIdx.x * HEAD + at, c);
  load_floats(o.sine + (size_t)blockIdx.x * HEAD + HALF + at, s);
#pragma unroll
  for (int i = 0; i < 8; i++) s[i] *= direction;
}

extern "C" __global__ void ROW_BOUNDS head_norm(Operands o) {
  launch_dependents();
  grid_dependency_wait();
  const int at = threadIdx.x % LANES * 8, heads = o.q_heads + o.k_heads;
  float c[8], s[8];
  load_angles(o, at, 1.f, c, s);
  for (int first = 0; first < heads; first += GROUPS) {
    const int head = first + threadIdx.x / LANES, some = head < heads ? head : heads - 1;  // all threads take part in sums
    const bool is_query = some < o.q_heads;
    Pair p = load(o.x + (size_t)blockIdx.x * o.x_stride + some * HEAD + at);
#if NORM
    float sum = 0, other = 0;
    Pair w;
    const float* weight = (is_query ? o.q_weight : o.k_weight) + at;
    load_floats(weight, w.a), load_floats(weight + HALF, w.b);
#pragma unroll
    for (int i = 0; i < 8; i++) sum += p.a[i] * p.a[i], other += p.b[i] * p.b[i];
    const float scale = 1.f / sqrtf(head_sum(sum + other) / HEAD + o.eps);
#pragma unroll
    for (int i = 0; i < 8; i++) p.a[i] = p.a[i] * scale * w.a[i], p.b[i] = p.b[i] * scale * w.b[i];
    round(p);
    if (head < heads && threadIdx.x % LANES == 0) o.inverse[(size_t)blockIdx.x * heads + head] = scale;
#endif
    if (head >= heads) continue;
    u16* to = is_query ? o.q + ((size_t)blockIdx.x * o.q_heads + head) * HEAD
                       : o.k + ((size_t)blockIdx.x * o.k_heads + head - o.q_heads) * HEAD;
    store(to + at, rotated(p, c, s));
  }
}

// dx of q and k, and dv beside them.
extern "C" __global__ void ROW_BOUNDS head_norm_backward(Operands o) {
  launch_dependents();
  grid_dependency_wait();
  const int at = threadIdx.x % LANES * 8, normed = o.q_heads + o.k_heads, heads = normed + o.v_heads;
  float c[8], s[8];
  load_angles(o, at, -1.f, c, s);
  for (int first = 0; first < heads; first += GROUPS) {
    const int head = first + threadIdx.x / LANES, some = head < heads ? head : heads - 1;
    const bool is_query = some < o.q_heads, is_value = some >= normed;
    const u16* from = is_query   ? o.dq + ((size_t)blockIdx.x * o.q_heads + some) * HEAD
                      : is_value ? o.dv + ((size_t)blockIdx.x * o.v_heads + some - normed) * HEAD
                                 : o.dk + ((size_t)blockIdx.x * o.k_heads + some - o.q_heads) * HEAD;
    Pair d = load(from + at);
    if (!is_value) d = rotated(d, c, s);
#if NORM
    const int own = is_value ? 0 : some;
    const float scale = o.inverse[(size_t)blockIdx.x * normed + own];
    const float* weight = (is_query ? o.q_weight : o.k_weight) + at;
    Pair x = load(o.x + (size_t)blockIdx.x * o.x_stride + own * HEAD + at), w, e = d;
    load_floats(weight, w.a), load_floats(weight + HALF, w.b);
    round(e);
    float sum = 0, other = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      e.a[i] *= w.a[i], x.a[i] *= scale, sum += e.a[i] * x.a[i];
      e.b[i] *= w.b[i], x.b[i] *= scale, other += e.b[i] * x.b[i];
    }
    const float along = head_sum(sum + other) / HEAD;
    if (!is_value) {
#pragma unroll
      for (int i = 0; i < 8; i++) d.a[i] = (e.a[i] - x.a[i] * along) * scale, d.b[i] = (e.b[i] - x.b[i] * along) * scale;
    }
#endif
    if (head < heads) store(o.dx + ((size_t)blockIdx.x * heads + head) * HEAD + at, d);
  }
}
