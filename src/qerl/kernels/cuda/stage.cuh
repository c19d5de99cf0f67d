// A stage of the shared-memory ring of nvfp4_decode.cu and head_sample.cu: MT tokens of x, then WG segments of W, for KB of k.
// The includer defines W_SEG, the bytes of a segment.
#pragma once
#include "mbarrier.cuh"
#include "wgmma.cuh"

#define NT (MT / 8)
#define X_STAGE (MT * KB * 2)
#define STAGE_BYTES ((X_STAGE + WG * W_SEG + 1023) / 1024 * 1024)  // the swizzle repeats every 1024
