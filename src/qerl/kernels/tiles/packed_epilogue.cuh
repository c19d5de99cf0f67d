// The end of a packed product: y = alpha * sums + u B^T + bias + residual, or silu(gate) * up of it, from the sums of a warp's 16 rows.
//
// A lane holds rows g and g + 8 of tokens 2 t and 2 t + 1 of each group of 8: the result layout of mma.sync and of a warp of wgmma.
// With SLOTS a token's adapter is b[slots[m]]; the products with others add zeros, so its bits are those of its adapter alone.
//
// Compile-time: RANK of the adapter or 0, SWIGLU, GIVEN_U. If given: SLOTS, with GIVEN_U; GATE, the function of the gate: 2 gelu, 3 its tanh form.
#pragma once
#include "bfloat16.cuh"
#include "mma.cuh"
#include "workspace.cuh"

#ifndef SLOTS
#define SLOTS 0
#endif
#ifndef EARLY_LOADS  // also stores; Hopper's kernel gained nothing
#define EARLY_LOADS 0
#endif
#if EARLY_LOADS
// Loads and stores without branches, which stay behind grid_dependency_wait, but which the compiler orders with others as it likes: no
// CTA of this launch writes what is loaded.
__device__ __forceinline__ float load_early(const float* p, bool is_wanted = true) {
  float v;
  asm volatile("{.reg .pred p; setp.ne.s32 p, %2, 0; mov.f32 %0, 0f00000000; @p ld.global.f32 %0, [%1];}" : "=f"(v) : "l"(p), "r"((int)is_wanted));
  return v;
}
__device__ __forceinline__ void load_early(const u32* p, u32 (&v)[4]) {
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "l"(p));
}
__device__ __forceinline__ void load_early(const u32* p, u32 (&v)[2]) { asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(v[0]), "=r"(v[1]) : "l"(p)); }
__device__ __forceinline__ void store_if(bool condition, void* p, u32 v) {
  asm volatile("{.reg .pred p; setp.ne.s32 p, %0, 0; @p st.global.u32 [%1], %2;}" ::"r"((int)condition), "l"(p), "r"(v));
}
__device__ __forceinline__ void store_if(bool condition, void* p, float v) { store_if(condition, p, __float_as_uint(v)); }
#endif

// How many of `count` token groups are loaded at once: at most 8, in chunks as equal as possible; the last may be smaller.
__device__ constexpr int together(int count) {
  const int times = (count + 7) / 8;
  return (count + times - 1) / times;
}

#if RANK > 0
// The first attempt may hit in L1, where other warps' loads left words; later attempts (load_relaxed) bypass it.
__device__ __forceinline__ void load_cached(const u32* p, u32 (&v)[4]) {
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "l"(p) : "memory");
}
__device__ __forceinline__ void load_cached(const u32* p, u32 (&v)[2]) {
  asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(v[0]), "=r"(v[1]) : "l"(p) : "memory");
}
struct __align__(RANK % 32 == 0 ? 16 : 8) Words {
  u32 at[RANK % 32 == 0 ? 4 : 2];
};
constexpr int LANE_WORDS = sizeof(Words) / 4;

// Wait for u of every eighth token from m on, of PARTS adapters side by side. Past the last token u is the last token's, or zeros. Only
// the first `count` tokens are loaded.
template <int PARTS, int COUNT>
__device__ __forceinline__ void wait_u(const u32* from, int width, int m, int M, int count, Words (&u)[PARTS][COUNT]) {
  const u32* at[COUNT];
#pragma unroll
  for (int n = 0; n < COUNT; n++) at[n] = GIVEN_U ? from + min(m + n * 8, M - 1) * width / 2 : from + m * width / 2 + n * 4 * width;
  bool missing = false;
#pragma unroll
  for (int i = 0; i < PARTS * COUNT; i++)
    if (i % COUNT < count) {
#if EARLY_LOADS && GIVEN_U
      load_early(at[i % COUNT] + i / COUNT * (RANK / 2), u[i / COUNT][i % COUNT].at);
#else
      load_cached(at[i % COUNT] + i / COUNT * (RANK / 2), u[i / COUNT][i % COUNT].at);
#endif
    }
#if EARLY_LOADS && GIVEN_U
  return;
#endif
#pragma unroll
  for (int i = 0; i < PARTS * COUNT; i++) if (i % COUNT < count) missing |= is_missing(u[i / COUNT][i % COUNT].at);
  while (!GIVEN_U && missing) {
    missing = false;
#pragma unroll
    for (int i = 0; i < PARTS * COUNT; i++)
      if (i % COUNT < count) load_relaxed(at[i % COUNT] + i / COUNT * (RANK / 2), u[i / COUNT][i % COUNT].at);
#pragma unroll
    for (int i = 0; i < PARTS * COUNT; i++) if (i % COUNT < count) missing |= is_missing(u[i / COUNT][i % COUNT].at);
  }
  __syncwarp();
}
#endif

