// SPDX-License-Identifier: MIT OR Apache-2.0
//
// What the slots of a batch have in common: the greatest rank, and whether a slot's experts all
// have the same A, or the same B.
//
// The rank sizes shrink, which the table's capacity would size for adapters that are not there. An
// operation whose x has a row per token exploits a shared A (A x once per token, not per route);
// one whose x has a row per route exploits a shared B (tiles by token instead of by expert). If all
// slots of the batch share in all slices, nothing is left to do by expert.
#pragma once

#include "../aril.h"
#include "../device/descriptor.cuh"
#include "routes.cuh"

namespace aril::detail {

// Whether a slot shares the factor that the operation can exploit, by what the experts of a slice
// have in common.
__device__ __forceinline__ bool shares(const aril_experts_args& p, const aril_descriptor& common) {
  return common.rank > 0 && common.rank <= p.weights.max_rank &&
         (p.from_tokens ? common.a : common.b) != nullptr;
}

// For the batch's slots, by a warp: each lane looks at some token tiles.
class WarpSharing {
 public:
  int tokens = 0, tiles = 0;  // of the batch

  // Without `matters` nothing is loaded, and the answers are not meaningful.
  __device__ __forceinline__ WarpSharing(const aril_experts_args& p, bool matters) {
    if (!matters) return;
    tokens = routed_tokens(p.routing, p.num_tokens);
    tiles = *p.routing.tiles.count;
    for (int i = threadIdx.x % 32; i < p.plan.max_tiles; i += 32) {
      // Count and tile are loaded independently, so entries beyond the count are read.
      const int slot = p.routing.tiles.all[i].slot;
      if (i >= tiles || slot < 0 || slot >= p.weights.num_slots) continue;
      for (int slice = 0; slice < p.num_slices; ++slice) {
        // Not module_of(): above the table's rank, others of the slot may be within it.
        const aril_descriptor common =
            p.weights.table[int64_t{slot} * p.weights.num_entries + slice];
        const bool is_shared = shares(p, common);
        rank_ = max(rank_, common.rank);
        any_ = any_ || is_shared;
        all_ = all_ && is_shared;
      }
    }
  }

  // The most rank tiles that a module of a slice has.
  __device__ __forceinline__ int rank_tiles(const aril_experts_args& p) const {
    const int rank = __reduce_max_sync(0xffffffffu, rank_);
    return ceil_div(min(rank, p.weights.max_rank), ARIL_RANK_TILE);
  }

  __device__ __forceinline__ bool any() const { return __any_sync(0xffffffffu, any_); }
  __device__ __forceinline__ bool all() const { return __all_sync(0xffffffffu, all_); }

 private:
  // Of the lane's tiles.
  int rank_ = 0;
  bool any_ = false, all_ = true;
};

// For the batch's slots, by a block: each thread looks at some wide tiles of tokens.
struct BlockSharing {
  bool any, all;

  __device__ __forceinline__ BlockSharing(const aril_experts_args& p, int token_tiles) {
    bool has_any = false, has_all = true;
    for (int i = threadIdx.x; i < token_tiles; i += blockDim.x) {
      const int slot = p.routing.wide_tiles.all[i].slot;
      if (slot < 0 || slot >= p.weights.num_slots) continue;
      for (int slice = 0; slice < p.num_slices; ++slice) {
        const bool is_shared = shares(p, module_of(p.weights, slot, slice));
        has_any = has_any || is_shared;
        has_all = has_all && is_shared;
      }
    }
    any = __syncthreads_or(has_any);
    all = __syncthreads_and(has_all);
  }
};

}  // namespace aril::detail
