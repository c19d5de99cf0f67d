// Kernels of fused_linear.py.
#include "bfloat16.cuh"
#include "launch.cuh"

// Fill the adapters' columns of [W | b]: row n of part i has b_i's row in the columns of part i and zeros in the others.
struct Parts {
  const u16* b[PARTS];  // [rows, rank], or null without an adapter
  int row_end[PARTS], column_end[PARTS];
};

extern "C" __global__ void __launch_bounds__(256) place_adapters(u16* out, int row_stride, int rows, int columns, Parts parts) {
  launch_dependents();
  grid_dependency_wait();
  const int i = blockIdx.x * 256 + threadIdx.x, row = i / (columns / 8), column = i % (columns / 8) * 8;
  if (row >= rows) return;
  uint4 v = make_uint4(0, 0, 0, 0);
  int first_row = 0, first_column = 0;
#pragma unroll
  for (int p = 0; p < PARTS; p++) {
    const int rank = parts.column_end[p] - first_column;
    if (row >= first_row && row < parts.row_end[p] && column >= first_column && column < parts.column_end[p])
      v = *(const uint4*)(parts.b[p] + (size_t)(row - first_row) * rank + column - first_column);
    first_row = parts.row_end[p], first_column = parts.column_end[p];
  }
  *(uint4*)(out + (size_t)row * row_stride + column) = v;
}

// Copy rows with different strides: 15 us where torch's copy takes 39 (4096 x 3584, H200).
extern "C" __global__ void __launch_bounds__(256) copy_rows(const u16* x, u16* y, int rows, int columns, int x_stride, int y_stride) {
  launch_dependents();
  grid_dependency_wait();
  for (int row = blockIdx.x; row < rows; row += gridDim.x)
    for (int at = threadIdx.x * 8; at < columns; at += 256 * 8)
      *(uint4*)(y + (size_t)row * y_stride + at) = *(const uint4*)(x + (size_t)row * x_stride + at);
}
