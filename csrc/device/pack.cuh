// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Packs factors in device memory into the layout of aril_descriptor.
#pragma once

#include <type_traits>

#include "../aril.h"
#include "../ptx/pdl.cuh"
#include "descriptor.cuh"
#include "vec.cuh"

namespace aril::detail {

constexpr int kPackThreads = 256;
// Rows of cores of a thread, whose loads are in flight together.
constexpr int kPackRows = 2;
constexpr int kPackBlockRows = kPackThreads * kPackRows;

// A row of a core: eight consecutive elements of a row of the source.
struct CoreRow {
  int row;
  int col;
  int target;  // among the rows of the cores
};

// Row `i` of the cores of A, in the order of the target: a warp reads 64 bytes of eight rows.
__device__ __forceinline__ CoreRow row_of_a(int i, int rank_tiles) {
  constexpr int kCores = ARIL_K_TILE / ARIL_CORE;
  const int core = i / ARIL_CORE, tile = core / kCores;
  return {tile % rank_tiles * ARIL_RANK_TILE + i % ARIL_CORE,
          tile / rank_tiles * ARIL_K_TILE + core % kCores * ARIL_CORE, i};
}

// The same of B, in an order in which a warp reads and writes few lines: that of the target would
// read 16 bytes of 32 rows. Here, up to four rank tiles, which are side by side in the source,
// alternate with cores.
__device__ __forceinline__ CoreRow row_of_b(int i, int rank_tiles) {
  constexpr int kCores = ARIL_OUT_TILE / ARIL_CORE;
  const int group = rank_tiles % 4 == 0 ? 4 : rank_tiles % 2 == 0 ? 2 : 1;
  const int n = i % ARIL_CORE, cores = i / ARIL_CORE / group, in_group = i / ARIL_CORE % group;
  const int core = cores % kCores, groups = cores / kCores * group;
  const int rank_tile = groups % rank_tiles + in_group, out_tile = groups / rank_tiles;
  const int unit = core / 4, j = core % 4;
  return {out_tile * ARIL_OUT_TILE + unit * ARIL_OUT_UNIT + n / 2 * 8 + 2 * j + n % 2,
          rank_tile * ARIL_RANK_TILE, ((groups + in_group) * kCores + core) * ARIL_CORE + n};
}

// The same of an embedding's A, whose rows lie one after the other.
__device__ __forceinline__ CoreRow row_of_embedding_a(int i, int rank_tiles) {
  return {i / rank_tiles, i % rank_tiles * ARIL_RANK_TILE, i};
}

__device__ __forceinline__ CoreRow row_of(int kind, int i, int rank_tiles) {
  if (kind == ARIL_PACK_EMBEDDING_A) return row_of_embedding_a(i, rank_tiles);
  return kind == ARIL_PACK_B ? row_of_b(i, rank_tiles) : row_of_a(i, rank_tiles);
}

// The elements of a row of a core.
template <typename T>
struct alignas(16) Elements {
  T values[ARIL_CORE];
};

// Rounds to nearest, ties to even.
template <typename T, typename S>
__device__ __forceinline__ T convert(S value) {
  if constexpr (std::is_same_v<T, S>) {
    return value;
  } else {
    return from_float<T>(to_float(value));
  }
}

template <typename S>
__device__ __forceinline__ Elements<S> load_row(const aril_pack_factor& factor, const CoreRow& at,
                                                bool aligned) {
  const S* const source = static_cast<const S*>(factor.source) + at.row * factor.row_stride +
                          at.col * factor.col_stride;
  const int valid = at.row < factor.rows ? factor.cols - at.col : 0;
  if (aligned && valid >= ARIL_CORE) return *reinterpret_cast<const Elements<S>*>(source);
  Elements<S> row;
#pragma unroll
  for (int i = 0; i < ARIL_CORE; ++i) {
    row.values[i] = i < valid ? source[i * factor.col_stride] : from_float<S>(0.0f);
  }
  return row;
}

// The factor of this block: the last one that begins at or before it.
__device__ __forceinline__ int factor_of_block(const aril_pack_args& args) {
  int first = 0, last = args.num_factors - 1;
  while (first < last) {
    const int middle = (first + last + 1) / 2;
    if (args.factors[middle].first_block <= static_cast<int>(blockIdx.x)) {
      first = middle;
    } else {
      last = middle - 1;
    }
  }
  return first;
}

template <typename T, typename S>
__global__ void __launch_bounds__(kPackThreads)
    pack_kernel(const __grid_constant__ aril_pack_args args) {
  // Only launches of this kernel are in front of it, behind a memset, and none writes what another
  // reads: those of a call run side by side.
  if (is_first_block()) wait_for_predecessors();
  launch_dependents();
  const aril_pack_factor& factor = args.factors[factor_of_block(args)];
  const int kind = factor.kind;
  const int rank_tiles = ceil_div(kind == ARIL_PACK_A ? factor.rows : factor.cols, ARIL_RANK_TILE);
  const bool aligned =
      factor.col_stride == 1 && is_aligned(static_cast<const S*>(factor.source), factor.row_stride);
  const int begin = (static_cast<int>(blockIdx.x) - factor.first_block) * kPackBlockRows +
                    static_cast<int>(threadIdx.x);
  Elements<S> rows[kPackRows];
  int targets[kPackRows];
#pragma unroll
  for (int k = 0; k < kPackRows; ++k) {
    const int i = begin + k * kPackThreads;
    if (i >= factor.core_rows) continue;
    const CoreRow at = row_of(kind, i, rank_tiles);
    targets[k] = at.target;
    rows[k] = load_row<S>(factor, at, aligned);
  }
  // Zero, or NaN once an element is not finite.
  float zero = 0.0f;
#pragma unroll
  for (int k = 0; k < kPackRows; ++k) {
    const int i = begin + k * kPackThreads;
    if (i >= factor.core_rows) continue;
    Elements<T> packed;
#pragma unroll
    for (int e = 0; e < ARIL_CORE; ++e) {
      packed.values[e] = convert<T>(rows[k].values[e]);
      zero = fmaf(to_float(packed.values[e]), 0.0f, zero);
    }
    static_cast<Elements<T>*>(factor.target)[targets[k]] = packed;
  }
  if (isnan(zero)) atomicMin(args.not_finite, static_cast<uint32_t>(factor.number));
}

}  // namespace aril::detail
