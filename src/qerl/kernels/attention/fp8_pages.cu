// Round keys and values to E4M3 with a scale for each token and head, and write both to pages of the KV cache (fp8_pages.py).
//
// A warp has one head of one token in registers. The next kernel is not let start early: decode attention reads pages before it waits.
// Compile-time: H, 64, 128 or 256; PAGE tokens; KV_HEADS.
#include "bfloat16.cuh"
#include "fp8_codes.cuh"
#include "launch.cuh"
#include "warp.cuh"

#define WORDS (H / 64)  // two numbers each, of a lane

struct Operands {
  const u16* x[2];       // keys and values [tokens, KV_HEADS, H]; tokens are `stride` numbers apart
  const long long* slots;
  u16* codes[2];         // [pages, PAGE, KV_HEADS, H / 2]: two codes each
  float* scales[2];      // [pages, KV_HEADS, PAGE]
  u16* stored[2];        // [tokens, KV_HEADS, H]: codes * scale, rounded
  int tokens, stride[2];
};

// The value of a code in the low 8 bits; 0x7F and 0xFF are NaN.
__device__ __forceinline__ float value_of(u32 code) {
  const float size = __uint_as_float((code & 0x7F) << 20) * __uint_as_float(0x7B800000u);  // 2^120, exact, also for subnormal codes
  const float value = code & 0x80 ? -size : size;
  return (code & 0x7F) == 0x7F ? __uint_as_float(0x7FC00000u) : value;
}

extern "C" __global__ void __launch_bounds__(128) write_fp8(const __grid_constant__ Operands o) {
  grid_dependency_wait();
  const int lane = threadIdx.x % 32, unit = blockIdx.x * 4 + threadIdx.x / 32;
  if (unit >= o.tokens * KV_HEADS * 2) return;
  const int of_values = unit % 2, head = unit / 2 % KV_HEADS, token = unit / (2 * KV_HEADS);
  const u32* from = (const u32*)(o.x[of_values] + (size_t)token * o.stride[of_values] + head * H);
  u32 x[WORDS];
  float absmax = 0.f;
#pragma unroll
  for (int i = 0; i < WORDS; i++) x[i] = from[i * 32 + lane];
#pragma unroll
  for (int i = 0; i < WORDS; i++) absmax = fmaxf(absmax, fmaxf(fabsf(low(x[i])), fabsf(high(x[i]))));
  absmax = warp_max(absmax);
  const float scale = absmax > 0.f ? __fdiv_rn(absmax, 448.f) : 1.f;
  const size_t slot = o.slots[token];
  u16* codes = o.codes[of_values] + (slot * KV_HEADS + head) * (H / 2);
  u32* stored = (u32*)(o.stored[of_values] + ((size_t)token * KV_HEADS + head) * H);
#pragma unroll
  for (int i = 0; i < WORDS; i++) {
    const u32 first = e4m3(__fdiv_rn(low(x[i]), scale)), second = e4m3(__fdiv_rn(high(x[i]), scale));
    codes[i * 32 + lane] = first | second << 8;
    stored[i * 32 + lane] = pack2(__fmul_rn(value_of(first), scale), __fmul_rn(value_of(second), scale));
  }
  if (lane == 0) o.scales[of_values][slot / PAGE * PAGE * KV_HEADS + head * PAGE + slot % PAGE] = scale;
}
