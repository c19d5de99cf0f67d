// y[m, n] = alpha[n] * sum_k x[m, k] W[n, k] + sum_r u[m, r] B[n, r] + bias[n] + residual[m, n], or silu(gate) * up of it.
//
// W is stored in tiles of 64 rows x 64 k (nvfp4_decode.py has the layout). A warp decodes 16 rows of a tile straight into the registers
// of wgmma's first operand; x, in shared memory, is the second. One warp keeps a ring of stages filled by bulk copies. All units (row
// tile, token tile, k block) are divided evenly among the CTAs, in order, so most tiles of a narrow weight belong to several CTAs. Each
// of these but the one with the tile's first k writes its sums to the workspace, and that one adds them in the order of k: the result
// does not depend on timing. The workspace's words are their own flags (workspace.cuh): at 8 tokens, o_proj of a 7B model, 5.6 us
// against 7.8 with a counter (H200). With SPLIT a tile of three or more CTAs is not finished by one of them: each writes all its sums,
// and after its units adds up and finishes an equal share of the tile. CTAs then wait for one another, so all of them must be on the
// device at once: at 128 tokens, down_proj, 35.4 us against 45.6.
//
// Tiles of more than 128 tokens or three warpgroups need more registers a thread than a launch gives: the multiplying warps take them from
// the last warpgroup (WIDE, nvfp4_shrink.cuh).
//
// Compile-time: MT tokens per tile, WG groups of 4 warps (64 rows each), KB k per stage, STAGES, CTAS per multiprocessor, GROUP k16 steps
// issued together, RANK of the adapter or 0, SWIGLU, SPLIT, GIVEN_U and U_WORDS (nvfp4_shrink.cuh), and U_BYTES (nvfp4_shared_u.cuh).
#include "launch.cuh"
#include "nvfp4_shared_u.cuh"

#define SLOT (WG * 4 * NT * 128)  // words of a tile's sums; a CTA has two slots: later k of one tile, first k of another
#define ITEM (NT % 4 == 0 ? 4 : NT % 3 == 0 ? 3 : NT % 2 == 0 ? 2 : 1)
#define ITEMS (WG * 4 * NT / ITEM)

#if SPLIT
// The CTAs that share a tile: `count` from part `first` on, in the order of k. If each finishes a share of the tile, this CTA's is `items`
// from `item` on, each of 16 rows and ITEM token groups.
struct SharedTile {
  int tile, first, count, item, items;
  __device__ __forceinline__ SharedTile(int tile, int part, u32 parts, u32 units, int kblocks) : tile(tile) {
    const u32 first_u = tile * kblocks;
    first = ((first_u + 1) * parts - 1) / units;
    count = ((first_u + kblocks) * parts - 1) / units - first + 1;
    item = ITEMS * (part - first) / count;
    items = count > 2 ? ITEMS * (part - first + 1) / count - item : 0;
  }
};

