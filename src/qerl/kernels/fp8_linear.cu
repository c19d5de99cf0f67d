// codes[t, k] = e4m3(x[t, k] / s), s = max |x| of 128 neighbours / 448, 1 where they are zero: a warp for 128 numbers of a row.
// Scales lie group after group, as cuBLAS wants them: scales[k / 128][t], `scale_stride` rows of t each.
typedef unsigned char u8;

extern "C" __global__ void __launch_bounds__(256) quantize_rows(const u16* x, u8* codes, float* scales, int rows, int columns, int x_stride,
                                                                int scale_stride) {
  begin();
  const int groups = (columns + 127) / 128, lane = threadIdx.x % 32;
  const int unit = blockIdx.x * 8 + threadIdx.x / 32, row = unit / groups, group = unit % groups;
  if (row >= rows) return;
  const int at = group * 128 + lane * 4;
  float f[4] = {0.f, 0.f, 0.f, 0.f};
  if (at < columns) {
    const uint2 v = *(const uint2*)(x + (size_t)row * x_stride + at);
    f[0] = __uint_as_float(v.x << 16), f[1] = __uint_as_float(v.x & 0xFFFF0000u);
    f[2] = __uint_as_float(v.y << 16), f[3] = __uint_as_float(v.y & 0xFFFF0000u);
  }
  float largest = fmaxf(fmaxf(fabsf(f[0]), fabsf(f[1])), fmaxf(fabsf(f[2]), fabsf(f[3])));
#pragma unroll
  for (int i = 16; i; i /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, i));
  float scale = __fdiv_rn(largest, 448.f);
  scale = scale == 0.f ? 1.f : scale;
  if (lane == 0) scales[(size_t)group * scale_stride + row] = scale;
  if (at >= columns) return;
  unsigned short low, high;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(__fdiv_rn(f[1], scale)), "f"(__fdiv_rn(f[0], scale)));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(__fdiv_rn(f[3], scale)), "f"(__fdiv_rn(f[2], scale)));
  *(u32*)(codes + (size_t)row * columns + at) = (u32)high << 16 | low;
}
