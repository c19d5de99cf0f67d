// Follows decode_attention_units.cu: the rows' keys and values into the cache and nothing else, one warp for each row and K/V head.
// The bits are those that decode_attention itself writes. Rows of one sequence can then attend to each other in one launch.
extern "C" __global__ void __launch_bounds__(32) decode_attention_put(const __grid_constant__ Parameters p) {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  const int row = blockIdx.x / KV_HEADS, head = blockIdx.x % KV_HEADS, lane = threadIdx.x, position = p.positions[row];
  if (position < 0) return;
  const u16* own = p.qkv + (size_t)row * WIDTH + (GROUP * KV_HEADS + head) * H;
  const Head key = load_head(own), value = load_head(own + KV_HEADS * H);
  const Stored k = stored(rotated(p, p.k_norm ? normed(key, p.k_norm, p.eps) : key, position)), v = stored(value);
  const size_t slot = (size_t)p.tables[(size_t)row * p.table_width + position / PAGE] * PAGE + position % PAGE;
  const size_t to = (slot * KV_HEADS + head) * ROW_BYTES + lane * 2 * ROW_BYTES / H, half = ROW_BYTES / 2;
  if (lane < H / 4) put(k, p.k + to, p.k + to + half), put(v, p.v + to, p.v + to + half);
#if FP8
  if (lane == 0) p.k_scales[slot * KV_HEADS + head] = k.scale, p.v_scales[slot * KV_HEADS + head] = v.scale;
#endif
}
