// Parts of the products of weights in tiles by mma.sync: a ring of stages in shared memory, each with KB of k of MT rows of x and of RT rows
// of W, and a warp's share of the work on a stage.
//
// A stage has x in lines of 64 k of a row, then W in segments of 64 rows, whose tiles of 64 k follow each other. WR warps take different rows
// of W, R16 blocks of 16 each, and WM warps different rows of x, NT groups of 8 each.
#pragma once
#include "async_copy.cuh"
#include "mma.cuh"
#include "tile_block.cuh"

#define THREADS (WR * WM * 32)
#define RT (WR * R16 * 16)
#define NT (MT / 8 / WM)
#define W_SEG (KB / 64 * TILE_BYTES)
#define X_STAGE (MT * KB * 2)
#define STAGE_BYTES (X_STAGE + RT / 64 * W_SEG)

// Begin this thread's share of the copy of segment s of W. `to` is its first piece of 16 bytes of segment 0, `from` that of segment s.
__device__ __forceinline__ void copy_segment(u32 to, int s, const u8* from) {
  constexpr int PIECES = W_SEG / 16;
#pragma unroll
  for (int i = 0; i < PIECES; i += THREADS)
    if (i + THREADS <= PIECES || i + threadIdx.x < PIECES) copy_async(to + (s * PIECES + i) * 16, from + i * 16);
}

// Decode 32 of the 64 k to operands of mma.sync, each for 16 k.
__device__ __forceinline__ void decode_blocks(const Block (&block)[R16], int half, u32 constant, u32 (&a)[R16][2][4]) {
#pragma unroll
  for (int r = 0; r < R16; r++) block[r].decode16(2 * half, constant, a[r][0]), block[r].decode16(2 * half + 1, constant, a[r][1]);
}

// Add the products of 32 k of the warp's blocks with group n of x to acc.
__device__ __forceinline__ void multiply(float (&acc)[R16][NT][4], int n, const u32 (&a)[R16][2][4], const u32 (&b)[4]) {
#pragma unroll
  for (int r = 0; r < R16; r++) {
    mma(acc[r][n], a[r][0][0], a[r][0][1], a[r][0][2], a[r][0][3], b[0], b[1]);
    mma(acc[r][n], a[r][1][0], a[r][1][1], a[r][1][2], a[r][1][3], b[2], b[3]);
  }
}
