// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Integer and vector arithmetic that host and device share.
#pragma once

#include <stdint.h>

namespace aril::detail {

__host__ __device__ __forceinline__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// A divisor that the host prepares, for dividends in [0, 2^31). A division on the device takes 40
// dependent instructions, and a block's first load waits for those that its index needs.
// T. Granlund, P. L. Montgomery: Division by Invariant Integers using Multiplication, PLDI 1994.
struct Divisor {
  int value;
  uint32_t multiplier;
  int shift;

  Divisor() = default;
  explicit Divisor(int divisor) : value(divisor), multiplier(0), shift(0) {
    int bits = 31;
    for (; int64_t{1} << (bits - 31) < divisor; ++bits) {}
    multiplier = static_cast<uint32_t>(((uint64_t{1} << bits) + divisor - 1) / divisor);
    shift = bits - 32;
  }

  __host__ __device__ __forceinline__ operator int() const { return value; }

  __device__ __forceinline__ int quotient(int dividend) const {
    return value == 1 ? dividend : static_cast<int>(__umulhi(dividend, multiplier) >> shift);
  }
};

__device__ __forceinline__ int ceil_div(int a, const Divisor& b) {
  return b.quotient(a + b.value - 1);
}

// Whether every row of a matrix starts at a multiple of 16 bytes.
template <typename T>
__device__ __forceinline__ bool is_aligned(const T* rows, int64_t stride) {
  return (reinterpret_cast<uintptr_t>(rows) | (stride * sizeof(T))) % 16 == 0;
}

__device__ __forceinline__ float2 operator+(const float2& a, const float2& b) {
  return make_float2(a.x + b.x, a.y + b.y);
}

__device__ __forceinline__ float4 operator+(const float4& a, const float4& b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

// Rounds each product: the compiler may not fuse it with a following addition.
__device__ __forceinline__ float4 operator*(const float4& a, float factor) {
  return make_float4(__fmul_rn(a.x, factor), __fmul_rn(a.y, factor), __fmul_rn(a.z, factor),
                     __fmul_rn(a.w, factor));
}

}  // namespace aril::detail
