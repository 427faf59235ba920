// SPDX-License-Identifier: MIT OR Apache-2.0
//
// aril_route: groups a batch's tokens by slot, once per step for all layers. A counting sort in one
// block; no result depends on the order of a slot's tokens, which is arbitrary.
//
// The batch may be in the host's memory, so each of its elements is read once, past all caches.
//
// Shared memory: a counter of 4 bytes per slot (at most 32 KB). Bound: latency. Every launch writes
// every output that the batch's tokens need, so nothing stale is read.
#pragma once

#include <cub/block/block_scan.cuh>

#include "../aril.h"
#include "../device/math.cuh"
#include "../ptx/pdl.cuh"
#include "segments.cuh"

namespace aril::detail {

constexpr int kRouteThreads = 1024;
constexpr int kWarpSize = 32;
// Tokens that a thread reads at once: each takes a microsecond from the host.
constexpr int kRouteReads = 8;
constexpr unsigned kFullWarp = 0xffffffffu;

// The token's slot; -1: the base model alone, or a slot outside the table.
__device__ __forceinline__ int slot_of(const aril_route_args& p, int token) {
  if (token >= p.num_tokens) return -1;
  const int slot = __ldcv(p.token_slots + token);
  return slot >= 0 && slot < p.num_slots ? slot : -1;
}

__global__ void __launch_bounds__(kRouteThreads)
    route_kernel(const __grid_constant__ aril_route_args p) {
  using Scan = cub::BlockScan<int, kRouteThreads>;
  __shared__ typename Scan::TempStorage scan;
  // [num_slots + 1] tokens of a slot, later where its next one goes. The last is for tokens without
  // a slot.
  extern __shared__ int32_t next[];
  __shared__ int32_t first_slots[ARIL_FORWARD_TOKENS];  // of the first tokens

  for (int slot = threadIdx.x; slot < p.num_slots; slot += kRouteThreads) next[slot] = 0;
  if (threadIdx.x < ARIL_FORWARD_TOKENS) first_slots[threadIdx.x] = -1;
  wait_for_predecessors();
  constexpr int kWords = sizeof(aril_segments) / sizeof(int32_t);
  if (threadIdx.x < kWords) reinterpret_cast<int32_t*>(p.routing.segments)[threadIdx.x] = -1;
  __syncthreads();
  for (int first = threadIdx.x; first < p.num_tokens; first += kRouteReads * kRouteThreads) {
    int slots[kRouteReads];
    float scales[kRouteReads];
#pragma unroll
    for (int i = 0; i < kRouteReads; ++i) {
      const int token = first + i * kRouteThreads;
      slots[i] = slot_of(p, token);
      const bool has_scale = p.token_scales != nullptr && token < p.num_tokens;
      scales[i] = has_scale ? __ldcv(p.token_scales + token) : 1.0f;
    }
#pragma unroll
    for (int i = 0; i < kRouteReads; ++i) {
      const int token = first + i * kRouteThreads;
      if (token >= p.num_tokens) break;
      if (slots[i] >= 0) atomicAdd(&next[slots[i]], 1);
      if (token < ARIL_FORWARD_TOKENS) first_slots[token] = slots[i];
      p.routing.scales[token] = scales[i];
      p.routing.slots[token] = slots[i];
    }
  }
  __syncthreads();
  if (threadIdx.x < ARIL_FORWARD_TOKENS) {
    make_segments(*p.routing.segments, threadIdx.x, first_slots[threadIdx.x]);
  }

  const int slots_per_thread = ceil_div(p.num_slots, kRouteThreads);
  const int first_slot = min(static_cast<int>(threadIdx.x) * slots_per_thread, p.num_slots);
  const int last_slot = min(first_slot + slots_per_thread, p.num_slots);
  int row = 0, tile = 0, wide_tile = 0, num_rows, num_tiles, num_wide_tiles;
  for (int slot = first_slot; slot < last_slot; ++slot) {
    row += next[slot];
    tile += ceil_div(next[slot], ARIL_TOKENS_PER_TILE);
    wide_tile += ceil_div(next[slot], ARIL_WIDE_TILE);
  }
  Scan(scan).ExclusiveSum(row, row, num_rows);
  __syncthreads();
  Scan(scan).ExclusiveSum(tile, tile, num_tiles);
  __syncthreads();
  Scan(scan).ExclusiveSum(wide_tile, wide_tile, num_wide_tiles);
  __syncthreads();
  const auto add_tiles = [](aril_tile* tiles, int& tile, int slot, int begin, int end, int size) {
    for (; begin < end; begin += size) tiles[tile++] = {slot, begin, min(end - begin, size)};
  };
  for (int slot = first_slot; slot < last_slot; ++slot) {
    const int end = row + next[slot];
    p.routing.indptr[slot] = row;
    next[slot] = row;
    add_tiles(p.routing.tiles.all, tile, slot, row, end, ARIL_TOKENS_PER_TILE);
    add_tiles(p.routing.wide_tiles.all, wide_tile, slot, row, end, ARIL_WIDE_TILE);
    row = end;
  }
  const int num_all_tiles = num_tiles + ceil_div(p.num_tokens - num_rows, ARIL_TOKENS_PER_TILE);
  if (threadIdx.x == 0) {
    p.routing.indptr[p.num_slots] = num_rows;
    *p.routing.num_tokens = p.num_tokens;
    next[p.num_slots] = num_rows;
    *p.routing.tiles.count = num_all_tiles;
    *p.routing.wide_tiles.count =
        num_wide_tiles + ceil_div(p.num_tokens - num_rows, ARIL_WIDE_TILE);
  }
  // Tiles of tokens without a slot.
  const auto add_base_tiles = [&](aril_tile* tiles, int first, int size) {
    for (int i = threadIdx.x; num_rows + i * size < p.num_tokens; i += kRouteThreads) {
      const int begin = num_rows + i * size;
      tiles[first + i] = {-1, begin, min(p.num_tokens - begin, size)};
    }
  };
  add_base_tiles(p.routing.tiles.all, num_tiles, ARIL_TOKENS_PER_TILE);
  add_base_tiles(p.routing.wide_tiles.all, num_wide_tiles, ARIL_WIDE_TILE);
  __syncthreads();

  const int lane = threadIdx.x % kWarpSize;
  for (int first_token = 0; first_token < p.num_tokens; first_token += kRouteThreads) {
    const int token = first_token + threadIdx.x;
    const bool live = token < p.num_tokens;
    // This thread has written it.
    const int slot = live ? p.routing.slots[token] : -2, group = slot < 0 ? p.num_slots : slot;
    const unsigned same = __match_any_sync(kFullWarp, slot);
    const int leader = __ffs(same) - 1;
    int begin = 0;
    if (live && lane == leader) begin = atomicAdd(&next[group], __popc(same));
    begin = __shfl_sync(kFullWarp, begin, leader);
    if (live) p.routing.tokens[begin + __popc(same & ((1u << lane) - 1))] = token;
  }
  __syncthreads();
  for (int i = threadIdx.x;; i += kRouteThreads) {
    const int tile = i / ARIL_TOKENS_PER_TILE, row = i % ARIL_TOKENS_PER_TILE;
    if (tile >= num_all_tiles) break;
    const aril_tile of = p.routing.tiles.all[tile];
    if (row >= of.count) continue;
    const int token = p.routing.tokens[of.begin + row];
    p.routing.rows[i] = {token, p.routing.scales[token]};
  }
  // Kernels of the step read this before their wait (ptx/pdl.cuh).
  __threadfence();
}

}  // namespace aril::detail
