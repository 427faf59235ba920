// SPDX-License-Identifier: MIT OR Apache-2.0
//
// aril_align: arranges routes with a slot in blocks of one slot and one expert, for a grouped GEMM
// that treats each such pair as an expert.
//
// One thread block for each expert reads all routes twice: to find the place of each of its own
// among those of its slot, and to write it there. In between it publishes how many blocks of routes
// it has and reads those of all earlier experts from the mailbox. Places are deterministic: one
// warp counts the routes in the order of their numbers, 32 at a time.
//
// Shared memory: a counter of 4 bytes per slot (at most 32 KB), and lists of 32 KB. Bound: latency;
// every block reads every id, from L2.
//
// align_kernel() is one long body: both passes over the routes share the ids that are loaded ahead.
#pragma once

#include <cub/block/block_scan.cuh>

#include "../../device/mailbox.cuh"
#include "../../device/token_tile.cuh"
#include "../../ptx/pdl.cuh"
#include "../routes.cuh"

namespace aril::detail {

constexpr int kAlignThreads = 512;

// Finds the places of a chunk's `num_own` routes among those of their slots. The chunk begins with
// route `first`. In order: routes of one slot that are together in a warp are counted by their
// first one; one warp turns the counts into places; every route adds its own position.
template <int kChunk, typename SlotOf>
__device__ __forceinline__ void place_routes(int first, int num_own, const SlotOf& slot_of,
                                             int (&own)[kChunk], int (&places)[kChunk],
                                             int32_t* next, int32_t* global_places, int thread,
                                             int warp, int lane, unsigned lanes_before) {
  constexpr unsigned kAll = 0xffffffffu;
  __syncthreads();
#pragma unroll 1
  for (int i = thread; i - thread < num_own; i += kAlignThreads) {
    const int slot = i < num_own ? slot_of(first + own[i]) : kNowhere;
    const unsigned same = __match_any_sync(kAll, slot);
    const bool is_first = slot >= 0 && (same & lanes_before) == 0;
    places[i] = is_first ? __popc(same) : 0;
    if (i < num_own) own[i] += (slot + 1) * kChunk;
  }
  __syncthreads();
  if (warp == 0) {
    constexpr int kAhead = 4;
#pragma unroll 1
    for (int i = lane; i - lane < num_own; i += kAhead * 32) {
      int counts[kAhead], slots[kAhead];
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        counts[j] = places[i + j * 32];
        slots[j] = own[i + j * 32] / kChunk - 1;
      }
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        if (counts[j] > 0) {
          const int place = next[slots[j]];
          next[slots[j]] = place + counts[j];
          places[i + j * 32] = place;
        }
        __syncwarp();
      }
    }
  }
  __syncthreads();
#pragma unroll 1
  for (int i = thread; i - thread < num_own; i += kAlignThreads) {
    const int slot = i < num_own ? own[i] / kChunk - 1 : kNowhere;
    const unsigned same = __match_any_sync(kAll, slot);
    const int place = places[i - lane + __ffs(same) - 1] + __popc(same & lanes_before);
    if (i < num_own) global_places[first + own[i] % kChunk] = slot < 0 ? kNowhere : place;
  }
}

