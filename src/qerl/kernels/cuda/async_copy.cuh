// Copies of 16 bytes from global to shared memory that a thread does not wait for (Ampere and later).
// With an L2 policy NVRTC 13 makes copies whose address is split over a uniform register, which a Hopper GPU refuses as illegal.
#pragma once
#include "types.cuh"

__device__ __forceinline__ void copy_async(u32 dst, const void* src) { asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst), "l"(src) : "memory"); }
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Wait until at most PENDING of this thread's committed groups are still being copied.
template <int PENDING>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
