// Route the rows of a decode step to experts: logits, the choice and its weights, rows sorted by expert; and the sum over a row's experts.
//
// Compile-time for `route` and `add_experts`: E experts, CHOSEN of each row, OVER_ALL (softmax over all experts), MT rows of an item.
#include "bfloat16.cuh"
#include "launch.cuh"
#include "warp.cuh"

#define MOST_ROWS 256
#define PER ((E + 31) / 32)  // experts of a lane: lane, lane + 32, ...

// logits[b, e] = sum_k x[b, k] W[e, k] + bias[e] in fp32. A warp multiplies 8 rows by one expert, always in the same order of k.
extern "C" __global__ void __launch_bounds__(256) router_logits(const u16* __restrict__ x, const u16* __restrict__ w, const float* __restrict__ bias,
                                                                float* logits, int num_rows, int num_experts, int width) {
  launch_dependents();
  const int lane = threadIdx.x % 32, expert = blockIdx.x % ((num_experts + 7) / 8) * 8 + threadIdx.x / 32;
  const int first = blockIdx.x / ((num_experts + 7) / 8) * 8;
  const u16* mine = w + (size_t)min(expert, num_experts - 1) * width;
  float sums[8] = {};
  grid_dependency_wait();
#pragma unroll 2
  for (int k = lane * 8; k < width; k += 256) {
    float weights[8];
    unpack(*(const uint4*)(mine + k), weights);
#pragma unroll
    for (int b = 0; b < 8; b++) {
      float v[8];
      unpack(*(const uint4*)(x + (size_t)min(first + b, num_rows - 1) * width + k), v);
#pragma unroll
      for (int i = 0; i < 8; i++) sums[b] = fmaf(v[i], weights[i], sums[b]);
    }
  }
#pragma unroll
  for (int b = 0; b < 8; b++) {
    const float sum = warp_sum(sums[b]);
    if (lane == 0 && expert < num_experts && first + b < num_rows)
      logits[(size_t)(first + b) * num_experts + expert] = sum + (bias ? bias[expert] : 0.f);
  }
}

#ifdef CHOSEN
// Numbers in the order of the floats, never 0.
__device__ __forceinline__ u32 key_of(float v) {
  const u32 bits = __float_as_uint(v);
  return max(bits >> 31 ? ~bits : bits | 0x80000000u, 1u);
}

// The record of each row's chosen experts: a layer's bytes [slots, CHOSEN], or null.
struct Record {
  u8* routes;
  const int* tables;  // [rows, stride] pages
  int stride, page_tokens;
};

