// SPDX-License-Identifier: MIT OR Apache-2.0
//
// A test of the early reads that ptx/pdl.cuh describes, when kernels are loaded: whether a kernel
// that starts while its predecessor drains finds in L1 what was there before the routing changed.
//
// In each turn one block writes other words, as the routing kernel does, and two kernels that start
// early read them on every multiprocessor before they wait. Launches of one context may overlap:
// words only grow, and a reader counts those below its own turn.
#pragma once

#include <stdint.h>

#include "../ptx/pdl.cuh"

namespace aril::detail {

constexpr int kReadThreads = 256;
constexpr int kReadWords = 4096;
constexpr int kReadTurns = 64;
constexpr int kReadersOfTurn = 2;

__device__ uint32_t early_words[kReadWords];
// The last turn in which a reader has found a word of an earlier one.
__device__ uint32_t stale_turn;

// One block. `turn` is larger than that of any launch before.
__global__ void __launch_bounds__(kReadThreads) write_words_kernel(uint32_t turn) {
  wait_for_predecessors();
  for (int i = threadIdx.x; i < kReadWords; i += kReadThreads) atomicMax(&early_words[i], turn);
  __threadfence();
}

__global__ void __launch_bounds__(kReadThreads) read_words_kernel(uint32_t turn) {
  launch_dependents();
  for (int i = threadIdx.x; i < kReadWords; i += kReadThreads) {
    uint32_t word;
    // Through L1, as the routing and the descriptors are read.
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(word) : "l"(&early_words[i]));
    if (word < turn) atomicMax(&stale_turn, turn);
  }
  wait_for_predecessors();
}

}  // namespace aril::detail
