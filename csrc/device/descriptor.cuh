// SPDX-License-Identifier: MIT OR Apache-2.0
//
// What a block of every operation begins with: its tile of tokens, and the factors that their slot
// has here; and the order of sums.
#pragma once

#include "../aril.h"
#include "../ptx/pdl.cuh"

namespace aril::detail {

__host__ __device__ __forceinline__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Whether an operation goes by the wide tiles.
__host__ __device__ __forceinline__ constexpr bool is_large_m(int num_tokens) {
  return num_tokens > ARIL_SMALL_M;
}

// A row that a block of expand works on.
struct ExpandRow {
  int y;         // -1 where there is nothing to do
  int v;         // -1, likewise
  float factor;  // on v
};

struct TokenTile {
  int slot;  // -1 if its tokens have none that the table knows
  int count;
  const int32_t* tokens;

  // No tokens where the routing has none for it. Both loads are independent: entries beyond the
  // count are read, too.
  __device__ __forceinline__ TokenTile(const aril_routing& routing, const aril_tiles& tiles,
                                       int max_tiles, int num_slots, int tile_idx) {
    const int num_tiles = *tiles.count;
    const aril_tile tile = tiles.all[tile_idx < max_tiles ? tile_idx : 0];
    const bool live = tile_idx < num_tiles && tile_idx < max_tiles;
    slot = live && tile.slot < num_slots ? tile.slot : -1;
    count = live ? tile.count : 0;
    tokens = routing.tokens + (live ? tile.begin : 0);
  }

  template <typename Args>
  __device__ __forceinline__ TokenTile(const Args& p, int tile_idx)
      : TokenTile(p.routing, is_large_m(p.num_tokens) ? p.routing.wide_tiles : p.routing.tiles,
                  p.max_tiles, p.weights.num_slots, tile_idx) {}

  // The tile's t-th token, or -1 if there is none below `num_tokens`.
  __device__ __forceinline__ int token(int t, int num_tokens) const {
    const int token = t < count ? tokens[t] : -1;
    return token < num_tokens ? token : -1;
  }

  // Gives the t-th token's row.
  template <typename Args>
  __device__ __forceinline__ auto expand_rows(const aril_descriptor& module, const Args& p) const {
    return [&](int t) {
      const int row = token(t, p.num_tokens);
      return ExpandRow{row, row, row < 0 ? 0.0f : module.scaling * p.routing.scales[row]};
    };
  }
};

// A slot's module; rank 0 where it has none.
__device__ __forceinline__ aril_descriptor module_of(const aril_weights& weights, int slot,
                                                     int slice) {
  aril_descriptor module = {};
  if (slot < 0) return module;
  module = weights.table[int64_t{slot} * weights.num_entries + slice];
  if (module.rank < 0 || module.rank > weights.max_rank) module.rank = 0;
  return module;
}

// A slot's module of the slice that is a lane's number.
__device__ __forceinline__ aril_descriptor module_of_lane(const aril_weights& weights, int slot,
                                                          int num_slices) {
  const int lane = threadIdx.x % 32;
  return module_of(weights, lane < num_slices ? slot : -1, lane);
}

// The first block of a grid. It waits for its predecessors even if it has nothing to do, so that a
// kernel never ends before them; others leave.
__device__ __forceinline__ bool is_first_block() { return blockIdx.x == 0 && blockIdx.y == 0; }

// A token's sum over the input features has one order, that of the layer's shape, in all kernels:
// a chain of instructions adds up 64 features, four chains make a lane's sum, ARIL_K_TILES_PER_SLAB
// lanes a group's, ARIL_K_SLABS_PER_SPAN groups a span's, and the spans, one after the other, the
// token's. However many blocks share the work, each sums up one of these, and the bits are the
// same.
constexpr int kKTilesPerSpan = ARIL_K_TILES_PER_SLAB * ARIL_K_SLABS_PER_SPAN;

struct KTiles {
  int begin, end;  // the lanes that a split sums up

  __device__ __forceinline__ KTiles(int in_features, int k_tiles_per_split, int to_bf16_terms) {
    const int num_k_tiles = ceil_div(in_features, ARIL_K_TILE);
    begin = k_tiles_per_split < num_k_tiles ? to_bf16_terms * k_tiles_per_split : 0;
    end =
        k_tiles_per_split < num_k_tiles ? min(begin + k_tiles_per_split, num_k_tiles) : num_k_tiles;
  }
};

__host__ __device__ __forceinline__ int num_splits(const aril_linear_args& p) {
  const int num_k_tiles = ceil_div(p.in_features, ARIL_K_TILE);
  return p.k_tiles_per_split < num_k_tiles ? ceil_div(num_k_tiles, p.k_tiles_per_split) : 1;
}

// Where shrink leaves a token's sums for expand: a plane for each split.
struct PartialLayout {
  int slice_stride;
  int64_t token_stride, partial_stride;

  __device__ __forceinline__ PartialLayout(int64_t rows, int num_slices, int max_rank)
      : slice_stride(ceil_div(max_rank, ARIL_RANK_TILE) * ARIL_RANK_TILE),
        token_stride(int64_t{num_slices} * slice_stride),
        partial_stride(rows * token_stride) {}

