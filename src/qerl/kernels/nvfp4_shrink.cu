// u[m, r] = bf16(scaling * sum_k x[m, k] a[r, k]), the adapter's first half, beside the product that adds u B^T at its end.
//
// nvfp4_decode.cu, which is compiled behind this, gives it two warps of each CTA. The first looks at the stages as they fill: where
// its plan says so, it multiplies a stage's x, SLICE_K of k at a time, by 16 rows of a and leaves the sums in `partials`. The plan
// (low_rank_plan.py) finds each piece of x and each 16 rows one CTA that has that piece early. The second warps add up the slices
// of each pair of rows in the order of k and leave two bf16 of u in a word. All words are their own flags, EMPTY until they are
// written, so all CTAs must be on the device at once. Whoever adds up a partial sum empties its word; u is read by many, so there
// are two, taken in turns: a launch empties the other one, which the launch before used up.
//
// Who may touch what: x, u, partials and turns only behind griddepcontrol.wait (a stage that is full lies behind the producer's);
// a and the plan before it, for no kernel of a step writes them.
#define SHRINK_WARPS (RANK && !GIVEN_U ? 2 : 0)  // GIVEN_U: u is complete before the launch, [M, rows] bf16
#define SLICE_K (KB < 256 ? KB : 256)

struct LowRank {
  const u16* a;     // [rows, K]
  const int4* plan;  // of each CTA: its first item (unit * 256 + slice of the stage * 32 + rows / 16), where its others begin and end
  u32* partials;    // [slices, M, rows] fp32
  u32* u;           // [2, U_WORDS], one of them [M, rows] bf16
  u32* turns;       // which u this launch uses, and how many warps have read that
  float scaling;
  int rows;
};

#if RANK > 0
#define TOKENS16 ((MT + 15) / 16)
#define UNITS (SLICE_K / 32)
#define ADDED (14 * WG)  // slices under way where they are added up

__device__ __forceinline__ uint4 load_row(const u16* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
__device__ __forceinline__ uint4 load_shared(u32 p) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(p) : "memory");
  return v;
}
__device__ __forceinline__ void load_pair(const u32* p, u32 (&v)[2]) {
  asm volatile("ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2];" : "=r"(v[0]), "=r"(v[1]) : "l"(p) : "memory");
}
__device__ __forceinline__ void store_pair(u32* p, u32 a, u32 b) {
  asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(a), "r"(b) : "memory");
}

// A thread takes neighbouring k of both operands, in one load: which k meets which step is the same for both.
struct Rows {
  uint4 at[UNITS][2];
  __device__ __forceinline__ void load(const u16* a, int K) {
#pragma unroll
    for (int i = 0; i < UNITS; i++)
#pragma unroll
      for (int j = 0; j < 2; j++) at[i][j] = load_row(a + (size_t)j * 8 * K + i * 32);
  }
};

// The sums of an item; x as the bulk copy left it, its 16-byte pieces exchanged.
__device__ __forceinline__ void put_slice(const LowRank& l, const Rows& a, u32 x, int row0, int slice, int m0, int M) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  float acc[TOKENS16][2][4] = {};
#pragma unroll
  for (int i = 0; i < UNITS; i++)
#pragma unroll
    for (int n = 0; n < TOKENS16; n++) {
      const u32 from = x + i / 2 * (MT * 128) + (n * 16 + g) * 128 + (((i % 2 * 4 + t) ^ g) << 4);
      const uint4 top = load_shared(from), bottom = n * 16 + 8 < MT ? load_shared(from + 1024) : make_uint4(0, 0, 0, 0);
#pragma unroll
      for (int j = 0; j < 2; j++) {
        mma(acc[n][j], top.x, bottom.x, top.y, bottom.y, a.at[i][j].x, a.at[i][j].y);
        mma(acc[n][j], top.z, bottom.z, top.w, bottom.w, a.at[i][j].z, a.at[i][j].w);
      }
    }
#pragma unroll
  for (int n = 0; n < TOKENS16; n++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int at = n * 16 + half * 8 + g, m = m0 + at;
      u32* to = l.partials + ((size_t)slice * M + m) * l.rows + row0 + 2 * t;
      if (at < MT && m < M)
#pragma unroll
        for (int j = 0; j < 2; j++) store_pair(to + j * 8, sum_bits(acc[n][j][2 * half]), sum_bits(acc[n][j][2 * half + 1]));
    }
}

