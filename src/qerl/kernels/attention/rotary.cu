// y_j = x_j cos_j - x_{j+H/2} sin_j, y_{j+H/2} = x_{j+H/2} cos_j + x_j sin_j. One CTA per row, H / 16 threads per head.
#include "bfloat16.cuh"
#include "launch.cuh"
#define HALF (HEAD / 2)
#define LANES (HEAD / 16)

// cosine and sine contain every angle twice; the sine is negative in the first half. Direction -1 is the inverse rotation.
extern "C" __global__ void __launch_bounds__(THREADS) rotate(const u16* x, const float* cosine, const float* sine, u16* y, int heads,
                                                           int x_stride, float direction) {
  launch_dependents();
  grid_dependency_wait();
  const int at = threadIdx.x % LANES * 8;
  if (threadIdx.x >= THREADS / LANES * LANES) return;
  float c[8], s[8];
#pragma unroll
  for (int i = 0; i < 8; i++) {
    c[i] = cosine[(size_t)blockIdx.x * HEAD + at + i];
    s[i] = sine[(size_t)blockIdx.x * HEAD + HALF + at + i] * direction;
  }
  for (int head = threadIdx.x / LANES; head < heads; head += THREADS / LANES) {
    const u16* from = x + (size_t)blockIdx.x * x_stride + head * HEAD + at;
    u16* to = y + ((size_t)blockIdx.x * heads + head) * HEAD + at;
    float a[8], b[8], rotated_a[8], rotated_b[8];
    unpack(*(const uint4*)from, a);
    unpack(*(const uint4*)(from + HALF), b);
#pragma unroll
    for (int i = 0; i < 8; i++) rotated_a[i] = a[i] * c[i] - b[i] * s[i], rotated_b[i] = b[i] * c[i] + a[i] * s[i];
    *(uint4*)to = pack(rotated_a);
    *(uint4*)(to + HALF) = pack(rotated_b);
  }
}
