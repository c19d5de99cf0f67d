// The gated delta rule over packed sequences, 64 tokens at a time (gated_delta_chunks.py). A CTA has one sequence, one value head and COLUMNS of its values.
//
// A warp has 16 columns v of the state, as S^T [16, HEAD] in the registers of mma's results, which are operands of the next product without a move:
//     known = S^T k_i, seen = S^T q_i      r_i = beta_i (v_i - e^L_i known)      (1 + A) d = r, by blocks of 16 tokens
//     o_i = e^L_i seen + sum_{j <= i} P_ij d_j                                   S^T = e^L_last S^T + sum_j e^(L_last - L_j) d_j k_j^T
// k and q are bf16 as they come, their lengths are factors of fp32. All else is fp32 or a sum of two bf16, which keeps 16 bits: a product of two such sums is
// three products of bf16. Of (1 + A)^-1 only the four blocks on the diagonal are made.
#include "async_copy.cuh"
#include "bfloat16.cuh"
#include "launch.cuh"
#include "memory.cuh"
#include "mma.cuh"

#define HEAD 128
#define TOKENS 64                // of a chunk
#define BLOCKS (TOKENS / 16)
#define BLOCK 256  // numbers of 16 x 16
#define PAIRS (BLOCKS * (BLOCKS + 1) / 2)  // of blocks, on and below the diagonal
#define WARPS 4
#define THREADS (32 * WARPS)
#define COLUMNS (16 * WARPS)
#define LENGTH_EPS 1e-6f  // under the root of a query's or key's length

struct Operands {
  const u16 *q, *k, *v;
  const float *log_decay, *beta;
  const long long* ends;
  const float* before;
  float* after;
  u16* o;
  int q_stride, k_stride, v_stride, heads, group;
};

struct Shared {
  u16 k[TOKENS * HEAD], q[TOKENS * HEAD];
  u16 among[2][PAIRS * BLOCK];      // -A's blocks below the diagonal, the inverses of 1 + A's on it; high and low parts
  u16 within[2][PAIRS * BLOCK];     // P's
  u16 rows[WARPS][BLOCKS * BLOCK];  // of v, then of o: a warp's columns
  float diagonal[BLOCKS][16][17]; // -A's blocks
  float log[TOKENS], decay[TOKENS], beta[TOKENS], k_scale[TOKENS], q_scale[TOKENS], left[TOKENS];
};

static_assert(sizeof(Shared) == 67328, "SHARED_BYTES of gated_delta_chunks.py");

// Two numbers as sums of two bf16.
struct Split {
  u32 high, low_part;
  __device__ __forceinline__ void of(float x, float y) {
    high = pack2(x, y);
    low_part = pack2(x - low(high), y - ::high(high));
  }
};
// An operand A [16, 16] from two results [16, 8].
struct Operand {
  u32 high[4], low[4];
  __device__ __forceinline__ void of(const float (&left)[4], const float (&right)[4]) {
    Split s;
    s.of(left[0], left[1]), high[0] = s.high, low[0] = s.low_part;
    s.of(left[2], left[3]), high[1] = s.high, low[1] = s.low_part;
    s.of(right[0], right[1]), high[2] = s.high, low[2] = s.low_part;
    s.of(right[2], right[3]), high[3] = s.high, low[3] = s.low_part;
  }
};

// Places of 16 bytes: ldmatrix and stores of 8 rows meet no bank conflict.
__device__ __forceinline__ int wide_place(int row, int piece) { return row * HEAD + (piece ^ row % 8) * 8; }           // of rows of HEAD
__device__ __forceinline__ int place(int row, int piece) { return row * 16 + (piece ^ row / 4 % 2) * 8; }              // of rows of 16
__device__ __forceinline__ constexpr u32 block_bytes(int i, int j) { return 2 * BLOCK * (i * (i + 1) / 2 + j); }  // of block (i, j <= i)

__device__ __forceinline__ void product(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma(c, a[0], a[1], a[2], a[3], b0, b1); }
// c [16, 16] += a b, b exact in bf16.
__device__ __forceinline__ void add_exact(float (&c0)[4], float (&c1)[4], const Operand& a, const u32 (&b)[4]) {
  product(c0, a.high, b[0], b[1]), product(c1, a.high, b[2], b[3]);
  product(c0, a.low, b[0], b[1]), product(c1, a.low, b[2], b[3]);
}
// c [16, 16] += a b with b^T the block (row, column) of a split matrix.
__device__ __forceinline__ void add_split(float (&c0)[4], float (&c1)[4], const Operand& a, u32 matrix, u32 bytes) {
  u32 high[4], low[4];
  ldmatrix_x4(high, matrix + bytes);
  ldmatrix_x4(low, matrix + bytes + 2 * PAIRS * BLOCK);
  add_exact(c0, c1, a, high);
  product(c0, a.high, low[0], low[1]), product(c1, a.high, low[2], low[3]);
}

