// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Programmatic dependent launch (PDL): a kernel starts while its predecessor drains, and loads data
// that the predecessor does not write.
//
// Rules.
// - Before wait_for_predecessors() a kernel reads only the routing and the weights: no kernel of a
//   step writes them, except the routing kernel. If the engine promises that all work before the
//   kernel in front has completed (aril_inputs), an operation on experts also
//   reads x and the routes, past L1, and uses its mailbox. If the activation in front of that kernel
//   may still run, x waits for what its blocks announce in the mailbox.
// - Operations call launch_dependents() at once, so that several kernels have weights in flight,
//   except the combine of experts beside the base operation in front (moe/block.cuh). The routing
//   kernel never calls it, so every kernel of a step starts after the routing is done.
// - In every kernel at least one block waits (is_first_block()). Then a kernel completes after all
//   its predecessors, and whoever waits for it waits for them, too.
//
// Visibility. CUDA guarantees that a predecessor's writes are visible after the wait, and nothing
// earlier. The early reads rely on this: copies and the routing kernel write routing and weights;
// the routing kernel ends with a fence and does not launch its dependents early; so a reader starts
// when the data is in L2, and its L1 holds no stale line: the lines of the last step were dropped
// when a kernel behind the routing started, and that kernel and all later ones of the step load the
// new data. PTX does not specify when lines are dropped. aril_load tests it on every device
// (device/early_reads.cuh), and no kernel starts early where the test fails; tests/gpu/early_loads.rs
// checks steps that each rewrite the routing or the descriptors right before two launches. Loads
// that bypass L1 would need only the fence, and cost up to 13 % (benches/record/designs.md).
#pragma once

namespace aril {

// Waits until all earlier kernels of the stream have completed and their writes are visible.
__device__ __forceinline__ void wait_for_predecessors() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Allows the next kernel to start when every block has called this or exited.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// The first block of a grid always waits for its predecessors, even if it has no work, so that the
// kernel completes after them. Other idle blocks exit.
__device__ __forceinline__ bool is_first_block() { return blockIdx.x == 0 && blockIdx.y == 0; }

}  // namespace aril
