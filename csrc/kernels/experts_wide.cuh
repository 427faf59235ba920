// SPDX-License-Identifier: MIT OR Apache-2.0
//
// A projection of experts with more than ARIL_FEW_ROUTES routes, in bf16 and f16: shrink and expand
// as for linear layers with many tokens (wide.cuh), a launch each, for tiles of up to 64 routes of
// one slot to one expert.
//
// Blocks have one piece of a tile after the other, so that a launch costs what there is to do, not
// what there could be. Nothing is fetched before the wait, as in experts.cuh.
#pragma once

#include "../common/pdl.cuh"
#include "experts.cuh"
#include "tile.cuh"
#include "wide.cuh"

namespace aril::detail {

// Routes of one slot to one expert.
class RouteTile {
 public:
  int count;

  __device__ __forceinline__ RouteTile(const aril_experts_args& p, int index) : p_(p) {
    const int4 tile = __ldcg(reinterpret_cast<const int4*>(p.groups.wide_tiles) + index);
    slot_ = tile.x < p.weights.num_slots && tile.y < p.top_k.num_experts ? tile.x : -1;
    expert_ = tile.y;
    routes_ = reinterpret_cast<const int4*>(p.groups.routes) + tile.z;
    count = tile.w;
  }

  // The slot's module for the expert.
  __device__ __forceinline__ aril_descriptor module(int slice) const {
    return module_of(p_.weights, slot_, (1 + expert_) * p_.num_slices + slice);
  }

  // Whether A x of a slice is summed up by token.
  __device__ __forceinline__ bool shares_a(int slice) const {
    if (!p_.from_tokens) return false;
    const aril_descriptor shared = module_of(p_.weights, slot_, slice);
    return shared.rank > 0 && shared.a != nullptr;
  }

  __device__ __forceinline__ ShrinkRow shrink_row(int t) const {
    if (t >= count) return {-1, -1};
    const int4 entry = __ldcg(routes_ + t);
    return {p_.from_tokens ? entry.x / p_.top_k.top_k : entry.y, entry.x};
  }

  __device__ __forceinline__ ExpandRow expand_row(int t, const aril_descriptor& module,
                                                  bool shares_a) const {
    if (t >= count) return {-1, -1, 0.0f};
    const int4 entry = __ldcg(routes_ + t);
    float factor = module.scaling * __int_as_float(entry.z);
    if (p_.weighted) factor *= __int_as_float(entry.w);
    const int num_routes = p_.num_tokens * p_.top_k.top_k;
    return {entry.y, shares_a ? num_routes + entry.x / p_.top_k.top_k : entry.x, factor};
  }

 private:
  const aril_experts_args& p_;
  int slot_, expert_;
  const int4* routes_;
};

// A block has pieces of tiles: some columns, and a group of lanes.
template <typename T, int kColumns>
__global__ void __launch_bounds__(shrink_threads<kColumns>, shrink_blocks<kColumns>)
    experts_shrink_wide_kernel(const __grid_constant__ aril_experts_args p, int column_blocks) {
  extern __shared__ __align__(1024) unsigned char stages_shared[];
  let_dependents_begin();
  wait_for_predecessors();
  const int lane = threadIdx.x % 32;
  const int columns = static_cast<int>(blockDim.x) / kWarpgroupThreads * kColumns;
  const int pieces = column_blocks * ceil_div(p.in_features, kGroupFeatures);
  const int num_routes = p.num_tokens * p.top_k.top_k;
  const Planes planes = planes_of(p);
  const bool has_routes = !p.from_tokens || !Sharing(p, true).all();
  const int token_tiles = p.from_tokens ? *p.routing.wide_tiles.count : 0;
  const int tiles = token_tiles + (has_routes ? __ldcg(p.groups.num_wide_tiles) : 0);
  for (int i = blockIdx.x; i < tiles * pieces; i += gridDim.x) {
    const int tile_index = i / pieces, piece = i % pieces;
    const int first_column = piece % column_blocks * columns, group = piece / column_blocks;
    const auto run = [&](const aril_descriptor& module, const auto& make_row) {
      wide_shrink<T, kColumns>(static_cast<const T*>(p.x), p.x_stride, p.in_features, module,
                               first_column, Lanes(p.in_features, ARIL_LANES_PER_GROUP, group),
                               make_row, p.planes + group * planes.plane_stride, planes,
                               stages_shared);
    };
    aril_descriptor module = {};
    if (tile_index < token_tiles) {
      const Tile tile(p.routing, p.routing.wide_tiles, token_tiles, p.weights.num_slots,
                      tile_index);
      module = module_of_lane(p.weights, tile.slot, p.num_slices);
      if (module.a == nullptr) module.rank = 0;
      run(module, [&](int t) {
        const int token = tile.token(t, p.num_tokens);
        return ShrinkRow{token, token < 0 ? -1 : num_routes + token};
      });
    } else {
      const RouteTile tile(p, tile_index - token_tiles);
      if (lane < p.num_slices && !tile.shares_a(lane)) module = tile.module(lane);
      run(module, [&](int t) { return tile.shrink_row(t); });
    }
    __syncthreads();
  }
}

// Blocks of expand on a multiprocessor, as far as registers go.
template <typename T>
constexpr int wide_experts_blocks() {
#if __CUDA_ARCH__ >= 900
  return kWideExpandBlocks<T>;
#else
  return std::is_same_v<T, __nv_bfloat16> ? kWideExpandBlocks<T> : 1;
#endif
}

// A block has pieces of tiles: some outputs of a slice.
template <typename T>
__global__ void __launch_bounds__(kExpandThreads, wide_experts_blocks<T>())
    experts_expand_wide_kernel(const __grid_constant__ aril_experts_args p, int ring_bytes) {
  extern __shared__ __align__(1024) unsigned char stages_shared[];
  __shared__ Arrival arrivals_shared[kMaxExpandStages];
  __shared__ ExpandRow rows[ARIL_WIDE_TILE];
  let_dependents_begin();
  ExpandArrivals arrivals(arrivals_shared);
  wait_for_predecessors();
  const int pieces = p.num_slices * ceil_div(p.out_features, p.outs_per_block);
  // What is not needed while the block works stands in shared memory.
  __shared__ int next, last;
  if (threadIdx.x == 0) {
    next = blockIdx.x;
    last = __ldcg(p.groups.num_wide_tiles + (p.form == ARIL_WRITE)) * pieces;
  }
  __syncthreads();
  while (next < last) {
    const RouteTile tile(p, next / pieces);
    int slice;
    const BlockOuts<T> outs(p, next % pieces, p.outs_per_block, slice);
    const aril_descriptor module = tile.module(slice);
    const bool shares_a = tile.shares_a(slice);
    if (threadIdx.x < ARIL_WIDE_TILE) {
      rows[threadIdx.x] = tile.expand_row(threadIdx.x, module, shares_a);
    }
    __syncthreads();
    if (threadIdx.x == 0) next += gridDim.x;
    if (module.rank > 0) {
      wide_expand<T>(
          tile.count, rows, module, outs, stages_shared, ring_bytes, arrivals,
          PlaneSums(p.planes, planes_of(p), ceil_div(p.in_features, kGroupFeatures), true, slice));
    } else if (outs.overwrites) {
      for (int t = 0; t < tile.count; ++t) {
        T* const y = outs.y + rows[t].y * outs.y_stride + outs.first;
        for (int out = threadIdx.x; out < outs.count; out += kExpandThreads) y[out] = T(0.0f);
      }
    }
    __syncthreads();
  }
}

}  // namespace aril::detail
