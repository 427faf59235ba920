// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Sorts few routes by expert, slot and number, by one block.
//
// Up to 64 are sorted by comparing each with all others, which every block of an operation does for
// itself, so that none waits for another. More are sorted by the first block of the first
// operation, which expand waits for: a counting sort by expert of tokens that stand by slot.
#pragma once

#include <cub/block/block_scan.cuh>

#include "../../device/descriptor.cuh"
#include "../../ptx/pdl.cuh"
#include "grid.cuh"

namespace aril::detail {

__host__ __device__ __forceinline__ bool fit_each_block(int num_tokens, const aril_top_k& top_k) {
  return num_tokens * top_k.top_k <= ARIL_EACH_BLOCK_ROUTES;
}

// Routes in the order of their tiles, in shared or global memory.
struct SortedRoutes {
  aril_route_entry* routes;
  aril_route_tile* tiles;
};

// Both sorts give the numbers of tiles: of those with a slot, which come first, and of all.

// Of up to ARIL_EACH_BLOCK_ROUTES routes, of which `num_routes` are there. Each has a thread, which
// has loaded what the router chose, the token's slot and the entry, and counts those that come
// before.
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
  __shared__ uint32_t firsts[ARIL_EACH_BLOCK_ROUTES / 32];  // a bit for each first one of a tile
  const int route = threadIdx.x;
  const int group = route < num_routes ? group_of(top_k, id, entry.row, slot) : kNowhere;
  const bool has_group = group != kNowhere, has_slot = has_group && group < top_k.num_experts;
  if (!has_slot) slot = -1;
  // What the tiles are of, and the number; behind all others where there is none.
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

// Of up to ARIL_ONE_BLOCK_ROUTES; waits for predecessors. Tokens are taken by slot, so that a
// counting sort by expert leaves those of a slot together, but for the few that a warp takes at
// once, whose order is left to chance: at worst they are a tile more. Each warp counts its own by
// expert, which says where they go once the counts have been added up.
template <int kThreads>
class OneBlockSort {
 public:
  // Of `scratch`, in shared memory, aligned to 16.
  __host__ __device__ __forceinline__ static int scratch_bytes(int num_tokens,
                                                               const aril_top_k& top_k) {
    constexpr int kRouteBytes = sizeof(uint32_t) + sizeof(aril_route_entry);
    return counted_bytes(parts_of(num_tokens, top_k), top_k) + ARIL_ONE_BLOCK_ROUTES * kRouteBytes +
           (ARIL_ONE_BLOCK_ROUTES + 1) * static_cast<int>(sizeof(uint16_t));
  }

