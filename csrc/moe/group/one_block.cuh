// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Groups up to ARIL_ONE_BLOCK_ROUTES routes by expert and slot: the first block of the first
// operation does so for all blocks and all operations.
//
// A counting sort by expert over tokens in the order of their slots leaves the routes of a slot
// together, except among the 32 that a warp takes at once, whose order is arbitrary: at worst a
// slot has one tile more. Each warp counts its routes by group in one byte, and a scan makes
// places of the counts. Bound: latency; expand waits for it.
//
// run() is one long body: moving the search of tiles out of it changes the machine code.
#pragma once

#include <cub/block/block_scan.cuh>

#include "../../device/math.cuh"
#include "../../ptx/pdl.cuh"
#include "../routes.cuh"

namespace aril::detail {

template <int kThreads>
class OneBlockSort {
 public:
  // Bytes of `scratch`, in shared memory, aligned to 16.
  __host__ __device__ __forceinline__ static int scratch_bytes(int num_tokens,
                                                               const aril_top_k& top_k) {
    constexpr int kRouteBytes = sizeof(uint32_t) + sizeof(aril_route_entry);
    return counted_bytes(rounds_of(num_tokens, top_k), top_k) +
           ARIL_ONE_BLOCK_ROUTES * kRouteBytes +
           (ARIL_ONE_BLOCK_ROUTES + 1) * static_cast<int>(sizeof(uint16_t));
  }

