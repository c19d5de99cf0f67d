// Segment size and parameters of head_sample.cu, which lists the compile-time constants.
#pragma once
#include "head_draw.cuh"
#include "nvfp4_codes.cuh"
#include "stage.cuh"

#if FORMAT == 0
#define W_SEG (KB * 128)
#elif FORMAT == 1
#define W_SEG (KB * 64)
#else
#define W_SEG (KB / 64 * TILE_BYTES)
#endif

typedef Rows Operands;
