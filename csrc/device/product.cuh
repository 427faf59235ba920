// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The arithmetic of expand in bf16 and f16: v enters as two bf16 terms, which leave out less than
// 2^-17 of it; f16's B, too, as two, which are exact. y is rounded once, at the store.
#pragma once

#include <type_traits>

#include "../ptx/mma.cuh"
#include "descriptor.cuh"
#include "vec.cuh"

namespace aril::detail {

constexpr int kRanksPerStep = 16;  // of an instruction
constexpr int kTerms = 2;          // of v

// Two values as bf16, and what that leaves out, as bf16 again.
__device__ __forceinline__ void to_bf16_terms(float v0, float v1, uint32_t& high, uint32_t& low) {
  const __nv_bfloat162 rounded = __floats2bfloat162_rn(v0, v1);
  const float2 back = __bfloat1622float2(rounded);
  const __nv_bfloat162 rest = __floats2bfloat162_rn(v0 - back.x, v1 - back.y);
  memcpy(&high, &rounded, sizeof(high));
  memcpy(&low, &rest, sizeof(low));
}

// c += v b, for all operands that have terms of v.
template <typename T, int kOperands>
__device__ __forceinline__ void mma_terms(float (&c)[4], const uint4 (&v)[kOperands], uint32_t b0,
                                          uint32_t b1) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
#pragma unroll
    for (int term = 0; term < kOperands; ++term) {
      mma_m16n8k16<T>(c, v[term], b0, b1);
    }
  } else {
    uint32_t high[2], low[2];
    const auto half2_to_terms = [](uint32_t b, uint32_t& high, uint32_t& low) {
      __half2 values;
      memcpy(&values, &b, sizeof(b));
      const float2 wide = __half22float2(values);
      to_bf16_terms(wide.x, wide.y, high, low);
    };
    half2_to_terms(b0, high[0], low[0]);
    half2_to_terms(b1, high[1], low[1]);
    mma_terms<__nv_bfloat16>(c, v, high[0], high[1]);
    mma_terms<__nv_bfloat16>(c, v, low[0], low[1]);
  }
}

// Puts ranks r and r + 1 of token t among the operands of 16 tokens and 16 ranks, [terms] of 16
// bytes a lane.
__device__ __forceinline__ void store_v(uint4* operands, int t, int r, float2 v) {
  uint32_t* word =
      reinterpret_cast<uint32_t*>(operands + t % 8 * 4 + r % 8 / 2) + r / 8 * 2 + t / 8;
  to_bf16_terms(v.x, v.y, word[0], word[32 * 4]);
}

// Eight neighbouring outputs of a token, of which `valid` are there.
template <typename T>
struct OutVec {
  uint4 bits = {};

  // Whether they move 16 bytes at a time. Others are read when they are written: a choice here
  // would have every load waited for where its ways meet.
  __device__ __forceinline__ static bool whole(int valid, bool aligned) {
    return aligned && valid >= Vec<T>::kSize;
  }

  __device__ __forceinline__ void load(const T* y, int valid, bool aligned) {
    if (whole(valid, aligned)) bits = *reinterpret_cast<const uint4*>(y);
  }

  // Adds a lane's eight deltas of token g (half 0) or g + 8 (half 1), and stores; `overwrites`
  // takes y for zero. Outputs that do not move together are `step` elements apart.
  __device__ __forceinline__ void add(T* y, int step, const float (&deltas)[4][4], int half,
                                      int valid, bool aligned, bool overwrites) const {
    const auto delta = [&](int i) { return deltas[i / 2][2 * half + i % 2]; };
    if (__builtin_expect(whole(valid, aligned), true)) {
      const Vec<T> base{bits};
      T sums[Vec<T>::kSize];
#pragma unroll
      for (int i = 0; i < Vec<T>::kSize; ++i) sums[i] = from_float<T>(base[i] + delta(i));
      uint4 result;
      memcpy(&result, sums, sizeof(result));
      *reinterpret_cast<uint4*>(y) = result;
      return;
    }
#pragma unroll
    for (int i = 0; i < Vec<T>::kSize; ++i) {
      if (i >= valid) continue;
      T& out = y[i * step];
      out = from_float<T>((overwrites ? 0.0f : to_float(out)) + delta(i));
    }
  }
};

}  // namespace aril::detail
