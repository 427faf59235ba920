// SPDX-License-Identifier: MIT OR Apache-2.0
//
// What a block of every operation begins with: its tile of tokens, and the factors that their slot
// has here.
#pragma once

#include "../aril.h"

namespace aril::detail {

__host__ __device__ __forceinline__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

struct Tile {
  int slot, count;
  const int32_t* tokens;

  // No tokens where the routing or the table has none for it. Both loads are independent: entries
  // beyond num_tiles are read, too.
  __device__ __forceinline__ Tile(const aril_routing& routing, const aril_weights& weights,
                                  int tile_idx, int max_tiles) {
    const int num_tiles = *routing.num_tiles;
    const aril_tile tile = routing.tiles[tile_idx < max_tiles ? tile_idx : 0];
    const bool live = tile_idx < num_tiles && tile_idx < max_tiles && tile.slot < weights.num_slots;
    slot = live ? tile.slot : 0;
    count = live ? tile.count : 0;
    tokens = routing.tokens + (live ? tile.begin : 0);
  }
};

// A slot's module; rank 0 where it has none.
__device__ __forceinline__ aril_descriptor module_of(const aril_weights& weights, int slot,
                                                     int slice) {
  aril_descriptor module = weights.table[int64_t{slot} * weights.num_entries + slice];
  if (module.rank < 0 || module.rank > weights.max_rank) module.rank = 0;
  return module;
}

// A token's sum over the input features has one order, that of the layer's shape, in all kernels:
// ARIL_K_PER_CHUNK features make a chunk's sum; chunks c, c + ARIL_SUM_LANES, ... a lane's;
// ARIL_LANES_PER_GROUP lanes a group's; and those the token's. However many blocks share the work,
// each sums up whole lanes, whole groups, or everything, and its bits are the same.
struct Lanes {
  int num_chunks, begin, end;  // the lanes that a split sums up

  __device__ __forceinline__ Lanes(const aril_linear_args& p, int split)
      : num_chunks(ceil_div(p.in_features, ARIL_K_PER_CHUNK)),
        begin(split * p.lanes_per_split),
        end(min(begin + p.lanes_per_split, min(num_chunks, ARIL_SUM_LANES))) {}
};

__host__ __device__ __forceinline__ int num_splits(const aril_linear_args& p) {
  const int num_chunks = ceil_div(p.in_features, ARIL_K_PER_CHUNK);
  return ceil_div(num_chunks < ARIL_SUM_LANES ? num_chunks : ARIL_SUM_LANES, p.lanes_per_split);
}

// Where shrink leaves a token's sums for expand: a plane for each split.
struct Planes {
  int slice_stride;
  int64_t token_stride, plane_stride;

  __device__ __forceinline__ explicit Planes(const aril_linear_args& p)
      : slice_stride(ceil_div(p.weights.max_rank, ARIL_V_ALIGNMENT) * ARIL_V_ALIGNMENT),
        token_stride(int64_t{p.num_slices} * slice_stride),
        plane_stride(p.num_tokens * token_stride) {}
};

}  // namespace aril::detail
