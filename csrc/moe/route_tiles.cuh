// SPDX-License-Identifier: MIT OR Apache-2.0
//
// What operations on experts work on: tiles of up to 8 routes of one slot to one expert, or to any
// experts where these share a factor, and what a lane needs of one.
#pragma once

#include "../device/descriptor.cuh"
#include "../linear/small_m.cuh"
#include "../ptx/pdl.cuh"
#include "group/grid.cuh"
#include "group/local.cuh"
#include "group/one_block.cuh"

namespace aril::detail {

struct ExpertsGrid {
  int first_shrink;  // blocks before those of shrink: the one that sorts, if any
  int shrink_blocks;
  int rank_tiles, groups;  // a slice's pieces of shrink
  bool beside_large_m;     // behind shrink of wide tiles, which has waited for both
};

// Whether an operation that may have either goes by wide tiles. Where these would be mostly empty,
// small ones are faster, the more so the fewer ranks there are. (H100, gate_up and down of 8192
// routes by either alone: with 8 of a slot to an expert in the mean, 138 us instead of 209 at rank
// 8, 193 instead of 235 at rank 16, and 350 instead of 320 at rank 32.)
__device__ __forceinline__ bool takes_large_m(const aril_experts_args& p) {
  constexpr int kRanks = 28;
  const int tiles = __ldcg(p.groups.num_tiles), wide_tiles = __ldcg(p.groups.num_wide_tiles);
  return int64_t{tiles} * p.weights.max_rank > int64_t{kRanks} * wide_tiles &&
         4 * int64_t{tiles} > 5 * int64_t{wide_tiles};
}

__device__ __forceinline__ PartialLayout partial_layout(const aril_experts_args& p) {
  const int64_t num_routes = int64_t{p.num_tokens} * p.top_k.top_k;
  return PartialLayout(num_routes + (p.from_tokens ? p.num_tokens : 0), p.num_slices,
                       p.weights.max_rank);
}

// The tiles of a launch's routes. The fewest routes are sorted by each block for itself (`kHere`).
// Others stand in lists, which the first block of the launch may be about to write; then a block of
// shrink finds its own, if it can. (H100: with up to 8 tokens kernels that can do both are 2 to 3 %
// slower, as there is more to jump over.)
template <bool kEachBlock>
class RouteTiles {
 public:
  // Waits for predecessors, unless shrink of wide tiles has; has no tiles if needed() says that
  // none is. A block that may have its own tiles gives room for these, and as much as it has
  // besides, to use until then. By a whole block.
  template <typename Needed>
  __device__ __forceinline__ RouteTiles(const aril_experts_args& p, const ExpertsGrid& grid,
                                        uint32_t tag, const Needed& needed, LocalTiles* own,
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
      wait_for_predecessors();
      if (route < num_routes) {
        id = p.top_k.ids[route];
        entry = entry_of(p.top_k, p.routing, p.num_tokens, route);
      }
      // The loads are on their way before any is used.
      asm volatile("" ::: "memory");
      if (!needed()) return;
      here_ = {routes, tiles};
      num_tiles_ = sort_in_each_block<kExpertsThreads>(p.top_k, num_routes, id, slot, entry, here_);
      return;
    }
    if (!needed()) {
      if (!grid.beside_large_m) wait_for_predecessors();
      return;
    }
    if (own != nullptr) {
      num_tiles_.x = own->find(p, scratch, scratch_bytes);
      if (num_tiles_.x >= 0) {
        own_ = own;
        return;
      }
    }
    if (!grid.beside_large_m) wait_for_predecessors();
    if (grid.first_shrink == 0) {
      num_tiles_ = make_int2(__ldcg(p.groups.num_tiles), __ldcg(p.groups.num_tiles + 1));
      return;
    }
    __shared__ int2 published;
    // One thread of a block looks: thousands of warps would hold each other up.
    if (threadIdx.x == 0) {
      TaggedPair sums;
      PollLimit polls;
      do {
        polls.count();
        sums = load_tagged(word(p));
      } while (sums.tag0 != tag);
      // What the tag stands for is read behind it.
      __threadfence();
      const uint32_t both = __float_as_uint(sums.value0);
      published = make_int2(both & 0xffff, both >> 16);
    }
    __syncthreads();
    num_tiles_ = published;
  }

