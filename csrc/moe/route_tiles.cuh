// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The route tiles of a launch, whichever block sorts the routes.
//
// A route tile has up to ARIL_ROUTES_PER_TILE routes of one slot to one expert. Up to
// ARIL_EACH_BLOCK_ROUTES routes, every block sorts them for itself (kEachBlock). Up to
// ARIL_ONE_BLOCK_ROUTES, the first block of the first operation sorts them and announces the result
// in the mailbox; meanwhile blocks of shrink find the tiles by themselves. Beyond that aril_group
// has sorted them. (H100: kernels that can do both are 2 to 3 % slower with up to 8 tokens.)
#pragma once

#include "../device/mailbox.cuh"
#include "../device/reduction.cuh"
#include "../ptx/pdl.cuh"
#include "group/each_block.cuh"
#include "group/local.cuh"
#include "group/one_block.cuh"
#include "routes.cuh"

namespace aril::detail {

// The grid of a launch on route tiles: the block that sorts, if any, then shrink, then expand.
struct ExpertsGrid {
  int first_shrink;  // blocks before those of shrink: 0 or 1
  int shrink_blocks;
  int slabs;             // of a slice
  bool beside_large_m;  // launched after a shrink of wide tiles, which has waited for predecessors
};

// Whether an operation that may use wide tiles does. Route tiles are faster if wide tiles would be
// mostly empty, the more so at low rank. (H100, gate_up and down of 8192 routes, 8 of a slot to an
// expert on average, route tiles against wide tiles: rank 8 138 and 209 us, rank 16 193 and 235 us,
// rank 32 350 and 320 us.)
__device__ __forceinline__ bool takes_large_m(const aril_experts_args& p) {
  constexpr int kRanks = 28;
  const int tiles = __ldcg(p.groups.num_tiles), wide_tiles = __ldcg(p.groups.num_wide_tiles);
  return int64_t{tiles} * p.weights.max_rank > int64_t{kRanks} * wide_tiles &&
         4 * int64_t{tiles} > 5 * int64_t{wide_tiles};
}

// Partials of an operation: a row per route, then, if x has a row per token, a row per token.
__device__ __forceinline__ PartialLayout partial_layout(const aril_experts_args& p) {
  const int64_t num_routes = int64_t{p.num_tokens} * p.top_k.top_k;
  return PartialLayout(num_routes + (p.from_tokens ? p.num_tokens : 0), p.num_slices,
                       p.weights.max_rank);
}

template <bool kEachBlock>
class RouteTiles {
 public:
  // Waits for inputs, unless a shrink of wide tiles has. Has no tiles if needed() is false. A
  // block of shrink passes `local` for its own tiles, and `scratch`, which is free until then. The
  // whole block calls it.
  template <typename Needed>
  __device__ __forceinline__ RouteTiles(const aril_experts_args& p, const ExpertsGrid& grid,
                                        uint32_t epoch, const Needed& needed, LocalTiles* local,
                                        void* scratch, int scratch_bytes)
      : p_(p) {
    if constexpr (kEachBlock) {
      __shared__ __align__(16) aril_route_entry routes[ARIL_EACH_BLOCK_ROUTES];
      __shared__ __align__(16) aril_route_tile tiles[ARIL_EACH_BLOCK_ROUTES];
      const int route = threadIdx.x, top_k = p.top_k.top_k;
      const int num_routes = routed_tokens(p.routing, p.num_tokens) * top_k;
      int id = -1, slot = -1;
      aril_route_entry entry = {};
      if (route < num_routes) slot = p.routing.slots[route / top_k];
      wait_for_inputs(p);
      if (route < num_routes) {
        id = id_of(p.top_k, route);
        entry = entry_of(p.top_k, p.routing, p.num_tokens, route);
      }
      // All loads are issued before the first use.
      asm volatile("" ::: "memory");
      if (!needed()) return;
      sorted_ = {routes, tiles};
      num_tiles_ =
          sort_in_each_block<kExpertsThreads>(p.top_k, num_routes, id, slot, entry, sorted_);
      return;
    }
    if (!needed()) {
      if (!grid.beside_large_m) wait_for_inputs(p);
      return;
    }
    if (local != nullptr) {
      num_tiles_.x = local->find(p, scratch, scratch_bytes);
      if (num_tiles_.x >= 0) {
        local_ = local;
        return;
      }
    }
    if (!grid.beside_large_m) wait_for_inputs(p);
    if (grid.first_shrink == 0) {
      num_tiles_ = make_int2(__ldcg(p.groups.num_tiles), __ldcg(p.groups.num_tiles + 1));
      return;
    }
    __shared__ int2 published;
    // One thread of a block polls: thousands of warps would slow each other down.
    if (threadIdx.x == 0) {
      TaggedPair words;
      PollLimit polls;
      while ((words = load_tagged(announcement(p))).epoch0 != epoch) polls.count();
      // Orders the loads of tiles and routes after the announcement.
      __threadfence();
      const uint32_t both = __float_as_uint(words.value0);
      published = make_int2(both & 0xffff, both >> 16);
    }
    __syncthreads();
    num_tiles_ = published;
  }