// Begin to copy rows of a head to shared memory; zeros after the sequence's end.
__device__ __forceinline__ void load_rows(u16* to, const u16* from, int stride, int count, int thread) {
#pragma unroll 1
  for (int i = thread; i < TOKENS * 16; i += THREADS) {
    const int row = i / 16, piece = i % 16;
    u16* place = to + wide_place(row, piece);
    if (row < count) copy_async(smem_u32(place), from + (size_t)row * stride + 8 * piece);
    else *(uint4*)place = make_uint4(0, 0, 0, 0);
  }
}
// The same of a warp's columns of v.
__device__ __forceinline__ void load_columns(u16* to, const u16* from, int stride, int count, int lane) {
#pragma unroll 1
  for (int i = lane; i < 2 * TOKENS; i += 32) {
    u16* at = to + place(i / 2, i % 2);
    if (i / 2 < count) copy_async(smem_u32(at), from + (size_t)(i / 2) * stride + i % 2 * 8);
    else *(uint4*)at = make_uint4(0, 0, 0, 0);
  }
}
// The inverse of a row's length.
__device__ __forceinline__ float inverse_length(const u16* rows, int row) {
  float sum = 0;
#pragma unroll 4
  for (int piece = 0; piece < 16; piece++) {
    float f[8];
    unpack(*(const uint4*)(rows + wide_place(row, piece)), f);
#pragma unroll
    for (int e = 0; e < 8; e++) sum += f[e] * f[e];
  }
  return rsqrtf(sum + LENGTH_EPS);
}

// Sum the chunk's log decays up to each token; one warp, two tokens a lane.
__device__ __forceinline__ void load_gates(Shared& s, const Operands& o, long long first, int head, int count, int lane) {
  float log[2], sum;
#pragma unroll
  for (int e = 0; e < 2; e++) {
    const int token = 2 * lane + e;
    const size_t at = (size_t)(first + token) * o.heads + head;
    log[e] = token < count ? o.log_decay[at] : 0;
    s.beta[token] = token < count ? o.beta[at] : 0;
  }
  sum = log[0] + log[1];
#pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    const float before = __shfl_up_sync(ALL_LANES, sum, by);
    if (lane >= by) sum += before;
  }
  const float before = __shfl_up_sync(ALL_LANES, sum, 1);
  log[0] += lane ? before : 0, log[1] += log[0];
#pragma unroll
  for (int e = 0; e < 2; e++) s.log[2 * lane + e] = log[e], s.decay[2 * lane + e] = expf(log[e]);
}

// Make one 16 x 16 block of -A or P.
__device__ __forceinline__ void make_block(Shared& s, bool is_within, int i, int j, int lane) {
  float c[2][4] = {};
  const u32 a_at = smem_u32(is_within ? s.q : s.k) + 32 * HEAD * i, b_at = smem_u32(s.k) + 32 * HEAD * j;
  const u32 bytes_a = 2 * wide_place(lane % 16, lane / 16), bytes_b = 2 * wide_place(lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
  for (int step = 0; step < HEAD / 16; step++) {
    u32 a[4], b[4];
    ldmatrix_x4(a, a_at + (bytes_a ^ 32 * step));
    ldmatrix_x4(b, b_at + (bytes_b ^ 32 * step));
    product(c[0], a, b[0], b[1]), product(c[1], a, b[2], b[3]);
  }
#pragma unroll
  for (int tile = 0; tile < 2; tile++) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = 16 * i + lane / 4 + 8 * half, column = 16 * j + 8 * tile + lane % 4 * 2;
      const float scale = is_within ? s.q_scale[row] : -s.beta[row] * s.k_scale[row];
      float x[2];
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int other = column + e;
        const bool is_seen = is_within ? other <= row : other < row;
        x[e] = is_seen ? c[tile][2 * half + e] * scale * s.k_scale[other] * expf(s.log[row] - s.log[other]) : 0;
      }
      if (!is_within && i == j) {
        s.diagonal[i][row % 16][column % 16] = x[0], s.diagonal[i][row % 16][column % 16 + 1] = x[1];
      } else {
        Split parts;
        parts.of(x[0], x[1]);
        u16(*matrix)[PAIRS * BLOCK] = is_within ? s.within : s.among;
        const int at = block_bytes(i, j) / 2 + place(row % 16, column % 16 / 8) + column % 8;
        *(u32*)(matrix[0] + at) = parts.high, *(u32*)(matrix[1] + at) = parts.low_part;
      }
    }
  }
}

