// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Descriptors and routes of a warp's tiles, loaded ahead.
//
// A tile needs three dependent loads: the tile, then its routes and descriptors, then the weights.
// TileQueue issues the first two for later tiles while the warp works on the current one.
#pragma once

#include "../aril.h"
#include "../device/descriptor.cuh"
#include "routes.cuh"

namespace aril::detail {

// What a lane needs of a tile.
struct TileLoads {
  // Instead of an expert: a tile of tokens (shrink), or of one token's routes to any expert
  // (expand).
  static constexpr int kOfTokens = -1, kOfToken = -2;

  int4 tile = {-1, 0, 0, 0};              // slot (-1: none), expert, first route or token, count
  aril_descriptor own = {}, shared = {};  // of the expert; of all experts
  aril_route_entry route = {-1, -1, 0.0f, 0.0f};  // route t; in a tile of tokens its `route` is the
                                                  // token

  // Loads the descriptors of a slice, and row t of the tile. kOthers says which tiles there are
  // besides those of routes: kOfTokens in shrink, kOfToken in expand.
  template <int kOthers, typename Tiles>
  __device__ __forceinline__ void load_all(const aril_experts_args& p, const Tiles& tiles,
                                           int slice, int t) {
    own = shared = {};
    route = {-1, -1, 0.0f, 0.0f};
    int expert = tile.y;
    if (kOthers == kOfToken && expert == kOfToken) {
      expert = p.top_k.num_experts;
      if (t < tile.w) {
        const unsigned id = id_of(p.top_k, tile.z + t);
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

  // Whether A x of the slice is computed per token.
  __device__ __forceinline__ bool shares_a(const aril_experts_args& p) const {
    return p.from_tokens && is_valid(p, shared) && shared.a != nullptr;
  }

  // Whether all experts of the slot have the same B, so that tiles of a token's routes use it.
  __device__ __forceinline__ bool shares_b(const aril_experts_args& p) const {
    return !p.from_tokens && is_valid(p, shared) && shared.b != nullptr;
  }

  // The slice's rank; 0: the slot has no such module.
  __device__ __forceinline__ int rank(const aril_experts_args& p) const {
    return is_valid(p, own) ? own.rank : 0;
  }

  // The row of v that expand reads; -1: none.
  __device__ __forceinline__ int v_row(const aril_experts_args& p) const {
    const int num_routes = p.num_tokens * p.top_k.top_k;
    return route.route < 0 ? -1
           : shares_a(p)   ? num_routes + route.route / p.top_k.top_k
                           : route.route;
  }

  __device__ __forceinline__ float factor(const aril_experts_args& p) const {
    return route_factor(own.scaling, route.scale, p.weighted, route.weight);
  }

 private:
  __device__ __forceinline__ static bool is_valid(const aril_experts_args& p,
                                                  const aril_descriptor& module) {
    return module.rank > 0 && module.rank <= p.weights.max_rank;
  }
};

// Row t of the tiles that a warp takes one after the other. load_tile(i) gives the i-th.
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

  // Goes on to the next tile, and requests tile `after`, the one behind it.
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

}  // namespace aril::detail
