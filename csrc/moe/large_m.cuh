// SPDX-License-Identifier: MIT OR Apache-2.0
//
// A projection of experts with more than ARIL_ONE_BLOCK_ROUTES routes in bf16 and f16, on wide
// tiles: up to 64 routes of one slot to one expert. Shrink and expand are those of
// linear/large_m_shrink.cuh and linear/large_m_expand.cuh, a launch each. Between the two is a
// launch on route tiles (expand.cuh). The device decides which of them do the work
// (takes_large_m()); the others exit.
//
// Blocks loop over work items, so a launch costs what there is to do, not what there could be. No
// weights are requested before the wait for predecessors, since the tiles are not known earlier.
// Bounds are those of the linear kernels.
#pragma once

#include "../device/descriptor.cuh"
#include "../device/reduction.cuh"
#include "../device/token_tile.cuh"
#include "../linear/large_m_expand.cuh"
#include "../linear/large_m_shrink.cuh"
#include "../ptx/pdl.cuh"
#include "route_tiles.cuh"
#include "routes.cuh"
#include "sharing.cuh"

namespace aril::detail {

// A wide tile of routes. Modules and routes are loaded independently, so both can be in flight.
class WideRouteTile {
 public:
  int count;

  __device__ __forceinline__ WideRouteTile(const aril_experts_args& p, const int4& tile)
      : count(tile.w), p_(p) {
    slot_ = tile.x < p.weights.num_slots && tile.y < p.top_k.num_experts ? tile.x : -1;
    expert_ = tile.y;
    routes_ = reinterpret_cast<const int4*>(p.groups.routes) + tile.z;
  }

  // Tile `index`; any tile beyond the most that there can be.
  __device__ __forceinline__ static int4 load(const aril_experts_args& p, int index) {
    const int num_routes = p.num_tokens * p.top_k.top_k;
    return __ldcg(reinterpret_cast<const int4*>(p.groups.wide_tiles) +
                  (index < num_routes ? index : 0));
  }

  __device__ __forceinline__ aril_descriptor module(int slice) const {
    return module_of(p_.weights, slot_, (1 + expert_) * p_.num_slices + slice);
  }

  // The module that all experts of the slot share.
  __device__ __forceinline__ aril_descriptor shared(int slice) const {
    return module_of(p_.weights, slot_, slice);
  }

  // Whether A x is computed per token, given what the slot's experts share.
  __device__ __forceinline__ bool shares_a(const aril_descriptor& shared) const {
    return p_.from_tokens && shared.rank > 0 && shared.a != nullptr;
  }

  __device__ __forceinline__ ShrinkRow shrink_row(int t) const {
    const int4 entry = route(t);
    if (t >= count) return {-1, -1};
    return {p_.from_tokens ? token_of(entry.x) : entry.y, entry.x};
  }

  __device__ __forceinline__ int4 route(int t) const { return __ldcg(routes_ + min(t, count - 1)); }

  __device__ __forceinline__ ExpandRow expand_row(const int4& entry, const aril_descriptor& module,
                                                  bool shares_a) const {
    const float factor =
        route_factor(module.scaling, __int_as_float(entry.z), p_.weighted, __int_as_float(entry.w));
    const int num_routes = p_.num_tokens * p_.top_k.top_k;
    return {entry.y, shares_a ? num_routes + token_of(entry.x) : entry.x, factor};
  }

 private:
  __device__ __forceinline__ int token_of(int route) const {
    return static_cast<unsigned>(route) / static_cast<unsigned>(p_.top_k.top_k);
  }

  const aril_experts_args& p_;
  int slot_, expert_;
  const int4* routes_;
};

// Up to 64 routes of a wide tile of tokens to any experts, for slots whose experts share B.
class TokenRoutesTile {
 public:
  int count;

  __device__ __forceinline__ TokenRoutesTile(const aril_experts_args& p, int token_tiles, int index)
      : p_(p),
        tile_(p.routing, p.routing.wide_tiles, token_tiles, p.weights.num_slots,
              index / p.top_k.top_k),
        first_(index % p.top_k.top_k * ARIL_WIDE_TILE) {
    count = max(0, min(tile_.count * p.top_k.top_k - first_, ARIL_WIDE_TILE));
  }

  // The shared module; rank 0 if the experts do not share B.
  __device__ __forceinline__ aril_descriptor module(int slice) const {
    aril_descriptor shared = module_of(p_.weights, tile_.slot, slice);
    if (shared.b == nullptr) shared.rank = 0;
    return shared;
  }

