// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The operations on experts in f32, with FMA: for checking models and adapters, not for speed.
//
// A block takes one route after the other, or in the combine one token: a warp computes a rank of
// v, then a thread computes an output.
#pragma once

#include "../device/descriptor.cuh"
#include "../device/f32.cuh"
#include "../ptx/pdl.cuh"
#include "activate.cuh"
#include "routes.cuh"

namespace aril::detail {

// v = A x of a row, by a block, in pairs of ranks, with zeros to the end of the last rank tile.
__device__ __forceinline__ void shrink_f32(const aril_descriptor& module, const float* x,
                                           int in_features, float2* v) {
  const int rank_tiles = ceil_div(module.rank, ARIL_RANK_TILE);
  for (int rank = threadIdx.x / 32; rank < rank_tiles * ARIL_RANK_TILE; rank += kF32Threads / 32) {
    float sum = 0.0f;
    if (rank < module.rank) sum = multiply_a_row_f32(module.a, rank_tiles, rank, x, in_features);
    if (threadIdx.x % 32 == 0) reinterpret_cast<float*>(v)[rank] = sum;
  }
}

// Output `out` of B v.
__device__ __forceinline__ float delta_f32(const aril_descriptor& module, const float2* v,
                                           int out) {
  const int rank_tiles = ceil_div(module.rank, ARIL_RANK_TILE);
  return delta_f32(f32_b_row(module.b, rank_tiles, out), rank_tiles, v);
}

// The factor on a route's delta; 0 without a module.
__device__ __forceinline__ float factor_f32(const aril_experts_args& p,
                                            const aril_descriptor& module, int route) {
  if (module.rank == 0) return 0.0f;
  const float scale = p.routing.scales[route / p.top_k.top_k];
  const float factor = route_factor(module.scaling, scale, false, 1.0f);
  return p.weighted && p.top_k.weights != nullptr
             ? route_factor(module.scaling, scale, true, p.top_k.weights[route])
             : factor;
}

struct RouteF32 {
  int row;
  int expert;  // as of group_of()
  int slot;    // -1: the base model alone, or a slot outside the table

  __device__ __forceinline__ RouteF32(const aril_experts_args& p, int route)
      : row(row_of(p.top_k, p.num_tokens, route)), slot(p.routing.slots[route / p.top_k.top_k]) {
    if (slot >= p.weights.num_slots) slot = -1;
    expert = group_of(p.top_k, p.top_k.ids[route], row, slot);
  }

  __device__ __forceinline__ bool is_here(const aril_experts_args& p) const {
    return row != kNowhere && expert <= p.top_k.num_experts;
  }

  __device__ __forceinline__ aril_descriptor module(const aril_experts_args& p, int slice) const {
    return module_of(p.weights, expert < p.top_k.num_experts ? slot : -1,
                     (1 + expert) * p.num_slices + slice);
  }

