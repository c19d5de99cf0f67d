// What SwiGLU's kernels do with a gate.
#pragma once

#define LEAST_GATE 8.673617379884035e-19f  // 2 ** -60

__device__ __forceinline__ float sigmoid(float v) { return __fdividef(1.f, 1.f + __expf(-v)); }
// A gate that a backward pass can divide by.
__device__ __forceinline__ float divisor(float gate) { return fabsf(gate) < LEAST_GATE ? LEAST_GATE : gate; }
