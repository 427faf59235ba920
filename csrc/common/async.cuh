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

#if __CUDA_ARCH__ >= 900
// Where bulk copies arrive, in shared memory. A phase ends when all that was expected has come and
// one thread has said that there will be no more.
struct Arrival {
  uint64_t barrier;

  // By one thread, before anything else.
  __device__ __forceinline__ void init() {
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(shared_address(&barrier)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }

  // Starts a copy; both sides and `bytes` are multiples of 16.
  __device__ __forceinline__ void copy(void* shared, const void* global, uint32_t bytes) {
    const uint32_t address = shared_address(&barrier);
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared.b64 [%0], %1;" ::"r"(address), "r"(bytes)
                 : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
        "[%3];" ::"r"(shared_address(shared)),
        "l"(global), "r"(bytes), "r"(address)
        : "memory");
  }

  // By one thread, after all copies of a phase were started.
  __device__ __forceinline__ void close() {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(&barrier)) : "memory");
  }

  __device__ __forceinline__ void wait(uint32_t parity) const {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}\n" ::"r"(shared_address(&barrier)),
        "r"(parity)
        : "memory");
  }
};
#endif

// A warp's own supply of weights: pieces that come into the slots of a ring in shared memory, one
// after the other. The whole warp calls.
class Supply {
 public:
  // What the supply of one warp needs beside its slots.
  struct State {
#if __CUDA_ARCH__ >= 900
    static constexpr int kMaxSlots = 16;
    Arrival arrivals[kMaxSlots];
#endif
  };

  __device__ __forceinline__ Supply(State& state, void* shared, int slots, int slot_bytes)
      : state_(state),
        shared_(static_cast<char*>(shared)),
        slots_(slots),
        slot_bytes_(slot_bytes) {}

  // Before the first piece, by the warp itself.
  __device__ __forceinline__ void prepare() {
#if __CUDA_ARCH__ >= 900
    const int lane = threadIdx.x % 32;
    if (lane < slots_) state_.arrivals[lane].init();
    __syncwarp();
#endif
  }

#if __CUDA_ARCH__ >= 900
  // The same by one thread, for the warp whose supply it will be.
  __device__ __forceinline__ static void prepare(State& state, int slots) {
    for (int i = 0; i < slots; ++i) state.arrivals[i].init();
  }

  // By one thread, once that is done: starts bringing the first pieces, `stride` bytes apart.
  __device__ __forceinline__ static void begin(State& state, void* shared, int slots,
                                               int slot_bytes, const void* global, int64_t stride) {
    for (int i = 0; i < slots; ++i) {
      state.arrivals[i].copy(static_cast<char*>(shared) + i * slot_bytes,
                             static_cast<const char*>(global) + i * stride, slot_bytes);
      state.arrivals[i].close();
    }
  }
#endif

  // Starts bringing the next piece, into the slot of the piece that came `slots` before it and that
  // the whole warp has done with. None if it has no bytes.
  __device__ __forceinline__ void start(const void* global, int bytes) {
    char* slot = shared_ + started_ * slot_bytes_;
    const int lane = threadIdx.x % 32;
#if __CUDA_ARCH__ >= 900
    if (lane == 0 && bytes > 0) {
      state_.arrivals[started_].copy(slot, global, bytes);
      state_.arrivals[started_].close();
    }
#else
    for (int at = lane * 16; at < bytes; at += 32 * 16) {
      copy_async(slot + at, static_cast<const char*>(global) + at);
    }
    commit_copies();
#endif
    if (++started_ == slots_) started_ = 0;
  }

  // The next piece, once it is there. As many have been started as there are slots.
  __device__ __forceinline__ const void* next() {
    const char* slot = shared_ + taken_ * slot_bytes_;
#if __CUDA_ARCH__ >= 900
    state_.arrivals[taken_].wait(parity_);
#else
    if (slots_ == 1) {
      wait_for_copies<0>();
    } else {
      wait_for_copies<1>();
    }
    __syncwarp();
#endif
    if (++taken_ == slots_) {
      taken_ = 0;
      parity_ ^= 1;
    }
    return slot;
  }

 private:
  State& state_;
  char* shared_;
  int slots_, slot_bytes_, started_ = 0, taken_ = 0;
  uint32_t parity_ = 0;
};

}  // namespace aril
