// Shared by lora_shrink.cu and lora_shrink_portable.cu: operands, loads, and the embedding.
#pragma once
#include "bfloat16.cuh"
#include "launch.cuh"
#include "shrink_unit.cuh"

#ifndef SLOTS
#define SLOTS 0
#endif

struct Operands {
  const void* h;        // [M, K], in fp32 with NORM; rows h_stride elements apart
  const float* weight;  // [K]
  const float* noise;   // [K] or null; with TABLE [.., K]
  const int* noise_rows;  // [M] with TABLE
  const int* slots;     // [M] with SLOTS
  const float* scalings;  // [slots] with SLOTS
  const u16* a;         // [rows, K], with SLOTS of each slot
  u16* x;               // [M, K], rows x_stride elements apart; without NORM a copy of h, or null
  u16* u;               // [M, rows], rows u_stride elements apart
  int M, K, rows, h_stride, x_stride, u_stride;
  float eps, scaling;
};

#if SLOTS
// True if one of this many tokens from m0 on has the slot; called by whole warps.
__device__ __forceinline__ bool has_slot(const Operands& o, int slot, int m0, int tokens) {
  const int lane = threadIdx.x % 32;
  return __any_sync(ALL_LANES, lane < tokens && m0 + lane < o.M && __ldg(o.slots + m0 + lane) == slot);
}
#endif
// True for a token of this launch; with SLOTS, of this slot.
__device__ __forceinline__ bool is_own(const Operands& o, int m, int slot) { return m < o.M && (!SLOTS || __ldg(o.slots + m) == slot); }
__device__ __forceinline__ float scaling_of(const Operands& o, int slot) { return SLOTS ? __ldg(o.scalings + slot) : o.scaling; }

__device__ __forceinline__ float4 add4(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }
__device__ __forceinline__ float4 as_float4(uint4 v) {
  return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w));
}
__device__ __forceinline__ float sum4(float v) {  // over the four lanes of a row
  v += __shfl_xor_sync(ALL_LANES, v, 1);
  return v + __shfl_xor_sync(ALL_LANES, v, 2);
}

// h[m] = table[tokens[m]] in fp32. Tokens are clamped to [0, vocabulary), because unused rows contain arbitrary numbers.
extern "C" __global__ void __launch_bounds__(256) embed(const int* tokens, const uint2* table, float4* h, int vocabulary, int pieces) {
  launch_dependents();
  grid_dependency_wait();
  const size_t token = min(max(((const volatile int*)tokens)[blockIdx.x], 0), vocabulary - 1);
  for (int i = threadIdx.x; i < pieces; i += 256) {
    const uint2 v = table[token * pieces + i];
    h[(size_t)blockIdx.x * pieces + i] = make_float4(low(v.x), high(v.x), low(v.y), high(v.y));
  }
}
