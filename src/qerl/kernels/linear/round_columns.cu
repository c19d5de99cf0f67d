// Round up to 128 columns of a weight to E2M1 values, one after the other, each passing its change on to the later ones (round_columns.py).
//
// A warp has ROWS rows, a lane 4 neighboring columns of each. Products and sums are rounded one by one, as PyTorch's operations round them.
#include "launch.cuh"
#include "types.cuh"

struct Operands {
  const float *target, *base, *step, *feedback;
  float *rounded, *change;
  int num_rows, columns, width;  // width: floats from row to row, of all but change
};

__device__ __forceinline__ float nearest(float value, float step) {
  const float units = __fdiv_rn(value, step), a = fminf(fabsf(units), 6.f);
  const float size = a < 2 ? rintf(a * 2) * 0.5f : a < 4 ? rintf(a) : rintf(a * 0.5f) * 2;
  return __fmul_rn(copysignf(size, units), step);
}

__device__ __forceinline__ void load(const float* from, float (&to)[4]) {
  const float4 x = *(const float4*)from;
  to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
}

extern "C" __global__ void __launch_bounds__(THREADS) round_columns(Operands o) {
  launch_dependents();
  grid_dependency_wait();
  const int lane = threadIdx.x % 32, first = (blockIdx.x * (THREADS / 32) + threadIdx.x / 32) * ROWS;
  if (first >= o.num_rows) return;
  const int column = lane * 4;
  const bool is_inside = column < o.columns;
  float target[ROWS][4], base[ROWS][4], step[ROWS][4], change[ROWS][4];
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    const int row = first + r < o.num_rows ? first + r : o.num_rows - 1;
    const size_t at = (size_t)row * o.width + (is_inside ? column : 0);
    load(o.target + at, target[r]), load(o.base + at, base[r]), load(o.step + at, step[r]);
  }
  for (int owner = 0; owner < o.columns / 4; owner++) {
#pragma unroll
    for (int e = 0; e < 4; e++) {
      float feedback[4];
      load(o.feedback + (size_t)(owner * 4 + e) * o.width + (is_inside ? column : 0), feedback);
#pragma unroll
      for (int r = 0; r < ROWS; r++) {
        const float own = nearest(target[r][e], step[r][e]) - base[r][e];
        if (lane == owner) change[r][e] = own;
        const float passed = __uint_as_float(__shfl_sync(ALL_LANES, (int)__float_as_uint(own), owner));
#pragma unroll
        for (int i = 0; i < 4; i++)  // an earlier column's target is not read again, but for its own change
          if (column + i > owner * 4 + e) target[r][i] += __fmul_rn(passed, feedback[i]);
      }
    }
  }
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    if (!is_inside || first + r >= o.num_rows) continue;
    float rounded[4];
#pragma unroll
    for (int i = 0; i < 4; i++) rounded[i] = nearest(target[r][i], step[r][i]);
    const size_t row = first + r;
    *(float4*)(o.rounded + row * o.width + column) = make_float4(rounded[0], rounded[1], rounded[2], rounded[3]);
    *(float4*)(o.change + row * o.columns + column) = make_float4(change[r][0], change[r][1], change[r][2], change[r][3]);
  }
}
