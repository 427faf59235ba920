// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Shrink, expand and embedding in f32, with FMA: for checking models and adapters, not for speed.
//
// A thread computes a rank of v, or an output. Shrink has a grid of (token tiles x slices, splits),
// expand and embedding of token tiles x blocks of kF32Threads outputs. The order of sums is that of
// device/reduction.cuh; the features of a K tile are added one after the other.
#pragma once

#include "../device/descriptor.cuh"
#include "../device/f32.cuh"
#include "../device/reduction.cuh"
#include "../device/token_tile.cuh"
#include "../ptx/pdl.cuh"
#include "embedding.cuh"
#include "expand_f32.cuh"

namespace aril::detail {

__global__ void __launch_bounds__(kF32Threads)
    shrink_f32_kernel(const __grid_constant__ aril_linear_args p, int slices) {
  __shared__ float x[ARIL_K_TILE];
  launch_dependents();
  wait_for_predecessors();
  const TokenTile tile(p, blockIdx.x / slices);
  const int slice = blockIdx.x % slices;
  const aril_descriptor module = module_of(p.weights, tile.slot, slice);
  const int rank_tiles = ceil_div(module.rank, ARIL_RANK_TILE);
  const KTiles k_tiles(p.in_features, p.plan.k_tiles_per_split, blockIdx.y);
  const PartialLayout layout(p);
  for (int t = 0; t < tile.count; ++t) {
    const int token = tile.token(t, p.num_tokens);
    for (int first_rank = 0; token >= 0 && first_rank < module.rank; first_rank += kF32Threads) {
      const int rank = first_rank + threadIdx.x;
      const float* a = f32_a_row(module.a, rank);
      float total = 0.0f, span = 0.0f, slab = 0.0f;
      for (int k_tile = k_tiles.begin; k_tile < k_tiles.end; ++k_tile) {
        const int first_k = k_tile * ARIL_K_TILE;
        const int features = min(p.in_features - first_k, ARIL_K_TILE);
        __syncthreads();
        for (int k = threadIdx.x; k < features; k += kF32Threads) {
          x[k] = static_cast<const float*>(p.x)[token * p.x_stride + first_k + k];
        }
        __syncthreads();
        float sum = 0.0f;
        for (int k = 0; rank < module.rank && k < features; ++k) {
          const int64_t core =
              int64_t{k_tile} * rank_tiles * kATileElems + k / ARIL_CORE * kCoreElems;
          sum += a[core + k % ARIL_CORE] * x[k];
        }
        slab += sum;
        const bool last = k_tile + 1 == k_tiles.end;
        if ((k_tile + 1) % ARIL_K_TILES_PER_SLAB != 0 && !last) continue;
        span += slab;
        slab = 0.0f;
        if ((k_tile + 1) % kKTilesPerSpan != 0 && !last) continue;
        total += span;
        span = 0.0f;
      }
      if (rank < rank_tiles * ARIL_RANK_TILE) {
        p.partials[blockIdx.y * layout.partial_stride + token * layout.row_stride +
                   slice * layout.slice_stride + rank] = rank < module.rank ? total : 0.0f;
      }
    }
  }
}

__global__ void __launch_bounds__(kF32Threads)
    expand_f32_kernel(const __grid_constant__ aril_linear_args p, int out_blocks) {
  launch_dependents();
  wait_for_predecessors();
  const TokenTile tile(p, blockIdx.x / out_blocks);
  int slice;
  const BlockOuts<float> outs(p, blockIdx.x % out_blocks, kF32Threads, slice);
  expand_f32(tile, module_of(p.weights, tile.slot, slice), p.routing.scales, outs, p.num_tokens,
             PartialSums(p, slice));
}

__global__ void __launch_bounds__(kF32Threads)
    embedding_f32_kernel(const __grid_constant__ aril_embedding_args p, int out_blocks) {
  launch_dependents();
  wait_for_predecessors();
  const TokenTile tile(p, blockIdx.x / out_blocks);
  const aril_descriptor module = module_of(p.weights, tile.slot, 0);
  expand_f32(tile, module, p.routing.scales,
             BlockOuts<float>(p, blockIdx.x % out_blocks, kF32Threads), p.num_tokens,
             EmbeddingRows<float>(p, module));
}

}  // namespace aril::detail
