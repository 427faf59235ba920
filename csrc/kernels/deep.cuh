// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Expand of more than ARIL_FEW_TOKENS tokens at ranks beyond ARIL_STAGED_RANK: 16 tokens of a wide
// tile after the other, as with few tokens.
#pragma once

#include "few.cuh"

namespace aril::detail {

template <typename T, typename V>
__device__ __forceinline__ void deep_expand(const Tile& tile, const aril_descriptor& module,
                                            const float* scales, int first_out, int outs,
                                            int num_outs, T* y, int64_t y_stride, int num_tokens,
                                            unsigned char* shared, const V& v) {
  for (int first = 0; first < tile.count; first += ARIL_TOKENS_PER_TILE) {
    if (first > 0) __syncthreads();
    Tile part = tile;
    part.tokens += first;
    part.count = min(tile.count - first, ARIL_TOKENS_PER_TILE);
    few_expand<T, false>(part, module, scales, first_out, outs, num_outs, y, y_stride, num_tokens,
                         shared, [&] { return v; });
  }
}

template <typename T>
__global__ void __launch_bounds__(kFewThreads, 2)
    expand_deep_kernel(const __grid_constant__ aril_linear_args p, int out_blocks) {
  extern __shared__ __align__(128) unsigned char shared[];
  let_dependents_begin();
  const Tile tile(p, blockIdx.x / out_blocks);
  const OutBlock block(p, blockIdx.x % out_blocks, p.outs_per_block);
  const aril_descriptor module = module_of(p.weights, tile.slot, block.slice);
  if (tile.count == 0 || module.rank == 0) {
    if (is_first_block()) wait_for_predecessors();
    return;
  }
  deep_expand<T>(tile, module, p.routing.scales, block.index * p.outs_per_block, p.outs_per_block,
                 p.out_features[block.slice], static_cast<T*>(p.y) + block.first_column, p.y_stride,
                 p.num_tokens, shared, PlaneSums(p, block.slice));
}

}  // namespace aril::detail
