// Sums over a token's rows, which are sorted by expert, and their gradients; 8 columns per thread.
#include "bfloat16.cuh"
#include "launch.cuh"

// out[t] = sum over i of weight[t, i] * y[row_of[t, i]], in the order of i, or adds it to out; a null weight is 1.
template <bool FP32>
__device__ __forceinline__ void gather(const u16* y, const float* weights, const long long* row_of, void* out, int chosen, int width,
                                       int blocks_a_row, int adds) {
  launch_dependents();
  grid_dependency_wait();
  const size_t t = blockIdx.x / blocks_a_row;
  const int at = (blockIdx.x % blocks_a_row * 256 + threadIdx.x) * 8;
  if (at >= width) return;
  float sum[8] = {};
  for (int i = 0; i < chosen; i++) {
    const size_t pair = t * chosen + i;
    const float weight = weights ? weights[pair] : 1.f;
    float v[8];
    unpack(__ldcs((const uint4*)(y + row_of[pair] * width + at)), v);
#pragma unroll
    for (int j = 0; j < 8; j++) sum[j] += weight * v[j];
  }
  if constexpr (FP32) {
    float4* to = (float4*)((float*)out + t * width + at);
    if (adds) {
      float before[8];
      *(float4*)before = to[0], *(float4*)(before + 4) = to[1];
#pragma unroll
      for (int j = 0; j < 8; j++) sum[j] = before[j] + sum[j];
    }
    to[0] = *(float4*)sum, to[1] = *(float4*)(sum + 4);
  } else {
    *(uint4*)((u16*)out + t * width + at) = pack(sum);
  }
}

extern "C" __global__ void __launch_bounds__(256) gather_fp32(const u16* y, const float* weights, const long long* row_of, float* out, int chosen,
                                                              int width, int blocks_a_row, int adds) {
  gather<true>(y, weights, row_of, out, chosen, width, blocks_a_row, adds);
}

extern "C" __global__ void __launch_bounds__(256) gather_bf16(const u16* y, const float* weights, const long long* row_of, u16* out, int chosen,
                                                              int width, int blocks_a_row, int adds) {
  gather<false>(y, weights, row_of, out, chosen, width, blocks_a_row, 0);
}

// dy[row] = weight * dout[t] and dweight = y[row] . dout[t] for each pair of a token t and one of its rows: a block per pair.
extern "C" __global__ void __launch_bounds__(256) gather_backward(const u16* y, const float* weights, const long long* row_of, const float* dout, u16* dy,
                                                                  float* dweights, int chosen, int width) {
  launch_dependents();
  grid_dependency_wait();
  const size_t pair = blockIdx.x, row = row_of[pair];
  const float* from = dout + pair / chosen * width;
  const float weight = weights[pair];
  float sum = 0.f;
  for (int at = threadIdx.x * 8; at < width; at += 256 * 8) {
    float v[8], d[8];
    unpack(__ldcs((const uint4*)(y + row * width + at)), v);
    *(float4*)d = *(const float4*)(from + at), *(float4*)(d + 4) = *(const float4*)(from + at + 4);
#pragma unroll
    for (int j = 0; j < 8; j++) sum += v[j] * d[j], d[j] *= weight;
    *(uint4*)(dy + row * width + at) = pack(d);
  }
  __shared__ float sums[8];
#pragma unroll
  for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    float whole = 0.f;
    for (int i = 0; i < 8; i++) whole += sums[i];
    dweights[pair] = whole;
  }
}
