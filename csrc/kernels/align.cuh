// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Puts routes that have a slot in blocks of one slot and one expert, for a grouped GEMM that takes
// the two for its expert.
//
// A block of threads for each expert goes through all routes twice: to count its own by slot, and
// to put each where it belongs. In between it needs to know how many blocks of routes come before
// its own: every block leaves its number with the launch's tag, and waits for those of lower index,
// as expand does for shrink (few.cuh). Routes of a slot keep their order, so that the result does
// not depend on chance: they are taken in the order of their numbers, and warps take turns.
//
// Shared memory: num_slots counters of 4 bytes (at most 32 KB) and a list of 16 KB. Bound: latency;
// a route's id is read by every block, from L2.
#pragma once

#include <cub/block/block_scan.cuh>

#include "../common/pdl.cuh"
#include "few.cuh"
#include "group.cuh"
#include "tile.cuh"

namespace aril::detail {

constexpr int kAlignThreads = 512;

__global__ void __launch_bounds__(kAlignThreads, 3)
    align_kernel(const __grid_constant__ aril_align_args p) {
  using Scan = cub::BlockScan<int, kAlignThreads>;
  constexpr int kWarps = kAlignThreads / 32, kPerThread = 8;
  constexpr int kChunk = kAlignThreads * kPerThread;  // routes that are gone through at a time
  constexpr unsigned kAll = 0xffffffffu;
  static_assert(ARIL_MAX_EXPERTS <= 2 * kAlignThreads, "a thread waits for two blocks");
  __shared__ typename Scan::TempStorage scan;
  __shared__ uint32_t tag;
  __shared__ int own_of_warps[kWarps];
  __shared__ int own[kChunk];        // this expert's of a chunk: slot, place
  extern __shared__ int32_t next[];  // [num_slots] routes, then where the next one goes
  const int mine = blockIdx.x, thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const unsigned lanes_before = (1u << lane) - 1;
  if (thread == 0) tag = enter(p.exchange);
  for (int slot = thread; slot < p.num_slots; slot += kAlignThreads) next[slot] = 0;
  __syncthreads();
  wait_for_predecessors();
  const int num_routes =
      mine < p.top_k.num_experts ? routed_tokens(p.routing, p.num_tokens) * p.top_k.top_k : 0;
  const auto place_of = [&](int i) { return (warp * kPerThread + i) * 32 + lane; };
  // Slots of those of a chunk that are this expert's; -1 for others.
  const auto load_slots = [&](int(&slots)[kPerThread], int first) {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const int route = first + place_of(i);
      slots[i] = route < num_routes ? p.top_k.ids[route] : -1;
    }
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const bool is_mine = slots[i] == mine;
      slots[i] = -1;
      if (!is_mine) continue;
      const int route = first + place_of(i), slot = p.routing.slots[route / p.top_k.top_k];
      if (slot < p.num_slots && row_of(p.top_k, p.num_tokens, route) != kNowhere) slots[i] = slot;
    }
  };

  bool has_own = false;
  for (int first = 0; first < num_routes; first += kChunk) {
    int slots[kPerThread];
    load_slots(slots, first);
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      if (slots[i] < 0) continue;
      has_own = true;
      atomicAdd(&next[slots[i]], 1);
    }
  }
  // A thread has neighbouring slots.
  const int share = ceil_div(p.num_slots, kAlignThreads);
  const int first_slot = min(thread * share, p.num_slots);
  const int last_slot = min(first_slot + share, p.num_slots);
  int begin = 0, count = 0;  // of blocks
  if (__syncthreads_or(has_own)) {
    for (int slot = first_slot; slot < last_slot; ++slot) {
      begin += ceil_div(next[slot], p.block_size);
    }
    Scan(scan).ExclusiveSum(begin, begin, count);
    __syncthreads();
  }
  uint64_t* const counts = tagged_planes(p.exchange);
  if (thread == 0) store_tagged(counts + mine, __int_as_float(count), tag);
  const bool is_last = mine == static_cast<int>(gridDim.x) - 1;
  if (count == 0 && !is_last) return;

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
  int32_t* const routes = p.sorted_routes + all_before * p.block_size;
  for (int i = thread; i < count * p.block_size; i += kAlignThreads) {
    routes[i] = p.num_tokens * p.top_k.top_k;
  }
  if (is_last) {
    if (thread == 0) *p.num_padded = (all_before + count) * p.block_size;
    for (int i = all_before + count + thread; i < p.max_blocks; i += kAlignThreads) {
      p.block_experts[i] = p.block_slots[i] = -1;
    }
  }
  __syncthreads();
  if (count == 0) return;

  for (int first = 0; first < num_routes; first += kChunk) {
    int slots[kPerThread], of_warp = 0;
    unsigned owners[kPerThread];
    load_slots(slots, first);
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      owners[i] = __ballot_sync(kAll, slots[i] >= 0);
      of_warp += __popc(owners[i]);
    }
    if (lane == 0) own_of_warps[warp] = of_warp;
    __syncthreads();
    const int of_lane = lane < kWarps ? own_of_warps[lane] : 0;
    const int num_own = __reduce_add_sync(kAll, of_lane);
    int at = __reduce_add_sync(kAll, lane < warp ? of_lane : 0);
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      if (slots[i] >= 0)
        own[at + __popc(owners[i] & lanes_before)] = slots[i] * kChunk + place_of(i);
      at += __popc(owners[i]);
    }
    __syncthreads();
    for (int i = thread; i - thread < num_own; i += kAlignThreads) {
      const int entry = i < num_own ? own[i] : -1;
      const int slot = i < num_own ? entry / kChunk : -1;
      const unsigned same = __match_any_sync(kAll, slot);
      const int leader = __ffs(same) - 1;
      int at = 0;
      for (int turn = 0; i - thread + turn * 32 < num_own && turn < kWarps; ++turn) {
        if (turn == warp && slot >= 0 && lane == leader) {
          at = next[slot];
          next[slot] = at + __popc(same);
        }
        __syncthreads();
      }
      at = __shfl_sync(kAll, at, leader) + __popc(same & lanes_before);
      if (slot < 0) continue;
      p.sorted_routes[at] = first + entry % kChunk;
      if (at % p.block_size == 0) {
        p.block_experts[at / p.block_size] = slot * p.top_k.num_experts + mine;
        p.block_slots[at / p.block_size] = slot;
      }
    }
  }
}

}  // namespace aril::detail