  // Sorts the routes for all blocks. By the first one.
  __device__ __forceinline__ static void publish(const aril_experts_args& p, uint32_t tag,
                                                 unsigned char* shared) {
    const int2 num_tiles = OneBlockSort<kExpertsThreads>::run(
        p.top_k, p.routing, p.num_tokens, {p.groups.routes, p.groups.tiles}, shared);
    // All threads have stored routes and tiles: each brings its own to L2 before one of them stores
    // the word that says so.
    __threadfence();
    __syncthreads();
    if (threadIdx.x != 0) return;
    p.groups.num_tiles[0] = num_tiles.x;
    p.groups.num_tiles[1] = num_tiles.y;
    store_tagged(word(p), __uint_as_float(num_tiles.y << 16 | num_tiles.x), tag);
  }

  // With `all`, those that have no slot, too, which come last.
  __device__ __forceinline__ int count(bool all) const { return all ? num_tiles_.y : num_tiles_.x; }

  // Slot, expert, where its routes begin, how many.
  __device__ __forceinline__ int4 tile(int i) const {
    return load((kEachBlock ? here_.tiles : p_.groups.tiles) + i);
  }

  __device__ __forceinline__ aril_route_entry route(int i) const {
    const int4 entry = load((kEachBlock ? here_.routes : p_.groups.routes) + i);
    return {entry.x, entry.y, __int_as_float(entry.z), __int_as_float(entry.w)};
  }

  // The same for shrink, which may have its own tiles: without what it has no use for.
  __device__ __forceinline__ int4 shrink_tile(int i) const {
    return own_ == nullptr ? tile(i) : own_->tile(i);
  }

  __device__ __forceinline__ aril_route_entry shrink_route(int i) const {
    if (own_ == nullptr) return route(i);
    const int route = own_->route(i);
    return {route, row_of(p_.top_k, p_.num_tokens, route), 0.0f, 0.0f};
  }

 private:
  __device__ __forceinline__ static void* word(const aril_experts_args& p) {
    return static_cast<char*>(p.mailbox) + kMailboxWord;
  }

  __device__ __forceinline__ int4 load(const void* pointer) const {
    const int4* const vec = static_cast<const int4*>(pointer);
    return kEachBlock ? *vec : __ldcg(vec);
  }

  const aril_experts_args& p_;
  SortedRoutes here_;
  const LocalTiles* own_ = nullptr;
  int2 num_tiles_ = {0, 0};
};

// What a lane needs of a tile, in the order in which it is loaded: each step takes what the one
// before has loaded, and leaves its own loads on their way.
struct TileLoads {
  // In the place of the expert: a tile of tokens, or of a token's routes to any expert.
  static constexpr int kOfTokens = -1, kOfToken = -2;

  // Slot, expert, where its routes or tokens begin, how many; a slot of -1 is none.
  int4 tile = {-1, 0, 0, 0};
  aril_descriptor own = {}, shared = {};
  aril_route_entry route = {-1, -1, 0.0f, 0.0f};  // in a tile of tokens, the token

  // The descriptors of a slice, and row t of the tile. Others than those of routes are kOfTokens or
  // kOfToken: for shrink, or for expand.
  template <int kOthers, typename Tiles>
  __device__ __forceinline__ void load_all(const aril_experts_args& p, const Tiles& tiles,
                                           int slice, int t) {
    own = shared = {};
    route = {-1, -1, 0.0f, 0.0f};
    int expert = tile.y;
    if (kOthers == kOfToken && expert == kOfToken) {
      expert = p.top_k.num_experts;
      if (t < tile.w) {
        const unsigned id = p.top_k.ids[tile.z + t];
        route = entry_of(p.top_k, p.routing, p.num_tokens, tile.z + t);
        if (id < static_cast<unsigned>(p.top_k.num_experts) && route.row != kNowhere) {
          expert = id;
        } else {
          route.route = -1;
        }
      }
    } else if (t < tile.w) {
      if constexpr (kOthers == kOfToken) {
        route = tiles.route(tile.z + t);
      } else if (expert == kOfTokens) {
        route.route = p.routing.tokens[tile.z + t];
      } else {
        route = tiles.shrink_route(tile.z + t);
      }
    }
    if (tile.x < 0 || tile.x >= p.weights.num_slots) return;
    const aril_descriptor* table =
        p.weights.table + int64_t{tile.x} * p.weights.num_entries + slice;
    if (expert < p.top_k.num_experts) own = table[(1 + expert) * p.num_slices];
    if (kOthers == kOfToken || tile.y != kOfTokens) shared = *table;
  }

