// SPDX-License-Identifier: MIT OR Apache-2.0
//
// What a block of every operation begins with: its tile of tokens, and the factors that their slot
// has here.
#pragma once

#include "../aril.h"

namespace aril::detail {

__host__ __device__ __forceinline__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Whether an operation goes by the wide tiles.
__host__ __device__ __forceinline__ constexpr bool is_wide(int num_tokens) {
  return num_tokens > ARIL_FEW_TOKENS;
}

struct Tile {
  int slot, count;
  const int32_t* tokens;

  // No tokens where the routing or the table has none for it. Both loads are independent: entries
  // beyond the count are read, too.
  template <typename Args>
  __device__ __forceinline__ Tile(const Args& p, int tile_idx) {
    const aril_tiles& tiles = is_wide(p.num_tokens) ? p.routing.wide_tiles : p.routing.tiles;
    const int num_tiles = *tiles.count;
    const aril_tile tile = tiles.all[tile_idx < p.max_tiles ? tile_idx : 0];
    const bool live =
        tile_idx < num_tiles && tile_idx < p.max_tiles && tile.slot < p.weights.num_slots;
    slot = live ? tile.slot : 0;
    count = live ? tile.count : 0;
    tokens = p.routing.tokens + (live ? tile.begin : 0);
  }

  // The tile's t-th token, or -1 if there is none below `num_tokens`.
  __device__ __forceinline__ int token(int t, int num_tokens) const {
    const int token = t < count ? tokens[t] : -1;
    return token < num_tokens ? token : -1;
  }
};

// A slot's module; rank 0 where it has none.
__device__ __forceinline__ aril_descriptor module_of(const aril_weights& weights, int slot,
                                                     int slice) {
  aril_descriptor module = weights.table[int64_t{slot} * weights.num_entries + slice];
  if (module.rank < 0 || module.rank > weights.max_rank) module.rank = 0;
  return module;
}

// The first block of a grid. It waits for its predecessors even if it has nothing to do, so that a
// kernel never ends before them; others leave.
__device__ __forceinline__ bool is_first_block() { return blockIdx.x == 0 && blockIdx.y == 0 && blockIdx.z == 0; }

// A token's sum over the input features has one order, that of the layer's shape, in all kernels:
// ARIL_LANE_FEATURES features make a lane's sum, ARIL_LANES_PER_GROUP lanes a group's, and the
// groups, one after the other, the token's. However many blocks share the work, each sums up a
// lane, a group, or everything, and its bits are the same.
struct Lanes {
  int begin, end;  // the lanes that a split sums up

  __device__ __forceinline__ Lanes(const aril_linear_args& p, int split) {
    const int num_lanes = ceil_div(p.in_features, ARIL_LANE_FEATURES);
    begin = p.lanes_per_split < num_lanes ? split * p.lanes_per_split : 0;
    end = p.lanes_per_split < num_lanes ? min(begin + p.lanes_per_split, num_lanes) : num_lanes;
  }
};

__host__ __device__ __forceinline__ int num_splits(const aril_linear_args& p) {
  const int num_lanes = ceil_div(p.in_features, ARIL_LANE_FEATURES);
  return p.lanes_per_split < num_lanes ? ceil_div(num_lanes, p.lanes_per_split) : 1;
}

// Where shrink leaves a token's sums for expand: a plane for each split.
struct Planes {
  int slice_stride;
  int64_t token_stride, plane_stride;

  __device__ __forceinline__ explicit Planes(const aril_linear_args& p)
      : slice_stride(ceil_div(p.weights.max_rank, ARIL_RANK_TILE) * ARIL_RANK_TILE),
        token_stride(int64_t{p.num_slices} * slice_stride),
        plane_stride(p.num_tokens * token_stride) {}
};

// Elements of a tile of a factor.
constexpr int kTileElems = ARIL_RANK_TILE * ARIL_K_TILE;

}  // namespace aril::detail
