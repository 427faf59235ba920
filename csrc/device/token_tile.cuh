// SPDX-License-Identifier: MIT OR Apache-2.0
//
// A block's share of an operation on tokens: a token tile (rows of one slot) and a range of
// outputs.
#pragma once

#include "../aril.h"
#include "../ptx/pdl.cuh"
#include "descriptor.cuh"
#include "math.cuh"

namespace aril::detail {

// Whether an operation works on wide tiles.
__host__ __device__ __forceinline__ bool is_large_m(const aril_linear_args& p) {
  return p.plan.large_m != 0;
}

__host__ __device__ __forceinline__ bool is_large_m(const aril_embedding_args& p) {
  return p.num_tokens > ARIL_SMALL_M;
}

// A row of an expand: y[y] += B (factor * v[v]).
struct ExpandRow {
  int y;  // -1: no work
  int v;  // -1: no delta
  float factor;
};

struct TokenTile {
  int slot = -1;  // the base model alone, or a slot outside the table, as in all later tiles
  int count = 0;
  const int32_t* tokens = nullptr;
  int num_tiles = 0;  // of the routing

  TokenTile() = default;

  // Empty beyond the routing's tiles. Count and tile are loaded independently, so an entry beyond
  // the count is read and discarded.
  __device__ __forceinline__ TokenTile(const aril_routing& routing, const aril_tiles& tiles,
                                       int max_tiles, int num_slots, int index) {
    num_tiles = min(*tiles.count, max_tiles);
    const aril_tile tile = tiles.all[index < max_tiles ? index : 0];
    const bool live = index < num_tiles;
    slot = live && tile.slot < num_slots ? tile.slot : -1;
    count = live ? tile.count : 0;
    tokens = routing.tokens + (live ? tile.begin : 0);
  }

  template <typename Args>
  __device__ __forceinline__ TokenTile(const Args& p, int index)
      : TokenTile(p.routing, is_large_m(p) ? p.routing.wide_tiles : p.routing.tiles,
                  p.plan.max_tiles, p.weights.num_slots, index) {}

  // Of a fully sharded layer, which has no wide tiles.
  __device__ __forceinline__ TokenTile(const aril_sharded_args& p, int index)
      : TokenTile(p.routing, p.routing.tiles, p.plan.max_tiles, p.weights.num_slots, index) {}

  // The tile's t-th token; -1 if there is none below `num_tokens`.
  __device__ __forceinline__ int token(int t, int num_tokens) const {
    const int token = t < count ? tokens[t] : -1;
    return token < num_tokens ? token : -1;
  }

  // A function that gives the t-th row of an expand with `module`.
  template <typename Args>
  __device__ __forceinline__ auto expand_rows(const aril_descriptor& module, const Args& p) const {
    return [&](int t) {
      const int row = token(t, p.num_tokens);
      return ExpandRow{row, row, row < 0 ? 0.0f : module.scaling * p.routing.scales[row]};
    };
  }
};

// The row of a token tile that is its thread's, threadIdx.x % ARIL_TOKENS_PER_TILE. It is loaded
// beside the tile: behind a base layer, whose weights have pushed the routing out of L2, a block
// that waits for its tile first, and for a token before its scale, asks memory three times, one
// after the other.
class TileRow {
 public:
  // Rows beyond the tile's tokens are read and discarded.
  template <typename Args>
  __device__ __forceinline__ TileRow(const Args& p, int tile_index)
      : row_(
            p.routing.rows[(tile_index < p.plan.max_tiles ? tile_index : 0) * ARIL_TOKENS_PER_TILE +
                           threadIdx.x % ARIL_TOKENS_PER_TILE]) {}

  // The token; -1 if the tile has none there below `num_tokens`.
  __device__ __forceinline__ int token(const TokenTile& tile, int num_tokens) const {
    const bool live = static_cast<int>(threadIdx.x % ARIL_TOKENS_PER_TILE) < tile.count;
    return live && row_.token < num_tokens ? row_.token : -1;
  }

  // Of a token.
  __device__ __forceinline__ float scale() const { return row_.scale; }

