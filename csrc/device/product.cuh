// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The product B v on tensor cores, in bf16 and f16, and its addition to y.
//
// v enters as kTerms bf16 terms: v rounded to bf16, and the rounded remainder, which together lose
// less than 2^-17 of v. B, whose elements are finite, enters as it is in bf16, and as two exact bf16
// terms in f16. v may be infinite; a delta is then infinite or NaN as B v is. Sums are f32; y is
// rounded once, when it is stored. All kernels multiply in the same order (steps of 16 ranks, the
// terms of a step one after the other), so they give the same bits.
//
// Shapes: a unit is 32 outputs (mma.sync, one warp), an output tile is two units (wgmma, one
// warpgroup). The rows of the product are tokens or routes.
#pragma once

#include <type_traits>

#include "../ptx/mma.cuh"
#include "../ptx/wgmma.cuh"
#include "descriptor.cuh"
#include "vec.cuh"

namespace aril::detail {

constexpr int kRanksPerStep = 16;  // of one product instruction
constexpr int kTerms = 2;          // of v
// Bytes of one term of v in a step, for the rows of a wide tile.
constexpr int kTermBytes = ARIL_WIDE_TILE * kRanksPerStep * 2;

__host__ __device__ __forceinline__ int rank_steps(const aril_weights& weights) {
  return ceil_div(weights.max_rank, kRanksPerStep);
}

// The two terms of each of two finite numbers: high = bf16(b), low = bf16(b - high).
__device__ __forceinline__ void split_finite(float b0, float b1, uint32_t& high, uint32_t& low) {
  const __nv_bfloat162 rounded = __floats2bfloat162_rn(b0, b1);
  const float2 back = __bfloat1622float2(rounded);
  const __nv_bfloat162 rest = __floats2bfloat162_rn(b0 - back.x, b1 - back.y);
  // Copies to variables, not to memory whose alignment memcpy would not know.
  uint32_t bits[2];
  memcpy(&bits[0], &rounded, sizeof(rounded));
  memcpy(&bits[1], &rest, sizeof(rest));
  high = bits[0];
  low = bits[1];
}

// All bits of those of two bf16 numbers that are finite.
__device__ __forceinline__ uint32_t finite_mask(uint32_t pair) {
  constexpr uint32_t kInfinities = 0x7f807f80u;
  __nv_bfloat162 values, infinities;
  memcpy(&values, &pair, sizeof(pair));
  memcpy(&infinities, &kInfinities, sizeof(kInfinities));
  return __hlt2_mask(__habs2(values), infinities);
}

// The two terms of v0 and of v1, which may be infinite, or too large for bf16: then high is infinite
// and low is zero, so that their sum is infinite. (Infinity minus itself is NaN.)
__device__ __forceinline__ void to_bf16_terms(float v0, float v1, uint32_t& high, uint32_t& low) {
  split_finite(v0, v1, high, low);
  low &= finite_mask(high);
}

// Both terms of up to 8 rows of v as one operand of mma_m16n8k16: rows 0 to 7 hold the high terms,
// rows 8 to 15 the low ones. Lane (g, q) passes ranks 2q, 2q + 1, 2q + 8 and 2q + 9 of row g.
__device__ __forceinline__ uint4 stacked_terms(const float4& v) {
  uint4 terms;
  to_bf16_terms(v.x, v.y, terms.x, terms.y);
  to_bf16_terms(v.z, v.w, terms.z, terms.w);
  return terms;
}

// Stores ranks r and r + 1 of row t to the operands [kTerms][32 lanes] of 16 rows and 16 ranks.
__device__ __forceinline__ void store_terms(uint4* operands, int t, int r, float2 v) {
  uint32_t* word =
      reinterpret_cast<uint32_t*>(operands + t % 8 * 4 + r % 8 / 2) + r / 8 * 2 + t / 8;
  to_bf16_terms(v.x, v.y, word[0], word[32 * 4]);
}

// The two terms of two elements of B in f16.
__device__ __forceinline__ void split_half2(uint32_t b, uint32_t& high, uint32_t& low) {
  __half2 values;
  memcpy(&values, &b, sizeof(b));
  const float2 wide = __half22float2(values);
  split_finite(wide.x, wide.y, high, low);
}

// c += v b, summed over the operands, which hold the terms of v.
template <typename T, int kOperands>
__device__ __forceinline__ void multiply_terms(float (&c)[4], const uint4 (&v)[kOperands],
                                               uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
#pragma unroll
    for (int term = 0; term < kOperands; ++term) {
      mma_m16n8k16<T>(c, v[term], b0, b1);
    }
  } else {
    uint32_t high[2], low[2];
    split_half2(b0, high[0], low[0]);
    split_half2(b1, high[1], low[1]);
    multiply_terms<__nv_bfloat16>(c, v, high[0], high[1]);
    // An infinite v is in the first product. B's low terms may be zero, and zero times infinity NaN.
    uint4 finite[kOperands];
#pragma unroll
    for (int i = 0; i < kOperands; ++i) {
      finite[i] = make_uint4(v[i].x & finite_mask(v[i].x), v[i].y & finite_mask(v[i].y),
                             v[i].z & finite_mask(v[i].z), v[i].w & finite_mask(v[i].w));
    }
    multiply_terms<__nv_bfloat16>(c, finite, low[0], low[1]);
  }
}

