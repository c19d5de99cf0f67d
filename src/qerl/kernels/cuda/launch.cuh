// Programmatic dependent launch: a kernel may start before the previous kernel on the stream has ended.
#pragma once

// Let the next kernel on the stream start as soon as this one leaves it room.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
// Wait until the previous kernel has ended and its writes are visible.
__device__ __forceinline__ void grid_dependency_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