  __device__ __forceinline__ const float* x(const aril_experts_args& p, int route) const {
    return static_cast<const float*>(p.x) +
           (p.from_tokens ? route / p.top_k.top_k : row) * p.x_stride;
  }
};

// The column of output `out` of a slice.
__device__ __forceinline__ int column_f32(const aril_experts_args& p, int slice, int out) {
  return p.interleaved ? out * p.num_slices + slice : slice * p.out_features + out;
}

__global__ void __launch_bounds__(kF32Threads, 2)
    experts_f32_kernel(const __grid_constant__ aril_experts_args p) {
  __shared__ float2 v[ARIL_MAX_RANK / 2];
  launch_dependents();
  wait_for_predecessors();
  const bool overwrites = p.form == ARIL_WRITE;
  const int num_routes = routed_tokens(p.routing, p.num_tokens) * p.top_k.top_k;
  for (int route = blockIdx.x; route < num_routes; route += gridDim.x) {
    const RouteF32 at(p, route);
    if (at.row == kNowhere) continue;
    for (int slice = 0; slice < p.num_slices; ++slice) {
      const aril_descriptor module = at.module(p, slice);
      if (module.rank == 0 && !overwrites) continue;
      __syncthreads();
      shrink_f32(module, at.x(p, route), p.in_features, v);
      __syncthreads();
      const float scale = factor_f32(p, module, route);
      for (int out = threadIdx.x; out < p.out_features; out += kF32Threads) {
        float& y = static_cast<float*>(p.y)[at.row * p.y_stride + column_f32(p, slice, out)];
        y = (overwrites ? 0.0f : y) + scale * delta_f32(module, v, out);
      }
    }
  }
}

__global__ void __launch_bounds__(kF32Threads, 2)
    activate_f32_kernel(const __grid_constant__ aril_experts_args p) {
  __shared__ float2 v[2][ARIL_MAX_RANK / 2];
  launch_dependents();
  wait_for_predecessors();
  const int num_routes = routed_tokens(p.routing, p.num_tokens) * p.top_k.top_k;
  for (int route = blockIdx.x; route < num_routes; route += gridDim.x) {
    const RouteF32 at(p, route);
    if (!at.is_here(p)) continue;
    __syncthreads();
    for (int slice = 0; slice < p.num_slices; ++slice) {
      shrink_f32(at.module(p, slice), at.x(p, route), p.in_features, v[slice]);
    }
    __syncthreads();
    for (int out = threadIdx.x; out < p.out_features; out += kF32Threads) {
      const auto sum = [&](int slice) {
        const aril_descriptor module = at.module(p, slice);
        const float* y = static_cast<const float*>(p.y) + at.row * p.y_stride;
        return y[column_f32(p, slice, out)] +
               factor_f32(p, module, route) * delta_f32(module, v[slice], out);
      };
      const bool is_gated = p.num_slices > 1;
      const float up = sum(p.up_slice), x = is_gated ? sum(1 - p.up_slice) : up;
      static_cast<float*>(p.out)[at.row * p.out_stride + out] =
          activation_of<float>(p, x, is_gated ? up : 1.0f);
    }
  }
}

// Sums of a token's routes are accumulated in the output itself.
__global__ void __launch_bounds__(kF32Threads, 2)
    combine_f32_kernel(const __grid_constant__ aril_experts_args p) {
  __shared__ float2 v[ARIL_MAX_RANK / 2];
  launch_dependents();
  wait_for_predecessors();
  const bool combines = p.form == ARIL_COMBINE;
  const int num_tokens = routed_tokens(p.routing, p.num_tokens);
  for (int token = blockIdx.x; token < num_tokens; token += gridDim.x) {
    float* const target = combines ? static_cast<float*>(p.out) + token * p.out_stride
                                   : static_cast<float*>(p.y) + token * p.y_stride;
    if (combines) {
      for (int out = threadIdx.x; out < p.out_features; out += kF32Threads) target[out] = 0.0f;
    }
    for (int k = 0; k < p.top_k.top_k; ++k) {
      const int route = token * p.top_k.top_k + k;
      const RouteF32 at(p, route);
      if (!at.is_here(p)) continue;
      const aril_descriptor module = at.module(p, 0);
      if (module.rank == 0 && !combines) continue;
      __syncthreads();
      shrink_f32(module, at.x(p, route), p.in_features, v);
      __syncthreads();
      const float scale = p.factor * factor_f32(p, module, route);
      const bool is_weighted = p.weighted && !p.rows_weighted && p.top_k.weights != nullptr;
      const float weight = is_weighted ? p.factor * p.top_k.weights[route] : p.factor;
      for (int out = threadIdx.x; out < p.out_features; out += kF32Threads) {
        float value = scale * delta_f32(module, v, out);
        if (combines) value += weight * static_cast<const float*>(p.y)[at.row * p.y_stride + out];
        target[out] += value;
      }
    }
  }
}

}  // namespace aril::detail
