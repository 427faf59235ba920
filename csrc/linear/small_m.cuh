// SPDX-License-Identifier: MIT OR Apache-2.0
//
// A linear layer on up to ARIL_SMALL_M tokens in bf16 and f16: shrink and expand in one launch.
//
// Blocks of shrink come first in the grid and wait for nobody; blocks of expand take v from the
// mailbox (device/mailbox.cuh). Both request their weights before they wait for predecessors, so
// what remains on the critical path is x, two short products with a round trip through L2 between
// them, and y. Either half can also be launched alone. Where the routing may have many tiles,
// blocks take turns on them (SmallMGrid).
#pragma once

#include "small_m_expand.cuh"
#include "small_m_shrink.cuh"

namespace aril::detail {

// Blocks on a multiprocessor, as far as registers allow. In f16 both terms of B take registers.
template <typename T, bool kStaged>
constexpr int small_m_blocks =
#if __CUDA_ARCH__ >= 900
    kStaged && std::is_same_v<T, __nv_bfloat16> ? 3 : 2;
#else
    2;
#endif

template <typename T, bool kStaged, bool kTakesTurns>
__global__ void __launch_bounds__(kSmallMThreads, small_m_blocks<T, kStaged>)
    small_m_kernel(const __grid_constant__ aril_linear_args p,
                   const __grid_constant__ SmallMGrid grid) {
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ uint32_t epoch;
  if (static_cast<int>(blockIdx.x) < grid.shrink) {
    small_m_shrink<T, kTakesTurns>(p, grid, epoch, shared);
    if (!is_first_block()) return;
    __syncthreads();
    return clear_stale_words(p.mailbox, p.mailbox_bytes, epoch);
  }
  if (grid.apart) {
    launch_dependents();
  } else if (threadIdx.x == kSmallMThreads - 1) {
    // Not the thread that requests B.
    epoch = begin_epoch(p.mailbox);
  }
  const int index = blockIdx.x - grid.shrink;
  const ExpandShares* shares = &grid.few;
  int tile_index = shares->out_blocks.quotient(index);
  TokenTile tile(p, tile_index);
  TileRow row(p, tile_index);
  if constexpr (kTakesTurns) {
    const int of_many = grid.many.out_blocks.quotient(index);
    const TokenTile tile_of_many(p, of_many);
    const TileRow row_of_many(p, of_many);
    if (tile.num_tiles > grid.few_tiles) {
      shares = &grid.many;
      tile_index = of_many;
      tile = tile_of_many;
      row = row_of_many;
    }
    // The last blocks may be too few for another tile.
    if (tile_index >= shares->tiles) return;
  }
  int slice;
  const BlockOuts<T> outs(p, index - tile_index * shares->out_blocks, shares->outs_per_block,
                          slice);
  for (int turn = 0;;) {
    const aril_descriptor module = module_of(p.weights, tile.slot, slice);
    if (outs.begin(tile, module, p.num_tokens)) {
      if (turn > 0) {
        // The last turn's B and v have been read. This turn's B may come where v was.
        fence_async_proxy();
        __syncthreads();
      }
      // Turns take registers: with three blocks on a multiprocessor, a second unit's y would be in
      // local memory.
      constexpr bool kHasFew = kTakesTurns && small_m_blocks<T, kStaged> > 2;
      small_m_expand<T, kStaged, kHasFew ? 1 : 2>(
          tile.count, [&](int) { return row.expand_row(tile, module, p); }, module, outs, shared,
          [&] {
            return MailboxSums(p.mailbox, PartialLayout(p), grid.slabs, grid.apart, slice, epoch);
          },
          turn);
      ++turn;
    }
    tile_index += shares->tiles;
    if (!kTakesTurns || tile_index >= tile.num_tiles) return;
    tile = TokenTile(p, tile_index);
    row = TileRow(p, tile_index);
  }
}

}  // namespace aril::detail
