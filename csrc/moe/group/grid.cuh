// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Groups more than ARIL_ONE_BLOCK_ROUTES routes by expert and slot: one launch (aril_group) for all
// operations on the layer's experts. No result depends on the order of routes within a group.
//
// One block for each expert, one for routes without a slot, one for routes to experts of other
// ranks. A block reads all routes twice: to count its own by slot, and to write them. In between it
// reads the counts of all earlier blocks from the mailbox. Bound: latency; every block reads every
// id, from L2.
//
// group_kernel() is one long body: its passes share their lists and lambdas, and moving the sum of
// the other blocks' counts out of it changes the machine code.
#pragma once

#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>

#include "../../device/mailbox.cuh"
#include "../../device/token_tile.cuh"
#include "../../ptx/pdl.cuh"
#include "../routes.cuh"

namespace aril::detail {

constexpr int kGroupThreads = 512;

// Routes, and their tiles of either size.
struct GroupCounts {
  int routes, small, wide;

  __device__ __forceinline__ GroupCounts operator+(const GroupCounts& other) const {
    return {routes + other.routes, small + other.small, wide + other.wide};
  }
};

constexpr int kGroupRound = 64 * kGroupThreads;  // routes that a block reads at a time
constexpr int kGroupSmemBytes = kGroupRound * 2 + ARIL_MAX_SLOTS * 4;
static_assert(kGroupSmemBytes <= 97 << 10, "the smallest devices have 99 KB");

// A bit for each of a thread's kAtOnce times four adjacent routes: whether it may belong to group
// `mine`. Rows are not checked. route_of(j) is the first route of the j-th four.
template <int kAtOnce, typename RouteOf>
__device__ __forceinline__ unsigned find_candidates(const int32_t* ids_of_routes,
                                                    const RouteOf& route_of, int num_routes,
                                                    int num_experts, int mine, bool vectors) {
  int4 ids[kAtOnce];
#pragma unroll
  for (int j = 0; j < kAtOnce; ++j) {
    const int left = num_routes - route_of(j);
    const int32_t* const from = ids_of_routes + route_of(j);
    if (vectors && left >= 4) {
      ids[j] = *reinterpret_cast<const int4*>(from);
    } else {
      ids[j] = make_int4(left > 0 ? from[0] : 0, left > 1 ? from[1] : 0, left > 2 ? from[2] : 0,
                         left > 3 ? from[3] : 0);
    }
  }
  unsigned candidates = 0;
#pragma unroll
  for (int j = 0; j < kAtOnce; ++j) {
    const auto may_be = [&](int id) -> unsigned {
      return mine < num_experts ? id == mine : static_cast<unsigned>(id) >= num_experts;
    };
    const unsigned there = (1u << max(0, min(num_routes - route_of(j), 4))) - 1;
    candidates |= ((may_be(ids[j].x) | may_be(ids[j].y) << 1 | may_be(ids[j].z) << 2 |
                    may_be(ids[j].w) << 3) &
                   there)
                  << 4 * j;
  }
  return candidates;
}

// Writes the tiles of one slot, which has `counts` and comes after the groups of `others` and the
// slots of `before`. This is thread `number` of `sharers`.
__device__ __forceinline__ void write_tiles(const aril_groups& groups, const GroupCounts& counts,
                                            const GroupCounts& others, const GroupCounts& before,
                                            int slot, int group, int number, int sharers) {
  const auto write = [&](aril_route_tile* tiles, int num_tiles, int size) {
#pragma unroll 1
    for (int i = number; i < num_tiles; i += sharers) {
      tiles[i] = {slot, group, others.routes + before.routes + i * size,
                  min(counts.routes - i * size, size)};
    }
  };
  write(groups.tiles + others.small + before.small, counts.small, ARIL_ROUTES_PER_TILE);
  write(groups.wide_tiles + others.wide + before.wide, counts.wide, ARIL_WIDE_TILE);
}

__global__ void __launch_bounds__(kGroupThreads, 1)
    group_kernel(const __grid_constant__ aril_group_args p) {
  using Scan = cub::BlockScan<GroupCounts, kGroupThreads, cub::BLOCK_SCAN_WARP_SCANS>;
  using Reduce = cub::BlockReduce<GroupCounts, kGroupThreads, cub::BLOCK_REDUCE_WARP_REDUCTIONS>;
  constexpr int kSmallTile = ARIL_ROUTES_PER_TILE, kWideTile = ARIL_WIDE_TILE;
  constexpr int kAtOnce = 4, kRound = kGroupRound;
  static_assert(kRound <= 1 << 16 && kRound % (4 * kAtOnce * kGroupThreads) == 0);
  __shared__ union {
    typename Scan::TempStorage scan;
    typename Reduce::TempStorage reduce;
  } storage;
  __shared__ uint32_t epoch;
  __shared__ GroupCounts of_others;
  __shared__ int num_listed;
  // Candidates of a round of routes; then, for each slot, its routes, later where its next route
  // goes. Groups without slots count in slot 0.
  extern __shared__ __align__(16) unsigned char group_shared[];
  uint16_t* const listed = reinterpret_cast<uint16_t*>(group_shared);
  int* const of_slots = reinterpret_cast<int*>(listed + kRound);
  const int mine = blockIdx.x, top_k = p.top_k.top_k, num_experts = p.top_k.num_experts;
  const bool has_slots = mine < num_experts;
  const int num_slots = has_slots ? p.num_slots : 1;
  if (threadIdx.x == 0) epoch = begin_epoch(p.groups.mailbox);
  for (int slot = threadIdx.x; slot < num_slots; slot += kGroupThreads) of_slots[slot] = 0;
  const int num_routes = routed_tokens(p.routing, p.num_tokens) * top_k;
  wait_for_predecessors();
  const bool vectors = reinterpret_cast<uintptr_t>(p.top_k.ids) % 16 == 0;
  const auto slot_of = [&](int route) { return p.routing.slots[route / top_k]; };
  const auto list = [&](int i) { listed[atomicAdd(&num_listed, 1)] = i; };
  const auto list_round = [&](int first) {
    __syncthreads();
    if (threadIdx.x == 0) num_listed = 0;
    __syncthreads();
    if (mine == num_experts) {
#pragma unroll 4
      for (int i = threadIdx.x; i < min(num_routes - first, kRound); i += kGroupThreads) {
        if (slot_of(first + i) < 0) list(i);
      }
    } else {
      const int last = min(num_routes, first + kRound);
#pragma unroll 1
      for (int begin = first; begin < last; begin += 4 * kAtOnce * kGroupThreads) {
        const auto route_of = [&](int j) {
          return begin + 4 * (j * kGroupThreads + static_cast<int>(threadIdx.x));
        };
        unsigned candidates =
            find_candidates<kAtOnce>(p.top_k.ids, route_of, num_routes, num_experts, mine, vectors);
        for (; candidates != 0; candidates &= candidates - 1) {
          const int bit = __ffs(candidates) - 1;
          list(route_of(bit / 4) + bit % 4 - first);
        }
      }
    }
    __syncthreads();
  };
  const auto for_own_routes = [&](bool is_listed, auto f) {
#pragma unroll 1
    for (int first = 0; first < num_routes; first += kRound) {
      if (!is_listed) list_round(first);
      for (int i = threadIdx.x; i < num_listed; i += kGroupThreads) {
        const int route = first + listed[i], slot = slot_of(route);
        const int row = row_of(p.top_k, p.num_tokens, route);
        if (group_of(p.top_k, p.top_k.ids[route], row, slot) == mine)
          f(route, has_slots ? slot : 0);
      }
    }
    __syncthreads();
  };
  for_own_routes(false, [&](int, int slot) { atomicAdd(&of_slots[slot], 1); });

  const auto counts_of = [&](int slot) {
    const int routes = of_slots[slot];
    return GroupCounts{routes, ceil_div(routes, kSmallTile), ceil_div(routes, kWideTile)};
  };
  const auto plus = [](const GroupCounts& a, const GroupCounts& b) { return a + b; };
  GroupCounts own = {0, 0, 0}, before, all;
  // Adjacent threads have adjacent slots, without bank conflicts.
#pragma unroll 4
  for (int slot = threadIdx.x; slot < num_slots; slot += kGroupThreads) own = own + counts_of(slot);
  Scan(storage.scan).ExclusiveScan(own, before, GroupCounts{0, 0, 0}, plus, all);

  // Each block publishes its counts, and sums those of the blocks before it, which have started.
  uint64_t* const words = tagged_words(p.groups.mailbox);
  if (is_first_block()) {
    constexpr int64_t kBytes = ARIL_GROUP_WORDS * ARIL_WORD_BYTES;
    clear_stale_words(p.groups.mailbox, ARIL_MAILBOX_HEADER + kBytes * gridDim.x, epoch);
  }
  if (threadIdx.x == 0) {
    store_tagged2(words + ARIL_GROUP_WORDS * mine, __int_as_float(all.routes),
                  __int_as_float(all.small), epoch);
    store_tagged(words + ARIL_GROUP_WORDS * mine + 2, __int_as_float(all.wide), epoch);
  }
  GroupCounts others = {0, 0, 0};
  for (int begin = threadIdx.x / 32 * 32; begin < mine; begin += kGroupThreads) {
    const int other = begin + static_cast<int>(threadIdx.x) % 32;
    TaggedPair first = {}, second = {};
    PollLimit polls;
    for (;;) {
      if (other < mine) {
        first = load_tagged(words + ARIL_GROUP_WORDS * other);
        second = load_tagged(words + ARIL_GROUP_WORDS * other + 2);
      }
      const bool came = other >= mine ||
                        (first.epoch0 == epoch && first.epoch1 == epoch && second.epoch0 == epoch);
      if (__all_sync(0xffffffffu, came)) break;
      polls.count();
    }
    others = others + GroupCounts{__float_as_int(first.value0), __float_as_int(first.value1),
                                  __float_as_int(second.value0)};
  }
  __syncthreads();
  others = Reduce(storage.reduce).Reduce(others, plus);
  if (threadIdx.x == 0) {
    of_others = others;
    const auto leave = [&](int i, const GroupCounts& counts) {
      p.groups.num_tiles[i] = counts.small;
      p.groups.num_wide_tiles[i] = counts.wide;
    };
    if (mine == num_experts) leave(0, others);
    if (mine == num_experts + 1) leave(1, others + all);
  }
  __syncthreads();
  others = of_others;

  if (has_slots) {
#pragma unroll 1
    for (int slot = threadIdx.x; slot < num_slots; slot += kGroupThreads) {
      const GroupCounts counts = counts_of(slot);
      if (counts.routes == 0) continue;
      write_tiles(p.groups, counts, others, before, slot, mine, 0, 1);
      of_slots[slot] = before.routes;
      before = before + counts;
    }
  } else {
    write_tiles(p.groups, all, others, {0, 0, 0}, -1, mine, threadIdx.x, kGroupThreads);
    if (threadIdx.x == 0) of_slots[0] = 0;
  }
  __syncthreads();
  for_own_routes(num_routes <= kRound, [&](int route, int slot) {
    p.groups.routes[others.routes + atomicAdd(&of_slots[slot], 1)] =
        entry_of(p.top_k, p.routing, p.num_tokens, route);
  });
}

}  // namespace aril::detail
