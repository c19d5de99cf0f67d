// Hopper's barriers in shared memory and the bulk copies (TMA) that arrive at them.
#pragma once
#include "memory.cuh"

struct __align__(64) TensorMap { u8 bytes[128]; };  // nvrtc.py: tensor_map

__device__ __forceinline__ void mbar_init(u32 bar, u32 count) { asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory"); }
// Make initialized barriers visible to the cluster and to bulk copies.
__device__ __forceinline__ void mbar_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void mbar_expect(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void mbar_arrive(u32 bar) { asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(bar) : "memory"); }
__device__ __forceinline__ void mbar_wait(u32 bar, u32 parity) {
  asm volatile(
      "{\n.reg .pred p;\nL_%=: mbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n@p bra D_%=;\nbra L_%=;\nD_%=:\n}" ::"r"(bar),
      "r"(parity)
      : "memory");
}

__device__ __forceinline__ void copy_bulk(u32 dst, const u8* src, u32 bytes, u32 bar, u64 policy) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(dst),
               "l"(src), "r"(bytes), "r"(bar), "l"(policy)
               : "memory");
}
// A box of a tensor map: from `row` and from column 64 * k64 on.
__device__ __forceinline__ void copy_box(u32 dst, const TensorMap* map, int k64, int row, u32 bar, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(
          dst),
      "l"(map), "r"(0), "r"(row), "r"(k64), "r"(bar), "l"(policy)
      : "memory");
}