// A row at a negative position is not in use: it gets no expert, and its places are -1. With sorted_x the rows of x are copied there, sorted
// by expert, by all CTAs: each of them sorts, and the first one writes the rest.
extern "C" __global__ void __launch_bounds__(1024) route(const float* __restrict__ logits, const int* __restrict__ positions, const Record record, u32* plan,
                                                         u16* rows, int* places, float* weights, const uint4* x, uint4* sorted_x, int num_rows, int pieces) {
  __shared__ u32 members[E][MOST_ROWS / 32];  // a bit for each row that chose the expert
  __shared__ u8 ids[MOST_ROWS * CHOSEN];
  __shared__ u16 order[MOST_ROWS * CHOSEN];
  __shared__ u32 starts[E], warp_totals[32];
  __shared__ int num_sorted;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const bool is_first = blockIdx.x == 0;
  for (int i = threadIdx.x; i < E * (MOST_ROWS / 32); i += 1024) members[i / (MOST_ROWS / 32)][i % (MOST_ROWS / 32)] = 0;
  launch_dependents();
  grid_dependency_wait();
  float next[PER];  // the logits of the warp's next row; lane i has the position and the page of its row i
  auto load = [&](int row) {
#pragma unroll
    for (int j = 0; j < PER; j++) next[j] = row < num_rows && j * 32 + lane < E ? logits[(size_t)row * E + j * 32 + lane] : -INF;
  };
  load(warp);
  const int own_row = warp + 32 * lane;
  const int own_position = positions && own_row < num_rows ? positions[own_row] : 0;
  int own_page = 0;
  if (record.routes && own_row < num_rows && own_position >= 0)
    own_page = record.tables[(size_t)own_row * record.stride + own_position / record.page_tokens];
  __syncthreads();
  for (int i = 0, row = warp; row < num_rows; i++, row += 32) {
    float v[PER];
    u32 keys[PER];
    u32 chosen = 0;  // a bit for each of this lane's experts
#pragma unroll
    for (int j = 0; j < PER; j++) {
      v[j] = next[j];
      keys[j] = j * 32 + lane < E ? key_of(v[j]) : 0;
    }
    load(row + 32);
    const int position = __shfl_sync(ALL_LANES, own_position, i), page = __shfl_sync(ALL_LANES, own_page, i);
    if (position < 0) continue;
#pragma unroll 1
    for (int c = 0; c < CHOSEN; c++) {  // the largest, of equal ones the first
      u32 best = 0, at = 0;
#pragma unroll
      for (int j = 0; j < PER; j++)
        if (keys[j] > best) best = keys[j], at = j * 32 + lane;
      const u32 largest = __reduce_max_sync(ALL_LANES, best), index = __reduce_min_sync(ALL_LANES, best == largest ? at : 0xFFFFFFFFu);
#pragma unroll
      for (int j = 0; j < PER; j++)
        if (index == j * 32 + lane) keys[j] = 0, chosen |= 1u << j;
    }
    float highest = -INF, sum = 0.f;
#pragma unroll
    for (int j = 0; j < PER; j++) highest = fmaxf(highest, v[j]);
    highest = warp_max(highest);
#pragma unroll
    for (int j = 0; j < PER; j++) {
      v[j] = expf(v[j] - highest);
      if (OVER_ALL || chosen >> j & 1) sum += v[j];
    }
    sum = warp_sum(sum);
    u8* recorded = is_first ? record.routes : nullptr;
    if (recorded) recorded += ((size_t)page * record.page_tokens + position % record.page_tokens) * CHOSEN;
    int before = 0;
#pragma unroll
    for (int j = 0; j < PER; j++) {
      const u32 both = __ballot_sync(ALL_LANES, chosen >> j & 1);
      if (chosen >> j & 1) {
        const int expert = j * 32 + lane, place = before + __popc(both & ((1u << lane) - 1));
        if (is_first) weights[row * CHOSEN + place] = __fdiv_rn(v[j], sum);
        ids[row * CHOSEN + place] = expert;
        if (recorded) recorded[place] = expert;
        atomicOr(&members[expert][row / 32], 1u << (row % 32));
      }
      before += __popc(both);
    }
  }
  __syncthreads();
  // rows before each expert's (low half) and items before its own (high half)
  u32 own = 0;
  int count = 0;
  if (threadIdx.x < E) {
#pragma unroll
    for (int i = 0; i < MOST_ROWS / 32; i++) count += __popc(members[threadIdx.x][i]);
    own = count | (u32)((count + MT - 1) / MT) << 16;
  }
  u32 upto = own;
#pragma unroll
  for (int i = 1; i < 32; i *= 2) {
    const u32 other = __shfl_up_sync(ALL_LANES, upto, i);
    if (lane >= i) upto += other;
  }
  if (lane == 31) warp_totals[warp] = upto;
  __syncthreads();
  u32 before = upto - own;
  for (int i = 0; i < warp; i++) before += warp_totals[i];
  if (threadIdx.x < E) {
    const int first = before & 0xFFFF, item = before >> 16;
    starts[threadIdx.x] = first;
    for (int i = 0; is_first && i * MT < count; i++) plan[1 + item + i] = threadIdx.x | (u32)min(MT, count - i * MT) << 8 | (u32)(first + i * MT) << 16;
    if (threadIdx.x == E - 1) {
      num_sorted = first + count;
      if (is_first) plan[0] = (before + own) >> 16;
    }
  }
  __syncthreads();
  for (int pair = threadIdx.x; pair < num_rows * CHOSEN; pair += 1024) {
    const int row = pair / CHOSEN, expert = ids[pair];
    if (positions && positions[row] < 0) {
      if (is_first) places[pair] = -1;
      continue;
    }
    int place = starts[expert];
    for (int i = 0; i < row / 32; i++) place += __popc(members[expert][i]);
    place += __popc(members[expert][row / 32] & ((1u << (row % 32)) - 1));
    order[place] = row;
    if (is_first) rows[place] = row, places[pair] = place;
  }
  if (!sorted_x) return;
  __syncthreads();
  for (int i = blockIdx.x * 1024 + threadIdx.x; i < num_sorted * pieces; i += gridDim.x * 1024)
    sorted_x[i] = x[order[i / pieces] * pieces + i % pieces];
}

// h[b] += scale * sum over the row's experts, in the order of their numbers, of weight * y[place]. A thread adds 8 columns.
extern "C" __global__ void __launch_bounds__(128) add_experts(float* h, const u16* __restrict__ y, const int* __restrict__ places,
                                                              const float* __restrict__ weights, int width, int ctas_a_row, float scale) {
  launch_dependents();
  grid_dependency_wait();
  const int row = blockIdx.x / ctas_a_row, at = (blockIdx.x % ctas_a_row * 128 + threadIdx.x) * 8;
  if (at >= width) return;
  float sums[8] = {};
#pragma unroll
  for (int i = 0; i < CHOSEN; i++) {
    const int place = places[row * CHOSEN + i];
    if (place < 0) continue;
    const float weight = weights[row * CHOSEN + i];
    float v[8];
    unpack(*(const uint4*)(y + (size_t)place * width + at), v);
#pragma unroll
    for (int j = 0; j < 8; j++) sums[j] = fmaf(weight, v[j], sums[j]);
  }
  float4* to = (float4*)(h + (size_t)row * width + at);
#pragma unroll
  for (int i = 0; i < 2; i++) {
    float4 v = to[i];
    v.x += scale * sums[4 * i], v.y += scale * sums[4 * i + 1], v.z += scale * sums[4 * i + 2], v.w += scale * sums[4 * i + 3];
    to[i] = v;
  }
}
#endif
