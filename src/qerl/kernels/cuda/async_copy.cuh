// Copies from global to shared memory that a thread does not wait for (Ampere and later). None has an L2 policy: where NVRTC 13.0
// splits the shared address of such a copy over a uniform register, it encodes UR0 and UR1 whatever it has set, which Hopper refuses
// as an illegal instruction.
#pragma once
#include "types.cuh"

__device__ __forceinline__ void copy_async(u32 dst, const void* src) { asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst), "l"(src) : "memory"); }
__device__ __forceinline__ void copy_async_if(bool condition, u32 dst, const void* src) {  // without a branch
  asm volatile("{.reg .pred p; setp.ne.s32 p, %0, 0; @p cp.async.cg.shared.global [%1], [%2], 16;}" ::"r"((int)condition), "r"(dst), "l"(src) : "memory");
}
__device__ __forceinline__ void copy_async_4(u32 dst, const void* src) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(dst), "l"(src) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Wait until at most PENDING of this thread's committed groups are still being copied.
template <int PENDING>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
