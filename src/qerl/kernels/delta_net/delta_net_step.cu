// One token a row through Gated DeltaNet: short convolution, gated delta rule and gated norm (delta_net_step.py). A CTA has one value head of one row at a time.
//
// The head's state [HEAD, HEAD] is in registers from one read to one write: warp w has rows w, w + WARPS, ..., lane l columns 4 l .. 4 l + 3. Both
// products with the old state are sums over the same elements, so the state is walked once before the write:
//     known = S^T k,  seen = S^T q          update = beta (v - decay known)          o = decay seen + (k.q) update          S = decay S + k update^T
// With AHEAD a CTA has several units (row, head), grid apart. The next one's state is copied to shared memory, each thread its own part, from the moment at
// which this one's is in registers: memory has something to read while the gates, sums and norms are waited for.
#include "async_copy.cuh"
#include "bfloat16.cuh"
#include "launch.cuh"
#include "memory.cuh"
#include "warp.cuh"

#define HEAD 128
#define WARPS 8
#define THREADS (32 * WARPS)
#define ROWS (HEAD / WARPS)  // of the state, in a thread
#define KEPT 3               // inputs of the convolution before this token's
#define VALUE_HEADS (KEY_HEADS * GROUP)
#define CHANNELS ((2 * KEY_HEADS + VALUE_HEADS) * HEAD)
#define LENGTH_EPS 1e-6f  // under the root of a query's or key's length

struct Operands {
  const u16 *y, *gates, *u, *b;
  const float *factors, *conv_weight, *a_log, *dt_bias, *norm;
  u16* conv;
  float* state;
  const int *positions, *slots;
  u16* out;
  int* turns;
  int y_stride, gates_stride, u_stride, out_stride;
  float eps;
  int units;  // rows x value heads
};

enum Part { Q, K, V, Z };

// First channel of a head's part in the order q | k | v | z, all heads of each part together.
__device__ __forceinline__ int channel(int part, int head) {
  return part < V ? (part * KEY_HEADS + head / GROUP) * HEAD : (2 * KEY_HEADS + (part - V) * VALUE_HEADS + head) * HEAD;
}
// First column of a head's part in y.
__device__ __forceinline__ int column(int part, int head) {
#if BY_HEAD  // q, k, v and z of one key head after the other
  const int within = part < V ? part : 2 + (part - V) * GROUP + head % GROUP;
  return (head / GROUP * (2 + 2 * GROUP) + within) * HEAD;
#else
  return channel(part, head);
#endif
}
// Row of the gates' linears: which = 0 is beta's, 1 the decay's.
__device__ __forceinline__ int gate_row(int which, int head) {
  return BY_HEAD ? (head / GROUP * 2 + which) * GROUP + head % GROUP : which * VALUE_HEADS + head;
}

__device__ __forceinline__ float silu(float x) { return x / (1 + expf(-x)); }

// beta or log_decay's argument of one row and head; all lanes of a warp get it.
__device__ __forceinline__ float gate(const Operands& o, int row, int head, int which, int lane) {
  const int at = gate_row(which, head);
  float x = low(o.gates[(size_t)row * o.gates_stride + at]) * (o.factors ? o.factors[at] : 1.f);
#if RANK
  const u16* u = o.u + (size_t)row * o.u_stride + (BY_HEAD ? 0 : which * RANK);
  float sum = 0;
  for (int r = lane; r < RANK; r += 32) sum += low(u[r]) * low(o.b[at * RANK + r]);
  x += warp_sum(sum);
#endif
  return x;
}