// `begin` starts loading an item's sums of all CTAs; `end` waits for them and adds them in the order of k.
struct Item {
  static constexpr int BATCH = 4;
  u32* slots;
  int row0, m0, count;
  float alpha0, alpha1;
  RowsOfB rows_of_b;
  u32 v[BATCH][ITEM][4];
  __device__ __forceinline__ u32* words(int p, int n) const { return slots + (2 * p + (p == 0)) * SLOT + n * 128; }
  __device__ __forceinline__ void load(int p0, int p) {
#pragma unroll
    for (int n = 0; n < ITEM; n++) load_relaxed(words(p0 + p, n), v[p][n]);
  }
  __device__ __forceinline__ void begin(const SharedTile& a, const SharedTile& b, int i, u32* workspace, const Epilogue& e, int token_tiles) {
    const bool of_a = i < a.items;
    const int tile = of_a ? a.tile : b.tile, at = of_a ? a.item + i : b.item + i - a.items;
    slots = workspace + (size_t)(of_a ? a.first : b.first) * (2 * SLOT) + at * (ITEM * 128) + threadIdx.x % 32 * 4;
    count = of_a ? a.count : b.count;
    row0 = tile / token_tiles * RT + at / (NT / ITEM) * 16, m0 = tile % token_tiles * MT + at % (NT / ITEM) * (ITEM * 8);
    if (row0 >= e.N) return;
    alpha0 = e.alpha[row0 + threadIdx.x % 32 / 4], alpha1 = e.alpha[row0 + threadIdx.x % 32 / 4 + 8];
    rows_of_b.load(e, row0, threadIdx.x % 32 / 4, threadIdx.x % 4);
#pragma unroll
    for (int p = 0; p < BATCH; p++)
      if (p < count) load(0, p);
  }
  __device__ __forceinline__ void end(float (&sum)[ITEM][4]) {
#pragma unroll
    for (int n = 0; n < ITEM; n++) sum[n][0] = sum[n][1] = sum[n][2] = sum[n][3] = -0.f;  // adding to -0 keeps the sign of a zero
#pragma unroll 1
    for (int p0 = 0; p0 < count; p0 += BATCH) {
      for (bool missing = p0 > 0, first = true; missing || first; first = false) {
        if (missing) {
#pragma unroll
          for (int p = 0; p < BATCH; p++)
            if (p0 + p < count) load(p0, p);
        }
        missing = false;
#pragma unroll
        for (int i = 0; i < BATCH * ITEM; i++) missing |= p0 + i / ITEM < count && is_missing(v[i / ITEM][i % ITEM]);
      }
#pragma unroll
      for (int p = 0; p < BATCH; p++) {
        if (p0 + p < count) {
#pragma unroll
          for (int n = 0; n < ITEM; n++) take_partial(words(p0 + p, n), v[p][n], sum[n]);
        }
      }
    }
    __syncwarp();
  }
};

// Finish this CTA's shares of its first and last tile, item by item over the warps.
__device__ __forceinline__ void finish_shared(const SharedTile& first, const SharedTile& last, u32* workspace, const Epilogue& e, AnyU u, int warp, int g, int t, int token_tiles) {
  Item item;
  int i = warp;
  const int items = first.items + last.items;
  if (i < items) item.begin(first, last, i, workspace, e, token_tiles);
#pragma unroll 1
  while (i < items) {
    const int row0 = item.row0, m0 = item.m0;
    const float alpha0 = item.alpha0, alpha1 = item.alpha1;
    const RowsOfB b = item.rows_of_b;
    float sum[ITEM][4];
    if (row0 < e.N) item.end(sum);
    i += WG * 4;
    if (i < items) item.begin(first, last, i, workspace, e, token_tiles);
    if (row0 < e.N) finish(sum, b, e, u, alpha0, alpha1, row0, m0, g, t);
  }
}
#endif

__device__ __forceinline__ void load_weights(const u8* w, const Position& at, int N, int K, u32 base, u32 bar, u64 policy) {
  const int valid = min(WG, N / 64 - at.rt * WG);
  const size_t row = (size_t)(K / 64) * TILE_BYTES;
  const u8* from = w + at.rt * WG * row + (size_t)at.kb * W_SEG;
  mbar_expect(bar, valid * W_SEG + X_STAGE);
#pragma unroll
  for (int s = 0; s < WG; s++)
    if (s < valid) copy_bulk(base + X_STAGE + s * W_SEG, from + s * row, W_SEG, bar, policy);
}

