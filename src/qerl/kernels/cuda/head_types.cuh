// Segment size and parameters of head_sample.cu, which lists the compile-time constants.
#pragma once
#include "nvfp4_codes.cuh"
#include "stage.cuh"

#ifndef SCALE
#define SCALE 0
#endif
#ifndef SOFTCAP
#define SOFTCAP 0
#endif

#if FORMAT == 0
#define W_SEG (KB * 128)
#elif FORMAT == 1
#define W_SEG (KB * 64)
#else
#define W_SEG (KB / 64 * TILE_BYTES)
#endif

struct Operands {
  const long long* keys;
  const int* positions;
  const float* temperature;
  const float* factors;  // NVFP4: of each row; FP8: of each block of 128 x 128
  float4* partials;
  float* logits;
  int M, V, D, pad;
#if SCALE || SOFTCAP
  float scale, softcap;
#endif
};
