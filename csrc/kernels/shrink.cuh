// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Shrink in f32 with FMA: v[token] = A x[token].
//
// A tile's tokens read each weight once. A token's sums are formed in an order that depends on the
// layer's shape alone, so its result has the same bits whatever else is in the batch, wherever in a
// tile it stands, and however the input is split.
//
// Grid (tiles, splits, slices * rank tiles); each warp dots rows of A with the tile's input, a lane
// 16 bytes at a time. Shared: ARIL_TOKENS_PER_TILE * ARIL_K_PER_CHUNK floats = 16 KB. Blocks beyond
// what the routing and the table really hold leave at once: grids are upper bounds, fit to be
// captured.
#pragma once

#include "../common/pdl.cuh"
#include "../common/vec.cuh"
#include "tile.cuh"

namespace aril::detail {

constexpr int kShrinkThreads = 256;

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, distance);
  }
  return value;
}

__global__ void __launch_bounds__(kShrinkThreads, 1)
    shrink_f32_kernel(const __grid_constant__ aril_linear_args p) {
  using T = float;
  constexpr int kWarps = kShrinkThreads / 32;
  constexpr int kRowsPerWarp = ARIL_RANKS_PER_TILE / kWarps;
  constexpr int kVecs = ARIL_K_PER_CHUNK / (32 * Vec<T>::kSize);
  static_assert(ARIL_TOKENS_PER_TILE <= 32, "a lane keeps a token's sums");
  __shared__ float x_chunk[ARIL_TOKENS_PER_TILE][ARIL_K_PER_CHUNK];

  const Tile tile(p.routing, p.weights, blockIdx.x, p.max_tiles);
  const int rank_tiles = ceil_div(p.weights.max_rank, ARIL_RANKS_PER_TILE);
  const int slice = blockIdx.z / rank_tiles;
  const int first_row = blockIdx.z % rank_tiles * ARIL_RANKS_PER_TILE;
  const aril_descriptor module = module_of(p.weights, tile.slot, slice);
  wait_for_predecessors();
  let_dependents_begin();
  if (tile.count == 0 || first_row >= module.rank) return;

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const T* x = static_cast<const T*>(p.x);
  const T* a = static_cast<const T*>(module.a);
  const int64_t a_stride = padded<T>(p.in_features);
  const Lanes lanes(p, blockIdx.y);

  float totals[kRowsPerWarp] = {},
        group_sums[kRowsPerWarp] = {};  // lane t of the warp has those of the tile's token t
  for (int sum_lane = lanes.begin; sum_lane < lanes.end; ++sum_lane) {
    float lane_sums[kRowsPerWarp] = {};
    for (int chunk = sum_lane; chunk < lanes.num_chunks; chunk += ARIL_SUM_LANES) {
      const int first_k = chunk * ARIL_K_PER_CHUNK;
      __syncthreads();
      for (int i = threadIdx.x; i < tile.count * ARIL_K_PER_CHUNK; i += kShrinkThreads) {
        const int t = i / ARIL_K_PER_CHUNK, k = first_k + i % ARIL_K_PER_CHUNK;
        const int token = tile.tokens[t];
        const bool inside = k < p.in_features && token < p.num_tokens;
        x_chunk[t][i % ARIL_K_PER_CHUNK] = inside ? x[int64_t{token} * p.x_stride + k] : 0.0f;
      }
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kRowsPerWarp; ++i) {
        const int row = first_row + i * kWarps + warp;
        if (row >= module.rank) break;
        Vec<T> a_vecs[kVecs];
#pragma unroll
        for (int v = 0; v < kVecs; ++v) {
          const int k = first_k + (v * 32 + lane) * Vec<T>::kSize;
          a_vecs[v] = Vec<T>::load(a + row * a_stride + k, p.in_features - k);
        }
        for (int t = 0; t < tile.count; ++t) {
          float sum = 0.0f;
#pragma unroll
          for (int v = 0; v < kVecs; ++v) {
            const float* x_values = &x_chunk[t][(v * 32 + lane) * Vec<T>::kSize];
#pragma unroll
            for (int j = 0; j < Vec<T>::kSize; ++j) sum += a_vecs[v][j] * x_values[j];
          }
          sum = warp_sum(sum);
          if (lane == t) lane_sums[i] += sum;
        }
      }
    }
    const bool group_ends = (sum_lane + 1) % ARIL_LANES_PER_GROUP == 0 || sum_lane + 1 == lanes.end;
#pragma unroll
    for (int i = 0; i < kRowsPerWarp; ++i) {
      group_sums[i] += lane_sums[i];
      if (group_ends) {
        totals[i] += group_sums[i];
        group_sums[i] = 0.0f;
      }
    }
  }

  const int token = lane < tile.count ? tile.tokens[lane] : p.num_tokens;
  if (token >= p.num_tokens) return;
  const Planes planes(p);
  float* v = p.planes + blockIdx.y * planes.plane_stride + token * planes.token_stride +
             slice * planes.slice_stride;
#pragma unroll
  for (int i = 0; i < kRowsPerWarp; ++i) {
    const int row = first_row + i * kWarps + warp;
    if (row < module.rank) v[row] = totals[i];
  }
}

}  // namespace aril::detail
