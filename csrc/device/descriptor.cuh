// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Descriptors: the LoRA module of a slot, and the layout of its factors (see aril_descriptor).
#pragma once

#include "../aril.h"
#include "math.cuh"

namespace aril::detail {

constexpr int kCoreElems = ARIL_CORE * ARIL_CORE;
constexpr int kATileElems = ARIL_RANK_TILE * ARIL_K_TILE;    // of A: a rank tile of one K tile
constexpr int kATileBytes = kATileElems * 2;                 // in 16-bit elements
constexpr int kBTileElems = ARIL_OUT_TILE * ARIL_RANK_TILE;  // of B: a rank tile of an output tile
constexpr int kBTileBytes = kBTileElems * 2;                 // in 16-bit elements
constexpr int kUnitBytes = kBTileBytes / 2;                  // of B: a rank tile of an output unit
static_assert(ARIL_OUT_TILE == 2 * ARIL_OUT_UNIT);

// Rank tiles that the plan allows for.
__host__ __device__ __forceinline__ int rank_tiles(const aril_weights& weights) {
  return ceil_div(weights.max_rank, ARIL_RANK_TILE);
}

// Whether kernels stage B in shared memory. Higher ranks read B in place.
inline bool is_staged(const aril_weights& weights) { return weights.max_rank <= ARIL_STAGED_RANK; }

// The module of `slot` at `entry` of its row in the table. Rank 0: the slot has none.
__device__ __forceinline__ aril_descriptor module_of(const aril_weights& weights, int slot,
                                                     int entry) {
  aril_descriptor module = {};
  if (slot < 0) return module;
  module = weights.table[int64_t{slot} * weights.num_entries + entry];
  if (module.rank < 0 || module.rank > weights.max_rank) module.rank = 0;
  return module;
}

// What stands for the modules of a table without slots.
static __device__ const aril_descriptor kNoModule = {};

// Lane i of a warp gets the module of slice i.
__device__ __forceinline__ aril_descriptor module_of_lane(const aril_weights& weights, int slot,
                                                          int num_slices) {
  const int lane = threadIdx.x % 32;
  return module_of(weights, lane < num_slices ? slot : -1, lane);
}

// The modules of few slots at a layer, loaded beside the routing. A block that waits for its slot
// first asks memory twice, one after the other: in an engine, the base weights have pushed both out
// of L2.
class EarlyModules {
 public:
  // A whole warp calls it. Lane i loads the i-th, the (i + 32)-th, ... module; no branch makes the
  // compiler wait for them.
  __device__ __forceinline__ EarlyModules(const aril_weights& weights, const Divisor& num_slices)
      : few_(int64_t{weights.num_slots} * num_slices <= kMost) {
    const int last = few_ ? weights.num_slots * num_slices - 1 : 0;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      const int index = min(static_cast<int>(threadIdx.x) % 32 + 32 * i, last);
      const int slot = num_slices.quotient(index);
      const aril_descriptor* const module =
          weights.num_slots > 0
              ? weights.table + int64_t{slot} * weights.num_entries + (index - slot * num_slices)
              : &kNoModule;
      a_[i] = reinterpret_cast<uintptr_t>(module->a);
      rank_[i] = module->rank;
    }
  }

  // Lane i gets A and the rank of slice i of a slot.
  __device__ __forceinline__ aril_descriptor of_lane(const aril_weights& weights, int slot,
                                                     int num_slices) const {
    if (!few_) return module_of_lane(weights, slot, num_slices);
    const int lane = threadIdx.x % 32, index = slot * num_slices + lane;
    aril_descriptor module = {};
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      const uintptr_t a = __shfl_sync(0xffffffffu, a_[i], index % 32);
      const int rank = __shfl_sync(0xffffffffu, rank_[i], index % 32);
      if (slot >= 0 && lane < num_slices && index / 32 == i) {
        module.a = reinterpret_cast<const void*>(a);
        module.rank = rank;
      }
    }
    if (module.rank < 0 || module.rank > weights.max_rank) module.rank = 0;
    return module;
  }

 private:
  static constexpr int kOfLane = 2, kMost = 32 * kOfLane;
  bool few_;
  uintptr_t a_[kOfLane];
  int rank_[kOfLane];
};

// One rank tile of A, among those of all slices of a slot, numbered slice by slice.
struct RankTile {
  const char* a;     // its first K tile; null if the slot has fewer rank tiles
  int k_tile_bytes;  // from one K tile to the next
  int slice, first_rank, rank;
  int count;  // rank tiles of the slot

  // Rank tile `index`. A whole warp calls; lane i passes the module of slice i.
  __device__ __forceinline__ RankTile(const aril_descriptor& module, int index) {
    static_assert(ARIL_MAX_SLICES <= 8, "three steps of the scan");
    const int lane = threadIdx.x % 32;
    const int tiles = ceil_div(module.rank, ARIL_RANK_TILE);
    int end = tiles;
#pragma unroll
    for (int distance = 1; distance < ARIL_MAX_SLICES; distance *= 2) {
      const int before = __shfl_up_sync(0xffffffffu, end, distance);
      if (lane >= distance) end += before;
    }
    count = __shfl_sync(0xffffffffu, end, ARIL_MAX_SLICES - 1);
    const unsigned owner = __ballot_sync(0xffffffffu, index >= end - tiles && index < end);
    slice = owner == 0 ? 0 : __ffs(owner) - 1;
    const int tile_in_slice = index - __shfl_sync(0xffffffffu, end - tiles, slice);
    rank = __shfl_sync(0xffffffffu, module.rank, slice);
    a = reinterpret_cast<const char*>(
        __shfl_sync(0xffffffffu, reinterpret_cast<uintptr_t>(module.a), slice));
    if (owner == 0) {
      a = nullptr;
    } else {
      a += tile_in_slice * kATileBytes;
    }
    first_rank = tile_in_slice * ARIL_RANK_TILE;
    k_tile_bytes = ceil_div(rank, ARIL_RANK_TILE) * kATileBytes;
  }
};

}  // namespace aril::detail