  __device__ __forceinline__ explicit PartialLayout(const aril_linear_args& p)
      : PartialLayout(p.num_tokens, p.num_slices, p.weights.max_rank) {}
};

constexpr int kCoreElems = ARIL_CORE * ARIL_CORE;
constexpr int kPieceElems = ARIL_RANK_TILE * ARIL_K_TILE;  // of A: 8 ranks of a lane
constexpr int kPieceBytes = kPieceElems * 2;               // of 16-bit elements

constexpr int kF32Threads = 256;
constexpr int kF32TileElems = ARIL_OUT_TILE * ARIL_RANK_TILE;

// Where an output's ranks stand, 8 of them together, tiles apart; see aril_descriptor.
__device__ __forceinline__ const float* f32_outputs_ranks(const float* b, int rank_tiles, int out) {
  const int column = out % ARIL_OUT_TILE;
  const int core = column / 32 * 4 + column % 8 / 2, row = column % 32 / 8 * 2 + column % 2;
  return b + int64_t{out / ARIL_OUT_TILE} * rank_tiles * kF32TileElems + core * kCoreElems +
         row * ARIL_RANK_TILE;
}

// The outputs of a slice that a block works on.
template <typename T>
struct BlockOuts {
  T* y;  // where the slice begins
  int64_t y_stride;
  int num_outs;  // of the slice
  int first, count;
  bool overwrites;
  int step = 1;  // from an output to the next

  // Output block `block` of a layer; gives its slice.
  __device__ __forceinline__ BlockOuts(const aril_linear_args& p, int block, int outs_per_block,
                                       int& slice)
      : y(static_cast<T*>(p.y)), y_stride(p.y_stride), overwrites(p.overwrites != 0) {
    for (slice = 0; slice < p.num_slices - 1; ++slice) {
      const int blocks = ceil_div(p.out_features[slice], outs_per_block);
      if (block < blocks) break;
      block -= blocks;
      y += p.out_features[slice];
    }
    num_outs = p.out_features[slice];
    first = block * outs_per_block;
    count = min(outs_per_block, num_outs - first);
  }

  __device__ __forceinline__ BlockOuts(const aril_embedding_args& p, int block, int outs_per_block)
      : y(static_cast<T*>(p.y)),
        y_stride(p.y_stride),
        num_outs(p.hidden),
        first(block * outs_per_block),
        count(min(outs_per_block, num_outs - first)),
        overwrites(false) {}

  // Output block `block` of a projection of experts; gives its slice.
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

  // Whether the tile has a delta here. If not, the block has done all there is to do.
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

template <typename T>
__device__ __forceinline__ bool is_aligned(const T* rows, int64_t stride) {
  return (reinterpret_cast<uintptr_t>(rows) | (stride * sizeof(T))) % 16 == 0;
}

__device__ __forceinline__ float2 operator+(const float2& a, const float2& b) {
  return make_float2(a.x + b.x, a.y + b.y);
}

__device__ __forceinline__ float4 operator+(const float4& a, const float4& b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

// Each product is rounded, whatever it is added to.
__device__ __forceinline__ float4 operator*(const float4& a, float factor) {
  return make_float4(__fmul_rn(a.x, factor), __fmul_rn(a.y, factor), __fmul_rn(a.z, factor),
                     __fmul_rn(a.w, factor));
}

// A token's v: shrink's partials, summed up in their order.
class PartialSums {
 public:
  __device__ __forceinline__ PartialSums(const float* partials, const PartialLayout& strides,
                                         int splits, bool groups_apart, int slice)
      : planes_(strides),
        splits_(splits),
        groups_apart_(groups_apart),
        first_partial_(partials + slice * planes_.slice_stride) {}

  __device__ __forceinline__ PartialSums(const aril_linear_args& p, int slice)
      : PartialSums(p.partials, PartialLayout(p), num_splits(p),
                    p.k_tiles_per_split == ARIL_K_TILES_PER_SLAB, slice) {}

  __device__ __forceinline__ bool lacks(int) const { return false; }

  // Ranks [r, r + 4) of a token.
  __device__ __forceinline__ float4 load4(int token, int r) const {
    const float* source = first_partial_ + token * planes_.token_stride + r;
    const float4 zero = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float4 total = zero, span = zero;
    // Many loads before the first use: they are what expand waits for.
    constexpr int kAtOnce = 2 * ARIL_K_SLABS_PER_SPAN;
    for (int first = 0; first < splits_; first += kAtOnce) {
      float4 sums[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        sums[i] = zero;
        if (first + i < splits_) {
          sums[i] = *reinterpret_cast<const float4*>(source + (first + i) * planes_.partial_stride);
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        span = span + sums[i];
        if (groups_apart_ && (i + 1) % ARIL_K_SLABS_PER_SPAN != 0) continue;
        total = total + span;
        span = zero;
      }
    }
    return total;
  }

  // Ranks r and r + 1 of a token; zero for token -1.
  template <int kTeam = 1>
  __device__ __forceinline__ float2 load2(int token, int r) const {
    if (token < 0) return make_float2(0.0f, 0.0f);
    const float4 sums = load4(token, r / 4 * 4);
    return r % 4 == 0 ? make_float2(sums.x, sums.y) : make_float2(sums.z, sums.w);
  }

 private:
  PartialLayout planes_;
  int splits_;
  bool groups_apart_;
  const float* first_partial_;
};

}  // namespace aril::detail
