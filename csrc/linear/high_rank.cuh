// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Expand of more than ARIL_FEW_TOKENS tokens at ranks beyond ARIL_STAGED_RANK: 16 tokens of a wide
// tile after the other, as with few tokens.
#pragma once

#include "small_m.cuh"

namespace aril::detail {

template <typename T, typename Args, typename V>
__device__ __forceinline__ void deep_expand(const Tile& tile, const aril_descriptor& module,
                                            const BlockOuts<T>& outs, const Args& p,
                                            unsigned char* shared, const V& v) {
  for (int first = 0; first < tile.count; first += ARIL_TOKENS_PER_TILE) {
    if (first > 0) __syncthreads();
    Tile part = tile;
    part.tokens += first;
    part.count = min(tile.count - first, ARIL_TOKENS_PER_TILE);
    few_expand<T, false>(part.count, part.expand_rows(module, p), module, outs, shared,
                         [&] { return v; });
  }
}

template <typename T>
__global__ void __launch_bounds__(kFewThreads, 2)
    expand_deep_kernel(const __grid_constant__ aril_linear_args p, int out_blocks) {
  extern __shared__ __align__(128) unsigned char shared[];
  let_dependents_begin();
  const Tile tile(p, blockIdx.x / out_blocks);
  int slice;
  const BlockOuts<T> outs(p, blockIdx.x % out_blocks, p.outs_per_block, slice);
  const aril_descriptor module = module_of(p.weights, tile.slot, slice);
  if (!outs.begin(tile, module, p.num_tokens)) return;
  deep_expand<T>(tile, module, outs, p, shared, PlaneSums(p, slice));
}

}  // namespace aril::detail