  // Whether A x of the slice is summed up by token.
  __device__ __forceinline__ bool shares_a(const aril_experts_args& p) const {
    return p.from_tokens && is_valid(p, shared) && shared.a != nullptr;
  }

  // Whether all experts of the slot have the same B, of which there is more in a tile of a token.
  __device__ __forceinline__ bool shares_b(const aril_experts_args& p) const {
    return !p.from_tokens && is_valid(p, shared) && shared.b != nullptr;
  }

  // The slice's rank; 0 where the slot has no such module.
  __device__ __forceinline__ int rank(const aril_experts_args& p) const {
    return is_valid(p, own) ? own.rank : 0;
  }

  // The row of v of expand; -1 if there is none.
  __device__ __forceinline__ int v_row(const aril_experts_args& p) const {
    const int num_routes = p.num_tokens * p.top_k.top_k;
    return route.route < 0 ? -1
           : shares_a(p)   ? num_routes + route.route / p.top_k.top_k
                           : route.route;
  }

  // On v.
  __device__ __forceinline__ float factor(const aril_experts_args& p) const {
    const float factor = own.scaling * route.scale;
    return p.weighted ? factor * route.weight : factor;
  }

 private:
  __device__ __forceinline__ static bool is_valid(const aril_experts_args& p,
                                                  const aril_descriptor& module) {
    return module.rank > 0 && module.rank <= p.weights.max_rank;
  }
};

// What a lane needs of a slice of its warp's tiles, one after the other: the loads of a tile are on
// their way while the one before is worked on, and so is what the one behind is of. Row t of each.
template <int kOthers, typename Tiles, typename LoadTile>
class TileQueue {
 public:
  TileLoads loads;

  __device__ __forceinline__ TileQueue(const aril_experts_args& p, const Tiles& tiles, int slice,
                                       int t, const LoadTile& load_tile, int first)
      : p_(p),
        tiles_(tiles),
        slice_(slice),
        t_(t),
        load_tile_(load_tile),
        after_(load_tile(first)) {}

  // Goes on to the next tile; `after` is the number of the one behind it.
  __device__ __forceinline__ void advance(int after) {
    loads.tile = after_;
    loads.load_all<kOthers>(p_, tiles_, slice_, t_);
    after_ = load_tile_(after);
  }

 private:
  const aril_experts_args& p_;
  const Tiles& tiles_;
  int slice_, t_;
  const LoadTile& load_tile_;
  int4 after_;
};

// Whether slots of the batch have the same factor for all experts, A of operations on x by token, B
// of others: one of them, or all with all their slices, so that there is nothing to do by expert.
// By a whole warp.
struct Sharing {
  int tokens = 0, tiles = 0;  // of the batch, if it matters
  bool lane_any = false, lane_all = true;

  __device__ __forceinline__ Sharing(const aril_experts_args& p, bool matters) {
    if (!matters) return;
    tokens = routed_tokens(p.routing, p.num_tokens);
    tiles = *p.routing.tiles.count;
    for (int i = threadIdx.x % 32; i < p.max_tiles; i += 32) {
      // Both loads are independent: entries beyond the count are read, too.
      const int slot = p.routing.tiles.all[i].slot;
      if (i >= tiles || slot < 0 || slot >= p.weights.num_slots) continue;
      for (int slice = 0; slice < p.num_slices; ++slice) {
        const aril_descriptor shared = module_of(p.weights, slot, slice);
        const bool shares = shared.rank > 0 && (p.from_tokens ? shared.a : shared.b) != nullptr;
        lane_any = lane_any || shares;
        lane_all = lane_all && shares;
      }
    }
  }

  __device__ __forceinline__ bool any() const { return __any_sync(0xffffffffu, lane_any); }
  __device__ __forceinline__ bool all() const { return __all_sync(0xffffffffu, lane_all); }
};

}  // namespace aril::detail
