// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Asynchronous copies between global and shared memory: cp.async (sm_80) and bulk copies (sm_90),
// and prefetches. What is in flight holds no registers.
#pragma once

#include <stdint.h>

namespace aril {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Starts a copy of 16 bytes; bytes at and beyond `valid` become zero. Both addresses are aligned to
// 16 bytes.
__device__ __forceinline__ void copy_async(void* shared, const void* global, int valid = 16) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
               "l"(global), "r"(valid)
               : "memory");
}

// Requests the line of an address into L2, for a load to come.
__device__ __forceinline__ void prefetch_l2(const void* global) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
}

// Ends this thread's current group of copies.
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most `kPending` of this thread's groups are in flight.
template <int kPending>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// An mbarrier in shared memory that counts the bytes of bulk copies. A phase completes when
// `senders` threads have called expect() and all expected bytes have arrived. Before sm_90 it does
// nothing: the threads that copy wait for their own cp.async groups, then synchronize.
struct TransactionBarrier {
  uint64_t barrier;

  // One thread calls it, before any other use.
  __device__ __forceinline__ void init(int senders = 1) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(senders)
                 : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
  }

  // Arrives as a sender whose copies bring `bytes` in this phase.
  __device__ __forceinline__ void expect(uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)),
        "r"(bytes)
        : "memory");
#endif
  }

  // Starts a bulk copy to shared memory. Addresses and `bytes` are multiples of 16.
  __device__ __forceinline__ void copy(void* shared, const void* global, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
        "[%3];" ::"r"(shared_address(shared)),
        "l"(global), "r"(bytes), "r"(shared_address(&barrier))
        : "memory");
#endif
  }

  // Waits until the phase of this parity has completed.
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

// Makes shared memory that this thread wrote, or waited for, visible to wgmma and bulk copies. Call
// it before the barrier that orders them.
__device__ __forceinline__ void fence_async_proxy() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Starts a bulk copy from shared memory, after fence_async_proxy(). Addresses and `bytes` are
// multiples of 16.
__device__ __forceinline__ void bulk_store(void* global, const void* shared, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
               "r"(shared_address(shared)), "r"(bytes)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#endif
}

// Waits until this thread's bulk stores have read their shared memory.
__device__ __forceinline__ void wait_for_bulk_store_reads() {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
#endif
}

// Waits until this thread's bulk stores have completed.
__device__ __forceinline__ void wait_for_bulk_stores() {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
#endif
}

// Starts a load of `bytes` into shared memory: one bulk copy by thread 0 of the `threads` that call
// it, or cp.async by all of them before sm_90. `thread` is the caller's number. The `first` load
// initializes the barrier; each completes a phase of it.
__device__ __forceinline__ void bulk_load(TransactionBarrier& barrier, void* shared,
                                          const void* global, uint32_t bytes, int thread,
                                          int threads, bool first = true) {
#if __CUDA_ARCH__ >= 900
  if (thread != 0) return;
  if (first) barrier.init();
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
