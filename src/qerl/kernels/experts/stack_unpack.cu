// out[g, n, k] = code[e, n, k] * scale[e, n, k / BLOCK] for e = chosen[g]: 16 weights per thread. BLOCK: 16 with scales in E4M3, 32 in E8M0.
#include "bfloat16.cuh"
#include "launch.cuh"

__device__ __forceinline__ float scale_of(unsigned char byte) {
#if BLOCK == 16
  return __uint_as_float((unsigned)byte << 20) * 1.329227995784916e36f;  // 2 ** 120
#else
  return byte ? __uint_as_float((unsigned)byte << 23) : 5.877471754111438e-39f;  // 2 ** -127
#endif
}

// A code's sign, exponent and mantissa, as those of a float 2 ** 126 times smaller.
__device__ __forceinline__ float code_of(unsigned bits) {
  return __uint_as_float((bits & 8u) << 28 | (bits & 7u) << 22) * 8.507059173023462e37f;
}

extern "C" __global__ void __launch_bounds__(256) stack_unpack(const unsigned char* codes, const unsigned char* scales, const int* chosen, u16* out,
                                                               int units_of_one, int blocks_of_one) {
  launch_dependents();
  grid_dependency_wait();
  const size_t g = blockIdx.x / blocks_of_one, e = chosen[g];
  const int unit = blockIdx.x % blocks_of_one * 256 + threadIdx.x;
  if (unit >= units_of_one) return;
  const size_t from = e * units_of_one + unit;
  const uint2 packed = __ldcs((const uint2*)codes + from);
  const float scale = scale_of(scales[from * 16 / BLOCK]);
  float v[8];
  uint4* to = (uint4*)out + (g * units_of_one + unit) * 2;
#pragma unroll
  for (int i = 0; i < 8; i++) v[i] = code_of(packed.x >> 4 * i) * scale;
  to[0] = pack(v);
#pragma unroll
  for (int i = 0; i < 8; i++) v[i] = code_of(packed.y >> 4 * i) * scale;
  to[1] = pack(v);
}