// deltas += B v of a unit and a step: b0 and b1 are the four cores of the step's rank tiles.
template <typename T, int kOperands>
__device__ __forceinline__ void multiply_unit(float (&deltas)[4][4], const uint4 (&v)[kOperands],
                                              const uint4& b0, const uint4& b1) {
  multiply_terms<T>(deltas[0], v, b0.x, b1.x);
  multiply_terms<T>(deltas[1], v, b0.y, b1.y);
  multiply_terms<T>(deltas[2], v, b0.z, b1.z);
  multiply_terms<T>(deltas[3], v, b0.w, b1.w);
}

// The same with B in shared memory: `row` is the lane's row of ldmatrix, which reads two cores of
// either rank tile, so that those of a product are in adjacent registers.
template <typename T, int kOperands>
__device__ __forceinline__ void multiply_unit_of_tiles(float (&deltas)[4][4],
                                                       const uint4 (&v)[kOperands], const void* row,
                                                       bool has_second) {
#pragma unroll
  for (int j = 0; j < 4; j += 2) {
    const uint4 cores = ldmatrix_x4(static_cast<const char*>(row) + j * (kCoreElems * 2));
    multiply_terms<T>(deltas[j], v, cores.x, has_second ? cores.y : 0);
    multiply_terms<T>(deltas[j + 1], v, cores.z, has_second ? cores.w : 0);
  }
}

// The same for at most 8 rows, with B in shared memory: b is the unit's first rank tile of the
// step, and the second follows `second_bytes` later. Without a second rank tile v is zero there,
// and `second_bytes` may be 0.
template <typename T>
__device__ __forceinline__ void multiply_unit_staged(float (&deltas)[4][4], const uint4& stacked,
                                                     const unsigned char* b, int second_bytes) {
  const int lane = threadIdx.x % 32;
  // Rows 8 to 15 of the operands are not needed: each operand has the other term there.
  const uint4 operands[kTerms] = {stacked, make_uint4(stacked.y, stacked.x, stacked.w, stacked.z)};
  const unsigned char* const row =
      b + lane / 16 * (kCoreElems * 2) + lane % 8 * 16 + (lane / 8 % 2 != 0 ? second_bytes : 0);
  multiply_unit_of_tiles<T>(deltas, operands, row, true);
}

// A unit's B of one step, held in registers: [rank tiles][cores].
struct UnitCores {
  uint32_t words[2][4];

  // `b` points to the lane's first word of the step's first rank tile, four bytes per lane.
  __device__ __forceinline__ void load(const char* b, bool has_second) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool is_there = half == 0 || has_second;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        words[half][j] = is_there ? load_once(b + half * kBTileBytes + j * kCoreElems * 2) : 0;
      }
    }
  }

  // deltas += B v. `stacked` holds both terms, so rows 8 to 15 of the deltas are the low terms'.
  template <typename T>
  __device__ __forceinline__ void multiply(float (&deltas)[4][4], const uint4 (&stacked)[1]) const {
#pragma unroll
    for (int j = 0; j < 4; ++j) multiply_terms<T>(deltas[j], stacked, words[0][j], words[1][j]);
  }
};

// Where B of the unit that begins with output `out` has the first rank tile of a step.
__device__ __forceinline__ const char* unit_at(const char* b, int out, int rank_tiles, int step) {
  return b + (int64_t{out / ARIL_OUT_TILE} * rank_tiles + step * 2) * kBTileBytes +
         out % ARIL_OUT_TILE / ARIL_OUT_UNIT * kUnitBytes;
}

