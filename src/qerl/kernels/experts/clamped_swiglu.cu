// y = (up + 1) * gate * sigmoid(alpha * gate) of clamped gate and up, whose columns alternate, and its gradient; 8 results per thread.
#include "bfloat16.cuh"
#include "gate.cuh"
#include "launch.cuh"

struct Settings {
  float alpha, limit;
};

// NaN stays NaN, as in torch's clamp.
__device__ __forceinline__ float at_most(float v, float limit) { return v > limit ? limit : v; }
__device__ __forceinline__ float at_least(float v, float limit) { return v < limit ? limit : v; }

extern "C" __global__ void __launch_bounds__(256) clamped_swiglu(const u16* gate_up, u16* y, Settings settings, int units) {
  launch_dependents();
  grid_dependency_wait();
  const int unit = blockIdx.x * 256 + threadIdx.x;
  if (unit >= units) return;
  float v[16], out[8];
  const uint4* from = (const uint4*)gate_up + (size_t)unit * 2;
  unpack(__ldcs(from), v), unpack(__ldcs(from + 1), v + 8);
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const float g = at_most(v[2 * i], settings.limit), u = at_least(at_most(v[2 * i + 1], settings.limit), -settings.limit);
    out[i] = (u + 1.f) * g * sigmoid(settings.alpha * g);
  }
  ((uint4*)y)[unit] = pack(out);
}

extern "C" __global__ void __launch_bounds__(256) clamped_swiglu_backward(const u16* dy, const u16* gate_up, u16* d, Settings settings, int units) {
  launch_dependents();
  grid_dependency_wait();
  const int unit = blockIdx.x * 256 + threadIdx.x;
  if (unit >= units) return;
  float v[16], dv[8];
  const uint4* from = (const uint4*)gate_up + (size_t)unit * 2;
  unpack(__ldcs(from), v), unpack(__ldcs(from + 1), v + 8), unpack(__ldcs((const uint4*)dy + unit), dv);
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const float g = at_most(v[2 * i], settings.limit), u = at_least(at_most(v[2 * i + 1], settings.limit), -settings.limit);
    const float s = sigmoid(settings.alpha * g);
    const bool gate_counts = !(v[2 * i] > settings.limit), up_counts = !(fabsf(v[2 * i + 1]) > settings.limit);
    v[2 * i] = gate_counts ? dv[i] * (u + 1.f) * s * (1.f + settings.alpha * g * (1.f - s)) : 0.f;
    v[2 * i + 1] = up_counts ? dv[i] * g * s : 0.f;
  }
  uint4* to = (uint4*)d + (size_t)unit * 2;
  to[0] = pack(v), to[1] = pack(v + 8);
}
