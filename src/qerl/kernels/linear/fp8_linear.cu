// codes[t, k] = e4m3(x[t, k] / s), s = max |x| over 128 neighbors / 448, or 1 if they are all zero.
//
// One warp quantizes 128 numbers of a row. Scales are stored as cuBLAS expects them: scales[k / 128][t], with `scale_stride`
// numbers from one group to the next.
#include "bfloat16.cuh"
#include "launch.cuh"
#include "warp.cuh"

extern "C" __global__ void __launch_bounds__(256) quantize_rows(const u16* x, u8* codes, float* scales, int rows, int columns, int x_stride,
                                                                int scale_stride) {
  launch_dependents();
  grid_dependency_wait();
  const int groups = (columns + 127) / 128, lane = threadIdx.x % 32;
  const int unit = blockIdx.x * 8 + threadIdx.x / 32, row = unit / groups, group = unit % groups;
  if (row >= rows) return;
  const int at = group * 128 + lane * 4;
  float f[4] = {0.f, 0.f, 0.f, 0.f};
  if (at < columns) {
    const uint2 v = *(const uint2*)(x + (size_t)row * x_stride + at);
    f[0] = low(v.x), f[1] = high(v.x), f[2] = low(v.y), f[3] = high(v.y);
  }
  const float absmax = warp_max(fmaxf(fmaxf(fabsf(f[0]), fabsf(f[1])), fmaxf(fabsf(f[2]), fabsf(f[3]))));
  float scale = __fdiv_rn(absmax, 448.f);
  scale = scale == 0.f ? 1.f : scale;
  if (lane == 0) scales[(size_t)group * scale_stride + row] = scale;
  if (at >= columns) return;
  u16 low_codes, high_codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low_codes) : "f"(__fdiv_rn(f[1], scale)), "f"(__fdiv_rn(f[0], scale)));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high_codes) : "f"(__fdiv_rn(f[3], scale)), "f"(__fdiv_rn(f[2], scale)));
  *(u32*)(codes + (size_t)row * columns + at) = (u32)high_codes << 16 | low_codes;
}