// The delta of a row without a module: added to a zero, it keeps its sign.
constexpr float kNoDelta = -0.0f;

template <int kCount>
__device__ __forceinline__ void fill(float (&sums)[kCount][4], float value) {
#pragma unroll
  for (int c = 0; c < kCount; ++c) {
#pragma unroll
    for (int e = 0; e < 4; ++e) sums[c][e] = value;
  }
}

template <int kCount>
__device__ __forceinline__ void set_zero(float (&sums)[kCount][4]) {
  fill(sums, 0.0f);
}

// deltas = B v of a wide tile and an output tile, by a warpgroup: wgmma on sm_90a in bf16,
// otherwise mma.sync. In shared memory, `v` is [steps][kTerms][2][8] cores, `b` is the output tile.
template <typename T>
__device__ __forceinline__ void multiply_out_tile(float (&deltas)[8][4], const unsigned char* v,
                                                  const unsigned char* b, int rank_tiles) {
  const int steps = ceil_div(rank_tiles, 2);
  set_zero(deltas);
#if __CUDA_ARCH_FEAT_SM90_ALL
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    uint64_t terms = core_descriptor(v, 1024, 128), cores = core_descriptor(b, kBTileBytes, 128);
    fence_operands(deltas);
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      // Without a second rank tile v is zero there, so the operand may repeat the first one.
      if (2 * step + 1 == rank_tiles) cores = core_descriptor(b + 2 * step * kBTileBytes, 0, 128);
      wgmma_fence();
#pragma unroll
      for (int term = 0; term < kTerms; ++term) {
        wgmma_k16<T>(deltas, terms, cores, true);
        terms += kTermBytes >> 4;
      }
      cores += 2 * kBTileBytes >> 4;
      wgmma_commit();
    }
    wgmma_wait();
    fence_operands(deltas);
    return;
  }
#endif
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    uint4 terms[kTerms];
#pragma unroll
    for (int term = 0; term < kTerms; ++term) {
      terms[term] = ldmatrix_x4(v + (step * kTerms + term) * kTermBytes + lane / 16 * 1024 +
                                warp * 256 + lane % 16 * 16);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const unsigned char* unit = b + 2 * step * kBTileBytes + half * kUnitBytes + lane * 16;
      const uint4 b0 = ldmatrix_x4(unit);
      uint4 b1 = make_uint4(0, 0, 0, 0);
      if (2 * step + 1 < rank_tiles) b1 = ldmatrix_x4(unit + kBTileBytes);
      multiply_terms<T>(deltas[half * 4 + 0], terms, b0.x, b1.x);
      multiply_terms<T>(deltas[half * 4 + 1], terms, b0.y, b1.y);
      multiply_terms<T>(deltas[half * 4 + 2], terms, b0.z, b1.z);
      multiply_terms<T>(deltas[half * 4 + 3], terms, b0.w, b1.w);
    }
  }
}

// Eight adjacent outputs of a row, of which `valid` exist.
template <typename T>
struct OutVec {
  uint4 bits = {};

  // Whether the eight move as 16 bytes. Otherwise add() reads y itself: a branch at the load would
  // make the compiler wait for the load where the paths join.
  __device__ __forceinline__ static bool whole(int valid, bool aligned) {
    return aligned && valid >= Vec<T>::kSize;
  }

  __device__ __forceinline__ void load(const T* y, int valid, bool aligned) {
    if (whole(valid, aligned)) bits = *reinterpret_cast<const uint4*>(y);
  }

  // Adds a lane's eight deltas of row g (half 0) or g + 8 (half 1), and stores. `overwrites` takes
  // y for zero. Outputs that do not move as 16 bytes are `step` elements apart.
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
    // All loads before the first store, which the compiler may not move them across.
    T bases[Vec<T>::kSize];
#pragma unroll
    for (int i = 0; i < Vec<T>::kSize; ++i) {
      bases[i] = T(0.0f);
      if (!overwrites && i < valid) bases[i] = y[i * step];
    }
#pragma unroll
    for (int i = 0; i < Vec<T>::kSize; ++i) {
      if (i < valid) y[i * step] = from_float<T>(to_float(bases[i]) + delta(i));
    }
  }
};

}  // namespace aril::detail