// The CTA's two channels of a thread: their kept inputs and weights, read before the previous kernel has ended.
struct Convolution {
  u32* kept;  // of two channels
  u32 old[KEPT];
  float4 weight[2];
  __device__ __forceinline__ Convolution(const Operands& o, int slot, int at) {
    kept = (u32*)(o.conv + (size_t)slot * KEPT * CHANNELS + at);
#pragma unroll
    for (int w = 0; w < KEPT; w++) old[w] = kept[w * CHANNELS / 2];
    weight[0] = ((const float4*)o.conv_weight)[at], weight[1] = ((const float4*)o.conv_weight)[at + 1];
  }
  __device__ __forceinline__ float2 of(u32 x) const {
    const float4 a = weight[0], b = weight[1];
    return make_float2(silu(a.x * low(old[0]) + a.y * low(old[1]) + a.z * low(old[2]) + a.w * low(x)),
                       silu(b.x * high(old[0]) + b.y * high(old[1]) + b.z * high(old[2]) + b.w * high(x)));
  }
  __device__ __forceinline__ void move_on(u32 x) const {
#pragma unroll
    for (int w = 0; w < KEPT; w++) kept[w * CHANNELS / 2] = w + 1 < KEPT ? old[w + 1] : x;
  }
};

// Slot of a unit's row; -1 if the row is idle or there is no such unit.
__device__ __forceinline__ int slot_of(const Operands& o, int unit) {
  if (unit >= o.units) return -1;
  const int row = unit / VALUE_HEADS, position = o.positions[row], slot = o.slots[row];
  return position < 0 ? -1 : slot;
}
// A thread's part of a unit's state.
__device__ __forceinline__ float4* state_of(const Operands& o, int unit, int slot) {
  return (float4*)(o.state + ((size_t)slot * VALUE_HEADS + unit % VALUE_HEADS) * HEAD * HEAD) + threadIdx.x;
}
// Begin to copy a unit's state, of which a thread gets what it will read itself. No other thread has part in that, so there is no barrier.
__device__ __forceinline__ void begin_copy(float4* to, const Operands& o, int unit, int slot) {
  if (slot >= 0) {
    const float4* from = state_of(o, unit, slot);
    const u32 at = smem_u32(to);
#pragma unroll
    for (int i = 0; i < ROWS; i++) copy_async(at + i * THREADS * (u32)sizeof(float4), from + i * THREADS);
  }
  commit_copies();
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) delta_net_step(Operands o) {
  __shared__ __align__(16) float parts[4][HEAD];  // q, k, v after the convolution; silu(z)
  __shared__ float lengths[4];      // sums of squares of the halves of q and of k
  __shared__ float gates[2];        // beta, decay
  __shared__ __align__(16) float sums[2][WARPS][HEAD], products[WARPS];
  __shared__ __align__(16) float updates[HEAD], squares[HEAD / 32];
  __shared__ int is_last;
#if AHEAD
  extern __shared__ __align__(128) u8 memory[];
  float4* copied = (float4*)memory + threadIdx.x;
#endif
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  launch_dependents();
  int unit = blockIdx.x, slot = slot_of(o, unit);
#if AHEAD
  begin_copy(copied, o, unit, slot);
#endif
  do {
    const bool is_first = unit == blockIdx.x;
    const int row = unit / VALUE_HEADS, head = unit % VALUE_HEADS;
    u16* out = o.out + (size_t)row * o.out_stride + head * HEAD;
    const int next = unit + gridDim.x, next_slot = AHEAD ? slot_of(o, next) : -1;
    if (slot < 0) {
      if (is_first) grid_dependency_wait();
      if (thread < HEAD) out[thread] = 0;
#if AHEAD
      begin_copy(copied, o, next, next_slot);
#endif
      unit = next, slot = next_slot;
      continue;
    }
    float4* at = state_of(o, unit, slot);
    float4 s[ROWS];
#if AHEAD
    if (!is_first) __syncthreads();  // the unit before has read its shared floats
#else
#pragma unroll
    for (int i = 0; i < ROWS; i++) s[i] = __ldcs(at + i * THREADS);
#endif

    // Two warps for each part: q, k and v go through the convolution, z through SiLU.
    const int part = warp / 2, pair = 2 * (thread % 64);
    const Convolution conv(o, slot, channel(part < Z ? part : V, head) + pair);
    if (is_first) grid_dependency_wait();
    const u32 x = *(const u32*)(o.y + (size_t)row * o.y_stride + column(part, head) + pair);
    const float2 f = part < Z ? conv.of(x) : make_float2(silu(low(x)), silu(high(x)));
    *(float2*)&parts[part][pair] = f;
    if (part < V) {
      const float length = warp_sum(f.x * f.x + f.y * f.y);
      if (lane == 0) lengths[warp] = length;
    } else if (part == Z) {
      const int which = warp % 2;
      const float g = gate(o, row, head, which, lane);
      if (lane == 0) {
        const float t = g + o.dt_bias[head];
        gates[which] = which ? expf(-expf(o.a_log[head]) * (t > 20 ? t : log1pf(expf(t)))) : 1 / (1 + expf(-g));
      }
    }
    __syncthreads();
    if (thread == 0) {  // the value heads of a key head read the same kept inputs: the last to come here moves them on
      __threadfence();
      int* turn = o.turns + row * KEY_HEADS + head / GROUP;
      is_last = GROUP == 1 || atomicAdd(turn, 1) == GROUP - 1;
      if (is_last) *turn = 0;
    }

#if AHEAD
    wait_copies<0>();
#pragma unroll
    for (int i = 0; i < ROWS; i++) s[i] = copied[i * THREADS];
#endif
    float4 known = make_float4(0, 0, 0, 0), seen = known;
    float product = 0;
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
      const float q = parts[Q][i * WARPS + warp], k = parts[K][i * WARPS + warp];
      product += q * k;
      known.x += s[i].x * k, known.y += s[i].y * k, known.z += s[i].z * k, known.w += s[i].w * k;
      seen.x += s[i].x * q, seen.y += s[i].y * q, seen.z += s[i].z * q, seen.w += s[i].w * q;
    }
    *(float4*)&sums[0][warp][4 * lane] = known, *(float4*)&sums[1][warp][4 * lane] = seen;
    if (lane == 0) products[warp] = product;
#if AHEAD
    begin_copy(copied, o, next, next_slot);  // all of s has been read: the sums above needed it
#endif
    __syncthreads();

    const float decay = gates[1];
    const float q_scale = rsqrtf(lengths[0] + lengths[1] + LENGTH_EPS) * rsqrtf((float)HEAD);
    const float k_scale = rsqrtf(lengths[2] + lengths[3] + LENGTH_EPS);
    float value = 0;
    if (thread < HEAD) {
      float known_v = 0, seen_v = 0, along = 0;
#pragma unroll
      for (int w = 0; w < WARPS; w++) known_v += sums[0][w][thread], seen_v += sums[1][w][thread], along += products[w];
      const float update = gates[0] * (parts[V][thread] - decay * k_scale * known_v) * k_scale;
      value = (decay * seen_v + along * update) * q_scale;
      updates[thread] = update;
      const float square = warp_sum(value * value);
      if (lane == 0) squares[warp] = square;
    }
    __syncthreads();
    const float4 update = *(const float4*)&updates[4 * lane];
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
      const float k = parts[K][i * WARPS + warp];
      s[i].x = decay * s[i].x + k * update.x, s[i].y = decay * s[i].y + k * update.y;
      s[i].z = decay * s[i].z + k * update.z, s[i].w = decay * s[i].w + k * update.w;
      __stcs(at + i * THREADS, s[i]);
    }
    if (thread < HEAD) {
      const float scale = rsqrtf((squares[0] + squares[1] + squares[2] + squares[3]) / HEAD + o.eps);
      out[thread] = (u16)pack2(value * scale * o.norm[thread] * parts[Z][thread], 0.f);
    }
    if (part == V || (part < V && is_last)) conv.move_on(x);
    unit = next, slot = next_slot;
  } while (AHEAD && unit < o.units);
}
