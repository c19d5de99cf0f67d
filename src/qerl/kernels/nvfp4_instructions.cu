// What nvfp4_decode.cu, which is compiled behind this, is made of: Hopper's instructions, one function each, where a unit of work
// lies, and the words of the workspace by which CTAs hand sums to one another.
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define TILE_BYTES 2304
#define NT (MT / 8)
#define RT (WG * 64)
#define W_SEG (KB / 64 * TILE_BYTES)
#define X_STAGE (MT * KB * 2)
#define STAGE_BYTES ((X_STAGE + WG * W_SEG + 1023) / 1024 * 1024)  // the swizzle repeats every 1024

struct __align__(64) TensorMap { u8 bytes[128]; };

__device__ __forceinline__ u32 smem_u32(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void mbar_init(u32 bar, u32 count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(bar), "r"(count));
}
__device__ __forceinline__ void mbar_expect(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void mbar_arrive(u32 bar) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void mbar_wait(u32 bar, u32 parity) {
  asm volatile(
      "{\n.reg .pred p;\nL_%=: mbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n@p bra D_%=;\nbra L_%=;\nD_%=:\n}" ::"r"(bar),
      "r"(parity)
      : "memory");
}
__device__ __forceinline__ void load_weight(u32 dst, const u8* src, u32 bytes, u32 bar, u64 policy) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(dst),
               "l"(src), "r"(bytes), "r"(bar), "l"(policy)
               : "memory");
}
__device__ __forceinline__ void load_x(u32 dst, const TensorMap* map, int k64, int m, u32 bar, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(
          dst),
      "l"(map), "r"(0), "r"(m), "r"(k64), "r"(bar), "l"(policy)
      : "memory");
}
__device__ __forceinline__ u32 pack2(float lo, float hi) {
  u32 d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
  return d;
}
__device__ __forceinline__ u32 transpose8x8(u32 a) {
  u32 d;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a));
  return d;
}
__device__ __forceinline__ void mma(float* d, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// WGMMA

// Keeps what is done with the sums from moving across the asynchronous products.
__device__ __forceinline__ void hold(float (&acc)[NT][4]) {
#pragma unroll
  for (int n = 0; n < NT; n++) asm volatile("" : "+f"(acc[n][0]), "+f"(acc[n][1]), "+f"(acc[n][2]), "+f"(acc[n][3])::"memory");
}

// Which row tile, token tile and k block a unit is.
struct Position {
  int rt, mt, kb;
  __device__ __forceinline__ Position(int unit, int kblocks, int token_tiles) {
    const int tile = unit / kblocks;
    kb = unit - tile * kblocks, rt = tile / token_tiles, mt = tile - rt * token_tiles;
  }
  __device__ __forceinline__ void next(int kblocks, int token_tiles) {
    if (++kb == kblocks) {
      kb = 0;
      if (++mt == token_tiles) mt = 0, rt++;
    }
  }
};

#define EMPTY 0xFFFFFFFFu  // a word of the workspace that nobody has written yet

__device__ __forceinline__ void load_partial(const u32* p, u32 (&v)[4]) {
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "l"(p) : "memory");
}
__device__ __forceinline__ u32 sum_bits(float v) {  // never EMPTY, whatever NaN it is
  const u32 bits = __float_as_uint(v);
  return bits == EMPTY ? 0x7FFFFFFFu : bits;
}
__device__ __forceinline__ void store_partial(u32* p, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// Who finds one of many words missing loads all of them again: one by one, each costs a trip to L2 of its own.
__device__ __forceinline__ bool is_missing(const u32 (&v)[4]) { return v[0] == EMPTY || v[1] == EMPTY || v[2] == EMPTY || v[3] == EMPTY; }
__device__ __forceinline__ bool is_missing(const u32 (&v)[2]) { return v[0] == EMPTY || v[1] == EMPTY; }

// Adds four sums that are there and empties their place.
__device__ __forceinline__ void take_partial(u32* from, const u32 (&v)[4], float (&sum)[4]) {
  store_partial(from, EMPTY, EMPTY, EMPTY, EMPTY);
#pragma unroll
  for (int i = 0; i < 4; i++) sum[i] += __uint_as_float(v[i]);
}

__device__ __forceinline__ void decode64(uint4 q, uint2 sc, u32 top, int first, u32 (*a)[4]) {
  const u32 words[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
  for (int j = first; j < first + GROUP; j++) decode(words[j], scale_pair(sc, j, top), a[j - first]);
}
