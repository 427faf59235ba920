// SPDX-License-Identifier: MIT OR Apache-2.0
//
// A projection of experts on route tiles in bf16 and f16: y[row] += B v, or y[row] = B v, in one
// launch with its shrink (shrink.cuh).
//
// A warp of expand has some outputs of a slice and takes one route tile after the other. It
// streams: B and y of the next tile go to shared memory while the current one is multiplied. v
// comes from the mailbox. If all ranks of B fit, a stage has B of all the warp's outputs
// (ExpandStages); otherwise it has one unit of outputs and some of the ranks. If a slot's experts
// share B and x has a row per route, tiles of one token's routes to any experts replace its route
// tiles.
//
// Bound: the bytes of B of the (slot, expert) pairs that occur, and those of y.
//
// experts_expand() is one long body: its lambdas share a warp's state. Splits of it alone have not
// been compared; a split in group/one_block.cuh, which its kernel inlines, changed 12 instructions.
#pragma once

#include <type_traits>

#include "../device/product.cuh"
#include "../device/reduction.cuh"
#include "../device/token_tile.cuh"
#include "../ptx/async.cuh"
#include "block.cuh"
#include "route_tiles.cuh"
#include "sharing.cuh"
#include "shrink.cuh"
#include "tile_queue.cuh"

namespace aril::detail {

// The most rank tiles of B that a stage has for all of a warp's outputs, as far as registers allow.
// In f16 both terms of B take registers.
template <typename T>
constexpr int kWholeRankTiles = std::is_same_v<T, __nv_bfloat16> ? 4 : 2;

// Shared memory of a warp of expand: two stages of B and y, and the terms of v.
struct ExpandStages {
  static constexpr int kRankTiles = 6;        // the most of B with one unit
  static constexpr int kBaseBytes = 32 * 16;  // of y: a unit

  int whole_rank_tiles = 0, b_bytes = 0, bytes = 0, of_warp = 0;

