// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Routes: where one stands, which group it belongs to, and what its delta is multiplied by.
#pragma once

#include "../aril.h"
#include "../device/math.cuh"
#include "../ptx/pdl.cuh"

namespace aril::detail {

constexpr int kExpertsWarps = ARIL_WARPS;  // of a block on route tiles
constexpr int kExpertsThreads = 32 * kExpertsWarps;

// A route without a row in matrices of routes, or without a group.
constexpr int kNowhere = -1;

// The tokens of an operation on `num_tokens` that were routed to slots.
__device__ __forceinline__ int routed_tokens(const aril_routing& routing, int num_tokens) {
  return min(*routing.num_tokens, num_tokens);
}

// Waits for predecessors, unless x, the routes and the mailbox are complete without it. Then no
// earlier wait has dropped stale lines of L1, so these are loaded past L1.
__device__ __forceinline__ void wait_for_inputs(const aril_experts_args& p) {
  if (p.plan.inputs == ARIL_INPUTS_IN_FRONT) wait_for_predecessors();
}

// The id of the expert that a route goes to.
__device__ __forceinline__ int32_t id_of(const aril_top_k& top_k, int route) {
  return __ldcg(top_k.ids + route);
}

// The router's weight of a route.
__device__ __forceinline__ float weight_of(const aril_top_k& top_k, int route) {
  return top_k.weights == nullptr ? 1.0f : __ldcg(top_k.weights + route);
}

// The row of a route in matrices of routes, or kNowhere.
__device__ __forceinline__ int row_of(const aril_top_k& top_k, int num_tokens, int route) {
  if (top_k.rows == nullptr) return route;
  const int row = __ldcg(top_k.rows + route);
  return row >= 0 && row < num_tokens * top_k.top_k ? row : kNowhere;
}

// The group of a route to expert `id` whose token has `slot`: the expert; num_experts without a
// slot; num_experts + 1 if the expert is on another rank; kNowhere without a row.
__device__ __forceinline__ int group_of(const aril_top_k& top_k, int32_t id, int row, int slot) {
  const unsigned expert = id, num_experts = top_k.num_experts;
  if (row == kNowhere) return kNowhere;
  return expert >= num_experts ? num_experts + 1 : slot < 0 ? num_experts : expert;
}

__device__ __forceinline__ aril_route_entry entry_of(const aril_top_k& top_k,
                                                     const aril_routing& routing, int num_tokens,
                                                     int route) {
  return {route, row_of(top_k, num_tokens, route), routing.scales[route / top_k.top_k],
          weight_of(top_k, route)};
}

// Routes in the order of their tiles, in shared or global memory.
struct SortedRoutes {
  aril_route_entry* routes;
  aril_route_tile* tiles;
};

// What multiplies B (A x) of a route: the module's scaling, the token's scale, and, if `weighted`,
// the router's weight, in this order.
__device__ __forceinline__ float route_factor(float scaling, float scale, bool weighted,
                                              float weight) {
  const float factor = scaling * scale;
  return weighted ? factor * weight : factor;
}

}  // namespace aril::detail
