// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Programmatic dependent launch: a kernel may begin while the one before it ends, and fetch what
// that one does not write.
//
// What may be read before wait_for_predecessors: routing and weights, which no kernel of a step
// writes. Operations let their dependents begin at once, so that many can have their weights on the
// way; the routing never does, so that nothing begins before the routing of its step is done. What
// begins once a kernel has waited need not wait for what that one did. A kernel that waits ends
// after all that was enqueued before it, and so does every kernel that waits for it: a kernel none
// of whose blocks waits would break that.
//
// Visibility. CUDA promises that what a predecessor wrote is visible behind the wait, and nothing
// before it. Reads before it rely on this: routing and weights are written by copies and by the
// routing kernel, which fences and never lets its dependents begin, so that what reads them begins
// after they are in L2, with an L1 that holds no line from before. Loads that bypass L1 would need
// only the fence: they cost up to 13 % (benches/record/designs.md).
#pragma once

namespace aril {

// Waits until all that was enqueued before has ended and is visible.
__device__ __forceinline__ void wait_for_predecessors() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel begin once every block has come here.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

}  // namespace aril