  __device__ __forceinline__ static int2 run(const aril_top_k& top_k, const aril_routing& routing,
                                             int num_tokens, const SortedRoutes& sorted,
                                             unsigned char* scratch) {
    using Scan = cub::BlockScan<int, kThreads, cub::BLOCK_SCAN_WARP_SCANS>;
    __shared__ typename Scan::TempStorage scan;
    __shared__ int last_firsts[kRows], leaders[kRows];
    __shared__ int num_with_slot;
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const unsigned lanes_before = (1u << lane) - 1;
    const int parts = parts_of(num_tokens, top_k), num_groups = top_k.num_experts + 2;
    // [groups][parts], of the counts a byte for each warp
    uint64_t* const counts = reinterpret_cast<uint64_t*>(scratch);
    uint16_t* const begins = reinterpret_cast<uint16_t*>(counts + num_groups * parts);
    uint32_t* const keys = reinterpret_cast<uint32_t*>(scratch + counted_bytes(parts, top_k));
    // Sorted here first: 16 bytes at a time, in any order, are slow to go to global memory. (H100:
    // up to 3 us)
    aril_route_entry* const routes =
        reinterpret_cast<aril_route_entry*>(keys + ARIL_ONE_BLOCK_ROUTES);
    uint16_t* const begins_of_tiles = reinterpret_cast<uint16_t*>(routes + ARIL_ONE_BLOCK_ROUTES);

    // A batch of more tokens than the operation has may have them anywhere in its order.
    const int live_tokens = *routing.num_tokens;
    const bool by_slot = live_tokens <= num_tokens;
    const int num_routes = min(live_tokens, num_tokens) * top_k.top_k;
    // Loads of all parts are on their way before any is used.
    int route[kParts], slot[kParts], group[kParts], at[kParts];
    aril_route_entry entry[kParts];
    const auto place_of = [&](int part) {
      const int i = part * kThreads + thread;
      return (i < num_routes ? i : 0) / top_k.top_k;
    };
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int place = place_of(part);
      route[part] = by_slot ? routing.tokens[place] : place;
    }
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int i = part * kThreads + thread;
      slot[part] = routing.slots[route[part]];
      // Threads without a route look at the first.
      route[part] = i < num_routes ? i + (route[part] - place_of(part)) * top_k.top_k : 0;
    }
    for (int i = thread; i < num_groups * parts; i += kThreads) counts[i] = 0;
    wait_for_predecessors();
    __syncthreads();
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      entry[part] = entry_of(top_k, routing, num_tokens, route[part]);
      group[part] = top_k.ids[route[part]];
    }
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      group[part] = group_of(top_k, group[part], entry[part].row, slot[part]);
      if (part * kThreads + thread >= num_routes) group[part] = kNowhere;
      if (group[part] >= top_k.num_experts) slot[part] = -1;
    }
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      if (group[part] == kNowhere) continue;
      const int shift = warp % 4 * 8;
      uint32_t* const word =
          reinterpret_cast<uint32_t*>(counts + group[part] * parts + part) + warp / 4;
      at[part] = atomicAdd(word, 1u << shift) >> shift & 0xff;
    }
    __syncthreads();

    const int groups_per_thread = ceil_div(num_groups, kThreads);
    const int first_group = min(thread * groups_per_thread, num_groups);
    const int last_group = min(first_group + groups_per_thread, num_groups);
    int begin = 0, num_sorted;
    for (int i = first_group * parts; i < last_group * parts; ++i) begin += sum_of(counts[i]);
    Scan(scan).ExclusiveSum(begin, begin, num_sorted);
    for (int i = first_group * parts; i < last_group * parts; ++i) {
      const uint64_t own = counts[i];
      begins[i] = begin;
      // Each byte becomes the sum of those below it, at most 7 * 32.
      counts[i] = (own << 8) * 0x0101010101010101ull;
      begin += sum_of(own);
    }
    __syncthreads();
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      if (group[part] == kNowhere) continue;
      const int i = group[part] * parts + part;
      at[part] += begins[i] + reinterpret_cast<const uint8_t*>(counts + i)[warp];
      keys[at[part]] = group[part] << kSlotBits | (slot[part] + 1);
      routes[at[part]] = entry[part];
    }
    const int without_slot = begins[top_k.num_experts * parts];
    __syncthreads();

    for (int i = thread; i < num_sorted; i += kThreads) {
      reinterpret_cast<int4*>(sorted.routes)[i] = reinterpret_cast<const int4*>(routes)[i];
    }
    // Where a route's slot and expert begin: in its row of 32, or at the last beginning before.
    const auto row_of = [&](int part) { return part * (kThreads / 32) + warp; };
    int first[kParts];
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      if (part >= parts) break;
      const int i = part * kThreads + thread;
      const bool begins_here = i < num_sorted && (i == 0 || keys[i] != keys[i - 1]);
      const unsigned all = __ballot_sync(kAll, begins_here);
      const unsigned up_to = all & (lanes_before | 1u << lane);
      first[part] = up_to == 0 ? -1 : row_of(part) * 32 + 31 - __clz(up_to);
      if (lane == 0)
        last_firsts[row_of(part)] = all == 0 ? -1 : row_of(part) * 32 + 31 - __clz(all);
    }
    __syncthreads();
    unsigned leads[kParts];
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      if (part >= parts) break;
      const int i = part * kThreads + thread;
      const int before = __reduce_max_sync(kAll, lane < row_of(part) ? last_firsts[lane] : -1);
      leads[part] = __ballot_sync(
          kAll, i < num_sorted && (i - max(first[part], before)) % ARIL_ROUTES_PER_TILE == 0);
      if (lane == 0) leaders[row_of(part)] = __popc(leads[part]);
    }
    __syncthreads();
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      if (part >= parts) break;
      const int i = part * kThreads + thread;
      const int tile = __reduce_add_sync(kAll, lane < row_of(part) ? leaders[lane] : 0) +
                       __popc(leads[part] & lanes_before);
      if (leads[part] >> lane & 1) begins_of_tiles[tile] = i;
      if (i == without_slot && i < num_sorted) num_with_slot = tile;
    }
    const int num_tiles =
        __reduce_add_sync(kAll, lane < parts * (kThreads / 32) ? leaders[lane] : 0);
    if (thread == 0) {
      begins_of_tiles[num_tiles] = num_sorted;
      if (without_slot == num_sorted) num_with_slot = num_tiles;
    }
    __syncthreads();
    for (int i = thread; i < num_tiles; i += kThreads) {
      const int first = begins_of_tiles[i];
      const uint32_t key = keys[first];
      sorted.tiles[i] = {static_cast<int>(key % (1u << kSlotBits)) - 1,
                         static_cast<int>(key >> kSlotBits), first, begins_of_tiles[i + 1] - first};
    }
    return make_int2(num_with_slot, num_tiles);
  }

 private:
  static constexpr unsigned kAll = 0xffffffffu;
  static constexpr int kParts =
      ARIL_ONE_BLOCK_ROUTES / kThreads;  // of the routes, one for each thread
  static constexpr int kRows = ARIL_ONE_BLOCK_ROUTES / 32;
  static constexpr int kSlotBits = 14;
  static_assert(kThreads / 32 == sizeof(uint64_t) && kRows <= 32);
  static_assert(ARIL_MAX_SLOTS < 1 << kSlotBits && ARIL_MAX_EXPERTS + 2 < 1 << (32 - kSlotBits));

  __host__ __device__ __forceinline__ static int counted_bytes(int parts, const aril_top_k& top_k) {
    const int bytes =
        (top_k.num_experts + 2) * parts * static_cast<int>(sizeof(uint64_t) + sizeof(uint16_t));
    return ceil_div(bytes, 16) * 16;
  }

  __host__ __device__ __forceinline__ static int parts_of(int num_tokens, const aril_top_k& top_k) {
    return ceil_div(num_tokens * top_k.top_k, kThreads);
  }

  __device__ __forceinline__ static int sum_of(uint64_t bytes) {
    return __vsadu4(static_cast<uint32_t>(bytes), 0) + __vsadu4(bytes >> 32, 0);
  }
};

}  // namespace aril::detail
