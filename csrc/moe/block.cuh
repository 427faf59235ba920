// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The roles of blocks in a launch on route tiles: the one that sorts the routes, shrink, and
// expand.
#pragma once

#include <type_traits>

#include "../device/mailbox.cuh"
#include "../device/token_tile.cuh"
#include "../ptx/pdl.cuh"
#include "route_tiles.cuh"
#include "sharing.cuh"
#include "shrink.cuh"

namespace aril::detail {

constexpr int kExpertsBlocks = 2;  // on a multiprocessor

// A block of the grid. Blocks of expand call expand(epoch, tiles, sharing), or expand(epoch) in an
// operation that expands by token. If the inputs are complete, they wait for predecessors
// themselves, before they access y.
template <typename T, bool kEachBlock, typename Expand>
__device__ __forceinline__ void experts_block(const aril_experts_args& p, const ExpertsGrid& grid,
                                              unsigned char* shared, const Expand& expand) {
  __shared__ uint32_t epoch;
  if (threadIdx.x == 0) {
    epoch = next_epoch(p.mailbox);
    // Beside the base operation in front, loads of the combine would wait behind those of weights
    // by the kernels behind it. They start when it has waited.
    if (p.form != ARIL_COMBINE || p.plan.inputs == ARIL_INPUTS_IN_FRONT) launch_dependents();
  }
  __syncthreads();
  const auto clear_stale = [&] { clear_stale_words(p.mailbox, p.mailbox_bytes, epoch); };
  const int index = static_cast<int>(blockIdx.x) - grid.first_shrink;
  if constexpr (!kEachBlock) {
    if (index < 0) return RouteTiles<kEachBlock>::publish(p, epoch, shared);
  }
  const bool shrinks = index < grid.shrink_blocks;
  if constexpr (std::is_invocable_v<Expand, uint32_t>) {
    if (!shrinks) {
      wait_for_inputs(p);
      return expand(epoch);
    }
  }
  if constexpr (!kEachBlock) {
    if (grid.beside_large_m && takes_large_m(p)) {
      if (!is_first_block()) return;
      wait_for_predecessors();
      return clear_stale();
    }
  }
  const bool may_share = shrinks == (p.from_tokens != 0);
  const WarpSharing sharing(p, shrinks || may_share);
  const auto has_routes = [&] {
    return !may_share || !sharing.all() || (!shrinks && p.form == ARIL_WRITE);
  };
  const bool finds_local = !kEachBlock && shrinks && grid.first_shrink > 0;
  const RouteTiles<kEachBlock> tiles(
      p, grid, epoch, has_routes,
      finds_local ? reinterpret_cast<LocalTiles*>(shared + ARIL_EXPERTS_SHRINK_BYTES) : nullptr,
      shared, ARIL_EXPERTS_SHRINK_BYTES);
  if constexpr (!std::is_invocable_v<Expand, uint32_t>) {
    if (!shrinks) return expand(epoch, tiles, sharing);
  }
  if (index == 0) clear_stale();
  constexpr bool kCombines = std::is_invocable_v<Expand, uint32_t>;
  experts_shrink<T, kEachBlock && kCombines>(p, grid, epoch, tiles, sharing, shared);
  if (!kEachBlock && grid.beside_large_m) wait_for_predecessors();
}

// How the warps of expand share tiles, or tokens, and outputs where every warp has all slices: with
// few warps for `last` tiles, a warp takes more outputs rather than more tiles.
class ExpandShare {
 public:
  __device__ __forceinline__ ExpandShare(const aril_experts_args& p, const ExpertsGrid& grid,
                                         int last) {
    constexpr int kMaxTimes = 8;
    const int first_block = grid.first_shrink + grid.shrink_blocks;
    const int warps = (gridDim.x - first_block) * kExpertsWarps;
    const int at_once = warps / ceil_div(p.out_features, p.plan.outs_per_block);
    const int outs = p.plan.outs_per_block * min(max(ceil_div(last, at_once), 1), kMaxTimes);
    const int items = ceil_div(p.out_features, outs);  // of a tile
    const int index = (blockIdx.x - first_block) * kExpertsWarps + threadIdx.x / 32;
    stride = warps / items;
    // Warps that are left over have no tiles.
    first = index / items < stride ? index / items : last;
    begin = index % items * outs;
    end = min(begin + outs, p.out_features);
  }

  int first, stride;  // of the warp's tiles
  int begin, end;     // of its outputs
};

}  // namespace aril::detail
