// Programmatic dependent launch: a kernel may start before the previous kernel on the stream has ended. Bounds of a launch.
#pragma once

#if __CUDA_ARCH__ >= 1000  // NVRTC would spill in kernels over rows, for more CTAs at once than memory needs
#define ROW_BOUNDS __launch_bounds__(THREADS, 1)
#else
#define ROW_BOUNDS __launch_bounds__(THREADS)
#endif

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
