// u[m, r] = bf16(scaling * sum_k x[m, k] a[r, k]), the adapter's first half, beside the product that adds u B^T at its end.
//
// nvfp4_decode.cu, which is compiled behind this, multiplies a just as it multiplies the weight. An item is RT rows of a, the tokens
// of a tile and SLICE_K of k; the items are dealt out to the CTAs, each does its own before its units, from a stage that holds x
// alone, and leaves the sums in `partials`. One more warp of each CTA adds up the slices in the order of k and leaves two bf16 of u
// in a word. All words are their own flags, EMPTY until they are written, so all CTAs must be on the device at once. Whoever adds up
// a partial sum empties its word; u is read by many, so there are two, taken in turns: a launch empties the other one, which the
// launch before used up. At 64 tokens the four products of a 7B layer take 3 us more than with a u that is given; 15 us when a warp
// beside made it by mma.sync, for which the tensor cores have time only between wgmma's turns (H200).
//
// Who may touch what: x, u, partials and turns only behind griddepcontrol.wait (a stage that is full lies behind the producer's);
// a before it, for no kernel of a step writes it.
#define SHRINK_WARPS (RANK && !GIVEN_U ? 1 : 0)  // GIVEN_U: u is complete before the launch, [M, rows] bf16
#define SLICE_K (KB < 256 ? KB : 256)

struct LowRank {
  const u16* a;   // [rows, K]
  u32* partials;  // [slices, rows / 16, tokens / 8, 128] fp32: what the lanes of a warp hold of a product; tokens of whole tiles
  u32* u;         // [2, U_WORDS], one of them [tokens, rows] bf16
  u32* turns;     // which u this launch uses, and how many warps have read that
  float scaling;
  int rows;
};

#if SHRINK_WARPS
__device__ __forceinline__ u32 load_a(const u16* p) {
  u32 v;
  asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
}
__device__ __forceinline__ int all_slices(const LowRank& l, int token_tiles, int K) { return K / SLICE_K * token_tiles * ((l.rows + RT - 1) / RT); }
// How many items are this CTA's.
__device__ __forceinline__ int own_slices(const LowRank& l, int token_tiles, int K) {
  const int all = all_slices(l, token_tiles, K);
  return (all + gridDim.x - 1 - blockIdx.x) / gridDim.x;
}
// Where x of this CTA's item i lies; `slice` tells which SLICE_K of it, and rt which rows of a.
__device__ __forceinline__ Position slice_position(int i, int token_tiles, int K, int* slice = nullptr) {
  Position at(blockIdx.x + i * gridDim.x, K / SLICE_K, token_tiles);
  if (slice) *slice = at.kb;
  at.kb /= KB / SLICE_K;
  return at;
}

// What a warp multiplies: 16 rows of a, as wgmma holds its first operand.
struct Rows {
  u32 at[SLICE_K / 16][4];
  __device__ __forceinline__ void load(const LowRank& l, int row0, int slice, int K) {
    const u16* top = l.a + (size_t)(min(row0, l.rows - 16) + threadIdx.x % 32 / 4) * K + slice * SLICE_K + threadIdx.x % 4 * 2;
#pragma unroll
    for (int j = 0; j < SLICE_K / 16; j++)
#pragma unroll
      for (int i = 0; i < 4; i++) at[j][i] = load_a(top + (size_t)(i % 2 * 8) * K + j * 16 + i / 2 * 8);
  }
};

// The CTA's items, before its units; returns behind griddepcontrol.wait how many stages they took.
__device__ __forceinline__ int put_slices(const LowRank& l, int token_tiles, u32 smem0, u32 full0, int K) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, own = own_slices(l, token_tiles, K);
  int slice;
  Position at = slice_position(0, token_tiles, K, &slice);
  Rows a;
  if (own) a.load(l, at.rt * RT + warp * 16, slice, K);
  asm volatile("griddepcontrol.wait;" ::: "memory");
