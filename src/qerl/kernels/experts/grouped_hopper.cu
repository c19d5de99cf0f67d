// grouped_product.cu on Hopper: the same products by wgmma. y[s, n] = alpha[e, n] * sum_k x[s, k] W[e, n, k] + bias[e, n], or the SwiGLU of
// it, for the sorted rows s of each expert e; with adapters plus sum_r u[s, r] B[e, n, r].
//
// A unit is an item and a tile of WG x 64 rows of W, over all k. A warp decodes 16 rows of W straight into the registers of wgmma's first
// operand; x, in shared memory, is the second. One thread keeps a ring of stages filled by bulk copies, and runs on from one unit to the
// next. In a stage each group of 8 rows of x has its k together, so that only the groups that an item has are copied, and a product is as
// wide as the item needs. All k run from 0 to the end in one warpgroup whatever the width is: a row's bits do not depend on other rows.
//
// Compile-time: MT most rows of an item, WG warpgroups, KB k per stage, STAGES, CTAS per multiprocessor, SWIGLU, EARLY (the plan is older
// than the previous kernel: read weights before that ends), GROUP_STRIDE (16 KB: from one group of x to the next). If given: RANK, ORDER.
#define FORMAT 0  // NVFP4
#define X_MAP 1
#include "mbarrier.cuh"
#include "grouped_epilogue.cuh"
#include "launch.cuh"
#include "tile_block.cuh"
#include "wgmma.cuh"

#define RT (WG * 64)
#define W_SEG (KB / 64 * TILE_BYTES)
#define X_STAGE (MT * KB * 2)
#define STAGE_BYTES ((X_STAGE + WG * W_SEG + 1023) / 1024 * 1024)  // the swizzle repeats every 1024
#define WIDTHS (MT > 16 ? MT / 16 : 1)  // widths of products, at even distances

struct Unit {
  const Item item;
  const int tile, groups;
  __device__ __forceinline__ Unit(const Operands& o, int unit, int row_tiles)
      : item(o.plan[1 + unit / row_tiles]), tile(unit % row_tiles), groups((item.count + 7) / 8) {}
};

// Announce a stage's bytes and copy its weights. A unit's last tile may have fewer than WG segments.
__device__ __forceinline__ void load_weights(const Operands& o, const Unit& at, int kb, u32 stage, u32 bar, u64 policy) {
  const int segments = min(WG, o.N / 64 - at.tile * WG);
  const size_t row = (size_t)(o.K / 64) * TILE_BYTES;
  const u8* from = o.w + ((size_t)at.item.expert * (o.N / 64) + at.tile * WG) * row + (size_t)kb * W_SEG;
  mbar_expect(bar, segments * W_SEG + at.groups * GROUP_STRIDE);
#pragma unroll
  for (int s = 0; s < WG; s++)
    if (s < segments) copy_bulk(stage + X_STAGE + s * W_SEG, from + s * row, W_SEG, bar, policy);
}
__device__ __forceinline__ void load_rows(const Operands& o, const Unit& at, int kb, u32 stage, u32 bar, u64 policy) {
#pragma unroll 1
  for (int i = 0; i < at.groups; i++) copy_box(stage + i * GROUP_STRIDE, &o.x_map, kb * (KB / 64), at.item.first + i * 8, bar, policy);
}

// Fill the ring with all stages of this CTA's units. The first ones' weights are asked for before the previous kernel ends.
__device__ __forceinline__ void produce(const Operands& o, int row_tiles, int kblocks, u32 smem0, u32 full0) {
  const u64 stream = l2_evict_first(), keep = l2_evict_last();
  int ahead = 0;
  if (EARLY) {
    const int units = o.plan[0] * row_tiles;
    for (int unit = blockIdx.x; unit < units && ahead < STAGES; unit += gridDim.x) {
      const Unit at(o, unit, row_tiles);
      for (int kb = 0; kb < kblocks && ahead < STAGES; kb++, ahead++)
        load_weights(o, at, kb, smem0 + ahead * STAGE_BYTES, full0 + ahead * 8, stream);
    }
  }
  grid_dependency_wait();
  launch_dependents();
  const int units = o.plan[0] * row_tiles;
  u32 stage = smem0, bar = full0, parity = 1;
  int filled = 0;
#pragma unroll 1
  for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const Unit at(o, unit, row_tiles);
#pragma unroll 1
    for (int kb = 0; kb < kblocks; kb++, filled++) {
      if (filled >= STAGES) mbar_wait(bar + STAGES * 8, parity);
      if (filled >= ahead) load_weights(o, at, kb, stage, bar, stream);
      load_rows(o, at, kb, stage, bar, keep);
      stage += STAGE_BYTES, bar += 8;
      if (bar == full0 + STAGES * 8) stage = smem0, bar = full0, parity ^= 1;
    }
  }
}

