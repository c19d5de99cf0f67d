// y = silu(a causal convolution over the last 4 rows of a sequence, channel by channel), over packed sequences (short_conv.py).
//
// A thread has 8 channels of ROWS consecutive rows and keeps the last 3 inputs in registers. Threads behind these write the sequences' states.
#include "bfloat16.cuh"
#include "launch.cuh"

#define TAPS 4
#define KEPT (TAPS - 1)

struct Operands {
  const u16* x;
  const float* weight;
  const long long* ends;
  const u16* before;
  u16 *y, *after;
  int x_stride, num_rows, num_sequences, channels;
};

// An input of a sequence by its position; the state's are at -3 .. -1.
__device__ __forceinline__ uint4 input(const Operands& o, int sequence, long long position, int channel) {
  if (position >= 0) return *(const uint4*)(o.x + (size_t)(o.ends[sequence] + position) * o.x_stride + channel);
  return *(const uint4*)(o.before + ((size_t)sequence * KEPT + KEPT + position) * o.channels + channel);
}

// The sequence that has this row: the last one that begins at or before it.
__device__ __forceinline__ int find_sequence(const Operands& o, int row) {
  int low = 0, high = o.num_sequences - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (o.ends[middle] <= row) low = middle;
    else high = middle - 1;
  }
  return low;
}

extern "C" __global__ void __launch_bounds__(THREADS) short_conv(Operands o) {
  launch_dependents();
  grid_dependency_wait();
  const int columns = o.channels / 8, runs = (o.num_rows + ROWS - 1) / ROWS;
  const long long unit = (long long)blockIdx.x * THREADS + threadIdx.x;
  const long long run = unit / columns;
  const int channel = (int)(unit % columns) * 8;
  if (run >= runs) {
    const long long place = run - runs;
    if (place >= (long long)o.num_sequences * KEPT) return;
    const int sequence = (int)(place / KEPT);
    const long long length = o.ends[sequence + 1] - o.ends[sequence];
    *(uint4*)(o.after + place * o.channels + channel) = input(o, sequence, length - KEPT + place % KEPT, channel);
    return;
  }
  float weight[TAPS][8];
#pragma unroll
  for (int e = 0; e < 8; e++) {
    const float4 w = *(const float4*)(o.weight + (size_t)(channel + e) * TAPS);
    weight[0][e] = w.x, weight[1][e] = w.y, weight[2][e] = w.z, weight[3][e] = w.w;
  }
  const int first = (int)run * ROWS, last = first + ROWS < o.num_rows ? first + ROWS : o.num_rows;
  int sequence = find_sequence(o, first);
  long long end = o.ends[sequence + 1];
  uint4 old[KEPT];
#pragma unroll
  for (int w = 0; w < KEPT; w++) old[w] = input(o, sequence, first - o.ends[sequence] - KEPT + w, channel);
  for (int row = first; row < last; row++) {
    if (row == end) {
      sequence = find_sequence(o, row), end = o.ends[sequence + 1];
#pragma unroll
      for (int w = 0; w < KEPT; w++) old[w] = input(o, sequence, w - KEPT, channel);
    }
    const uint4 x = *(const uint4*)(o.x + (size_t)row * o.x_stride + channel);
    float y[8] = {}, f[8];
#pragma unroll
    for (int w = 0; w < TAPS; w++) {
      unpack(w < KEPT ? old[w] : x, f);
#pragma unroll
      for (int e = 0; e < 8; e++) y[e] += weight[w][e] * f[e];
    }
#pragma unroll
    for (int e = 0; e < 8; e++) y[e] = y[e] / (1 + expf(-y[e]));
    *(uint4*)(o.y + (size_t)row * o.channels + channel) = pack(y);
    old[0] = old[1], old[1] = old[2], old[2] = x;
  }
}
