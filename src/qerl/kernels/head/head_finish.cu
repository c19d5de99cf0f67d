// The second launch of head_sample.py, one CTA per row: reduce the row's partials in an order that depends on the vocabulary alone,
//
//   token = the v with the best score          logprob = y[token] - log sum exp y, NaN if a logit of the row is not finite
//
// With STEP also update the row's state and advance the step index (`place`), which the last CTA to arrive does. Without STEP only store
// token and logprob.
#include "launch.cuh"
#include "types.cuh"

#define WARPS 16

struct Finish {
  const float4* partials;
  const int* stops;
  const int* ends;
  int* positions;
  int* tokens;
  float* logprobs;
  int* drawn_tokens;
  float* drawn_logprobs;
  int* place;
  u32* arrived;
  int tiles, num_stops, token_stride, logprob_stride;
};

struct Row {
  float score, y, most, sum;  // log sum exp = most + log(sum)
  int v;
  __device__ __forceinline__ void join(const Row& other) {
    if (other.score > score || (other.score == score && other.v < v)) score = other.score, y = other.y, v = other.v;
    const float m = fmaxf(most, other.most);
    sum = (most == m ? sum : sum * expf(most - m)) + (other.most == m ? other.sum : other.sum * expf(other.most - m));
    most = m;
  }
};

__device__ __forceinline__ Row read(float4 p) {  // a NaN in the log sum exp becomes a NaN in the sum
  return {p.x, p.y, p.w == p.w ? p.w : -INF, p.w == p.w ? 1.f : p.w, __float_as_int(p.z)};
}

__device__ __forceinline__ Row warp_reduce(Row row) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    Row other;
    other.score = __shfl_xor_sync(ALL_LANES, row.score, step), other.y = __shfl_xor_sync(ALL_LANES, row.y, step);
    other.most = __shfl_xor_sync(ALL_LANES, row.most, step), other.sum = __shfl_xor_sync(ALL_LANES, row.sum, step);
    other.v = __shfl_xor_sync(ALL_LANES, row.v, step);
    row.join(other);
  }
  return row;
}

__device__ __forceinline__ void store(const Finish& e, int m, const Row& row) {
  const float logprob = row.y - (row.most + logf(row.sum));
#if STEP
  const int position = e.positions[m], place = *e.place;
  const bool is_live = position >= 0;
  e.drawn_tokens[(size_t)place * e.token_stride + m] = is_live ? row.v : 0;
  e.drawn_logprobs[(size_t)place * e.logprob_stride + m] = is_live ? logprob : 0.f;
  if (is_live) {
    bool has_ended = position + 1 >= e.ends[m] || !(fabsf(logprob) < INF);
    for (int i = 0; i < e.num_stops; i++) has_ended |= e.stops[i] == row.v;
    e.tokens[m] = row.v, e.positions[m] = has_ended ? -1 : position + 1;
  }
  __threadfence();
  if (atomicAdd(e.arrived, 1u) == gridDim.x - 1) {
    *e.arrived = 0;
    *e.place = place + 1;
  }
#else
  e.tokens[m] = row.v, e.logprobs[m] = logprob;
#endif
}

extern "C" __global__ void __launch_bounds__(WARPS * 32) head_finish(const __grid_constant__ Finish e) {
  __shared__ Row rows[WARPS];
  grid_dependency_wait();
  const int m = blockIdx.x, lane = threadIdx.x % 32;
  const float4* partials = e.partials + (size_t)m * e.tiles;
  Row row = {-INF, 0.f, -INF, 0.f, 0x7FFFFFFF};
#pragma unroll 5
  for (int i = threadIdx.x; i < e.tiles; i += WARPS * 32) row.join(read(partials[i]));
  row = warp_reduce(row);
  if (lane == 0) rows[threadIdx.x / 32] = row;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  row = warp_reduce(lane < WARPS ? rows[lane] : Row{-INF, 0.f, -INF, 0.f, 0x7FFFFFFF});
  if (lane == 0) store(e, m, row);
}
