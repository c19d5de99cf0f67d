// y = silu(gate) * up and its gradients, 8 elements per thread.
#include "bfloat16.cuh"
#include "gate.cuh"
#include "launch.cuh"

extern "C" __global__ void __launch_bounds__(256) swiglu(const u16* gate, const u16* up, u16* y, int features, int blocks_a_row,
                                                         int stride, int y_stride) {
  launch_dependents();
  grid_dependency_wait();
  const size_t row = blockIdx.x / blocks_a_row;
  const int at = (blockIdx.x % blocks_a_row * 256 + threadIdx.x) * 8;
  if (at >= features) return;
  float g[8], u[8];
  unpack(__ldcs((const uint4*)(gate + row * stride + at)), g);
  unpack(__ldcs((const uint4*)(up + row * stride + at)), u);
#pragma unroll
  for (int i = 0; i < 8; i++) u[i] = g[i] * sigmoid(g[i]) * u[i];
  *(uint4*)(y + row * y_stride + at) = pack(u);
}

// The same from gate | up in fp32, their columns times `factors` if it is not null. `saved_gate`, if not null, gets gate in bfloat16 for the
// backward pass, which divides by it.
extern "C" __global__ void __launch_bounds__(256) swiglu_wide(const float* gate_up, u16* y, u16* saved_gate, const float* factors,
                                                              int features, int blocks_a_row, int y_stride) {
  launch_dependents();
  grid_dependency_wait();
  const size_t row = blockIdx.x / blocks_a_row;
  const int at = (blockIdx.x % blocks_a_row * 256 + threadIdx.x) * 8;
  if (at >= features) return;
  const float4* from = (const float4*)(gate_up + row * 2 * features + at);
  float g[8], u[8];
#pragma unroll
  for (int i = 0; i < 2; i++) *(float4*)(g + 4 * i) = __ldcs(from + i), *(float4*)(u + 4 * i) = __ldcs(from + features / 4 + i);
  if (factors) {
#pragma unroll
    for (int i = 0; i < 8; i++) g[i] *= factors[at + i], u[i] *= factors[features + at + i];
  }
#pragma unroll
  for (int i = 0; i < 8; i++) g[i] = divisor(g[i]);
  if (saved_gate) __stcs((uint4*)(saved_gate + row * features + at), pack(g));
#pragma unroll
  for (int i = 0; i < 8; i++) u[i] = g[i] * sigmoid(g[i]) * u[i];
  *(uint4*)(y + row * y_stride + at) = pack(u);
}

// With s = sigmoid(gate): dgate = dy up s (1 + gate (1 - s)), dup = dy gate s. Each row of d is dgate, then dup.
extern "C" __global__ void __launch_bounds__(256) swiglu_backward(const u16* dy, const u16* gate, const u16* up, u16* d, int features,
                                                                  int blocks_a_row, int stride, int dy_stride) {
  launch_dependents();
  grid_dependency_wait();
  const size_t row = blockIdx.x / blocks_a_row;
  const int at = (blockIdx.x % blocks_a_row * 256 + threadIdx.x) * 8;
  if (at >= features) return;
  float g[8], u[8], y[8];
  unpack(__ldcs((const uint4*)(gate + row * stride + at)), g);
  unpack(__ldcs((const uint4*)(up + row * stride + at)), u);
  unpack(__ldcs((const uint4*)(dy + row * dy_stride + at)), y);
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const float s = sigmoid(g[i]), dup = y[i] * g[i] * s;
    g[i] = y[i] * u[i] * s * (1.f + g[i] * (1.f - s));
    u[i] = dup;
  }
  *(uint4*)(d + row * 2 * features + at) = pack(g);
  *(uint4*)(d + row * 2 * features + features + at) = pack(u);
}

// The same from swiglu_wide's y instead of up: up s = y / gate.
extern "C" __global__ void __launch_bounds__(256) swiglu_wide_backward(const u16* dy, const u16* gate, const u16* y, u16* d, int features,
                                                                       int blocks_a_row, int y_stride, int dy_stride) {
  launch_dependents();
  grid_dependency_wait();
  const size_t row = blockIdx.x / blocks_a_row;
  const int at = (blockIdx.x % blocks_a_row * 256 + threadIdx.x) * 8;
  if (at >= features) return;
  float g[8], v[8], dv[8];
  unpack(__ldcs((const uint4*)(gate + row * features + at)), g);
  unpack(__ldcs((const uint4*)(y + row * y_stride + at)), v);
  unpack(__ldcs((const uint4*)(dy + row * dy_stride + at)), dv);
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const float s = sigmoid(g[i]), dup = dv[i] * g[i] * s;
    g[i] = dv[i] * __fdividef(v[i], g[i]) * (1.f + g[i] * (1.f - s));
    v[i] = dup;
  }
  *(uint4*)(d + row * 2 * features + at) = pack(g);
  *(uint4*)(d + row * 2 * features + features + at) = pack(v);
}
