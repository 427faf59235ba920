// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Copies from global to shared memory that hold no registers while they are under way.
#pragma once

#include <stdint.h>

namespace aril {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Starts copying 16 bytes, of which those from `valid` on become zero. Both sides are aligned
// to 16.
__device__ __forceinline__ void copy_async(void* shared, const void* global, int valid = 16) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
               "l"(global), "r"(valid)
               : "memory");
}

// Ends a group of copies.
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until all of this thread's groups but the last `kPending` have arrived.
template <int kPending>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Where bulk copies arrive, in shared memory. A phase ends when all that was expected has come and
// `senders` threads have said what to expect. Without bulk copies (before sm_90), whoever brings
// something waits for it himself, and all meet before anyone reads it.
struct TransactionBarrier {
  uint64_t barrier;

  // By one thread, before anything else.
  __device__ __forceinline__ void init(int senders = 1) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(senders)
                 : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
  }

  // By a sender: what will come of it in this phase.
  __device__ __forceinline__ void expect(uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)),
        "r"(bytes)
        : "memory");
#endif
  }

  // Starts a copy; both sides and `bytes` are multiples of 16.
  __device__ __forceinline__ void copy(void* shared, const void* global, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
        "[%3];" ::"r"(shared_address(shared)),
        "l"(global), "r"(bytes), "r"(shared_address(&barrier))
        : "memory");
#endif
  }

  __device__ __forceinline__ void wait(uint32_t parity) const {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}\n" ::"r"(shared_address(&barrier)),
        "r"(parity)
        : "memory");
#endif
  }
};

// Makes what this thread wrote to shared memory, or what it waited for, visible to products and
// bulk copies. Before the threads meet.
__device__ __forceinline__ void fence_async_proxy() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Starts a copy from shared memory, of which `publish_shared` was called; `bytes` is a multiple
// of 16.
__device__ __forceinline__ void bulk_store(void* global, const void* shared, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
               "r"(shared_address(shared)), "r"(bytes)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#endif
}

// Waits until this thread's copies back have read shared memory.
__device__ __forceinline__ void wait_for_bulk_store_reads() {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
#endif
}

// Waits until they are done.
__device__ __forceinline__ void wait_for_bulk_stores() {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
#endif
}

// Brings weights to shared memory: by one thread where there are bulk copies, by all `threads`,
// of which this is number `thread`, elsewhere.
__device__ __forceinline__ void bulk_load(TransactionBarrier& barrier, void* shared,
                                          const void* global, uint32_t bytes, int thread,
                                          int threads) {
#if __CUDA_ARCH__ >= 900
  if (thread != 0) return;
  barrier.init();
  barrier.expect(bytes);
  if (bytes > 0) barrier.copy(shared, global, bytes);
#else
  for (uint32_t at = thread * 16; at < bytes; at += threads * 16) {
    copy_async(static_cast<char*>(shared) + at, static_cast<const char*>(global) + at);
  }
  commit_copies();
#endif
}

}  // namespace aril
