// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The sigmoid of activations, and SiLU with a product. NaN gives NaN.
#pragma once

#include "../ptx/approximate.cuh"

namespace aril::detail {

// In f32 within a few roundings. Where results are rounded to 16 bits, with a relative error below
// (|x| + 4) * 2^-23, in a quarter of the instructions: the exact functions take longer than the
// bytes. Explicit roundings keep the compiler from contracting differently in different kernels, so
// that all give the same bits.
template <typename T>
__device__ __forceinline__ float sigmoid(float x) {
  if constexpr (sizeof(T) == sizeof(float)) {
    return 1.0f / __fadd_rn(1.0f, expf(-x));
  } else {
    return approximate_reciprocal(__fadd_rn(1.0f, approximate_exp2(x * -1.442695041f)));
  }
}

template <typename T>
__device__ __forceinline__ float silu_mul(float gate, float up) {
  return gate * sigmoid<T>(gate) * up;
}

}  // namespace aril::detail
