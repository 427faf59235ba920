// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Groups up to ARIL_EACH_BLOCK_ROUTES routes by expert and slot: every block of an operation does
// so for itself, so that none waits for another.
//
// One thread per route compares its key with all others, which gives the route's place directly.
// Bound: latency, a few hundred instructions behind the loads.
#pragma once

#include "../routes.cuh"

namespace aril::detail {

// Sorts the routes of `num_routes` by group, slot and number. Each thread passes one route: the
// expert's id, the token's slot, and the entry. Returns the tiles with a slot, which come first,
// and all tiles. The whole block calls it.
template <int kThreads>
__device__ __forceinline__ int2 sort_in_each_block(const aril_top_k& top_k, int num_routes, int id,
                                                   int slot, const aril_route_entry& entry,
                                                   const SortedRoutes& sorted) {
  constexpr int kSlotBits = 13, kRouteBits = 8;
  static_assert(ARIL_EACH_BLOCK_ROUTES <= kThreads && ARIL_EACH_BLOCK_ROUTES <= 1 << kRouteBits);
  static_assert(ARIL_MAX_SLOTS <= 1 << kSlotBits);
  static_assert(ARIL_MAX_EXPERTS + 2 < 1 << (32 - kSlotBits - kRouteBits));
  constexpr uint32_t kRoutes = (1u << kRouteBits) - 1;
  __shared__ __align__(16) uint32_t keys[ARIL_EACH_BLOCK_ROUTES];
  __shared__ uint32_t firsts[ARIL_EACH_BLOCK_ROUTES / 32];  // bit i: route i is a tile's first
  const int route = threadIdx.x;
  const int group = route < num_routes ? group_of(top_k, id, entry.row, slot) : kNowhere;
  const bool has_group = group != kNowhere, has_slot = has_group && group < top_k.num_experts;
  if (!has_slot) slot = -1;
  // Group, slot, route; the largest key without a group.
  const uint32_t key =
      has_group ? static_cast<uint32_t>(group << kSlotBits | max(slot, 0)) << kRouteBits | route
                : ~0u;
  if (route < ARIL_EACH_BLOCK_ROUTES) keys[route] = key;
  if (route < ARIL_EACH_BLOCK_ROUTES / 32) firsts[route] = 0;
  __syncthreads();
  int before = 0, before_group = 0, up_to_group = 0;
#pragma unroll 1
  for (int i = 0; has_group && i < num_routes; i += 4) {
    const uint4 others = *reinterpret_cast<const uint4*>(keys + i);
    for (const uint32_t other : {others.x, others.y, others.z, others.w}) {
      before += other < key;
      before_group += other < (key & ~kRoutes);
      up_to_group += other <= (key | kRoutes);
    }
  }
  const bool is_first = has_group && (before - before_group) % ARIL_ROUTES_PER_TILE == 0;
  if (is_first) atomicOr(&firsts[before / 32], 1u << before % 32);
  if (has_group) sorted.routes[before] = entry;
  const int with_slot = __syncthreads_count(is_first && has_slot);
  if (is_first) {
    int tile = __popc(firsts[before / 32] & ((1u << before % 32) - 1));
    for (int i = 0; i < before / 32; ++i) tile += __popc(firsts[i]);
    sorted.tiles[tile] = {slot, group, before, min(up_to_group - before, ARIL_ROUTES_PER_TILE)};
  }
  return make_int2(with_slot, __syncthreads_count(is_first));
}

}  // namespace aril::detail
