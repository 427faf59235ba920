// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Products with factors in f32, by FMA.
#pragma once

#include "descriptor.cuh"

namespace aril::detail {

constexpr int kF32Threads = 256;  // of a block in all kernels in f32

// Where A's row `rank` starts in f32: features are contiguous within a core, cores kCoreElems
// apart.
__device__ __forceinline__ const float* f32_a_row(const void* a, int rank) {
  return static_cast<const float*>(a) + rank / ARIL_RANK_TILE * kATileElems +
         rank % ARIL_RANK_TILE * ARIL_CORE;
}

// Where the ranks of output `out` of B start in f32: the ranks of a rank tile are contiguous, rank
// tiles kBTileElems apart.
__device__ __forceinline__ const float* f32_b_row(const void* b, int rank_tiles, int out) {
  const int column = out % ARIL_OUT_TILE;
  const int core = column / 32 * 4 + column % 8 / 2, row = column % 32 / 8 * 2 + column % 2;
  return static_cast<const float*>(b) + int64_t{out / ARIL_OUT_TILE} * rank_tiles * kBTileElems +
         core * kCoreElems + row * ARIL_RANK_TILE;
}

// Row `rank` of A x, in all lanes of a warp: each takes every 32nd feature.
__device__ __forceinline__ float multiply_a_row_f32(const void* a, int rank_tiles, int rank,
                                                    const float* x, int in_features) {
  const float* row = f32_a_row(a, rank);
  float sum = 0.0f;
  for (int k = threadIdx.x % 32; k < in_features; k += 32) {
    const int64_t core = int64_t{k / ARIL_K_TILE} * rank_tiles * kATileElems +
                         k % ARIL_K_TILE / ARIL_CORE * kCoreElems;
    sum += row[core + k % ARIL_CORE] * x[k];
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(0xffffffffu, sum, distance);
  }
  return sum;
}

// Copies v of a row, in pairs of ranks, by a block. rows.load2(row, r) gives ranks r and r + 1.
template <typename V>
__device__ __forceinline__ void load_v_f32(float2* v, int rank_tiles, const V& rows, int row) {
  for (int i = threadIdx.x; i < rank_tiles * (ARIL_RANK_TILE / 2); i += kF32Threads) {
    v[i] = rows.load2(row, i * 2);
  }
}

// An output of B v, whose ranks of B start at `b`, as of f32_b_row(). v has zeros beyond the rank.
__device__ __forceinline__ float delta_f32(const float* b, int rank_tiles, const float2* v) {
  constexpr int kPairs = ARIL_RANK_TILE / 2;
  float delta = 0.0f;
#pragma unroll 1
  for (int tile = 0; tile < rank_tiles; ++tile) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const float2 b_pair = reinterpret_cast<const float2*>(b + tile * kBTileElems)[i];
      const float2 v_pair = v[tile * kPairs + i];
      delta += b_pair.x * v_pair.x;
      delta += b_pair.y * v_pair.y;
    }
  }
  return delta;
}

}  // namespace aril::detail