  // The row of an expand with `module`.
  template <typename Args>
  __device__ __forceinline__ ExpandRow expand_row(const TokenTile& tile,
                                                  const aril_descriptor& module,
                                                  const Args& p) const {
    const int row = token(tile, p.num_tokens);
    return {row, row, row < 0 ? 0.0f : module.scaling * row_.scale};
  }

 private:
  aril_row row_;
};

// Outputs [first, first + count) of a slice.
template <typename T>
struct BlockOuts {
  T* y;  // the slice's first output
  int64_t y_stride;
  int num_outs;  // of the slice
  int first, count;
  bool overwrites;
  int step = 1;  // elements from an output to the next

  // Block `block` of a linear layer's outputs. Sets `slice`. `outs_per_block` is an int or a
  // Divisor.
  template <typename Args, typename Outs>
  __device__ __forceinline__ BlockOuts(const Args& p, int block, Outs outs_per_block, int& slice,
                                       bool overwrites)
      : overwrites(overwrites) {
    for (slice = 0; slice < p.num_slices - 1; ++slice) {
      const int blocks = ceil_div(p.out_features[slice], outs_per_block);
      if (block < blocks) break;
      block -= blocks;
    }
    y = static_cast<T*>(p.y[slice].first);
    y_stride = p.y[slice].stride;
    num_outs = p.out_features[slice];
    first = block * outs_per_block;
    count = min(static_cast<int>(outs_per_block), num_outs - first);
  }

  template <typename Outs>
  __device__ __forceinline__ BlockOuts(const aril_linear_args& p, int block, Outs outs_per_block,
                                       int& slice)
      : BlockOuts(p, block, outs_per_block, slice, p.overwrites != 0) {}

  __device__ __forceinline__ BlockOuts(const aril_embedding_args& p, int block, int outs_per_block)
      : y(static_cast<T*>(p.y)),
        y_stride(p.y_stride),
        num_outs(p.hidden),
        first(block * outs_per_block),
        count(min(outs_per_block, num_outs - first)),
        overwrites(false) {}

  // Block `block` of this rank's outputs of a fully sharded layer. Sets `slice`.
  __device__ __forceinline__ BlockOuts(const aril_sharded_args& p, int block, int outs_per_block,
                                       int& slice)
      : overwrites(false) {
    for (slice = 0; slice < p.num_slices - 1; ++slice) {
      const int blocks = ceil_div(p.num_outs[slice], outs_per_block);
      if (block < blocks) break;
      block -= blocks;
    }
    y = static_cast<T*>(p.y[slice].first);
    y_stride = p.y[slice].stride;
    num_outs = p.num_outs[slice];
    first = block * outs_per_block;
    count = min(outs_per_block, num_outs - first);
  }

  // Block `block` of the outputs of a projection of experts. Sets `slice`.
  __device__ __forceinline__ BlockOuts(const aril_experts_args& p, int block, int outs_per_block,
                                       int& slice)
      : y(static_cast<T*>(p.y)),
        y_stride(p.y_stride),
        num_outs(p.out_features),
        overwrites(p.form == ARIL_WRITE),
        step(p.interleaved ? p.num_slices : 1) {
    const int blocks = ceil_div(num_outs, outs_per_block);
    slice = block / blocks;
    y += p.interleaved ? slice : slice * num_outs;
    first = block % blocks * outs_per_block;
    count = min(outs_per_block, num_outs - first);
  }

  // Whether the tile has a delta in these outputs. If not, the block is done: an operation that
  // overwrites has stored its zeros.
  __device__ __forceinline__ bool begin(const TokenTile& tile, const aril_descriptor& module,
                                        int num_tokens) const {
    if (tile.count > 0 && module.rank > 0) return true;
    const bool clears = overwrites && tile.count > 0;
    if (clears || is_first_block()) wait_for_predecessors();
    for (int t = 0; clears && t < tile.count; ++t) {
      const int token = tile.token(t, num_tokens);
      for (int i = threadIdx.x; token >= 0 && i < count; i += blockDim.x) {
        y[token * y_stride + first + i] = T(0.0f);
      }
    }
    return false;
  }
};

}  // namespace aril::detail
