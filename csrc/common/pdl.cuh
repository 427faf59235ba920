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
// before it. Before it, this relies on L2: whoever writes routing or weights ends with a fence, by
// which its stores have come there, and whoever reads them early reads there, by load_early() or by
// a copy to shared memory. A plain load may hit a line that its multiprocessor's L1 has kept from
// an earlier step.
#pragma once

#include <stdint.h>

#include <type_traits>

#include "../aril.h"

namespace aril {

// Waits until all that was enqueued before has ended and is visible.
__device__ __forceinline__ void wait_for_predecessors() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Loads what may be read before the wait, from L2 where kernels begin early.
template <typename T>
__device__ __forceinline__ T load_early(const T* pointer) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  using Bits = std::conditional_t<sizeof(T) == 4, unsigned int, unsigned long long>;
#if __CUDA_ARCH__ >= 900
  const Bits bits = __ldcg(reinterpret_cast<const Bits*>(pointer));
  T value;
  memcpy(&value, &bits, sizeof(value));
  return value;
#else
  return *pointer;
#endif
}

template <>
__device__ __forceinline__ aril_tile load_early(const aril_tile* pointer) {
  return {load_early(&pointer->slot), load_early(&pointer->begin), load_early(&pointer->count)};
}

template <>
__device__ __forceinline__ aril_descriptor load_early(const aril_descriptor* pointer) {
  return {load_early(&pointer->a), load_early(&pointer->b), load_early(&pointer->rank),
          load_early(&pointer->scaling)};
}

// Lets the next kernel begin once every block has come here.
__device__ __forceinline__ void let_dependents_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

}  // namespace aril