#pragma unroll 1
  for (int i = 0; i < own; i++) {
    if (i) {
      at = slice_position(i, token_tiles, K, &slice);
      a.load(l, at.rt * RT + warp * 16, slice, K);
    }
    const u32 bar = full0 + i % STAGES * 8, x = smem0 + i % STAGES * STAGE_BYTES + slice % (KB / SLICE_K) * (SLICE_K / 64) * (MT * 128);
    mbar_wait(bar, i / STAGES & 1);
    const int row0 = at.rt * RT + warp * 16;
    if (at.rt * RT + warp / 4 * 64 < l.rows) {  // the same for all four warps that multiply together
      float acc[NT][4];
#pragma unroll
      for (int n = 0; n < NT; n++) acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0.f;
      hold(acc);
      const u32 desc = __shfl_sync(0xFFFFFFFFu, (x >> 4) | (1u << 16), 0);
      asm volatile("wgmma.fence.sync.aligned;");
#pragma unroll
      for (int j = 0; j < SLICE_K / 16; j++) wgmma(acc, a.at[j], desc + (j / 4 * (MT * 128) + j % 4 * 32) / 16);
      asm volatile("wgmma.commit_group.sync.aligned;");
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      hold(acc);
      u32* to = l.partials + ((size_t)(slice * (l.rows / 16) + row0 / 16) * token_tiles + at.mt) * (NT * 128) + lane * 4;
      if (row0 < l.rows)
#pragma unroll
        for (int n = 0; n < NT; n++) store_partial(to + n * 128, sum_bits(acc[n][0]), sum_bits(acc[n][1]), sum_bits(acc[n][2]), sum_bits(acc[n][3]));
    }
    __syncwarp();
    if (lane == 0) mbar_arrive(bar + STAGES * 8);
  }
  return own;
}

#define ADDED (14 * WG)  // slices under way where they are added up

__device__ __forceinline__ void load_pair(const u32* p, u32 (&v)[2]) {
  asm volatile("ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2];" : "=r"(v[0]), "=r"(v[1]) : "l"(p) : "memory");
}
__device__ __forceinline__ void store_pair(u32* p, u32 a, u32 b) {
  asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(a), "r"(b) : "memory");
}

// A row's slices for two tokens in the order of k, as they arrive.
__device__ __forceinline__ void add_slices(u32* from, size_t stride, int slices, float& low, float& high) {
  low = high = 0.f;
#pragma unroll 1
  for (int s0 = 0; s0 < slices; s0 += ADDED) {
    u32 v[ADDED][2];
    bool missing;
    do {
      missing = false;
#pragma unroll
      for (int i = 0; i < ADDED; i++) load_pair(from + min(s0 + i, slices - 1) * stride, v[i]);
#pragma unroll
      for (int i = 0; i < ADDED; i++) missing |= is_missing(v[i]);
    } while (missing);
#pragma unroll
    for (int i = 0; i < ADDED; i++) {
      if (s0 + i < slices) {
        store_pair(from + (s0 + i) * stride, EMPTY, EMPTY);
        low += __uint_as_float(v[i][0]), high += __uint_as_float(v[i][1]);
      }
    }
  }
}

// What the warp behind the producer does. `told` and `ready` let the others know the turn.
__device__ __forceinline__ void put_u(const LowRank& l, int parts, int token_tiles, u32 told, u32 ready, int K) {
  const int lane = threadIdx.x % 32, groups = token_tiles * NT;
  asm volatile("griddepcontrol.wait;" ::: "memory");
  u32 turn;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(turn) : "l"(l.turns) : "memory");
  if (lane == 0) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(told), "r"(turn) : "memory");
    mbar_arrive(ready);
  }
  __syncwarp();
  u32 *u = l.u + turn * U_WORDS, *other = l.u + (turn ^ 1) * U_WORDS;
