// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Shared factors: slots whose experts all have the same A, or the same B.
//
// An operation whose x has a row per token exploits a shared A (A x once per token, not per route);
// one whose x has a row per route exploits a shared B (tiles by token instead of by expert). If all
// slots of the batch share in all slices, nothing is left to do by expert.
#pragma once

#include "../aril.h"
#include "../device/descriptor.cuh"
#include "routes.cuh"

namespace aril::detail {

// Adds a slot to the answers whether any, and all, slots share the factor that the operation can
// exploit.
__device__ __forceinline__ void add_slot(const aril_experts_args& p, int slot, bool& any,
                                         bool& all) {
  for (int slice = 0; slice < p.num_slices; ++slice) {
    const aril_descriptor shared = module_of(p.weights, slot, slice);
    const bool shares = shared.rank > 0 && (p.from_tokens ? shared.a : shared.b) != nullptr;
    any = any || shares;
    all = all && shares;
  }
}

// For the batch's slots, by a warp: each lane looks at some token tiles.
struct WarpSharing {
  int tokens = 0, tiles = 0;  // of the batch
  bool lane_any = false, lane_all = true;

  // Without `matters` nothing is loaded, and the answers are not meaningful.
  __device__ __forceinline__ WarpSharing(const aril_experts_args& p, bool matters) {
    if (!matters) return;
    tokens = routed_tokens(p.routing, p.num_tokens);
    tiles = *p.routing.tiles.count;
    for (int i = threadIdx.x % 32; i < p.max_tiles; i += 32) {
      // Count and tile are loaded independently, so entries beyond the count are read.
      const int slot = p.routing.tiles.all[i].slot;
      if (i >= tiles || slot < 0 || slot >= p.weights.num_slots) continue;
      add_slot(p, slot, lane_any, lane_all);
    }
  }

  __device__ __forceinline__ bool any() const { return __any_sync(0xffffffffu, lane_any); }
  __device__ __forceinline__ bool all() const { return __all_sync(0xffffffffu, lane_all); }
};

// For the batch's slots, by a block: each thread looks at some wide tiles of tokens.
struct BlockSharing {
  bool any, all;

  __device__ __forceinline__ BlockSharing(const aril_experts_args& p, int token_tiles) {
    bool has_any = false, has_all = true;
    for (int i = threadIdx.x; i < token_tiles; i += blockDim.x) {
      const int slot = p.routing.wide_tiles.all[i].slot;
      if (slot < 0 || slot >= p.weights.num_slots) continue;
      add_slot(p, slot, has_any, has_all);
    }
    any = __syncthreads_or(has_any);
    all = __syncthreads_and(has_all);
  }
};

}  // namespace aril::detail
