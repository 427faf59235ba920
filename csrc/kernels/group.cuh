// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Groups the routes of a layer by expert and slot: once, for all operations on the layer's experts.
// No result depends on the order of routes within a group.
//
// Up to ARIL_FEW_ROUTES, a block of the first operation sorts them. Beyond, a kernel of its own
// has a block for each expert, one for the routes without a slot, and one for those that are not
// here: each goes through all routes, by and large in the order of their tokens' slots, first to
// count its own and those of the blocks before it, then to write them down. Bound: latency; a
// route's id is read by every block, from L2.
#pragma once

#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>

#include "../common/pdl.cuh"
#include "tile.cuh"

namespace aril::detail {

constexpr int kGroupThreads = 1024;

// What has no row in matrices of routes.
constexpr int kNowhere = -1;

// The row of a route in matrices of routes, or kNowhere.
__device__ __forceinline__ int row_of(const aril_top_k& top_k, int num_tokens, int route) {
  if (top_k.rows == nullptr) return route;
  const int row = top_k.rows[route];
  return row >= 0 && row < num_tokens * top_k.top_k ? row : kNowhere;
}

// The expert of a route of a token of `slot`: num_experts if there is no slot, num_experts + 1 if
// the route is not here, kNowhere if it has no row.
__device__ __forceinline__ int group_of(const aril_top_k& top_k, int num_tokens, int route,
                                        int slot) {
  const unsigned expert = top_k.ids[route], num_experts = top_k.num_experts;
  if (top_k.rows != nullptr && row_of(top_k, num_tokens, route) == kNowhere) return kNowhere;
  return expert >= num_experts ? num_experts + 1 : slot < 0 ? num_experts : expert;
}

// The tokens of an operation on `num_tokens` that were routed.
__device__ __forceinline__ int routed_tokens(const aril_routing& routing, int num_tokens) {
  return min(*routing.num_tokens, num_tokens);
}

__host__ __device__ __forceinline__ bool are_few(int num_tokens, const aril_top_k& top_k) {
  return num_tokens * top_k.top_k <= ARIL_FEW_ROUTES;
}

__device__ __forceinline__ aril_route_entry entry_of(const aril_top_k& top_k,
                                                     const aril_routing& routing, int num_tokens,
                                                     int route) {
  return {route, row_of(top_k, num_tokens, route), routing.scales[route / top_k.top_k],
          top_k.weights == nullptr ? 1.0f : top_k.weights[route]};
}

// Sorts few routes by expert, slot and number, by a block of kThreads: each goes to its expert's
// part of a list, where it counts those that come before it.
template <int kThreads>
class RouteSort {
 public:
  // Gives the number of tiles, of those with a slot and of all.
  __device__ __forceinline__ int2 run(const aril_top_k& top_k, const aril_routing& routing,
                                      const aril_groups& groups, int num_tokens) {
    const int num_routes = routed_tokens(routing, num_tokens) * top_k.top_k;
    const int num_groups = top_k.num_experts + 2;
    const int thread = threadIdx.x;
    const auto route_of = [&](int i) { return i * kThreads + thread; };
    int group[kPerThread], slot[kPerThread], at[kPerThread];
    aril_route_entry entries[kPerThread];
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      group[i] = kNowhere;
      if (route_of(i) >= num_routes) continue;
      entries[i] = entry_of(top_k, routing, num_tokens, route_of(i));
      slot[i] = routing.slots[route_of(i) / top_k.top_k];
      group[i] = group_of(top_k, num_tokens, route_of(i), slot[i]);
      if (group[i] >= top_k.num_experts) slot[i] = -1;
    }
    for (int i = thread; i <= num_groups; i += kThreads) begins_[i] = 0;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      if (group[i] != kNowhere) at[i] = atomicAdd(&begins_[group[i]], 1);
    }
    __syncthreads();
    int begins[kGroupsPerThread], num_sorted;
#pragma unroll
    for (int i = 0; i < kGroupsPerThread; ++i) {
      const int g = thread * kGroupsPerThread + i;
      begins[i] = g < num_groups ? begins_[g] : 0;
    }
    Scan(scan_).ExclusiveSum(begins, begins, num_sorted);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kGroupsPerThread; ++i) {
      const int g = thread * kGroupsPerThread + i;
      if (g <= num_groups) begins_[g] = begins[i];
    }
    __syncthreads();
    const auto key_of = [&](int i) {
      return static_cast<uint32_t>(slot[i] + 1) << 16 | route_of(i);
    };
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      if (group[i] != kNowhere) unsorted_[begins_[group[i]] + at[i]] = key_of(i);
    }
    __syncthreads();
    // Where the route goes; of the first of a tile, where the tile ends, of others -1.
    int end[kPerThread];
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      if (group[i] == kNowhere) continue;
      int before = 0, of_slot_before = 0, of_slot = 0;
      for (int j = begins_[group[i]]; j < begins_[group[i] + 1]; ++j) {
        const uint32_t other = unsorted_[j];
        const bool same = other >> 16 == key_of(i) >> 16;
        before += other < key_of(i);
        of_slot_before += same && other < key_of(i);
        of_slot += same;
      }
      at[i] = begins_[group[i]] + before;
      end[i] = of_slot_before % ARIL_ROUTES_PER_TILE == 0
                   ? at[i] + min(of_slot - of_slot_before, ARIL_ROUTES_PER_TILE)
                   : -1;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      if (group[i] == kNowhere) continue;
      groups.routes[at[i]] = entries[i];
      ends_[at[i]] = end[i];
    }
    __syncthreads();
    int tile[kPerThread], num_tiles;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const int j = thread * kPerThread + i;
      tile[i] = j < num_sorted && ends_[j] >= 0;
    }
    Scan(scan_).ExclusiveSum(tile, tile, num_tiles);
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) tiles_[thread * kPerThread + i] = tile[i];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      if (group[i] == kNowhere || end[i] < 0) continue;
      groups.tiles[tiles_[at[i]]] = {slot[i], group[i], at[i], end[i] - at[i]};
    }
    const int without_slot = begins_[top_k.num_experts];
    return make_int2(without_slot < num_sorted ? tiles_[without_slot] : num_tiles, num_tiles);
  }

 private:
  using Scan = cub::BlockScan<int, kThreads>;
  static constexpr int kPerThread = ARIL_FEW_ROUTES / kThreads;
  static constexpr int kGroupsPerThread = ceil_div(ARIL_MAX_EXPERTS + 3, kThreads);

  typename Scan::TempStorage scan_;
  int begins_[ARIL_MAX_EXPERTS + 3];
  uint32_t unsorted_[ARIL_FEW_ROUTES];  // slot + 1, number
  int ends_[ARIL_FEW_ROUTES];
  int tiles_[ARIL_FEW_ROUTES];
};