  // Sorts the routes for all blocks, and announces the numbers of tiles. The first block calls it.
  __device__ __forceinline__ static void publish(const aril_experts_args& p, uint32_t epoch,
                                                 unsigned char* shared) {
    const int2 num_tiles = OneBlockSort<kExpertsThreads>::run(
        p, {p.groups.routes, p.groups.tiles}, shared);
    // Every thread has stored routes and tiles: each fences its own before one thread announces.
    __threadfence();
    __syncthreads();
    if (threadIdx.x != 0) return;
    p.groups.num_tiles[0] = num_tiles.x;
    p.groups.num_tiles[1] = num_tiles.y;
    store_tagged(announcement(p), __uint_as_float(num_tiles.y << 16 | num_tiles.x), epoch);
  }

  // Tiles with a slot, which come first; with `all`, those without a slot, too.
  __device__ __forceinline__ int count(bool all) const { return all ? num_tiles_.y : num_tiles_.x; }

  // Slot, expert, first route, number of routes.
  __device__ __forceinline__ int4 tile(int i) const {
    return load((kEachBlock ? sorted_.tiles : p_.groups.tiles) + i);
  }

  __device__ __forceinline__ aril_route_entry route(int i) const {
    const int4 entry = load((kEachBlock ? sorted_.routes : p_.groups.routes) + i);
    return {entry.x, entry.y, __int_as_float(entry.z), __int_as_float(entry.w)};
  }

  // The same for shrink, which may have local tiles. Its routes may lack scale and weight.
  __device__ __forceinline__ int4 shrink_tile(int i) const {
    return local_ == nullptr ? tile(i) : local_->tile(i);
  }

  __device__ __forceinline__ aril_route_entry shrink_route(int i) const {
    if (local_ == nullptr) return route(i);
    const int route = local_->route(i);
    return {route, row_of(p_.top_k, p_.num_tokens, route), 0.0f, 0.0f};
  }

 private:
  // The tagged word in the mailbox's header that announces the numbers of tiles.
  __device__ __forceinline__ static void* announcement(const aril_experts_args& p) {
    return static_cast<char*>(p.mailbox) + kHeaderWord;
  }

  // Another block may have written global tiles and routes, so their loads bypass L1.
  __device__ __forceinline__ int4 load(const void* pointer) const {
    const int4* const vec = static_cast<const int4*>(pointer);
    return kEachBlock ? *vec : __ldcg(vec);
  }

  const aril_experts_args& p_;
  SortedRoutes sorted_;
  const LocalTiles* local_ = nullptr;
  int2 num_tiles_ = {0, 0};
};

}  // namespace aril::detail
