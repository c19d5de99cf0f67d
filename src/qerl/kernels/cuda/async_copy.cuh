// Copies from global to shared memory that a thread does not wait for (Ampere and later). Only Hopper's have an L2 policy, and never with
// a shared address that is split over a uniform register: NVRTC 13.0 then encodes UR0 and UR1 whatever it has set, which the GPU refuses
// as an illegal instruction (tests/kernels/test_compile_matrix.py).
#pragma once
#include "memory.cuh"
#include "types.cuh"

__device__ __forceinline__ void copy_async(u32 dst, const void* src) { asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst), "l"(src) : "memory"); }
__device__ __forceinline__ void copy_async_if(bool condition, u32 dst, const void* src) {  // without a branch
  asm volatile("{.reg .pred p; setp.ne.s32 p, %0, 0; @p cp.async.cg.shared.global [%1], [%2], 16;}" ::"r"((int)condition), "r"(dst), "l"(src) : "memory");
}
#if __CUDA_ARCH__ == 900
// The same number, of which the compiler does not know that it is the same in all lanes (it does of a shuffle).
__device__ __forceinline__ u32 own_register(u32 v) {
  asm volatile("{.reg .u32 zero; mov.u32 zero, %%laneid; shr.u32 zero, zero, 5; add.u32 %0, %0, zero;}" : "+r"(v));
  return v;
}
__device__ __forceinline__ u64 once_policy() { return l2_evict_first(); }
// Bytes that are read once: L2 gives their place away first. dst: own_register of an address, and what is added to it; policy: once_policy.
__device__ __forceinline__ void copy_async_once(u32 dst, const void* src, u64 policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "l"(policy) : "memory");
}
__device__ __forceinline__ void copy_async_once_if(bool condition, u32 dst, const void* src, u64 policy) {  // without a branch
  asm volatile("{.reg .pred p; setp.ne.s32 p, %0, 0; @p cp.async.cg.shared.global.L2::cache_hint [%1], [%2], 16, %3;}" ::"r"((int)condition), "r"(dst), "l"(src),
               "l"(policy)
               : "memory");
}
#else
__device__ __forceinline__ u32 own_register(u32 v) { return v; }
__device__ __forceinline__ u64 once_policy() { return 0; }
__device__ __forceinline__ void copy_async_once(u32 dst, const void* src, u64) { copy_async(dst, src); }
__device__ __forceinline__ void copy_async_once_if(bool condition, u32 dst, const void* src, u64) { copy_async_if(condition, dst, src); }
#endif
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Wait until at most PENDING of this thread's committed groups are still being copied.
template <int PENDING>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
