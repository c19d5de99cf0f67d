// Write the keys and values of all rows' new tokens to the cache: one warp for each row and K/V head.
//
// The bits are those that decode_attention writes itself. Rows of one sequence can then attend to each other in one launch.
#include "decode_attention_token.cuh"

extern "C" __global__ void __launch_bounds__(32) decode_attention_write(const __grid_constant__ Parameters p) {
  grid_dependency_wait();
  const int row = blockIdx.x / KV_HEADS, head = blockIdx.x % KV_HEADS, position = p.positions[row];
  if (position < 0) return;
  CacheEntry k, v;
  load_new_token(p, row, head, position, k, v);
  write_cache(p, head, (size_t)p.tables[(size_t)row * p.table_width + position / PAGE] * PAGE + position % PAGE, k, v);
}
