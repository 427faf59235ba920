// SPDX-License-Identifier: MIT OR Apache-2.0
//
// What the slots of a batch have in common: the greatest rank, and whether a slot's experts all have
// the same A, or the same B.
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

// For the batch's slots, by a warp: each lane looks at some slices of some token tiles.
class WarpSharing {
 public:
  int tokens = 0, tiles = 0;  // of the batch

  // Requests the tiles. Without `matters` nothing is loaded, and the answers are not meaningful.
  __device__ __forceinline__ WarpSharing(const aril_experts_args& p, bool matters)
      : matters_(matters) {
    if (!matters) return;
    tokens = routed_tokens(p.routing, p.num_tokens);
    tiles = *p.routing.tiles.count;
    // Count and first tile are loaded independently, so entries beyond the count are read.
    const int tile = lane() / p.num_slices;
    if (tile < p.max_tiles) first_slot_ = p.routing.tiles.all[tile].slot;
  }

  // Requests the modules, before the answers are asked for. The lane's first is waited for by the
  // answer: no branch makes the compiler wait for it here.
  __device__ __forceinline__ void look(const aril_experts_args& p) {
    if (!matters_) return;
    const int last = min(tiles, p.max_tiles) * p.num_slices;
    const auto is_module = [&](int i, int slot) {
      return i < last && slot >= 0 && slot < p.weights.num_slots;
    };
    const auto module = [&](int i, int slot) {
      return p.weights.table + int64_t{slot} * p.weights.num_entries + i % p.num_slices;
    };
    has_first_ = is_module(lane(), first_slot_);
    first_ = *(has_first_ ? module(lane(), first_slot_) : &kNoModule);
#pragma unroll 1
    for (int i = lane() + 32; i < last; i += 32) {
      const int slot = p.routing.tiles.all[i / p.num_slices].slot;
      if (!is_module(i, slot)) continue;
      const aril_descriptor common = *module(i, slot);
      rank_ = max(rank_, common.rank);
      any_ = any_ || shares(p, common);
      all_ = all_ && shares(p, common);
    }
  }

  // The most rank tiles that a module of a slice has. Experts of a higher rank than the table's
  // have no module, but others of the slot may.
  __device__ __forceinline__ int rank_tiles(const aril_experts_args& p) const {
    const int rank = __reduce_max_sync(0xffffffffu, max(rank_, first_.rank));
    return ceil_div(min(rank, p.weights.max_rank), ARIL_RANK_TILE);
  }

  __device__ __forceinline__ bool any(const aril_experts_args& p) const {
    return __any_sync(0xffffffffu, any_ || shares(p, first_));
  }

  __device__ __forceinline__ bool all(const aril_experts_args& p) const {
    return __all_sync(0xffffffffu, all_ && (!has_first_ || shares(p, first_)));
  }

 private:
  __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }

  bool matters_, has_first_ = false;
  int first_slot_ = -1;
  aril_descriptor first_ = {};
  // Of the lane's others.
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
