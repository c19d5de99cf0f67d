// For each row of fp32 logits / temperature: the target's log-probability, the entropy, and onehot - p in bfloat16.
#include "bfloat16.cuh"
#include "launch.cuh"

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

__device__ __forceinline__ void load8(const float* from, float factor, float* l) {
  *(float4*)l = __ldcs((const float4*)from), *(float4*)(l + 4) = __ldcs((const float4*)from + 1);
#pragma unroll
  for (int i = 0; i < 8; i++) l[i] *= factor;
}

extern "C" __global__ void __launch_bounds__(THREADS) logprob(const float* logits, const long long* targets, float* logprobs,
                                                              float* entropies, u16* slopes, int width, float factor) {
  launch_dependents();
  grid_dependency_wait();
  __shared__ Sums parts[THREADS / 32];
  const size_t row = blockIdx.x;
  logits += row * width;
  Sums all = {-3e38f, 0, 0};
  for (int at = threadIdx.x * 8; at < width; at += THREADS * 8) {
    float l[8];
    load8(logits + at, factor, l);
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
  const int target = (int)targets[row];
  if (threadIdx.x == 0) {
    logprobs[row] = logits[target] * factor - all.top - logf(all.total);
    entropies[row] = logf(all.total) - all.along / all.total;
  }
  if (!slopes) return;
  slopes += row * width;
  const float share = 1.f / all.total;
  for (int at = threadIdx.x * 8; at < width; at += THREADS * 8) {
    float l[8];
    load8(logits + at, factor, l);
#pragma unroll
    for (int i = 0; i < 8; i++) l[i] = (at + i == target ? 1.f : 0.f) - __expf(l[i] - all.top) * share;
    *(uint4*)(slopes + at) = pack(l);
  }
}
