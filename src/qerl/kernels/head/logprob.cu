// For each row of fp32 logits / temperature: the target's log-probability, the entropy, and onehot - p in bfloat16. With SOFTCAP the
// rows are products: a logit is cap tanh(scale product / cap), and onehot - p is times its slope, scale (1 - (logit / cap)^2).
#include "bfloat16.cuh"
#include "launch.cuh"
#include "logit.cuh"

#ifndef SOFTCAP
#define SOFTCAP 0
#endif

struct Factors {
  float factor;  // 1 / temperature
#if SOFTCAP
  float scale, softcap;
#endif
};

struct Operands {
  const float* logits;
  const long long* targets;
  float *logprobs, *entropies;
  u16* slopes;  // or null
  int width;
  Factors factors;
};

struct Sums {
  float top, total, along;  // max l, sum exp(l - top), sum exp(l - top) (l - top)
};

__device__ __forceinline__ Sums joined(Sums a, Sums b) {
  const float top = fmaxf(a.top, b.top), da = a.top - top, db = b.top - top, sa = __expf(da), sb = __expf(db);
  return {top, a.total * sa + b.total * sb, sa * (a.along + da * a.total) + sb * (b.along + db * b.total)};
}

__device__ __forceinline__ Sums shuffled(Sums a, int distance) {
  return {__shfl_xor_sync(~0u, a.top, distance), __shfl_xor_sync(~0u, a.total, distance), __shfl_xor_sync(~0u, a.along, distance)};
}

__device__ __forceinline__ float logit(float x, Factors f) {
#if SOFTCAP
  x = capped_logit(x * f.scale, f.softcap);
#endif
  return x * f.factor;
}

__device__ __forceinline__ void load8(const float* from, Factors f, float* l) {
  *(float4*)l = __ldcs((const float4*)from), *(float4*)(l + 4) = __ldcs((const float4*)from + 1);
#pragma unroll
  for (int i = 0; i < 8; i++) l[i] = logit(l[i], f);
}

extern "C" __global__ void __launch_bounds__(THREADS) logprob(const __grid_constant__ Operands o) {
  launch_dependents();
  grid_dependency_wait();
  __shared__ Sums parts[THREADS / 32];
  const size_t row = blockIdx.x;
  const float* logits = o.logits + row * o.width;
  const int width = o.width;
  const Factors f = o.factors;
  Sums all = {-3e38f, 0, 0};
  for (int at = threadIdx.x * 8; at < width; at += THREADS * 8) {
    float l[8];
    load8(logits + at, f, l);
    Sums some = {l[0], 0, 0};
#pragma unroll
    for (int i = 1; i < 8; i++) some.top = fmaxf(some.top, l[i]);
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const float d = l[i] - some.top, e = __expf(d);
      some.total += e, some.along += e * d;
    }
    all = joined(all, some);
  }
#pragma unroll
  for (int i = 16; i; i /= 2) all = joined(all, shuffled(all, i));
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = all;
  __syncthreads();
  all = parts[0];
  for (int i = 1; i < THREADS / 32; i++) all = joined(all, parts[i]);
  const int target = (int)o.targets[row];
  if (threadIdx.x == 0) {
    o.logprobs[row] = logit(logits[target], f) - all.top - logf(all.total);
    o.entropies[row] = logf(all.total) - all.along / all.total;
  }
  if (!o.slopes) return;
  u16* slopes = o.slopes + row * width;
  const float share = 1.f / all.total;
  for (int at = threadIdx.x * 8; at < width; at += THREADS * 8) {
    float l[8];
    load8(logits + at, f, l);
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const float slope = (at + i == target ? 1.f : 0.f) - __expf(l[i] - all.top) * share;
#if SOFTCAP
      const float bent = l[i] / (f.factor * f.softcap);
      l[i] = slope * f.scale * (1.f - bent * bent);
#else
      l[i] = slope;
#endif
    }
    *(uint4*)(slopes + at) = pack(l);
  }
}