#pragma unroll 1
  for (int i = blockIdx.x * 32 + lane; i < l.rows * groups * 4; i += parts * 32) {  // of the pairs of words of a slice
    float low, high;
    add_slices(l.partials + 2 * i, (size_t)l.rows * groups * 8, K / SLICE_K, low, high);
    // This lane has row g (+ 8) of tokens 2t and 2t + 1, lane ^ 8 the row beside it: each makes a word of one of the tokens.
    const int g = i / 8 % 8, t = i / 2 % 4, row = i / 64 / groups * 16 + i % 2 * 8 + g, token = i / 64 % groups * 8 + 2 * t + g % 2;
    const float mine = l.scaling * (g % 2 ? high : low), given = __shfl_xor_sync(0xFFFFFFFFu, l.scaling * (g % 2 ? low : high), 8);
    const u32 word = g % 2 ? pack2(given, mine) : pack2(mine, given);  // never EMPTY: a NaN becomes 0x7FFF
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(u + (token * l.rows + row) / 2), "r"(word) : "memory");
  }
  for (int i = blockIdx.x * 32 + lane; i < U_WORDS / 4; i += parts * 32) store_partial(other + 4 * i, EMPTY, EMPTY, EMPTY, EMPTY);
  if (lane == 0) {
    u32 before;  // who comes last passes the turn on: all have read it, for what each adds depends on it
    asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(l.turns + 1), "r"(1 + (turn >> 1)) : "memory");
    if (before == parts - 1) asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1, 0};" ::"l"(l.turns), "r"(turn ^ 1) : "memory");
  }
}
#else
__device__ __forceinline__ int own_slices(const LowRank&, int, int) { return 0; }
__device__ __forceinline__ Position slice_position(int, int token_tiles, int) { return Position(0, 1, token_tiles); }
__device__ __forceinline__ int put_slices(const LowRank&, int, u32, u32, int) {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  return 0;
}
#endif

#if RANK > 0
// The u of this launch, once a warp of the CTA has told whose turn it is.
__device__ __forceinline__ const u32* find_u(const LowRank& l, u32 told, u32 ready) {
  u32 turn = 0;
#if !GIVEN_U
  mbar_wait(ready, 0);
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(turn) : "r"(told) : "memory");
#endif
  return l.u + turn * U_WORDS;
}
// A first look may find words in L1, which other warps brought there; a later look goes past it.
__device__ __forceinline__ void look(const u32* p, u32 (&v)[4]) {
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "l"(p) : "memory");
}
__device__ __forceinline__ void look(const u32* p, u32 (&v)[2]) {
  asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(v[0]), "=r"(v[1]) : "l"(p) : "memory");
}
__device__ __forceinline__ void load_words(const u32* p, u32 (&v)[4]) { load_partial(p, v); }
__device__ __forceinline__ void load_words(const u32* p, u32 (&v)[2]) {
  asm volatile("ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2];" : "=r"(v[0]), "=r"(v[1]) : "l"(p) : "memory");
}

struct __align__(RANK % 32 == 0 ? 16 : 8) Words {
  u32 at[RANK % 32 == 0 ? 4 : 2];
};

// u of every eighth token from m on, of PARTS adapters side by side. Beyond the last token it is that one's, or zeros.
template <int PARTS, int COUNT>
__device__ __forceinline__ void await_u(const u32* from, int width, int m, int M, Words (&u)[PARTS][COUNT]) {
  const u32* at[COUNT];
#pragma unroll
  for (int n = 0; n < COUNT; n++) at[n] = GIVEN_U ? from + min(m + n * 8, M - 1) * width / 2 : from + m * width / 2 + n * 4 * width;
  bool missing = false;
#pragma unroll
  for (int i = 0; i < PARTS * COUNT; i++) look(at[i % COUNT] + i / COUNT * (RANK / 2), u[i / COUNT][i % COUNT].at);
#pragma unroll
  for (int i = 0; i < PARTS * COUNT; i++) missing |= is_missing(u[i / COUNT][i % COUNT].at);
  while (!GIVEN_U && missing) {
    missing = false;
#pragma unroll
    for (int i = 0; i < PARTS * COUNT; i++) load_words(at[i % COUNT] + i / COUNT * (RANK / 2), u[i / COUNT][i % COUNT].at);
#pragma unroll
    for (int i = 0; i < PARTS * COUNT; i++) missing |= is_missing(u[i / COUNT][i % COUNT].at);
  }
  __syncwarp();
}
#else
__device__ __forceinline__ const u32* find_u(const LowRank&, u32, u32) { return nullptr; }
#endif