// Invert 1 + A's block on the diagonal, one column a thread.
__device__ __forceinline__ void invert(Shared& s, int block, int column) {
  float x[16];
#pragma unroll
  for (int i = 0; i < 16; i++) x[i] = i == column;
#pragma unroll
  for (int j = 0; j < 15; j++) {
#pragma unroll
    for (int i = j + 1; i < 16; i++) x[i] += s.diagonal[block][i][j] * x[j];
  }
#pragma unroll
  for (int i = 0; i < 16; i++) {
    Split parts;
    parts.of(x[i], 0);
    const int at = block_bytes(block, block) / 2 + place(i, column / 8) + column % 8;
    s.among[0][at] = (u16)parts.high, s.among[1][at] = (u16)parts.low_part;
  }
}

// Write o^T [16, 8] to a warp's rows.
__device__ __forceinline__ void put_transposed(u16* rows, const float (&x)[4], int row, int lane) {
  *(u32*)(rows + place(row, 0) + lane % 4 * 2) = transpose8x8(pack2(x[0], x[1]));
  *(u32*)(rows + place(row, 1) + lane % 4 * 2) = transpose8x8(pack2(x[2], x[3]));
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS) gated_delta_chunks(Operands o) {
  extern __shared__ __align__(128) u8 memory[];
  Shared& s = *(Shared*)memory;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int part = blockIdx.x % (HEAD / COLUMNS), unit = blockIdx.x / (HEAD / COLUMNS);
  const int head = unit % o.heads, sequence = unit / o.heads, key_head = head / o.group;
  const int column = part * COLUMNS + 16 * warp;  // first of the warp
  const u32 values = smem_u32(s.rows[warp]), bytes_rows = 2 * place(lane % 16, lane / 16);
  const u32 keys = smem_u32(s.k), queries = smem_u32(s.q), among = smem_u32(s.among), within = smem_u32(s.within);
  const int row_b = lane % 8 + lane / 16 * 8, piece_b = lane / 8 % 2;
  const u32 bytes_a = 2 * wide_place(lane % 16, lane / 16), bytes_b = 2 * wide_place(row_b, piece_b), bytes_block = 2 * place(row_b, piece_b);
  launch_dependents();
  grid_dependency_wait();
  const long long start = o.ends[sequence], end = o.ends[sequence + 1];
  const size_t state_at = (size_t)unit * HEAD * HEAD + column + lane / 4 + (size_t)(lane % 4 * 2) * HEAD;
  float state[HEAD / 8][4];  // S^T [16, HEAD] in tiles of 8
#pragma unroll
  for (int tile = 0; tile < HEAD / 8; tile++)
#pragma unroll
    for (int e = 0; e < 4; e++) state[tile][e] = o.before[state_at + (8 * tile + e % 2) * HEAD + e / 2 * 8];

  for (long long first = start; first < end; first += TOKENS) {
    const int count = end - first < TOKENS ? (int)(end - first) : TOKENS;
    __syncthreads();
    load_rows(s.k, o.k + (size_t)first * o.k_stride + key_head * HEAD, o.k_stride, count, thread);
    load_rows(s.q, o.q + (size_t)first * o.q_stride + key_head * HEAD, o.q_stride, count, thread);
    load_columns(s.rows[warp], o.v + (size_t)first * o.v_stride + head * HEAD + column, o.v_stride, count, lane);
    commit_copies();
    if (warp == 0) load_gates(s, o, first, head, count, lane);
    wait_copies<0>();
    __syncthreads();
    if (thread < TOKENS) s.k_scale[thread] = inverse_length(s.k, thread);
    else s.q_scale[thread - TOKENS] = inverse_length(s.q, thread - TOKENS) * rsqrtf((float)HEAD);
    __syncthreads();
    if (thread < TOKENS) s.left[thread] = expf(s.log[TOKENS - 1] - s.log[thread]) * s.k_scale[thread];
    for (int task = warp; task < 2 * PAIRS; task += WARPS) {
      const int pair = task % PAIRS, i = pair < 1 ? 0 : pair < 3 ? 1 : pair < 6 ? 2 : 3;
      make_block(s, task >= PAIRS, i, pair - i * (i + 1) / 2, lane);
    }
    __syncthreads();
    if (thread < TOKENS) invert(s, thread / 16, thread % 16);

    Operand d[BLOCKS];
    float known[2 * BLOCKS][4] = {}, seen[2 * BLOCKS][4] = {};  // [16, TOKENS] in tiles of 8
#pragma unroll
    for (int step = 0; step < HEAD / 16; step++) {
      Operand a;
      a.of(state[2 * step], state[2 * step + 1]);
#pragma unroll
      for (int n = 0; n < BLOCKS; n++) {
        u32 b[4];
        ldmatrix_x4(b, keys + 32 * HEAD * n + (bytes_b ^ 32 * step));
        add_exact(known[2 * n], known[2 * n + 1], a, b);
        ldmatrix_x4(b, queries + 32 * HEAD * n + (bytes_b ^ 32 * step));
        add_exact(seen[2 * n], seen[2 * n + 1], a, b);
      }
    }
    __syncthreads();  // the inverses are there
#pragma unroll
    for (int i = 0; i < BLOCKS; i++) {
      u32 v[4];  // tokens 0-7 and 8-15 of the first columns, then of the last
      ldmatrix_x4_transposed(v, values + 2 * BLOCK * i + bytes_rows);
#pragma unroll
      for (int e = 0; e < 8; e++) {
        const int t = 16 * i + e / 4 * 8 + lane % 4 * 2 + e % 2;
        const u32 pair = v[e / 4 + e % 4 / 2 * 2];
        float &x = known[2 * i + e / 4][e % 4], &y = seen[2 * i + e / 4][e % 4];
        x = s.beta[t] * ((e % 2 ? high(pair) : low(pair)) - s.decay[t] * s.k_scale[t] * x);
        y *= s.decay[t] * s.q_scale[t];
      }
#pragma unroll
      for (int j = 0; j < i; j++) add_split(known[2 * i], known[2 * i + 1], d[j], among + block_bytes(i, j), bytes_block);
      Operand r;
      r.of(known[2 * i], known[2 * i + 1]);
      float solved[2][4] = {};
      add_split(solved[0], solved[1], r, among + block_bytes(i, i), bytes_block);
      d[i].of(solved[0], solved[1]);
#pragma unroll
      for (int j = 0; j <= i; j++) add_split(seen[2 * i], seen[2 * i + 1], d[j], within + block_bytes(i, j), bytes_block);
      put_transposed(s.rows[warp] + BLOCK * i, seen[2 * i], lane / 4, lane);
      put_transposed(s.rows[warp] + BLOCK * i, seen[2 * i + 1], lane / 4 + 8, lane);
    }
    __syncwarp();
    u16* to = o.o + ((size_t)first * o.heads + head) * HEAD + column;
#pragma unroll 1  // unrolled, its addresses would not fit the registers
    for (int i = lane; i < 2 * TOKENS; i += 32)
      if (i / 2 < count) *(uint4*)(to + (size_t)(i / 2) * o.heads * HEAD + i % 2 * 8) = *(const uint4*)(s.rows[warp] + place(i / 2, i % 2));
    const float decay = s.decay[TOKENS - 1];
#pragma unroll
    for (int tile = 0; tile < HEAD / 8; tile++)
#pragma unroll
      for (int e = 0; e < 4; e++) state[tile][e] *= decay;
#pragma unroll
    for (int i = 0; i < BLOCKS; i++) {
      float x[2][4];
#pragma unroll
      for (int p = 0; p < 4; p++) {
        const int t = 16 * i + p / 2 * 8 + lane % 4 * 2;
        x[p / 2][p % 2 * 2] = (low(d[i].high[p]) + low(d[i].low[p])) * s.left[t];
        x[p / 2][p % 2 * 2 + 1] = (high(d[i].high[p]) + high(d[i].low[p])) * s.left[t + 1];
      }
      Operand a;
      a.of(x[0], x[1]);
#pragma unroll
      for (int n = 0; n < HEAD / 16; n++) {
        u32 b[4];
        ldmatrix_x4_transposed(b, keys + 32 * HEAD * i + (bytes_a ^ 32 * n));
        add_exact(state[2 * n], state[2 * n + 1], a, b);
      }
    }
  }
#pragma unroll
  for (int tile = 0; tile < HEAD / 8; tile++)
#pragma unroll
    for (int e = 0; e < 4; e++) o.after[state_at + (8 * tile + e % 2) * HEAD + e / 2 * 8] = state[tile][e];
}
