// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Puts routes that have a slot in blocks of one slot and one expert, for a grouped GEMM that takes
// the two for its expert.
//
// A block of threads for each expert goes through all routes twice: to find each of its own a place
// among those of its slot, and to put it there. In between it needs to know how many blocks of
// routes come before its own: every block leaves its number with the launch's tag, and waits for
// those of lower index, as expand does for shrink (few.cuh). Places do not depend on chance: routes
// are counted in the order of their numbers, 32 at a time by one warp.
//
// Shared memory: num_slots counters of 4 bytes (at most 32 KB) and lists of 32 KB. Bound: latency;
// a route's id is read by every block, from L2.
#pragma once

#include <cub/block/block_scan.cuh>

#include "../common/pdl.cuh"
#include "few.cuh"
#include "group.cuh"
#include "tile.cuh"

namespace aril::detail {

constexpr int kAlignThreads = 512;

__global__ void __launch_bounds__(kAlignThreads, 2)
    align_kernel(const __grid_constant__ aril_align_args p) {
  using Scan = cub::BlockScan<int, kAlignThreads>;
  constexpr int kWarps = kAlignThreads / 32, kPerThread = 8;
  constexpr int kChunk = kAlignThreads * kPerThread;  // routes that are gone through at a time
  constexpr unsigned kAll = 0xffffffffu;
  static_assert(ARIL_MAX_EXPERTS <= 2 * kAlignThreads, "a thread waits for two blocks");
  __shared__ typename Scan::TempStorage scan;
  __shared__ uint32_t tag;
  __shared__ int own_of_warps[2][kWarps];
  // This expert's routes of a chunk: slot and place in the chunk; and, of those of a slot that
  // stand together in a warp, how many, then the place of the first in the slot.
  __shared__ int own[kChunk], places[kChunk];
  extern __shared__ int32_t next[];  // [num_slots] routes; then where the first one goes
  const int mine = blockIdx.x, thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const unsigned lanes_before = (1u << lane) - 1;
  if (thread == 0) tag = enter(p.exchange);
  for (int slot = thread; slot < p.num_slots; slot += kAlignThreads) next[slot] = 0;
  __syncthreads();
  wait_for_predecessors();
  const int num_routes =
      mine < p.top_k.num_experts ? routed_tokens(p.routing, p.num_tokens) * p.top_k.top_k : 0;
  int ids[kPerThread];
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
    // All loads are on their way before one is looked at.
    int slots[kPerThread], rows[kPerThread], of_warp = 0;
    unsigned owners[kPerThread];
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      slots[i] = rows[i] = -1;
      if (ids[i] != mine) continue;
      const int route = first + in_chunk(i);
      slots[i] = p.routing.slots[route / p.top_k.top_k];
      rows[i] = row_of(p.top_k, p.num_tokens, route);
    }
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      if (slots[i] >= p.num_slots || rows[i] == kNowhere) slots[i] = -1;
      if (ids[i] == mine && slots[i] < 0) p.places[first + in_chunk(i)] = -1;
      owners[i] = __ballot_sync(kAll, slots[i] >= 0);
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
      if (slots[i] >= 0) {
        own[at + __popc(owners[i] & lanes_before)] = slots[i] * kChunk + in_chunk(i);
      }
      at += __popc(owners[i]);
    }
    __syncthreads();
    // Calls f(i, slot, lanes of the warp that have the slot, too); the slot is -1 behind the last.
    const auto for_own = [&](auto f) {
      for (int i = thread; i - thread < num_own; i += kAlignThreads) {
        const int slot = i < num_own ? own[i] / kChunk : -1;
        f(i, slot, __match_any_sync(kAll, slot));
      }
    };
    for_own([&](int i, int slot, unsigned same) {
      const bool is_first = slot >= 0 && (same & lanes_before) == 0;
      places[i] = is_first ? __popc(same) : 0;
    });
    __syncthreads();
    if (warp == 0) {
      constexpr int kAhead = 4;
      for (int i = lane; i - lane < num_own; i += kAhead * 32) {
        int sizes[kAhead], slots[kAhead];
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
          sizes[j] = places[i + j * 32];
          slots[j] = own[i + j * 32] / kChunk;
        }
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
          if (sizes[j] > 0) {
            places[i + j * 32] = next[slots[j]];
            next[slots[j]] += sizes[j];
          }
          __syncwarp();
        }
      }
    }
    __syncthreads();
    for_own([&](int i, int slot, unsigned same) {
      if (slot < 0) return;
      p.places[first + own[i] % kChunk] =
          places[i - lane + __ffs(same) - 1] + __popc(same & lanes_before);
    });
  }

  // A thread has neighbouring slots.
  const int share = ceil_div(p.num_slots, kAlignThreads);
  const int first_slot = min(thread * share, p.num_slots);
  const int last_slot = min(first_slot + share, p.num_slots);
  int begin = 0, count = 0;  // of blocks
  if (has_own) {
    for (int slot = first_slot; slot < last_slot; ++slot) {
      begin += ceil_div(next[slot], p.block_size);
    }
    Scan(scan).ExclusiveSum(begin, begin, count);
    __syncthreads();
  }
  uint64_t* const counts = tagged_planes(p.exchange);
  if (thread == 0) store_tagged(counts + mine, __int_as_float(count), tag);
  const bool is_last = mine == static_cast<int>(gridDim.x) - 1;
  if (!has_own && !is_last) return;

  load_ids(0);
  int before = 0, all_before;
  if (2 * thread < mine) {
    const bool has_second = 2 * thread + 1 < mine;
    TaggedSums sums;
    do sums = load_tagged(counts + 2 * thread);
    while (sums.tag0 != tag || (has_second && sums.tag1 != tag));
    before = __float_as_int(sums.sum0) + (has_second ? __float_as_int(sums.sum1) : 0);
  }
  Scan(scan).ExclusiveSum(before, before, all_before);
  begin += all_before;
  for (int slot = first_slot; slot < last_slot; ++slot) {
    const int blocks = ceil_div(next[slot], p.block_size);
    next[slot] = begin * p.block_size;
    begin += blocks;
  }
  // What no route takes the place of is padding.
  int32_t* const padded = p.sorted_routes + all_before * p.block_size;
  for (int i = thread; i < count * p.block_size; i += kAlignThreads) {
    padded[i] = p.num_tokens * p.top_k.top_k;
  }
  if (is_last) {
    if (thread == 0) *p.num_padded = (all_before + count) * p.block_size;
    for (int i = all_before + count + thread; i < p.max_blocks; i += kAlignThreads) {
      p.block_experts[i] = p.block_slots[i] = -1;
    }
  }
  __syncthreads();
  if (!has_own) return;

  for (int first = 0; first < num_routes; first += kChunk) {
    int slots[kPerThread], place[kPerThread];
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      slots[i] = place[i] = -1;
      if (ids[i] != mine) continue;
      const int route = first + in_chunk(i);
      slots[i] = p.routing.slots[route / p.top_k.top_k];
      place[i] = p.places[route];
    }
    load_ids(first + kChunk);
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      if (place[i] < 0) continue;
      const int at = next[slots[i]] + place[i];
      p.sorted_routes[at] = first + in_chunk(i);
      if (at % p.block_size == 0) {
        p.block_experts[at / p.block_size] = slots[i] * p.top_k.num_experts + mine;
        p.block_slots[at / p.block_size] = slots[i];
      }
    }
  }
}

}  // namespace aril::detail