  // Waits for inputs, then sorts. Returns the tiles with a slot, which come first, and all tiles.
  __device__ __forceinline__ static int2 run(const aril_experts_args& p, const SortedRoutes& sorted,
                                             unsigned char* scratch) {
    const aril_top_k& top_k = p.top_k;
    const aril_routing& routing = p.routing;
    const int num_tokens = p.num_tokens;
    using Scan = cub::BlockScan<int, kThreads, cub::BLOCK_SCAN_WARP_SCANS>;
    __shared__ typename Scan::TempStorage scan;
    __shared__ int last_firsts[kRows], leaders[kRows];
    __shared__ int num_with_slot;
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const unsigned lanes_before = (1u << lane) - 1;
    const int rounds = rounds_of(num_tokens, top_k), num_groups = top_k.num_experts + 2;
    // [groups][rounds], with one byte for each warp in `counts`
    uint64_t* const counts = reinterpret_cast<uint64_t*>(scratch);
    uint16_t* const begins = reinterpret_cast<uint16_t*>(counts + num_groups * rounds);
    uint32_t* const keys = reinterpret_cast<uint32_t*>(scratch + counted_bytes(rounds, top_k));
    // Sorted in shared memory first: scattered stores of 16 bytes to global memory are slow. (H100:
    // up to 3 us)
    aril_route_entry* const routes =
        reinterpret_cast<aril_route_entry*>(keys + ARIL_ONE_BLOCK_ROUTES);
    uint16_t* const begins_of_tiles = reinterpret_cast<uint16_t*>(routes + ARIL_ONE_BLOCK_ROUTES);

    // If the batch has more tokens than the operation, the operation's tokens may be anywhere in
    // the batch's order. If it has none, the order was never written.
    const int live_tokens = *routing.num_tokens;
    const bool by_slot = live_tokens > 0 && live_tokens <= num_tokens;
    const int num_routes = min(live_tokens, num_tokens) * top_k.top_k;
    // The loads of all rounds are issued before the first use.
    int route[kRounds], slot[kRounds], group[kRounds], at[kRounds];
    aril_route_entry entry[kRounds];
    const auto place_of = [&](int round) {
      const int i = round * kThreads + thread;
      return (i < num_routes ? i : 0) / top_k.top_k;
    };
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      const int place = place_of(round);
      route[round] = by_slot ? routing.tokens[place] : place;
    }
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      const int i = round * kThreads + thread;
      slot[round] = routing.slots[route[round]];
      // Threads without a route load the first one.
      route[round] = i < num_routes ? i + (route[round] - place_of(round)) * top_k.top_k : 0;
    }
    for (int i = thread; i < num_groups * rounds; i += kThreads) counts[i] = 0;
    wait_for_inputs(p);
    __syncthreads();
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      entry[round] = entry_of(top_k, routing, num_tokens, route[round]);
      group[round] = id_of(top_k, route[round]);
    }
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      group[round] = group_of(top_k, group[round], entry[round].row, slot[round]);
      if (round * kThreads + thread >= num_routes) group[round] = kNowhere;
      if (group[round] >= top_k.num_experts) slot[round] = -1;
    }
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      if (group[round] == kNowhere) continue;
      const int shift = warp % 4 * 8;
      uint32_t* const word =
          reinterpret_cast<uint32_t*>(counts + group[round] * rounds + round) + warp / 4;
      at[round] = atomicAdd(word, 1u << shift) >> shift & 0xff;
    }
    __syncthreads();

    const int groups_per_thread = ceil_div(num_groups, kThreads);
    const int first_group = min(thread * groups_per_thread, num_groups);
    const int last_group = min(first_group + groups_per_thread, num_groups);
    int begin = 0, num_sorted;
    for (int i = first_group * rounds; i < last_group * rounds; ++i) begin += sum_of(counts[i]);
    Scan(scan).ExclusiveSum(begin, begin, num_sorted);
    for (int i = first_group * rounds; i < last_group * rounds; ++i) {
      const uint64_t own = counts[i];
      begins[i] = begin;
      // Each byte becomes the sum of the bytes below it, at most 7 * 32.
      counts[i] = (own << 8) * 0x0101010101010101ull;
      begin += sum_of(own);
    }
    __syncthreads();
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      if (group[round] == kNowhere) continue;
      const int i = group[round] * rounds + round;
      at[round] += begins[i] + reinterpret_cast<const uint8_t*>(counts + i)[warp];
      keys[at[round]] = group[round] << kSlotBits | (slot[round] + 1);
      routes[at[round]] = entry[round];
    }
    const int without_slot = begins[top_k.num_experts * rounds];
    __syncthreads();

    for (int i = thread; i < num_sorted; i += kThreads) {
      reinterpret_cast<int4*>(sorted.routes)[i] = reinterpret_cast<const int4*>(routes)[i];
    }
    // Where the route's slot and expert begin: in its row of 32, or in the last row that has a
    // beginning.
    const auto row_of = [&](int round) { return round * (kThreads / 32) + warp; };
    int first[kRounds];
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      if (round >= rounds) break;
      const int i = round * kThreads + thread;
      const bool begins_here = i < num_sorted && (i == 0 || keys[i] != keys[i - 1]);
      const unsigned all = __ballot_sync(kAll, begins_here);
      const unsigned up_to = all & (lanes_before | 1u << lane);
      first[round] = up_to == 0 ? -1 : row_of(round) * 32 + 31 - __clz(up_to);
      if (lane == 0)
        last_firsts[row_of(round)] = all == 0 ? -1 : row_of(round) * 32 + 31 - __clz(all);
    }
    __syncthreads();
    unsigned leads[kRounds];
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      if (round >= rounds) break;
      const int i = round * kThreads + thread;
      const int before = __reduce_max_sync(kAll, lane < row_of(round) ? last_firsts[lane] : -1);
      leads[round] = __ballot_sync(
          kAll, i < num_sorted && (i - max(first[round], before)) % ARIL_ROUTES_PER_TILE == 0);
      if (lane == 0) leaders[row_of(round)] = __popc(leads[round]);
    }
    __syncthreads();
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      if (round >= rounds) break;
      const int i = round * kThreads + thread;
      const int tile = __reduce_add_sync(kAll, lane < row_of(round) ? leaders[lane] : 0) +
                       __popc(leads[round] & lanes_before);
      if (leads[round] >> lane & 1) begins_of_tiles[tile] = i;
      if (i == without_slot && i < num_sorted) num_with_slot = tile;
    }
    const int num_tiles =
        __reduce_add_sync(kAll, lane < rounds * (kThreads / 32) ? leaders[lane] : 0);
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
  static constexpr int kRounds =
      ARIL_ONE_BLOCK_ROUTES / kThreads;  // of the routes, one for each thread
  static constexpr int kRows = ARIL_ONE_BLOCK_ROUTES / 32;
  static constexpr int kSlotBits = 14;
  static_assert(kThreads / 32 == sizeof(uint64_t) && kRows <= 32);
  static_assert(ARIL_MAX_SLOTS < 1 << kSlotBits && ARIL_MAX_EXPERTS + 2 < 1 << (32 - kSlotBits));

  __host__ __device__ __forceinline__ static int counted_bytes(int rounds,
                                                               const aril_top_k& top_k) {
    const int bytes =
        (top_k.num_experts + 2) * rounds * static_cast<int>(sizeof(uint64_t) + sizeof(uint16_t));
    return ceil_div(bytes, 16) * 16;
  }

  __host__ __device__ __forceinline__ static int rounds_of(int num_tokens,
                                                           const aril_top_k& top_k) {
    return ceil_div(num_tokens * top_k.top_k, kThreads);
  }

  __device__ __forceinline__ static int sum_of(uint64_t bytes) {
    return __vsadu4(static_cast<uint32_t>(bytes), 0) + __vsadu4(bytes >> 32, 0);
  }
};

}  // namespace aril::detail