#ifndef GATE
#define GATE 1
#endif
__device__ __forceinline__ float activation(float v) {
#if GATE == 2
  return .5f * v * (1.f + erff(v * 0.70710678f));
#elif GATE == 3  // v (1 + tanh(z)) / 2 = v / (1 + e^(-2 z))
  return __fdividef(v, 1.f + __expf(-1.59576912f * fmaf(.044715f * v * v, v, v)));
#else
  return __fdividef(v, 1.f + __expf(-v));
#endif
}

struct Epilogue {
  const float* alpha;
  const float* bias;
  const u16* lora_b;
  const float* residual;
  void* y;  // in fp32 with a residual, else in bfloat16
  const int* slots;  // [M] with SLOTS; slot 0 has no adapter
  int M, N, group1, group2;
};

#if RANK > 0
// Numbers of u per token, and the first of a row's own adapter.
__device__ __forceinline__ int u_width(const Epilogue& e) { return SWIGLU ? 2 * RANK : RANK * (1 + (e.group1 < e.N) + (e.group2 < e.N)); }
__device__ __forceinline__ int u_offset(const Epilogue& e, int row0) { return SWIGLU ? 0 : RANK * ((row0 >= e.group1) + (row0 >= e.group2)); }

// Add one Words of u times those of B's rows g and g + 8; of SwiGLU, part 0 is gate's, rows g, and part 1 up's, rows g + 8.
__device__ __forceinline__ void add_words(float (&acc)[4], const Words& low, const Words& high, const Words& u, int part) {
#pragma unroll
  for (int i = 0; i < LANE_WORDS; i += 2)
    mma(acc, SWIGLU && part ? 0 : low.at[i], SWIGLU && !part ? 0 : high.at[i], SWIGLU && part ? 0 : low.at[i + 1],
        SWIGLU && !part ? 0 : high.at[i + 1], u.at[i], u.at[i + 1]);
}

#if SLOTS
// At the end of a tile of 256 tokens with SWIGLU 432 bytes of a thread do not fit its registers, of 128 tokens 56.
__device__ __forceinline__ int slot_of(const Epilogue& e, int m) { return __ldg(e.slots + min(m, e.M - 1)); }
// The slots of a warp's tokens, as bits.
template <int COUNT>
__device__ __forceinline__ u32 slots_of(const Epilogue& e, int m0, int g) {
  u32 bits = 0;
#pragma unroll
  for (int n = 0; n < COUNT; n++) bits |= 1u << slot_of(e, m0 + n * 8 + g);
  return __reduce_or_sync(ALL_LANES, bits);
}
#endif

