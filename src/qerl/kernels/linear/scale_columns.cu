// Factors of a product's columns (fused_linear.py): what a weight's operand leaves out, one for each row of the weight.
#include "bfloat16.cuh"
#include "launch.cuh"
#define ROWS 4  // of a thread, loaded at once

struct Operands {
  const void* from;      // [rows, columns], rows from_stride elements apart
  const float* factors;  // [columns]
  const u16* bias;       // [columns] or null
  void* to;              // [rows, columns], rows to_stride elements apart; may be `from`
  int rows, columns, from_stride, to_stride;
};

// The first of a thread's rows, and its column; false without any.
template <int WIDTH>
__device__ __forceinline__ bool place(const Operands& o, int& row, int& column) {
  const int blocks = (o.columns + 256 * WIDTH - 1) / (256 * WIDTH);
  row = blockIdx.x / blocks * ROWS, column = (blockIdx.x % blocks * 256 + threadIdx.x) * WIDTH;
  return column < o.columns;
}

// to = factors * from + bias in bfloat16, rounded once.
extern "C" __global__ void __launch_bounds__(256) scale_columns(Operands o) {
  launch_dependents();
  grid_dependency_wait();
  int row, column;
  if (!place<8>(o, row, column)) return;
  float factor[8], bias[8] = {};
#pragma unroll
  for (int i = 0; i < 8; i++) factor[i] = o.factors[column + i];
  if (o.bias) unpack(*(const uint4*)(o.bias + column), bias);
  uint4 v[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; r++)
    if (row + r < o.rows) v[r] = *(const uint4*)((const u16*)o.from + (size_t)(row + r) * o.from_stride + column);
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    if (row + r >= o.rows) return;
    float x[8];
    unpack(v[r], x);
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] = x[i] * factor[i] + bias[i];
    *(uint4*)((u16*)o.to + (size_t)(row + r) * o.to_stride + column) = pack(x);
  }
}

// to += factors * from + bias in fp32.
extern "C" __global__ void __launch_bounds__(256) add_scaled(Operands o) {
  launch_dependents();
  grid_dependency_wait();
  int row, column;
  if (!place<4>(o, row, column)) return;
  float factor[4], bias[4];
#pragma unroll
  for (int i = 0; i < 4; i++) factor[i] = o.factors[column + i], bias[i] = o.bias ? low(o.bias[column + i]) : 0.f;
  float4 x[ROWS], y[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; r++)
    if (row + r < o.rows) {
      x[r] = __ldcs((const float4*)((const float*)o.from + (size_t)(row + r) * o.from_stride + column));
      y[r] = *(const float4*)((const float*)o.to + (size_t)(row + r) * o.to_stride + column);
    }
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    if (row + r >= o.rows) return;
    y[r].x += x[r].x * factor[0] + bias[0], y[r].y += x[r].y * factor[1] + bias[1];
    y[r].z += x[r].z * factor[2] + bias[2], y[r].w += x[r].w * factor[3] + bias[3];
    *(float4*)((float*)o.to + (size_t)(row + r) * o.to_stride + column) = y[r];
  }
}