  __device__ __forceinline__ ExpandRow expand_row(int t, int slice) const {
    ExpandRow row = {-1, -1, 0.0f};
    const int top_k = p_.top_k.top_k, number = first_ + t;
    const int token = t < count ? tile_.token(number / top_k, p_.num_tokens) : -1;
    if (token < 0) return row;
    const int route = token * top_k + number % top_k;
    const aril_route_entry entry = entry_of(p_.top_k, p_.routing, p_.num_tokens, route);
    const unsigned expert = p_.top_k.ids[route];
    if (expert >= static_cast<unsigned>(p_.top_k.num_experts) || entry.row == kNowhere) return row;
    const aril_descriptor own =
        module_of(p_.weights, tile_.slot, (1 + expert) * p_.num_slices + slice);
    if (own.rank > 0) {
      row = {entry.row, route, 0.0f};
      row.factor = route_factor(own.scaling, entry.scale, p_.weighted, entry.weight);
    } else if (p_.form == ARIL_WRITE) {
      row.y = entry.row;
    }
    return row;
  }

 private:
  const aril_experts_args& p_;
  TokenTile tile_;
  int first_;
};

// A work item is a tile, some rank tiles and a slab. Tiles of routes come first, then tiles of
// tokens.
template <typename T, int kRankTiles>
__global__ void __launch_bounds__(shrink_threads<kRankTiles>, shrink_blocks<kRankTiles>)
    experts_large_m_shrink_kernel(const __grid_constant__ aril_experts_args p, int rank_blocks) {
  extern __shared__ __align__(1024) unsigned char stages_shared[];
  wait_for_predecessors();
  launch_dependents();
  if (!takes_large_m(p)) return;
  const int lane = threadIdx.x % 32;
  const int rank_tiles = static_cast<int>(blockDim.x) / kWarpgroupThreads * kRankTiles;
  const unsigned items = rank_blocks * ceil_div(p.in_features, kSlabFeatures);
  const int num_routes = p.num_tokens * p.top_k.top_k;
  const PartialLayout layout = partial_layout(p);
  // Requested before the number of tiles is known.
  int4 route_tile = WideRouteTile::load(p, blockIdx.x / items);
  int route_tiles = __ldcg(p.groups.num_wide_tiles);
  const int token_tiles = p.from_tokens ? *p.routing.wide_tiles.count : 0;
  if (p.from_tokens && BlockSharing(p, token_tiles).all) route_tiles = 0;
  // 32 bits suffice: each item has at least 8 sums in partials and mailbox, so 2^32 need 400 GB.
  const unsigned last = static_cast<unsigned>(route_tiles + token_tiles) * items;
  for (unsigned i = blockIdx.x; i < last; i += gridDim.x) {
    const int tile_index = i / items, item = i % items;
    const int first_rank_tile = item % rank_blocks * rank_tiles, slab = item / rank_blocks;
    const WideRouteTile routes(p, route_tile);
    TokenTile tokens;
    aril_descriptor module = {};
    if (tile_index < route_tiles) {
      aril_descriptor shared = {};
      if (lane < p.num_slices) {
        module = routes.module(lane);
        shared = routes.shared(lane);
      }
      if (routes.shares_a(shared)) module.rank = 0;
    } else {
      tokens = TokenTile(p.routing, p.routing.wide_tiles, token_tiles, p.weights.num_slots,
                         tile_index - route_tiles);
      module = module_of_lane(p.weights, tokens.slot, p.num_slices);
      if (module.a == nullptr) module.rank = 0;
    }
    const auto make_row = [&](int t) {
      if (tile_index < route_tiles) return routes.shrink_row(t);
      const int token = tokens.token(t, p.num_tokens);
      return ShrinkRow{token, token < 0 ? -1 : num_routes + token};
    };
    large_m_shrink<T, kRankTiles>(static_cast<const T*>(p.x), p.x_stride, p.in_features, module,
                                  first_rank_tile,
                                  KTiles(p.in_features, ARIL_K_TILES_PER_SLAB, slab), 1, make_row,
                                  p.partials + slab * layout.partial_stride, layout, stages_shared);
    route_tile = WideRouteTile::load(p, (i + gridDim.x) / items);
    __syncthreads();
  }
}

// Blocks of expand on a multiprocessor, as far as registers allow.
template <typename T>
constexpr int experts_large_m_blocks() {
#if __CUDA_ARCH__ >= 900
  return kLargeMExpandBlocks<T>;
#else
  return std::is_same_v<T, __nv_bfloat16> ? kLargeMExpandBlocks<T> : 1;
#endif
}

// A work item is a tile and some outputs of a slice. With kMayShare, slots whose experts share B
// have tiles of their tokens' routes instead, if those are far fewer. (H100, down of 8192 routes,
// rank 32: 8 slots, 117 us by expert and 67 us by token; one slot, with half as many tiles by
// expert, 42 and 50 us.)
template <typename T, bool kMayShare>
__global__ void __launch_bounds__(kExpandThreads, experts_large_m_blocks<T>())
    experts_large_m_expand_kernel(const __grid_constant__ aril_experts_args p, int smem_bytes) {
  extern __shared__ __align__(1024) unsigned char stages_shared[];
  __shared__ TransactionBarrier barriers_shared[kMaxExpandStages];
  __shared__ ExpandRow rows[ARIL_WIDE_TILE];
  launch_dependents();
  ExpandBarriers barriers(barriers_shared);
  wait_for_predecessors();
  if (!takes_large_m(p)) return;
  const int items = p.num_slices * ceil_div(p.out_features, p.plan.wide_outs_per_block);
  // In shared memory, since registers are short. Tiles of tokens' routes come first.
  __shared__ int next, last, last_by_token;
  if (threadIdx.x == 0) {
    next = blockIdx.x;
    last_by_token = 0;
    last = __ldcg(p.groups.num_wide_tiles + (p.form == ARIL_WRITE)) * items;
  }
  __syncthreads();
  if constexpr (kMayShare) {
    const int token_tiles = *p.routing.wide_tiles.count, top_k = p.top_k.top_k;
    if (4 * int64_t{last} > 7 * int64_t{token_tiles} * top_k * items) {
      const BlockSharing sharing(p, token_tiles);
      if (threadIdx.x == 0 && sharing.any) {
        last_by_token = token_tiles * top_k * items;
        last = last_by_token + (sharing.all && p.form != ARIL_WRITE ? 0 : last);
      }
      __syncthreads();
    }
  }
  int4 route_tile = WideRouteTile::load(p, max(next - last_by_token, 0) / items);
  while (next < last) {
    int slice;
    const BlockOuts<T> outs(p, next % items, p.plan.wide_outs_per_block, slice);
    aril_descriptor module;
    int count;
    if (kMayShare && next < last_by_token) {
      const TokenRoutesTile tile(p, *p.routing.wide_tiles.count, next / items);
      module = tile.module(slice);
      count = module.rank > 0 ? tile.count : 0;
      if (count == 0) module.rank = 0;
      if (threadIdx.x < ARIL_WIDE_TILE) rows[threadIdx.x] = tile.expand_row(threadIdx.x, slice);
    } else {
      const WideRouteTile tile(p, route_tile);
      module = tile.module(slice);
      count = tile.count;
      aril_descriptor shared = {};
      if (!kMayShare || last_by_token > 0) shared = tile.shared(slice);
      if (threadIdx.x < ARIL_WIDE_TILE) {
        const int4 route = tile.route(threadIdx.x);
        ExpandRow row = tile.expand_row(route, module, tile.shares_a(shared));
        if (threadIdx.x >= count) row = {-1, -1, 0.0f};
        rows[threadIdx.x] = row;
      }
      if (kMayShare && shared.rank > 0 && shared.b != nullptr) count = module.rank = 0;
    }
    __syncthreads();
    if (threadIdx.x == 0) next += gridDim.x;
    if (module.rank > 0) {
      large_m_expand<T>(count, rows, module, outs, stages_shared, smem_bytes, barriers,
                        PartialSums(p.partials, partial_layout(p),
                                    ceil_div(p.in_features, kSlabFeatures), true, slice));
    } else if (outs.overwrites) {
      for (int t = 0; t < count; ++t) {
        T* const y = outs.y + rows[t].y * outs.y_stride + outs.first;
        for (int out = threadIdx.x; out < outs.count; out += kExpandThreads) y[out] = T(0.0f);
      }
    }
    __syncthreads();
    if (next < last) route_tile = WideRouteTile::load(p, max(next - last_by_token, 0) / items);
  }
}

}  // namespace aril::detail
