// SPDX-License-Identifier: MIT OR Apache-2.0
//
// A test of the block order that mailbox.cuh relies on: one launch, when kernels are loaded.
//
// A block announces that it has started, then waits until all blocks of lower index have done so.
// The grid has several times as many blocks as the device can run. If a block starts only after one
// of higher index has ended, that one times out and reports it.
//
// The test shows that this device under this driver keeps the order in such a launch. It cannot
// show the order of other grids, beside other kernels, or after a preemption: the GPU tests
// (contention.rs) and builds with ARIL_DEBUG cover those.
#pragma once

#include <stdint.h>

namespace aril::detail {

constexpr int kOrderThreads = 1024;  // at most two blocks fit on a multiprocessor
constexpr int kOrderBlocksPerMultiprocessor = 8;
constexpr int kMostOrderBlocks = 4096;

// The last launch in which each block has started, and in which a wait has timed out. Launches of
// one context may overlap, each with its own number: a block of a later launch counts for both.
__device__ uint32_t begun[kMostOrderBlocks];
__device__ uint32_t out_of_order;

// Grid: up to kMostOrderBlocks. `launch` is larger than that of any launch before.
__global__ void __launch_bounds__(kOrderThreads) block_order_kernel(uint32_t launch) {
  constexpr int kPolls = 1 << 20;  // about a second
  if (threadIdx.x == 0) atomicMax(&begun[blockIdx.x], launch);
  for (unsigned block = threadIdx.x; block < blockIdx.x; block += kOrderThreads) {
    const volatile uint32_t& lower = begun[block];
    int polls = 0;
    while (lower < launch && ++polls < kPolls) __nanosleep(100);
    if (polls == kPolls) atomicMax(&out_of_order, launch);
  }
}

}  // namespace aril::detail