// Add u B^T, after waiting for u. A thread loads neighboring k of both operands at once: both use the same order of k. With SLOTS B is that
// of the slot, and u of tokens with another one is 0.
template <int COUNT>
__device__ __forceinline__ void add_adapter(float (&acc)[COUNT][4], const Epilogue& e, const u32* u, int slot, int row0, int m0, int g, int t) {
  constexpr int TOKENS = together(COUNT), PARTS = SWIGLU && COUNT <= 8 ? 2 : 1;
  const int width = u_width(e), offset = u_offset(e, row0);
  const u16* b = e.lora_b + ((size_t)slot * e.N + row0 + g) * RANK + 2 * LANE_WORDS * t;
#pragma unroll
  for (int k = 0; k < RANK; k += 8 * LANE_WORDS) {
    const Words low = *(const Words*)(b + k), high = *(const Words*)(b + 8 * RANK + k);
#pragma unroll
    for (int part0 = 0; part0 < 1 + SWIGLU; part0 += PARTS) {  // gate and its rows g, then up and its rows g + 8
#pragma unroll
      for (int n0 = 0; n0 < COUNT; n0 += TOKENS) {
        Words um[PARTS][TOKENS];
        wait_u(u + (offset + part0 * RANK + k) / 2 + LANE_WORDS * t, width, m0 + n0 * 8 + g, e.M, min(TOKENS, COUNT - n0), um);
#if SLOTS
#pragma unroll
        for (int n = 0; n < min(TOKENS, COUNT - n0); n++) {
          const bool is_own = slot_of(e, m0 + (n0 + n) * 8 + g) == slot;
#pragma unroll
          for (int i = 0; i < PARTS * LANE_WORDS; i++) um[i / LANE_WORDS][n].at[i % LANE_WORDS] = is_own ? um[i / LANE_WORDS][n].at[i % LANE_WORDS] : 0;
        }
#endif
#pragma unroll
        for (int part = part0; part < part0 + PARTS; part++)
#pragma unroll
          for (int n = 0; n < min(TOKENS, COUNT - n0); n++) add_words(acc[n0 + n], low, high, um[part - part0][n], part);
      }
    }
  }
}
#endif

#if RANK > 0
// Add each token's u B^T.
template <int COUNT>
__device__ __forceinline__ void add_low_rank(float (&acc)[COUNT][4], const Epilogue& e, const u32* u, int row0, int m0, int g, int t) {
#if SLOTS
#pragma unroll 1
  for (u32 left = slots_of<COUNT>(e, m0, g) & ~1u; left; left &= left - 1) add_adapter(acc, e, u, __ffs(left) - 1, row0, m0, g, t);
#else
  add_adapter(acc, e, u, 0, row0, m0, g, t);
#endif
}
#endif

#if !SWIGLU
// y = sums + residual, both fp32. Each lane handles its own numbers; those of the eight g are neighbors in a sector.
template <int COUNT>
__device__ __forceinline__ void add_residual(const float (&acc)[COUNT][4], const Epilogue& e, int row0, int m0, int g, int t) {
  constexpr int STEP = COUNT % 4 == 0 ? 4 : COUNT % 3 == 0 ? 3 : together(COUNT);  // token groups whose loads are in flight together
#pragma unroll
  for (int n0 = 0; n0 < COUNT; n0 += STEP) {
    float r[STEP][4];
    const int first = m0 + n0 * 8 + 2 * t;
    const size_t at = (size_t)first * e.N + row0 + g;
#pragma unroll
    for (int n = 0; n < min(STEP, COUNT - n0); n++)
#pragma unroll
      for (int i = 0; i < 4; i++)
#if EARLY_LOADS
        r[n][i] = load_early(e.residual + at + (n * 8 + i % 2) * e.N + i / 2 * 8, first + n * 8 + i % 2 < e.M);
#else
        r[n][i] = first + n * 8 + i % 2 < e.M ? e.residual[at + (n * 8 + i % 2) * e.N + i / 2 * 8] : 0.f;
#endif
#pragma unroll
    for (int n = 0; n < min(STEP, COUNT - n0); n++)
#pragma unroll
      for (int i = 0; i < 4; i++)
#if EARLY_LOADS
        store_if(first + n * 8 + i % 2 < e.M, (float*)e.y + at + (n * 8 + i % 2) * e.N + i / 2 * 8, acc[n0 + n][i] + r[n][i]);
#else
        if (first + n * 8 + i % 2 < e.M) ((float*)e.y)[at + (n * 8 + i % 2) * e.N + i / 2 * 8] = acc[n0 + n][i] + r[n][i];
#endif
  }
}
#endif

