// SPDX-License-Identifier: MIT OR Apache-2.0
//
// L2 eviction priorities; and from sm_90 on tensor copies, the barriers they complete on, and the shared memory of a cluster.
// Nothing here needs sm_90a.
#pragma once

#include <cuda.h>
#include <stdint.h>

#include "async.cuh"

namespace aril {

// L2 eviction priorities of copies and loads, as createpolicy.fractional encodes them.
constexpr uint64_t kEvictFirst = 0x12F0000000000000ull;  // read once by the whole device
constexpr uint64_t kEvictLast = 0x14F0000000000000ull;   // read by many blocks

#if __CUDA_ARCH__ >= 900

// Copies a box of a matrix to shared memory; elements outside the matrix become zero. `arrival`
// counts the bytes of the whole box.
__device__ __forceinline__ void copy_box(void* shared, const CUtensorMap& map, int column, int row,
                                         TransactionBarrier& arrival, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(shared)),
      "l"(&map), "r"(column), "r"(row), "r"(shared_address(&arrival.barrier)), "l"(policy)
      : "memory");
}

// Counts this thread's arrival.
__device__ __forceinline__ void arrive(TransactionBarrier& arrival) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&arrival.barrier))
               : "memory");
}

// The address of a variable of this block in block `rank` of the cluster.
__device__ __forceinline__ uint32_t cluster_address(const void* shared, uint32_t rank) {
  uint32_t address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(address)
               : "r"(shared_address(shared)), "r"(rank));
  return address;
}

// Stores to a variable of the cluster, and counts the 16 bytes at a barrier of the same block. An
// arrival that releases a store to the cluster would wait for all stores of its thread.
__device__ __forceinline__ void store_cluster(uint32_t address, float4 values, uint32_t barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(address),
      "f"(values.x), "f"(values.y), "f"(values.z), "f"(values.w), "r"(barrier)
      : "memory");
}

// Waits for all threads of a cluster, and makes what they wrote visible to each other.
__device__ __forceinline__ void sync_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The two halves of a barrier of all threads of a cluster. A block that has passed it knows that
// the other ones run, and that their barriers are initialised. It may not have seen anything else
// that they wrote.
__device__ __forceinline__ void arrive_at_cluster() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void wait_for_cluster() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

#endif

}  // namespace aril
