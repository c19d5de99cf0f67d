// out[s] = alpha[e] * product[s] + bias[e] + plus[s] for rows sorted by expert; 8 columns per thread. A null alpha is 1; null biases
// and plus are 0. Row s belongs to the first group g with ends[g] > s, which is expert e = chosen[g]. out may be product.
#include "bfloat16.cuh"
#include "launch.cuh"

struct Operands {
  const u16* product;
  const float* alpha;
  const u16* bias;
  const u16* plus;
  const int* chosen;
  const int* ends;
  u16* out;
  int groups, width, blocks_a_row;
};

extern "C" __global__ void __launch_bounds__(256) scale_and_add(const __grid_constant__ Operands o) {
  launch_dependents();
  grid_dependency_wait();
  const int s = blockIdx.x / o.blocks_a_row, at = (blockIdx.x % o.blocks_a_row * 256 + threadIdx.x) * 8;
  int first = 0, last = o.groups - 1;
  while (first < last) {
    const int middle = (first + last) / 2;
    if (o.ends[middle] > s)
      last = middle;
    else
      first = middle + 1;
  }
  if (at >= o.width) return;
  const size_t e = o.chosen[first], place = (size_t)s * o.width + at;
  const float factor = o.alpha ? o.alpha[e] : 1.f;
  float sum[8], v[8];
  unpack(__ldcs((const uint4*)(o.product + place)), sum);
#pragma unroll
  for (int j = 0; j < 8; j++) sum[j] *= factor;
  if (o.bias) {
    unpack(*(const uint4*)(o.bias + e * o.width + at), v);
#pragma unroll
    for (int j = 0; j < 8; j++) sum[j] += v[j];
  }
  if (o.plus) {
    unpack(__ldcs((const uint4*)(o.plus + place)), v);
#pragma unroll
    for (int j = 0; j < 8; j++) sum[j] += v[j];
  }
  *(uint4*)(o.out + place) = pack(sum);
}
