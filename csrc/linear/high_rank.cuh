// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Expand of more than ARIL_SMALL_M tokens at ranks above ARIL_STAGED_RANK, where B does not fit in
// shared memory: the block expands a wide tile 16 tokens at a time, as small_m_expand.cuh does.
#pragma once

#include "../device/reduction.cuh"
#include "small_m_expand.cuh"

namespace aril::detail {

template <typename T, typename Args, typename V>
__device__ __forceinline__ void high_rank_expand(const TokenTile& tile,
                                                 const aril_descriptor& module,
                                                 const BlockOuts<T>& outs, const Args& p,
                                                 unsigned char* shared, const V& v) {
  for (int first = 0; first < tile.count; first += ARIL_TOKENS_PER_TILE) {
    if (first > 0) __syncthreads();
    TokenTile rows = tile;
    rows.tokens += first;
    rows.count = min(tile.count - first, ARIL_TOKENS_PER_TILE);
    small_m_expand<T, false>(rows.count, rows.expand_rows(module, p), module, outs, shared,
                             [&] { return v; });
  }
}

template <typename T>
__global__ void __launch_bounds__(kSmallMThreads, 2)
    high_rank_expand_kernel(const __grid_constant__ aril_linear_args p, int out_blocks) {
  extern __shared__ __align__(128) unsigned char shared[];
  launch_dependents();
  const TokenTile tile(p, blockIdx.x / out_blocks);
  int slice;
  const BlockOuts<T> outs(p, blockIdx.x % out_blocks, p.plan.outs_per_block, slice);
  const aril_descriptor module = module_of(p.weights, tile.slot, slice);
  if (!outs.begin(tile, module, p.num_tokens)) return;
  high_rank_expand<T>(tile, module, outs, p, shared, PartialSums(p, slice));
}

}  // namespace aril::detail
