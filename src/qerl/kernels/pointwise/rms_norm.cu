// y = x / sqrt(mean(x^2) + eps) * (weight + noise) and its gradient in x. A CTA takes several rows of WIDTH and keeps each in registers.
//
// The noise is one vector, or with TABLE a table: row t of x takes row noise_rows[t]. x and its gradient are fp32, or bfloat16
// with X_BYTES 2; y and dy are bfloat16. The forward kernel can also copy x; the copy's gradient is then added to x's. The backward
// kernel can also store its result rounded to bfloat16.
#include "bfloat16.cuh"
#include "launch.cuh"
#include "warp.cuh"

#if X_BYTES == 4
typedef float X;
#else
typedef u16 X;
#endif

struct Eight {  // eight numbers of x
  uint4 v[X_BYTES / 2];
};

__device__ __forceinline__ void unpack(const Eight& x, float* f) {
#if X_BYTES == 4
  *(uint4*)f = x.v[0], *(uint4*)(f + 4) = x.v[1];
#else
  unpack(x.v[0], f);
#endif
}
__device__ __forceinline__ void store(X* x, const float* f) {
#if X_BYTES == 4
  *(float4*)x = *(const float4*)f, *(float4*)(x + 4) = *(const float4*)(f + 4);
#else
  *(uint4*)x = pack(f);
#endif
}

#define VECTORS ((WIDTH / 8 + THREADS - 1) / THREADS)

__device__ __forceinline__ float block_sum(float v) {
  __shared__ float sums[THREADS / 32];
  __syncthreads();  // all threads have read the previous row's sums
  v = warp_sum(v);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = v;
  __syncthreads();
  float total = 0;
#pragma unroll
  for (int i = 0; i < THREADS / 32; i++) total += sums[i];
  return total;
}

__device__ __forceinline__ void add_noise(const float* noise, float* w) {
  float n[8];
  *(float4*)n = *(const float4*)noise, *(float4*)(n + 4) = *(const float4*)(noise + 4);
#pragma unroll
  for (int i = 0; i < 8; i++) w[i] += n[i];
}
// The part that all rows share: with TABLE the weight alone.
__device__ __forceinline__ void load_weight(const float* weight, const float* noise, int at, float* w) {
  *(float4*)w = *(const float4*)(weight + at), *(float4*)(w + 4) = *(const float4*)(weight + at + 4);
  if (!TABLE && noise) add_noise(noise + at, w);
}
// The weight of one row.
__device__ __forceinline__ void row_weight(const float* shared, const float* noise, const int* noise_rows, int row, int at, float* w) {
#pragma unroll
  for (int i = 0; i < 8; i++) w[i] = shared[i];
  if (TABLE) add_noise(noise + (size_t)noise_rows[row] * WIDTH + at, w);
}

// The next row is loaded before this one is finished. The weight and a shared noise are read once for all rows of a CTA.
extern "C" __global__ void __launch_bounds__(THREADS) rms_norm(const X* x, const float* weight, const float* noise, const int* noise_rows, u16* y,
                                                               X* copy, float* inverse, int rows, int x_stride, int y_stride, float eps) {
  launch_dependents();
  grid_dependency_wait();
  float w[VECTORS][8];
  Eight next[VECTORS];
#pragma unroll
  for (int v = 0; v < VECTORS; v++) {
    const int at = (v * THREADS + threadIdx.x) * 8;
    next[v] = Eight{};
    if (at < WIDTH) {
      load_weight(weight, noise, at, w[v]);
      next[v] = *(const Eight*)(x + (size_t)blockIdx.x * x_stride + at);
    }
  }
  for (int row = blockIdx.x; row < rows; row += gridDim.x) {
    float f[VECTORS][8], sum = 0;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
      const int at = (v * THREADS + threadIdx.x) * 8;
      unpack(next[v], f[v]);
      if (at < WIDTH && copy) store(copy + (size_t)row * WIDTH + at, f[v]);
      if (at < WIDTH && row + gridDim.x < rows) next[v] = *(const Eight*)(x + (size_t)(row + gridDim.x) * x_stride + at);
#pragma unroll
      for (int i = 0; i < 8; i++) sum += f[v][i] * f[v][i];
    }
    const float scale = 1.f / sqrtf(block_sum(sum) / WIDTH + eps);
    if (threadIdx.x == 0) inverse[row] = scale;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
      const int at = (v * THREADS + threadIdx.x) * 8;
      if (at >= WIDTH) break;
      float own[8];
      row_weight(w[v], noise, noise_rows, row, at, own);
#pragma unroll
      for (int i = 0; i < 8; i++) f[v][i] = f[v][i] * scale * own[i];
      *(uint4*)(y + (size_t)row * y_stride + at) = pack(f[v]);
    }
  }
}

// dx = (dy w - x_hat mean(dy w x_hat)) / rms + dcopy
extern "C" __global__ void ROW_BOUNDS rms_norm_backward(const u16* dy, const X* x, const float* weight, const float* noise,
                                                         const int* noise_rows, const float* inverse, const X* dcopy, X* dx, u16* rounded,
                                                         int rows, int dy_stride, int x_stride) {
  launch_dependents();
  grid_dependency_wait();
  float w[VECTORS][8];
#pragma unroll
  for (int v = 0; v < VECTORS; v++) {
    const int at = (v * THREADS + threadIdx.x) * 8;
    if (at < WIDTH) load_weight(weight, noise, at, w[v]);
  }
  for (int row = blockIdx.x; row < rows; row += gridDim.x) {
    const float scale = inverse[row];
    float d[VECTORS][8], f[VECTORS][8], sum = 0;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
      const int at = (v * THREADS + threadIdx.x) * 8;
      if (at >= WIDTH) break;
      unpack(*(const Eight*)(x + (size_t)row * x_stride + at), f[v]);
      unpack(*(const uint4*)(dy + (size_t)row * dy_stride + at), d[v]);
      float own[8];
      row_weight(w[v], noise, noise_rows, row, at, own);
#pragma unroll
      for (int i = 0; i < 8; i++) d[v][i] *= own[i], f[v][i] *= scale, sum += d[v][i] * f[v][i];
    }
    const float along = block_sum(sum) / WIDTH;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
      const int at = (v * THREADS + threadIdx.x) * 8;
      if (at >= WIDTH) break;
#pragma unroll
      for (int i = 0; i < 8; i++) d[v][i] = (d[v][i] - f[v][i] * along) * scale;
      if (dcopy) {
        unpack(*(const Eight*)(dcopy + (size_t)row * WIDTH + at), f[v]);
#pragma unroll
        for (int i = 0; i < 8; i++) d[v][i] += f[v][i];
      }
      store(dx + (size_t)row * WIDTH + at, d[v]);
      if (rounded) *(uint4*)(rounded + (size_t)row * WIDTH + at) = pack(d[v]);
    }
  }
}