// Each scheduler has WG warps of a CTA and at most one more: the launch bound counts that one four times.
extern "C" __global__ void __launch_bounds__((WG * 4 + 4) * 32, CTAS)
nvfp4_decode(const u8* __restrict__ w, const __grid_constant__ TensorMap x_map, const __grid_constant__ Epilogue e, const __grid_constant__ LowRank l,
             u32* workspace, int M, int N, int K) {
  extern __shared__ u8 raw[];
  const u32 smem0 = (smem_u32(raw) + 1023) & ~1023u;
  const u32 shared_u = smem0 + STAGES * STAGE_BYTES, full0 = shared_u + U_BYTES, empty0 = full0 + STAGES * 8, turn_ready = empty0 + STAGES * 8, turn_at = turn_ready + 8;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int kblocks = K / KB, token_tiles = (M + MT - 1) / MT;
  const int units = ((N + RT - 1) / RT) * token_tiles * kblocks;
  // All units are divided evenly. A later CTA takes earlier units, so that it waits only for CTAs that started before it.
  const int parts = gridDim.x, part = parts - 1 - blockIdx.x;
  const int u0 = (u32)units * part / parts, u1 = (u32)units * (part + 1) / parts;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      mbar_init(full0 + i * 8, 1);
      mbar_init(empty0 + i * 8, WG * 4);
    }
    mbar_init(turn_ready, U_BYTES ? 32 : 1);
    mbar_init_fence();
  }
  __syncthreads();
  launch_dependents();

  if (warp >= WG * 4) {
    if (WIDE) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(FEW_REGISTERS));
#if SHRINK_WARPS || U_BYTES
    if (warp == WG * 4 + 1) share_u(reduce_u(l, parts, token_tiles, turn_at, turn_ready, K), e, token_tiles * MT, shared_u, turn_ready);
#endif
    if (threadIdx.x != WG * 128) return;  // the producer
    const u64 stream = l2_evict_first(), keep = l2_evict_last();
    // The weights of the first stages do not depend on the previous kernel.
    const int slices = own_slices(l, token_tiles, K), total = slices + u1 - u0, pre = min(total, STAGES);
    Position at(u0, kblocks, token_tiles), ahead = at;
    for (int i = slices; i < pre; i++, ahead.next(kblocks, token_tiles))
      load_weights(w, ahead, N, K, smem0 + i * STAGE_BYTES, full0 + i * 8, stream);
    grid_dependency_wait();
    u32 base = smem0, bar = full0, parity = 1;
    for (int i = 0; i < total; i++) {
      if (i >= STAGES) mbar_wait(bar + STAGES * 8, parity);
      Position x = at;
      if (i < slices) {
        x = slice_position(i, token_tiles, K);
        mbar_expect(bar, X_STAGE);
      } else {
        if (i >= pre) load_weights(w, at, N, K, base, bar, stream);
        at.next(kblocks, token_tiles);
      }
      copy_box(base, &x_map, x.kb * (KB / 64), x.mt * MT, bar, keep);
      base += STAGE_BYTES, bar += 8;
      if (bar == empty0) base = smem0, bar = full0, parity ^= 1;
    }
    return;
  }
  if (WIDE) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MANY_REGISTERS));

  const int slices = compute_slices(l, token_tiles, smem0, full0, K);
  u32 top;  // SCALE_TOP in a register: a LOP3 takes only one immediate
  asm volatile("or.b32 %0, %1, 0x70007000;" : "=r"(top) : "r"(gridDim.y - 1));
  const u32 my_codes = X_STAGE + warp / 4 * W_SEG + (warp % 4) * 512 + lane * 16;
  const u32 my_scales = X_STAGE + warp / 4 * W_SEG + 2048 + (warp % 4) * 64 + g * 8;
  const u32 begin_at = smem0 + slices % STAGES * STAGE_BYTES;
  const u8* stage = raw + (begin_at - smem_u32(raw));
  u32 full = full0 + slices % STAGES * 8, parity = slices / STAGES & 1, desc = (begin_at >> 4) | (1u << 16);
  uint4 q;
  uint2 sc;
  if (u0 < u1) {
    mbar_wait(full, parity);
    q = *(const uint4*)(stage + my_codes), sc = *(const uint2*)(stage + my_scales);
  }
#if SPLIT
  const SharedTile first(u0 / kblocks, part, parts, units, kblocks);
  SharedTile last((u1 - 1) / kblocks, part, parts, units, kblocks);
  if (last.tile == first.tile) last.items = 0;