__global__ void __launch_bounds__(kAlignThreads, 2)
    align_kernel(const __grid_constant__ aril_align_args p) {
  using Scan = cub::BlockScan<int, kAlignThreads>;
  constexpr int kWarps = kAlignThreads / 32, kPerThread = 8;
  constexpr int kChunk = kAlignThreads * kPerThread;  // routes read at a time
  constexpr unsigned kAll = 0xffffffffu;
  static_assert(ARIL_MAX_EXPERTS <= 2 * kAlignThreads, "a thread waits for two blocks");
  __shared__ typename Scan::TempStorage scan;
  __shared__ uint32_t epoch;
  __shared__ int own_of_warps[2][kWarps];
  // This expert's routes of a chunk: slot + 1, and place in the chunk. For routes of one slot that
  // are together in a warp: how many, later the place of the first in the slot.
  __shared__ int own[kChunk], places[kChunk];
  extern __shared__ int32_t next[];  // [num_slots] routes, later where the first one goes
  const int mine = blockIdx.x, thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const unsigned lanes_before = (1u << lane) - 1;
  if (thread == 0) epoch = begin_epoch(p.mailbox);
#pragma unroll 1
  for (int slot = thread; slot < p.num_slots; slot += kAlignThreads) next[slot] = 0;
  __syncthreads();
  wait_for_predecessors();
  if (is_first_block()) {
    clear_stale_words(p.mailbox, ARIL_MAILBOX_HEADER + int64_t{ARIL_WORD_BYTES} * gridDim.x, epoch);
  }
  const int num_routes =
      mine < p.top_k.num_experts ? routed_tokens(p.routing, p.num_tokens) * p.top_k.top_k : 0;
  int ids[kPerThread];
  const auto slot_at = [&](int route) { return p.routing.slots[route / p.top_k.top_k]; };
  const auto slot_of = [&](int route) {
    const int slot = slot_at(route), row = row_of(p.top_k, p.num_tokens, route);
    return slot >= 0 && slot < p.num_slots && row != kNowhere ? slot : kNowhere;
  };
  const auto in_chunk = [&](int i) { return (warp * kPerThread + i) * 32 + lane; };
  const auto load_ids = [&](int first) {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const int route = first + in_chunk(i);
      ids[i] = route < num_routes ? p.top_k.ids[route] : -1;
    }
  };

  bool has_own = false;
  int parity = 0;
  load_ids(0);
  for (int first = 0; first < num_routes; first += kChunk, parity ^= 1) {
    unsigned owners[kPerThread];
    int of_warp = 0;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      owners[i] = __ballot_sync(kAll, ids[i] == mine);
      of_warp += __popc(owners[i]);
    }
    load_ids(first + kChunk);
    if (lane == 0) own_of_warps[parity][warp] = of_warp;
    __syncthreads();
    const int of_lane = lane < kWarps ? own_of_warps[parity][lane] : 0;
    const int num_own = __reduce_add_sync(kAll, of_lane);
    if (num_own == 0) continue;
    has_own = true;
    int at = __reduce_add_sync(kAll, lane < warp ? of_lane : 0);
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      if (owners[i] >> lane & 1) own[at + __popc(owners[i] & lanes_before)] = in_chunk(i);
      at += __popc(owners[i]);
    }
    place_routes<kChunk>(first, num_own, slot_of, own, places, next, p.places, thread, warp, lane,
                         lanes_before);
  }

  // A thread has adjacent slots.
  const int share = ceil_div(p.num_slots, kAlignThreads);
  const int first_slot = min(thread * share, p.num_slots);
  const int last_slot = min(first_slot + share, p.num_slots);
  int begin = 0, count = 0;  // of blocks
  if (has_own) {
#pragma unroll 1
    for (int slot = first_slot; slot < last_slot; ++slot) {
      begin += ceil_div(next[slot], p.block_size);
    }
    Scan(scan).ExclusiveSum(begin, begin, count);
    __syncthreads();
  }
  uint64_t* const counts = tagged_words(p.mailbox);
  if (thread == 0) store_tagged(counts + mine, __int_as_float(count), epoch);
  const bool is_last = mine == static_cast<int>(gridDim.x) - 1;
  if (count == 0 && !is_last) return;

  load_ids(0);
  int before = 0, all_before;
  if (2 * (thread - lane) < mine) {
    const bool has_first = 2 * thread < mine, has_second = 2 * thread + 1 < mine;
    TaggedPair sums = {};
    PollLimit polls;
    for (;;) {
      if (has_first) sums = load_tagged(counts + 2 * thread);
      const bool came =
          (!has_first || sums.epoch0 == epoch) && (!has_second || sums.epoch1 == epoch);
      if (__all_sync(kAll, came)) break;
      polls.count();
    }
    before = __float_as_int(sums.value0) + (has_second ? __float_as_int(sums.value1) : 0);
  }
  Scan(scan).ExclusiveSum(before, before, all_before);
  begin += all_before;
#pragma unroll 1
  for (int slot = first_slot; slot < last_slot; ++slot) {
    const int blocks = ceil_div(next[slot], p.block_size);
    next[slot] = begin * p.block_size;
    begin += blocks;
  }
  // Places that no route takes are padding.
  int32_t* const padded = p.sorted_routes + all_before * p.block_size;
#pragma unroll 1
  for (int i = thread; i < count * p.block_size; i += kAlignThreads) {
    padded[i] = p.num_tokens * p.top_k.top_k;
  }
  if (is_last) {
    if (thread == 0) *p.num_padded = (all_before + count) * p.block_size;
#pragma unroll 1
    for (int i = all_before + count + thread; i < p.max_blocks; i += kAlignThreads) {
      p.block_experts[i] = p.block_slots[i] = -1;
    }
  }
  __syncthreads();
  if (count == 0) return;

  int* const own_of_warp = own + warp * kPerThread * 32;
  for (int first = 0; first < num_routes; first += kChunk) {
    int num_own = 0;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const unsigned owners = __ballot_sync(kAll, ids[i] == mine);
      if (ids[i] == mine) own_of_warp[num_own + __popc(owners & lanes_before)] = in_chunk(i);
      num_own += __popc(owners);
    }
    load_ids(first + kChunk);
    __syncwarp();
#pragma unroll 1
    for (int i = lane; i < num_own; i += 32) {
      const int route = first + own_of_warp[i], place = p.places[route];
      if (place < 0) continue;
      const int slot = slot_at(route), at = next[slot] + place;
      p.sorted_routes[at] = route;
      if (at % p.block_size == 0) {
        p.block_experts[at / p.block_size] = slot * p.top_k.num_experts + mine;
        p.block_slots[at / p.block_size] = slot;
      }
    }
    __syncwarp();
  }
}

}  // namespace aril::detail
