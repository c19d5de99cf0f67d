// The place of a unit of work in a packed product; units are numbered k block first, then token tile, then row tile.
#pragma once

// The row tile, token tile and k block of a unit.
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
