// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Expand of more than ARIL_FEW_TOKENS tokens at ranks beyond ARIL_STAGED_RANK: 16 tokens of a wide
// tile after the other, as with few tokens.
#pragma once

#include "few.cuh"

namespace aril::detail {

template <typename T, typename V>
__device__ __forceinline__ void deep_expand(const Tile& tile, const aril_descriptor& module,
                                            const float* scales, const BlockOuts<T>& outs,
                                            int num_tokens, unsigned char* shared, const V& v) {
  for (int first = 0; first < tile.count; first += ARIL_TOKENS_PER_TILE) {
    if (first > 0) __syncthreads();
    Tile part = tile;
    part.tokens += first;
    part.count = min(tile.count - first, ARIL_TOKENS_PER_TILE);
    few_expand<T, false>(part, module, scales, outs, num_tokens, shared, [&] { return v; });
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
  deep_expand<T>(tile, module, p.routing.scales, outs, p.num_tokens, shared, PlaneSums(p, slice));
}

}  // namespace aril::detail