#endif
  for (int u = u0; u < u1;) {
    const int tile = u / kblocks, first_u = tile * kblocks, begin = u, end = min(u1, first_u + kblocks);
    const int row0 = tile / token_tiles * RT + warp * 16;
    float alpha0 = 0.f, alpha1 = 0.f;
    if (row0 < N) alpha0 = e.alpha[row0 + g], alpha1 = e.alpha[row0 + g + 8];
#if RANK > 0
    if (begin == first_u && row0 < N && lane < RANK / 4)  // the warp's rows of the adapter, 128 bytes a lane
      asm volatile("prefetch.global.L2 [%0];" ::"l"(e.lora_b + (size_t)row0 * RANK + lane * 64));
#endif
    float acc[NT][4];
    clear_sums(acc);
    u32 before = 0;                  // barrier of the stage whose last products may still be running
    u32 a0[GROUP][4], a1[GROUP][4];  // wgmma reads one while the other is being filled
    for (; u < end; u++) {
      const u32 x_desc = __shfl_sync(ALL_LANES, desc, 0), here = full + STAGES * 8;  // the shuffle makes it uniform for the compiler
#pragma unroll
      for (int b = 0; b < KB / 64; b += GROUP / 2) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const int k16 = b * 4 + half * GROUP;
          u32(*a)[4] = half ? a1 : a0;
          decode64(q, sc, top, k16 % 4, a);
          wgmma_fence();
#pragma unroll
          for (int j = 0; j < GROUP; j++) wgmma(acc, a[j], x_desc + ((k16 / 4) * MT * 128 + (k16 % 4 + j) * 32) / 16);
          wgmma_commit();
          if (k16 + GROUP == KB / 16) {
            full += 8, stage += STAGE_BYTES, desc += STAGE_BYTES / 16;
            if (full == empty0) full = full0, stage -= STAGES * STAGE_BYTES, desc -= STAGES * STAGE_BYTES / 16, parity ^= 1;
            if (u + 1 < u1) mbar_wait(full, parity);
          }
          if (k16 % 4 + GROUP == 4) {  // load the next codes; those after the last unit are not used
            const int next = k16 + GROUP == KB / 16 ? 0 : k16 / 4 + 1;
            q = ((const uint4*)(stage + my_codes))[next * (TILE_BYTES / 16)], sc = ((const uint2*)(stage + my_scales))[next * (TILE_BYTES / 8)];
          }
          wgmma_wait<1>();
          if (k16 == 0 && before && lane == 0) mbar_arrive(before);
        }
      }
      before = here;
    }
    RowsOfB b;
    if (begin == first_u && row0 < N) b.load(e, row0, g, t);  // arrives behind the last products
    wgmma_wait<0>();
    fence_sums(acc);
    if (lane == 0) mbar_arrive(before);
    u32* slot = workspace + (size_t)(2 * part) * SLOT + warp * (NT * 128) + lane * 4;
#if SPLIT
    const bool split = (tile == first.tile ? first.count : tile == last.tile ? last.count : 1) > 2;
#else
    const bool split = false;
#endif
    if (begin > first_u || split) {
#pragma unroll
      for (int n = 0; n < NT; n++)
        if (row0 < N || !split)  // no CTA takes an item past the last row
          store_partial(slot + (begin == first_u) * SLOT + n * 128, acc[n]);
    } else {
      if (end < first_u + kblocks) {
        const int last_part = ((u32)(first_u + kblocks) * parts - 1) / (u32)units;
        add_partials(acc, slot + 2 * SLOT, 2 * SLOT, last_part - part);
      }
      if (row0 < N) finish(acc, b, e, wait_for_u(l, shared_u, turn_at, turn_ready), alpha0, alpha1, row0, tile % token_tiles * MT, g, t);
    }
  }
#if SPLIT
  finish_shared(first, last, workspace, e, wait_for_u(l, shared_u, turn_at, turn_ready), warp, g, t, token_tiles);
#endif
}
