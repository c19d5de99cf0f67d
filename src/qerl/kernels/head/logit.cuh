// A logit from the head's product: cap tanh(product / cap), NaN if the product is not finite, so that a cap hides no overflow.
#pragma once

__device__ __forceinline__ float capped_logit(float product, float cap) { return fmaf(product, 0.f, cap * tanhf(product / cap)); }
