// SPDX-License-Identifier: MIT OR Apache-2.0
//
// A test of the block order that the mailbox relies on (mailbox.cuh): one launch, when kernels
// are loaded.
//
// A block says that it has begun, then waits until all blocks of lower index have said so. There
// are several times as many as the device has room for. Where a block begins only after one of
// higher index has ended, the latter waits in vain, and reports that.
//
// The test shows that this device, under this driver, keeps the order in such a launch. It cannot
// show the order of every other launch: of other grids, beside other kernels, or after a
// preemption. Those are left to the GPU tests (contention.rs) and to ARIL_DEBUG.
#pragma once

#include <stdint.h>

namespace aril::detail {

constexpr int kOrderThreads = 1024;  // at most two blocks have room on a multiprocessor
constexpr int kOrderBlocksPerMultiprocessor = 8;
constexpr int kMostOrderBlocks = 4096;

// The last launch in which a block has begun, and in which one has waited in vain. Launches of one
// context at the same time, each with a number of its own, need not wait for each other: a block of
// a later one counts for both.
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