// What the CTA's first warp behind the producer does: it looks at each of the CTA's units [u0, u1) in its stage, then frees it.
__device__ __forceinline__ void put_slices(const LowRank& l, int part, int u0, int u1, int token_tiles, u32 smem0, u32 full0, int M, int K) {
  const int lane = threadIdx.x % 32, kblocks = K / KB, g = lane / 4, t = lane % 4;
  const int4 own = l.plan[part];
  int item = own.x, next = own.y;
  Position at(u0, kblocks, token_tiles);
  u32 base = smem0, bar = full0, parity = 0;
  for (int i = 0; i < u1 - u0; i++, at.next(kblocks, token_tiles)) {
    bool is_full = false;
    while (item >> 8 == i) {
      const int row0 = item % 32 * 16, piece = item / 32 % 8, slice = at.kb * (KB / SLICE_K) + piece;
      Rows a;
      a.load(l.a + (size_t)(row0 + g) * K + slice * SLICE_K + t * 8, K);
      item = next < own.z ? ((const int*)l.plan)[next++] : -1;
      asm volatile("griddepcontrol.wait;" ::: "memory");
      if (!is_full) mbar_wait(bar, parity);
      is_full = true;
      put_slice(l, a, base + piece * (SLICE_K / 64) * (MT * 128), row0, slice, at.mt * MT, M);
    }
    if (!is_full) mbar_wait(bar, parity);
    __syncwarp();
    if (lane == 0) mbar_arrive(bar + STAGES * 8);
    base += STAGE_BYTES, bar += 8;
    if (bar == full0 + STAGES * 8) base = smem0, bar = full0, parity ^= 1;
  }
}

// A word of u: two rows' slices in the order of k, as they arrive.
__device__ __forceinline__ u32 add_slices(const LowRank& l, u32* from, size_t stride, int slices) {
  float low = 0.f, high = 0.f;
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
  return pack2(l.scaling * low, l.scaling * high);  // never EMPTY: a NaN becomes 0x7FFF
}

// What its second warp does, of `parts`. `told` and `ready` let the others know the turn.
__device__ __forceinline__ void put_u(const LowRank& l, int part, int parts, u32 told, u32 ready, int M, int K) {
  const int lane = threadIdx.x % 32;
  asm volatile("griddepcontrol.wait;" ::: "memory");
  u32 turn;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(turn) : "l"(l.turns) : "memory");
  if (lane == 0) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(told), "r"(turn) : "memory");
    mbar_arrive(ready);
  }
  __syncwarp();
  u32 *u = l.u + turn * U_WORDS, *other = l.u + (turn ^ 1) * U_WORDS;
  for (int i = part * 32 + lane; i < M * l.rows / 2; i += parts * 32) {
    const u32 word = add_slices(l, l.partials + 2 * i, (size_t)M * l.rows, K / SLICE_K);
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(u + i), "r"(word) : "memory");
  }
  for (int i = part * 32 + lane; i < U_WORDS / 4; i += parts * 32) store_partial(other + 4 * i, EMPTY, EMPTY, EMPTY, EMPTY);
  if (lane == 0) {
    u32 before;  // who comes last passes the turn on: all have read it, for what each adds depends on it
    asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(l.turns + 1), "r"(1 + (turn >> 1)) : "memory");
    if (before == parts - 1) asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1, 0};" ::"l"(l.turns), "r"(turn ^ 1) : "memory");
  }
}

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
__device__ __forceinline__ void load_words(const u32* p, u32 (&v)[2]) { load_pair(p, v); }

struct __align__(RANK % 32 == 0 ? 16 : 8) Words {
  u32 at[RANK % 32 == 0 ? 4 : 2];
};

// u of every eighth token, of those that are left; zeros beyond.
template <int COUNT>
__device__ __forceinline__ void await_u(const u32* from, int stride, int left, Words (&u)[COUNT]) {
  bool missing = false;
#pragma unroll
  for (int n = 0; n < COUNT; n++) {
    u[n] = Words{};
    if (n * 8 < left) look(from + n * stride, u[n].at);
    missing |= is_missing(u[n].at);
  }
  while (!GIVEN_U && missing) {
    missing = false;
#pragma unroll
    for (int n = 0; n < COUNT; n++)
      if (n * 8 < left) load_words(from + n * stride, u[n].at);
#pragma unroll
    for (int n = 0; n < COUNT; n++) missing |= is_missing(u[n].at);
  }
  __syncwarp();
}
#else
__device__ __forceinline__ const u32* find_u(const LowRank&, u32, u32) { return nullptr; }
#endif