__global__ void __launch_bounds__(kGroupThreads)
    group_kernel(const __grid_constant__ aril_group_args p) {
  using Scan = cub::BlockScan<int, kGroupThreads>;
  using Reduce = cub::BlockReduce<int, kGroupThreads>;
  __shared__ union {
    typename Scan::TempStorage scan;
    typename Reduce::TempStorage reduce;
  } storage;
  constexpr int kSlots = 8192;
  __shared__ int begin, is_last, first_tiles[ARIL_MAX_EXPERTS + 2];
  __shared__ int16_t slots[kSlots];  // of the group's first routes
  const int mine = blockIdx.x, top_k = p.top_k.top_k;
  const auto slot_at = [&](int token) {
    const int slot = p.routing.slots[token];
    return slot < p.num_slots ? slot : -1;
  };
  // A thread has neighbouring tokens, so that the threads' shares stand in the order of slots.
  const int num_tokens = routed_tokens(p.routing, p.num_tokens);
  const int share = ceil_div(num_tokens, kGroupThreads);
  const int first = min(static_cast<int>(threadIdx.x) * share, num_tokens);
  const int last = min(first + share, num_tokens);
  const auto for_routes = [&](auto f) {
    constexpr int kAtOnce = 4;
    for (int i = first; i < last; i += kAtOnce) {
      int tokens[kAtOnce], token_slots[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) tokens[j] = p.routing.tokens[min(i + j, last - 1)];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) token_slots[j] = slot_at(tokens[j]);
      for (int k = 0; k < top_k; ++k) {
        int groups[kAtOnce];
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          groups[j] = group_of(p.top_k, p.num_tokens, tokens[j] * top_k + k, token_slots[j]);
        }
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          if (i + j < last) f(tokens[j] * top_k + k, token_slots[j], groups[j]);
        }
      }
    }
  };
  wait_for_predecessors();

  int own = 0, of_others = 0;  // routes of this group, of those before it
  for_routes([&](int, int, int group) {
    own += group == mine;
    of_others += group != kNowhere && group < mine;
  });
  int before, count;
  Scan(storage.scan).ExclusiveSum(own, before, count);
  __syncthreads();
  of_others = Reduce(storage.reduce).Sum(of_others);
  if (threadIdx.x == 0) {
    begin = of_others;
    p.groups.begins[mine] = of_others;
  }
  __syncthreads();
  aril_route_entry* const routes = p.groups.routes + begin;
  if (own > 0) {
    for_routes([&](int route, int slot, int group) {
      if (group != mine) return;
      if (before < kSlots) slots[before] = slot;
      routes[before++] = entry_of(p.top_k, p.routing, p.num_tokens, route);
    });
  }
  __syncthreads();

  // A tile begins where the slot changes, and every so many routes.
  const auto slot_of_own = [&](int i) -> int {
    if (mine >= p.top_k.num_experts) return -1;
    return i < kSlots ? slots[i] : slot_at(routes[i].route / top_k);
  };
  const auto begins = [&](int i) {
    return i % (2 * ARIL_ROUTES_PER_TILE) == 0 || slot_of_own(i) != slot_of_own(i - 1);
  };
  int tiles = 0;
  for (int first = 0; first < count; first += kGroupThreads) {
    const int i = first + threadIdx.x;
    const bool is_first = i < count && begins(i);
    int before, total;
    __syncthreads();
    Scan(storage.scan).ExclusiveSum(is_first ? 1 : 0, before, total);
    if (is_first) {
      int end = i + 1;
      while (end < count && !begins(end)) ++end;
      p.groups.scratch[begin + tiles + before] = {slot_of_own(i), mine, begin + i, end - i};
    }
    tiles += total;
  }
  if (threadIdx.x == 0) p.groups.counts[mine] = tiles;

  // The last block puts all tiles one after the other.
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    is_last = atomicAdd(p.groups.arrived, 1) == static_cast<int>(gridDim.x) - 1;
    __threadfence();
  }
  __syncthreads();
  if (!is_last) return;
  int all = 0;
  for (int first = 0; first < static_cast<int>(gridDim.x); first += kGroupThreads) {
    const int group = first + threadIdx.x;
    const bool live = group < static_cast<int>(gridDim.x);
    const int tiles = live ? __ldcg(p.groups.counts + group) : 0;
    int before, total;
    __syncthreads();
    Scan(storage.scan).ExclusiveSum(tiles, before, total);
    if (live) first_tiles[group] = all + before;
    all += total;
  }
  __syncthreads();
  // Each tile's group is found among their first tiles.
  for (int i = threadIdx.x; i < all; i += kGroupThreads) {
    int group = 0;
    for (int step = 1 << 10; step > 0; step /= 2) {
      const int next = group + step;
      if (next < static_cast<int>(gridDim.x) && first_tiles[next] <= i) group = next;
    }
    const int from = __ldcg(p.groups.begins + group) + i - first_tiles[group];
    reinterpret_cast<int4*>(p.groups.tiles)[i] =
        __ldcg(reinterpret_cast<const int4*>(p.groups.scratch) + from);
  }
  if (threadIdx.x == 0) {
    p.groups.num_tiles[0] = first_tiles[p.top_k.num_experts];
    p.groups.num_tiles[1] = all;
    *p.groups.arrived = 0;
  }
}

}  // namespace aril::detail
