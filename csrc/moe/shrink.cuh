// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Shrink of route tiles in bf16 and f16, with mma.sync.
//
// A set of four warps computes one slab of v for one rank tile, a K tile per warp, and takes one
// route tile after the other. Most tiles have one or two routes, so the work is to stream A: the A
// of the next tile is loaded into registers, and its x into shared memory, while the current one is
// multiplied. If a slot's experts share A and x has a row per token, tiles of tokens replace its
// tiles of routes: A x is computed once per token, and expand reads it for every route.
//
// No weights are requested before the wait for inputs, since the router's choice is not known
// earlier. Bound: the bytes of A of the (slot, expert) pairs that occur.
#pragma once

#include "../device/mailbox.cuh"
#include "../device/reduction.cuh"
#include "../device/vec.cuh"
#include "../ptx/async.cuh"
#include "../ptx/mma.cuh"
#include "route_tiles.cuh"
#include "sharing.cuh"
#include "tile_queue.cuh"

namespace aril::detail {

constexpr int kChainFeatures = 64;
constexpr int kChainCores = kChainFeatures / ARIL_CORE;
constexpr int kChains = ARIL_K_TILE / kChainFeatures;
constexpr int kShrinkSets = kExpertsWarps / ARIL_K_TILES_PER_SLAB;  // of warps in a block

constexpr int kInputRowBytes = ARIL_K_TILE * 2 + 16;  // of x; padded so that 8 rows hit all banks
constexpr int kInputStageBytes = ARIL_ROUTES_PER_TILE * kInputRowBytes;
static_assert(ARIL_EXPERTS_SHRINK_BYTES == kExpertsWarps * 2 * kInputStageBytes);

// Synchronizes the warps of a set.
__device__ __forceinline__ void sync_set(int set) {
  asm volatile("bar.sync %0, %1;" ::"r"(set + 1), "n"(ARIL_K_TILES_PER_SLAB * 32) : "memory");
}

// What a warp of shrink streams for a tile.
struct ShrinkSource {
  int rank;          // 0: no work for the set
  const char* a;     // null: no work for the warp
  int count;         // rows
  int x_row, v_row;  // lane (g, q) has row g; -1: none
};

// The item of a set is `rank_tile`, that of its warp is also `k_tile`, if `has_k_tile`.
__device__ __forceinline__ ShrinkSource source_of(const aril_experts_args& p,
                                                  const TileLoads& loads, int rank_tile, int k_tile,
                                                  bool has_k_tile, int num_routes, int lane) {
  ShrinkSource source = {0, nullptr, 0, -1, -1};
  const int rank = loads.rank(p);
  if (rank_tile * ARIL_RANK_TILE >= rank || loads.own.a == nullptr || loads.shares_a(p)) {
    return source;
  }
  source.rank = rank;
  if (has_k_tile) {
    const int64_t k_tile_bytes = ceil_div(rank, ARIL_RANK_TILE) * kATileBytes;
    source.a = static_cast<const char*>(loads.own.a) + k_tile * k_tile_bytes +
               rank_tile * kATileBytes + lane * 4;
  }
  source.count = loads.tile.w;
  const int route = loads.route.route;
  if (loads.tile.y == TileLoads::kOfTokens) {
    if (route >= 0 && route < p.num_tokens) source.x_row = route;
    if (source.x_row >= 0) source.v_row = num_routes + route;
  } else if (route >= 0) {
    source.x_row = p.from_tokens ? route / p.top_k.top_k : loads.route.row;
    source.v_row = route;
  }
  return source;
}

// With kBesideActivation, the activation in front may still run.
template <typename T, bool kBesideActivation, typename Tiles>
__device__ __forceinline__ void experts_shrink(const aril_experts_args& p, const ExpertsGrid& grid,
                                               uint32_t epoch, const Tiles& tiles,
                                               const WarpSharing& sharing, unsigned char* shared) {
  constexpr int kRows = ARIL_ROUTES_PER_TILE, kHalves = ARIL_TOKENS_PER_TILE / kRows;
  __shared__ float2 k_tile_sums[2][kExpertsWarps][32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const int set = warp / ARIL_K_TILES_PER_SLAB;
  const int index = (static_cast<int>(blockIdx.x) - grid.first_shrink) * kShrinkSets + set;
  const int rank_tiles = sharing.rank_tiles(p);
  if (rank_tiles == 0) return;
  const int items = p.num_slices * rank_tiles * grid.slabs;     // of a tile
  const int stride = grid.shrink_blocks * kShrinkSets / items;  // of tiles
  const int slice = index % items % p.num_slices, item = index % items / p.num_slices;
  const int slab = item % grid.slabs, rank_tile = item / grid.slabs;
  const int k_tile = slab * ARIL_K_TILES_PER_SLAB + warp % ARIL_K_TILES_PER_SLAB;
  const int num_routes = p.num_tokens * p.top_k.top_k;
  const T* const input = static_cast<const T*>(p.x);
  const bool has_k_tile = k_tile * ARIL_K_TILE < p.in_features;
  const bool aligned = is_aligned(input, p.x_stride);
  const PartialLayout layout = partial_layout(p);
  uint64_t* const partial = tagged_words(p.mailbox) + slab * layout.partial_stride +
                            slice * layout.slice_stride + rank_tile * ARIL_RANK_TILE + 2 * q;
  // Tiles of tokens come first.
  const int token_tiles = p.from_tokens ? sharing.tiles * kHalves : 0;
  const bool has_experts = !p.from_tokens || !sharing.all();
  const int last = token_tiles + (has_experts ? tiles.count(false) : 0);
  if (index / items >= stride) return;
  // Rows that are not aligned are loaded through L1.
  if (!aligned) wait_for_predecessors();

  const auto load_tile = [&](int i) {
    if (i >= last) return make_int4(-1, 0, 0, 0);
    if (i >= token_tiles) return tiles.shrink_tile(i - token_tiles);
    const aril_tile& tile = p.routing.tiles.all[i / kHalves];
    const int first = i % kHalves * kRows;
    return make_int4(tile.slot, TileLoads::kOfTokens, tile.begin + first,
                     min(tile.count - first, kRows));
  };
  const auto next_source = [&](const TileLoads& loads) {
    return source_of(p, loads, rank_tile, k_tile, has_k_tile, num_routes, lane);
  };
  uint32_t weights[kChains][kChainCores] = {};
  const auto fetch_weights = [&](const ShrinkSource& source, int chain) {
    if (source.a == nullptr) return;
#pragma unroll
    for (int core = 0; core < kChainCores; ++core) {
      weights[chain][core] = load_once(source.a + (chain * kChainCores + core) * kCoreElems * 2);
    }
  };
  unsigned char* const inputs = shared + warp * 2 * kInputStageBytes;
  const int k = k_tile * ARIL_K_TILE + lane * Vec<T>::kSize;
  const bool whole = aligned && (k_tile + 1) * ARIL_K_TILE <= p.in_features;
  const auto fetch_inputs = [&](const ShrinkSource& source, int stage) {
    unsigned char* to = inputs + stage * kInputStageBytes + lane * 16;
#pragma unroll 1
    for (int t = 0; t < source.count; ++t, to += kInputRowBytes) {
      const int row = __shfl_sync(0xffffffffu, source.x_row, t * 4);
      if (row < 0) continue;
      const T* const from = input + row * p.x_stride;
      if (whole) {
        copy_async(to, from + k);
      } else if (has_k_tile) {
        copy_vec_async(to, from, k, p.in_features, aligned);
      }
    }
    commit_copies();
  };

  TileQueue<TileLoads::kOfTokens, Tiles, decltype(load_tile)> queue(p, tiles, slice, g, load_tile,
                                                                    index / items);
  queue.advance(index / items + stride);
  ShrinkSource source = next_source(queue.loads);
  queue.advance(index / items + 2 * stride);
#pragma unroll
  for (int chain = 0; chain < kChains; ++chain) fetch_weights(source, chain);
  if constexpr (kBesideActivation) {
    if (p.plan.inputs == ARIL_INPUTS_ANNOUNCED) {
      wait_for_activation(p.mailbox, p.plan.activation_blocks, epoch);
    }
  }
  fetch_inputs(source, 0);
  int parity = 0;
  for (int i = index / items; i < last; i += stride) {
    const ShrinkSource next = next_source(queue.loads);
    queue.advance(i + 3 * stride);
    fetch_inputs(next, parity ^ 1);
    wait_for_copies<1>();
    __syncwarp();
    // Lane i names row i % 8 of a core; the operand's rows 8 to 15 repeat rows 0 to 7.
    const unsigned char* x = inputs + parity * kInputStageBytes + lane % 8 * kInputRowBytes +
                             lane / 16 * (ARIL_CORE * 2);
    float2 k_tile_sum = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int chain = 0; chain < kChains; ++chain) {
      if (source.a != nullptr) {
        float sums[4] = {};
#pragma unroll
        for (int core = 0; core < kChainCores; core += 2) {
          const uint4 rows = ldmatrix_x4(x + (chain * kChainCores + core) * ARIL_CORE * 2);
          mma_m16n8k16<T>(sums, rows, weights[chain][core], weights[chain][core + 1]);
        }
        k_tile_sum = k_tile_sum + make_float2(sums[0], sums[1]);
      }
      fetch_weights(next, chain);
    }
    if (source.rank > 0) k_tile_sums[parity][warp][lane] = k_tile_sum;
    // In every tile: then no warp overwrites sums that another still reads, two tiles later.
    sync_set(set);
    if (source.rank > 0 && warp % ARIL_K_TILES_PER_SLAB == 0) {
      float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
      for (int k = 0; k < ARIL_K_TILES_PER_SLAB; ++k) {
        sum = sum + k_tile_sums[parity][set * ARIL_K_TILES_PER_SLAB + k][lane];
      }
      const int r = rank_tile * ARIL_RANK_TILE + 2 * q;
      if (source.v_row >= 0) {
        store_tagged2(partial + source.v_row * layout.row_stride, r < source.rank ? sum.x : 0.0f,
                      r + 1 < source.rank ? sum.y : 0.0f, epoch);
      }
    }
    parity ^= 1;
    source = next;
  }
}

}  // namespace aril::detail
