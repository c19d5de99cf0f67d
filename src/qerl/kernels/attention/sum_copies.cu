// Sums of rows that were copied, for keys and values at once; 8 columns per thread.
#include "bfloat16.cuh"
#include "launch.cuh"

struct Operands {
  const u16 *dk, *dv;        // [R, width]
  const int *places, *starts;  // [R], [rows + 1]
  u16 *dk_sum, *dv_sum;      // [rows, width]
  int rows, width;
};

__device__ __forceinline__ void add(float* sum, const u16* from) {
  float v[8];
  unpack(__ldcs((const uint4*)from), v);
#pragma unroll
  for (int j = 0; j < 8; j++) sum[j] += v[j];
}

// sum[row] = sum over i of d[places[i]], for i from starts[row] to starts[row + 1], in this order, in fp32.
extern "C" __global__ void __launch_bounds__(256) sum_copies(Operands o) {
  launch_dependents();
  grid_dependency_wait();
  const int vector = blockIdx.x * 256 + threadIdx.x, row = vector / (o.width / 8);
  if (row >= o.rows) return;
  const size_t at = (size_t)vector * 8, column = at - (size_t)row * o.width;
  float k[8] = {}, v[8] = {};
  for (int i = o.starts[row], end = o.starts[row + 1]; i < end; i++) {
    const size_t from = (size_t)o.places[i] * o.width + column;
    add(k, o.dk + from);
    add(v, o.dv + from);
  }
  *(uint4*)(o.dk_sum + at) = pack(k);
  *(uint4*)(o.dv_sum + at) = pack(v);
}