// sums = alpha * sums + bias
template <int COUNT>
__device__ __forceinline__ void scale_sums(float (&acc)[COUNT][4], const Epilogue& e, float alpha0, float alpha1, int row0, int g) {
#if EARLY_LOADS
  const float bias0 = load_early(e.bias + row0 + g, e.bias), bias1 = load_early(e.bias + row0 + g + 8, e.bias);
#else
  const float bias0 = e.bias ? e.bias[row0 + g] : 0.f, bias1 = e.bias ? e.bias[row0 + g + 8] : 0.f;
#endif
#pragma unroll
  for (int n = 0; n < COUNT; n++) {
    acc[n][0] = fmaf(acc[n][0], alpha0, bias0);
    acc[n][1] = fmaf(acc[n][1], alpha0, bias0);
    acc[n][2] = fmaf(acc[n][2], alpha1, bias1);
    acc[n][3] = fmaf(acc[n][3], alpha1, bias1);
  }
}

// Write y: the sums, with the residual added, or activation(gate) * up, whose rows are both among the sums.
template <int COUNT>
__device__ __forceinline__ void write_sums(const float (&acc)[COUNT][4], const Epilogue& e, int row0, int m0, int g, int t) {
#if !SWIGLU
  if (e.residual) {
    add_residual(acc, e, row0, m0, g, t);
    return;
  }
#endif
#pragma unroll
  for (int n = 0; n < COUNT; n++) {
    const int m = m0 + n * 8 + g;
#if SWIGLU
    const float v0 = activation(acc[n][0]) * acc[n][2], v1 = activation(acc[n][1]) * acc[n][3];
    const u32 o = transpose8x8(pack2(v0, v1));
#if EARLY_LOADS
    store_if(m < e.M, (u16*)e.y + (size_t)m * (e.N / 2) + row0 / 2 + 2 * t, o);
#else
    if (m < e.M) *(u32*)((u16*)e.y + (size_t)m * (e.N / 2) + row0 / 2 + 2 * t) = o;
#endif
#else
    u16* y = (u16*)e.y + (size_t)m * e.N + row0 + 2 * t;
    const u32 o0 = transpose8x8(pack2(acc[n][0], acc[n][1])), o1 = transpose8x8(pack2(acc[n][2], acc[n][3]));
#if EARLY_LOADS
    store_if(m < e.M, y, o0), store_if(m < e.M, y + 8, o1);
#else
    if (m < e.M) *(u32*)y = o0, *(u32*)(y + 8) = o1;
#endif
#endif
  }
}

template <int COUNT>
__device__ __forceinline__ void finish(float (&acc)[COUNT][4], const Epilogue& e, const u32* u, float alpha0, float alpha1, int row0, int m0, int g, int t) {
  scale_sums(acc, e, alpha0, alpha1, row0, g);
#if RANK > 0
  add_low_rank(acc, e, u, row0, m0, g, t);
#endif
  write_sums(acc, e, row0, m0, g, t);
}

// Add the sums of the CTAs that share this tile's k, in the order of k, waiting for each.
template <int TILES>
__device__ __forceinline__ void add_partials(float (&acc)[TILES][4], u32* slot, u32 stride, int count) {
  constexpr int CHUNK = together(TILES), BATCH = TILES >= 8 ? 1 : 8 / TILES;  // about 8 loads in flight
#pragma unroll 1
  for (int p0 = 0; p0 < count; p0 += BATCH) {
#pragma unroll
    for (int n0 = 0; n0 < TILES; n0 += CHUNK) {
      u32 v[BATCH][CHUNK][4];
      bool missing;
      do {
        missing = false;
#pragma unroll
        for (int p = 0; p < BATCH; p++)
#pragma unroll
          for (int n = 0; n < min(CHUNK, TILES - n0); n++) load_relaxed(slot + min(p0 + p, count - 1) * stride + (n0 + n) * 128, v[p][n]);
#pragma unroll
        for (int i = 0; i < BATCH * CHUNK; i++) missing |= n0 + i % CHUNK < TILES && is_missing(v[i / CHUNK][i % CHUNK]);
      } while (missing);
#pragma unroll
      for (int p = 0; p < BATCH; p++) {
        if (p0 + p < count) {
#pragma unroll
          for (int n = 0; n < min(CHUNK, TILES - n0); n++) take_partial(slot + (p0 + p) * stride + (n0 + n) * 128, v[p][n], acc[n0 + n]);
        }
      }
    }
  }
  __syncwarp();
}