// The stage that a warp reads next, and the codes of its first 64 k.
struct Reader {
  const u8* generic;  // of stage 0
  u32 smem0, full0, stage, bar, parity;
  int warp, lane, left;  // stages from this one on
  Block block;
  __device__ __forceinline__ Reader(const u8* generic, u32 smem0, u32 full0, int stages)
      : generic(generic), smem0(smem0), full0(full0), stage(smem0), bar(full0), parity(0), warp(threadIdx.x / 32), lane(threadIdx.x % 32), left(stages) {
    if (left) mbar_wait(bar, parity), load(0);
  }
  __device__ __forceinline__ void load(int k64) { block.load(generic + (stage - smem0) + X_STAGE + warp / 4 * W_SEG + k64 * TILE_BYTES, warp % 4, lane); }
  __device__ __forceinline__ void next() {
    stage += STAGE_BYTES, bar += 8;
    if (bar == full0 + STAGES * 8) stage = smem0, bar = full0, parity ^= 1;
    if (--left) mbar_wait(bar, parity);
  }
};

// Compute one unit for items of up to 8 N rows.
template <int N>
__device__ __forceinline__ void multiply_unit(const Operands& o, const Unit& at, int kblocks, u32 constant, Reader& reader) {
  const int row = at.tile * RT + reader.warp * 16, g = reader.lane / 4;
  const bool exists = row < o.N;
  float alpha[2] = {}, bias[2] = {};
  if (exists) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const size_t place = (size_t)at.item.expert * o.N + row + i * 8 + g;
      alpha[i] = o.alpha[place], bias[i] = o.bias ? o.bias[place] : 0.f;
    }
  }
  float acc[N][4];
  clear_sums(acc);
  u32 before = 0;  // barrier of the stage whose last products may still be running
#pragma unroll 1
  for (int kb = 0; kb < kblocks; kb++) {
    const u32 x_desc = __shfl_sync(ALL_LANES, (reader.stage >> 4) | (1u << 16), 0);  // the shuffle makes it uniform for the compiler
    const u32 here = reader.bar + STAGES * 8;
    u32 a0[2][4], a1[2][4];  // wgmma reads one while the other is being filled
#pragma unroll
    for (int k64 = 0; k64 < KB / 64; k64++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        u32(&a)[2][4] = half ? a1 : a0;
        reader.block.decode16(2 * half, constant, a[0]), reader.block.decode16(2 * half + 1, constant, a[1]);
        wgmma_fence();
#pragma unroll
        for (int j = 0; j < 2; j++) wgmma(acc, a[j], x_desc + (k64 * 1024 + (2 * half + j) * 32) / 16);
        wgmma_commit();
        if (half == 1) {  // the next codes; those after the last stage are not used
          if (k64 == KB / 64 - 1) reader.next();
          reader.load((k64 + 1) % (KB / 64));
        }
        wgmma_wait<1>();
        if (k64 == 0 && half == 0 && before && reader.lane == 0) mbar_arrive(before);
      }
    }
    before = here;
  }
  wgmma_wait<0>();
  fence_sums(acc);
  if (reader.lane == 0) mbar_arrive(before);
  if (!exists) return;
#pragma unroll
  for (int n = 0; n < N; n++)
    if (n < at.groups) finish_group(o, at.item, row, n, acc[n], alpha, bias, g, reader.lane % 4);
}

// Each scheduler has WG warps of a CTA and at most one more: the launch bound counts that one four times.
extern "C" __global__ void __launch_bounds__((WG * 4 + 4) * 32, CTAS) grouped_hopper(const __grid_constant__ Operands o) {
  extern __shared__ __align__(128) u8 memory[];
  const u32 smem0 = (smem_u32(memory) + 1023) & ~1023u, full0 = smem0 + STAGES * STAGE_BYTES;
  const int row_tiles = (o.N + RT - 1) / RT, kblocks = o.K / KB;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) mbar_init(full0 + i * 8, 1), mbar_init(full0 + (STAGES + i) * 8, WG * 4);
    mbar_init_fence();
  }
  __syncthreads();
  if (threadIdx.x >= WG * 128) {
    if (threadIdx.x == WG * 128) produce(o, row_tiles, kblocks, smem0, full0);
    return;
  }
  grid_dependency_wait();
  launch_dependents();  // after the wait: the kernel after the next reads the plan early
  const u32 constant = decoding_constant(threadIdx.x % 32);
  const int units = o.plan[0] * row_tiles, own = units > (int)blockIdx.x ? (units - 1 - (int)blockIdx.x) / (int)gridDim.x + 1 : 0;
  Reader reader(memory + (smem0 - smem_u32(memory)), smem0, full0, own * kblocks);
#pragma unroll 1
  for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const Unit at(o, unit, row_tiles);
    const int width = (at.groups * 8 * WIDTHS + MT - 1) / MT;
    if (WIDTHS == 1 || width == WIDTHS)
      multiply_unit<MT / 8>(o, at, kblocks, constant, reader);
    else if (width == 1)
      multiply_unit<MT / 8 / WIDTHS>(o, at, kblocks, constant, reader);
    else if (WIDTHS > 2 && width == 2)
      multiply_unit<MT / 8 * 2 / WIDTHS>(o, at, kblocks, constant, reader);
    else if (WIDTHS > 2)
      multiply_unit<MT / 8 * 3 / WIDTHS>(o, at, kblocks, constant, reader);
  }
}
