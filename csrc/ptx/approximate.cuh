// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Functions that the hardware approximates in one instruction, with an error of about 2^-22.
// Subnormal arguments and results count as zero.
#pragma once

namespace aril {

// 2^x
__device__ __forceinline__ float approximate_exp2(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}

// 1 / x; zero of infinity.
__device__ __forceinline__ float approximate_reciprocal(float x) {
  float reciprocal;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(x));
  return reciprocal;
}

}  // namespace aril
