// SPDX-License-Identifier: MIT OR Apache-2.0
//
// A projection of experts in f32, with FMA: for checking models and adapters, not for speed.
//
// A block takes one route after the other: a warp for each rank of v, then a thread for each
// output.
#pragma once

#include "../common/pdl.cuh"
#include "experts.cuh"
#include "tile.cuh"

namespace aril::detail {

__global__ void __launch_bounds__(kF32Threads, 2)
    experts_f32_kernel(const __grid_constant__ aril_experts_args p) {
  __shared__ float v[ARIL_MAX_RANK];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  let_dependents_begin();
  wait_for_predecessors();
  const int num_routes = routed_tokens(p.routing, p.num_tokens) * p.top_k.top_k;
  for (int route = blockIdx.x; route < num_routes; route += gridDim.x) {
    const int token = route / p.top_k.top_k, row = row_of(p.top_k, p.num_tokens, route);
    if (row == kNowhere) continue;
    int slot = p.routing.slots[token];
    if (slot >= p.weights.num_slots) slot = -1;
    const int expert = group_of(p.top_k, p.num_tokens, route, slot);
    const float* x = static_cast<const float*>(p.x) + (p.from_tokens ? token : row) * p.x_stride;
    for (int slice = 0; slice < p.num_slices; ++slice) {
      const aril_descriptor module = module_of(p.weights, expert < p.top_k.num_experts ? slot : -1,
                                               (1 + expert) * p.num_slices + slice);
      if (module.rank == 0 && !p.overwrites) continue;
      const int rank_tiles = ceil_div(module.rank, ARIL_RANK_TILE);
      __syncthreads();
      for (int rank = warp; rank < module.rank; rank += kF32Threads / 32) {
        const float* a = static_cast<const float*>(module.a) + rank / ARIL_RANK_TILE * kPieceElems +
                         rank % ARIL_RANK_TILE * ARIL_CORE;
        float sum = 0.0f;
        for (int k = lane; k < p.in_features; k += 32) {
          const int64_t core = int64_t{k / ARIL_LANE_FEATURES} * rank_tiles * kPieceElems +
                               k % ARIL_LANE_FEATURES / ARIL_CORE * kCoreElems;
          sum += a[core + k % ARIL_CORE] * x[k];
        }
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2) {
          sum += __shfl_xor_sync(0xffffffffu, sum, distance);
        }
        if (lane == 0) v[rank] = sum;
      }
      __syncthreads();
      float scale = module.rank > 0 ? module.scaling * p.routing.scales[token] : 0.0f;
      if (p.weighted && p.top_k.weights != nullptr) scale *= p.top_k.weights[route];
      for (int out = threadIdx.x; out < p.out_features; out += kF32Threads) {
        const float* b = f32_outputs_ranks(static_cast<const float*>(module.b), rank_tiles, out);
        float delta = 0.0f;
        for (int rank = 0; rank < module.rank; ++rank) {
          delta += b[rank / ARIL_RANK_TILE * kF32TileElems + rank % ARIL_RANK_TILE] * v[rank];
        }
        const int at = p.interleaved ? out * p.num_slices + slice : slice * p.out_features + out;
        float& y = static_cast<float*>(p.y)[row * p.y_stride + at];
        y = (p.overwrites ? 0.0f : y) + scale * delta;
      }
    }
  }
}

}  // namespace aril::detail
