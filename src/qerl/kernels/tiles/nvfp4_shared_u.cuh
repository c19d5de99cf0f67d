// y += u B^T of nvfp4_decode.cu from u in shared memory. Without U_BYTES each warp loads u from global memory for each of its tiles.
//
// One warp of each CTA copies u of all tokens to shared memory while the others multiply the weight. If a token's u is a multiple of 128
// bytes, odd tokens have the 64-byte halves of each 128 bytes exchanged: eight lanes that load 16 bytes each then use all 32 banks.
// Compile-time: U_BYTES, the bytes of u in shared memory, or 0: u stays in global memory.
#pragma once
#include "nvfp4_shrink.cuh"
#include "packed_epilogue.cuh"

#if U_BYTES
using AnyU = u32;  // u's address in shared memory
#define U_IN_FLIGHT 4  // pieces, one Words each, that a lane loads together

// The offset in shared memory of a byte of a token's u; width: numbers of u per token.
__device__ __forceinline__ int u_place(int width, int token, int byte) { return token * 2 * width + (width % 64 ? byte : byte ^ token % 2 * 64); }

__device__ __forceinline__ void store_shared(u32 to, const u32 (&v)[4]) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
}
__device__ __forceinline__ void store_shared(u32 to, const u32 (&v)[2]) { asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(to), "r"(v[0]), "r"(v[1]) : "memory"); }
__device__ __forceinline__ void load_shared(u32 from, u32 (&v)[4]) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(from));
}
__device__ __forceinline__ void load_shared(u32 from, u32 (&v)[2]) { asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v[0]), "=r"(v[1]) : "r"(from)); }

// Copy u of `tokens` tokens (whole tiles) to shared memory at `to`. If this launch makes u, wait for each word. Called by one warp.
__device__ __forceinline__ void share_u(const u32* from, const Epilogue& e, int tokens, u32 to, u32 ready) {
  const int width = u_width(e), pieces = width / (2 * LANE_WORDS), all = tokens * pieces;
  grid_dependency_wait();
#pragma unroll 1
  for (int i0 = threadIdx.x % 32; i0 < all; i0 += 32 * U_IN_FLIGHT) {
    Words v[U_IN_FLIGHT];
    bool missing;
    do {
      missing = false;
#pragma unroll
      for (int i = 0; i < U_IN_FLIGHT; i++) {
        const int piece = min(i0 + i * 32, all - 1), row = piece / pieces;
        load_relaxed(from + (GIVEN_U ? min(row, e.M - 1) : row) * (width / 2) + piece % pieces * LANE_WORDS, v[i].at);
      }
#pragma unroll
      for (int i = 0; i < U_IN_FLIGHT; i++)
        if (!GIVEN_U && is_missing(v[i].at)) missing = true;
    } while (missing);
#pragma unroll
    for (int i = 0; i < U_IN_FLIGHT; i++) {
      const int piece = min(i0 + i * 32, all - 1);
      store_shared(to + u_place(width, piece / pieces, piece % pieces * (4 * LANE_WORDS)), v[i].at);
    }
  }
  mbar_arrive(ready);  // each lane
}

// Rows g and g + 8 of a warp's 16 rows of B, as a lane holds them.
struct RowsOfB {
  Words at[RANK / (8 * LANE_WORDS)][2];
  __device__ __forceinline__ void load(const Epilogue& e, int row0, int g, int t) {
#pragma unroll
    for (int i = 0; i < RANK / (4 * LANE_WORDS); i++) at[i / 2][i % 2] = *(const Words*)(e.lora_b + (size_t)(row0 + g + i % 2 * 8) * RANK + (8 * (i / 2) + 2 * t) * LANE_WORDS);
  }
};

// Add u B^T to the sums of 16 rows and the tokens from m0 on. Gate has rows g, up rows g + 8.
template <int COUNT>
__device__ __forceinline__ void add_shared_u(float (&acc)[COUNT][4], const RowsOfB& b, const Epilogue& e, u32 u, int row0, int m0, int g, int t) {
  const int width = u_width(e), offset = u_offset(e, row0);
#pragma unroll
  for (int n = 0; n < COUNT; n++)
#pragma unroll
    for (int k = 0; k < RANK / (8 * LANE_WORDS); k++)
#pragma unroll
      for (int part = 0; part < 1 + SWIGLU; part++) {
        Words v;
        load_shared(u + n * 16 * width + u_place(width, m0 + g, 2 * (offset + part * RANK) + (4 * k + t) * (4 * LANE_WORDS)), v.at);
        add_words(acc[n], b.at[k][0], b.at[k][1], v, part);
      }
}

// `finish` of packed_epilogue.cuh with u in shared memory.
template <int COUNT>
__device__ __forceinline__ void finish(float (&acc)[COUNT][4], const RowsOfB& b, const Epilogue& e, AnyU u, float alpha0, float alpha1, int row0, int m0, int g, int t) {
  scale_sums(acc, e, alpha0, alpha1, row0, g);
  add_shared_u(acc, b, e, u, row0, m0, g, t);
  write_sums(acc, e, row0, m0, g, t);
}
__device__ __forceinline__ AnyU wait_for_u(const LowRank&, u32 shared_u, u32, u32 ready) {
  mbar_wait(ready, 0);
  return shared_u;
}
#else
using AnyU = const u32*;
struct RowsOfB {
  __device__ __forceinline__ void load(const Epilogue&, int, int, int) {}
};
__device__ __forceinline__ void share_u(const u32*, const Epilogue&, int, u32, u32) {}
template <int COUNT>
__device__ __forceinline__ void finish(float (&acc)[COUNT][4], const RowsOfB&, const Epilogue& e, AnyU u, float alpha0, float alpha1, int row0, int m0, int g, int t) {
  finish(acc, e, u, alpha0, alpha1, row0, m0, g, t);
}
__device__ __forceinline__ AnyU wait_for_u(const LowRank& l, u32, u32 turn_at, u32 turn_ready) { return current_u(l, turn_at, turn_ready); }
#endif
