// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Access to factors in f32, element by element.
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

}  // namespace aril::detail
