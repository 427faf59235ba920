// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The sigmoid of activations. NaN gives NaN.
#pragma once

#include "../ptx/approximate.cuh"

namespace aril::detail {

// Within a few roundings of f32. Explicit roundings keep the compiler from contracting differently
// in different kernels, so that all give the same bits.
__device__ __forceinline__ float sigmoid(float x) { return 1.0f / __fadd_rn(1.0f, expf(-x)); }

// With a relative error below (|x| + 4) * 2^-23, in a quarter of the instructions: for results that
// are rounded to 16 bits.
__device__ __forceinline__ float approximate_sigmoid(float x) {
  return approximate_reciprocal(1.0f + approximate_exp2(x * -1.442695041f));
}

}  // namespace aril::detail