  constexpr ExpandStages(int max_whole_rank_tiles, int max_rank, int outs) {
    const int all_rank_tiles = ceil_div(max_rank, ARIL_RANK_TILE);
    const int rank_tiles = all_rank_tiles < kRankTiles ? all_rank_tiles : kRankTiles;
    const int units = outs / ARIL_OUT_UNIT;
    whole_rank_tiles = rank_tiles <= max_whole_rank_tiles ? rank_tiles : 2;
    const int pieces = units * whole_rank_tiles;
    b_bytes = (pieces > rank_tiles ? pieces : rank_tiles) * kUnitBytes;
    bytes = b_bytes + units * kBaseBytes;
    // If all ranks are whole, the terms of the first step stay in registers.
    const int steps = ceil_div(rank_tiles, 2) - (rank_tiles == whole_rank_tiles);
    of_warp = 2 * bytes + steps * 32 * static_cast<int>(sizeof(uint4));
  }
};

// Devices of compute capability 8.6 and 8.9 have the least shared memory, 99 KB for a block. It has
// room for a block's warps with one output tile each, at every rank.
constexpr bool have_room_everywhere(int max_whole_rank_tiles) {
  constexpr int kBytes = (99 << 10) - ARIL_STATIC_BYTES;
  for (int rank = 1; rank <= ARIL_MAX_RANK; ++rank) {
    const ExpandStages stages(max_whole_rank_tiles, rank, ARIL_OUT_TILE);
    if (kExpertsWarps * stages.of_warp > kBytes) return false;
  }
  return ARIL_EXPERTS_SHRINK_BYTES <= kBytes;
}
static_assert(have_room_everywhere(kWholeRankTiles<__nv_bfloat16>));
static_assert(have_room_everywhere(kWholeRankTiles<__half>));

template <typename T, typename Tiles>
__device__ __forceinline__ void experts_expand(const aril_experts_args& p, const ExpertsGrid& grid,
                                               const ExpandStages& stages, uint32_t epoch,
                                               const Tiles& tiles, const WarpSharing& sharing,
                                               unsigned char* shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const bool overwrites = p.form == ARIL_WRITE;
  // Tiles of a token's routes, for slots that share B, come before route tiles.
  const int tiles_of_token = ceil_div(p.top_k.top_k, ARIL_ROUTES_PER_TILE);
  const int token_tiles = !p.from_tokens && sharing.any() ? sharing.tokens * tiles_of_token : 0;
  const bool has_experts = p.from_tokens || overwrites || !sharing.all();
  const int last = token_tiles + (has_experts ? tiles.count(overwrites) : 0);
  const int first_block = grid.first_shrink + grid.shrink_blocks;
  const int warps = (gridDim.x - first_block) * kExpertsWarps;
  const int index = (blockIdx.x - first_block) * kExpertsWarps + warp;
  const auto items_of = [&](int outs) { return p.num_slices * ceil_div(p.out_features, outs); };
  // With few tiles, warps take fewer outputs each.
  const bool are_few = int64_t{last} * items_of(ARIL_OUT_TILE) <= warps;
  const int outs_per_warp = are_few ? ARIL_OUT_TILE : p.plan.outs_per_block;
  const int items = items_of(outs_per_warp), stride = warps / items;  // of a tile; of tiles
  if (index / items >= stride) return;
  int slice;
  const BlockOuts<T> outs(p, index % items, outs_per_warp, slice);
  const bool aligned = outs.step == 1 && is_aligned(outs.y, outs.y_stride);
  const int valid = outs.num_outs - outs.first - 8 * q;
  const PartialLayout layout = partial_layout(p);
  const uint64_t* const partial = tagged_words(p.mailbox) + slice * layout.slice_stride + 2 * q;
  unsigned char* stage = shared + warp * stages.of_warp;
  unsigned char* other = stage + stages.bytes;
  uint4* const terms = reinterpret_cast<uint4*>(stage + 2 * stages.bytes) + lane;

  const auto load_tile = [&](int i) {
    if (i >= last) return make_int4(-1, 0, 0, 0);
    if (i >= token_tiles) return tiles.tile(i - token_tiles);
    const int token = i / tiles_of_token, first = i % tiles_of_token * ARIL_ROUTES_PER_TILE;
    return make_int4(p.routing.slots[token], TileLoads::kOfToken, token * p.top_k.top_k + first,
                     min(p.top_k.top_k - first, ARIL_ROUTES_PER_TILE));
  };
  // A lane's work on a tile.
  struct Work {
    const char* b;
    int rank_tiles;
    T* y;  // null: no row for the lane, or no work
    int v_row;
    float factor;
  };
  const auto work_of = [&](const TileLoads& loads) {
    Work work = {nullptr, 0, nullptr, -1, 0.0f};
    const bool is_of_token = loads.tile.y == TileLoads::kOfToken;
    if (is_of_token != loads.shares_b(p)) return work;
    const int rank = loads.rank(p);
    work.rank_tiles = ceil_div(is_of_token ? loads.shared.rank : rank, ARIL_RANK_TILE);
    work.b = static_cast<const char*>(is_of_token ? loads.shared.b : loads.own.b) +
             int64_t{outs.first / ARIL_OUT_TILE} * work.rank_tiles * 2 * kUnitBytes;
    if (rank > 0) {
      work.v_row = loads.v_row(p);
      work.factor = loads.factor(p);
    }
    if (loads.route.route >= 0 && (rank > 0 || overwrites)) {
      work.y = outs.y + loads.route.row * outs.y_stride + (outs.first + 8 * q) * outs.step;
    }
    return work;
  };

  // Requests B and y of a stage: all outputs, or those from `out` on, with some of the ranks, and
  // y with the last of them. y moves 16 bytes at a time, or is read when it is written.
  const auto fetch = [&](const Work& work, int out, int first_rank_tile) {
    const bool whole = work.rank_tiles <= stages.whole_rank_tiles;
    const int count = min(work.rank_tiles - first_rank_tile, ExpandStages::kRankTiles);
    const char* b = work.b +
                    (out / ARIL_OUT_TILE * work.rank_tiles + first_rank_tile) * 2 * kUnitBytes +
                    out % ARIL_OUT_TILE / ARIL_OUT_UNIT * kUnitBytes + lane * 16;
    unsigned char* to = other + lane * 16;
    const int pieces = whole ? ceil_div(outs.count, ARIL_OUT_TILE) * 2 * count : count;
#pragma unroll 2
    for (int i = 0; i < pieces; ++i, b += (whole ? 1 : 2) * kUnitBytes, to += kUnitBytes) {
      copy_async(to, b);
    }
    if (first_rank_tile + count == work.rank_tiles && !overwrites && work.y != nullptr) {
      to = other + stages.b_bytes + lane * 16;
      const int end = whole ? outs.count : out + ARIL_OUT_UNIT;
#pragma unroll 1
      for (; out < end; out += ARIL_OUT_UNIT, to += ExpandStages::kBaseBytes) {
        if (OutVec<T>::whole(valid - out, aligned)) copy_async(to, work.y + out);
      }
    }
    commit_copies();
  };
  const auto swap_stages = [&] {
    unsigned char* const done = stage;
    stage = other;
    other = done;
  };

  TileQueue<TileLoads::kOfToken, Tiles, decltype(load_tile)> queue(p, tiles, slice, g, load_tile,
                                                                   index / items);
  queue.advance(index / items + stride);
  Work work = work_of(queue.loads);
  queue.advance(index / items + 2 * stride);
  fetch(work, 0, 0);
  swap_stages();
  for (int i = index / items; i < last; i += stride) {
    const Work next = work_of(queue.loads);
    queue.advance(i + 3 * stride);
    const auto terms_of = [&](int rank_tile) {
      return stacked_terms(poll_v(partial + rank_tile * ARIL_RANK_TILE, layout, grid.slabs,
                                  work.v_row, rank_tile + 1 < work.rank_tiles, epoch) *
                           work.factor);
    };
    const auto finish = [&](const float (&deltas)[4][4], int out, int unit) {
      if (work.y == nullptr || valid <= out) return;
      OutVec<T> base;
      if (!overwrites) {
        base.bits = *reinterpret_cast<const uint4*>(stage + stages.b_bytes +
                                                    unit * ExpandStages::kBaseBytes + lane * 16);
      }
      base.add(work.y + out * outs.step, outs.step, deltas, 0, valid - out, aligned, overwrites);
    };
    if (work.rank_tiles <= stages.whole_rank_tiles) {
      fetch(next, 0, 0);
      const bool has_deltas = work.rank_tiles > 0;
      uint4 first_terms = make_uint4(0, 0, 0, 0);
      if (has_deltas) first_terms = terms_of(0);
      const bool has_more = kWholeRankTiles<T> > 2 && work.rank_tiles > 2;
      if (has_more) terms[0] = terms_of(2);
      wait_for_copies<1>();
      __syncwarp();
      const int rank_bytes = 2 * kUnitBytes, rest_bytes = (work.rank_tiles - 1) * rank_bytes;
      const auto add_outs = [&](auto more) {
        const unsigned char* b = stage;
        for (int out = 0; out < outs.count; out += ARIL_OUT_UNIT) {
          float deltas[4][4] = {};
          if (has_deltas) {
            multiply_unit_staged<T>(deltas, first_terms, b, work.rank_tiles > 1 ? rank_bytes : 0);
          }
          if constexpr (decltype(more)::value) {
            multiply_unit_staged<T>(deltas, terms[0], b + 2 * rank_bytes,
                                    work.rank_tiles > 3 ? rank_bytes : 0);
          }
          finish(deltas, out, out / ARIL_OUT_UNIT);
          b += kUnitBytes + (out % ARIL_OUT_TILE != 0 ? rest_bytes : 0);
        }
      };
      if (has_more) {
        add_outs(std::true_type());
      } else if (has_deltas || overwrites) {
        add_outs(std::false_type());
      }
      __syncwarp();
      swap_stages();
    } else {
      float deltas[4][4] = {};
      for (int out = 0, first = 0; out < outs.count;) {
        const int count = min(work.rank_tiles - first, ExpandStages::kRankTiles);
        const bool is_last = first + count == work.rank_tiles;
        const int next_out = is_last ? out + ARIL_OUT_UNIT : out;
        const bool ends = next_out >= outs.count;
        Work from = work;
        if (ends) from = next;
        fetch(from, ends ? 0 : next_out, is_last ? 0 : first + count);
        // The terms of all ranks stay for the outputs that follow.
        if (out == 0 || count < work.rank_tiles) {
          for (int r = 0; r < count; r += 2) terms[r / 2 * 32] = terms_of(first + r);
        }
        wait_for_copies<1>();
        __syncwarp();
        for (int r = 0; r < count; r += 2) {
          multiply_unit_staged<T>(deltas, terms[r / 2 * 32], stage + r * kUnitBytes,
                                  r + 1 < count ? kUnitBytes : 0);
        }
        if (is_last) {
          finish(deltas, out, 0);
          set_zero(deltas);
        }
        __syncwarp();
        swap_stages();
        first = is_last ? 0 : first + count;
        out = next_out;
      }
    }
    work = next;
  }
}

template <typename T, bool kEachBlock>
__global__ void __launch_bounds__(kExpertsThreads, kExpertsBlocks)
    experts_kernel(const __grid_constant__ aril_experts_args p,
                   const __grid_constant__ ExpertsGrid grid,
                   const __grid_constant__ ExpandStages stages) {
  extern __shared__ __align__(128) unsigned char shared[];
  experts_block<T, kEachBlock>(p, grid, shared,
                               [&](uint32_t epoch, const auto& tiles, const WarpSharing& sharing) {
                                 experts_expand<T>(p, grid, stages, epoch, tiles, sharing, shared);
                               });
}

}  // namespace aril::detail
