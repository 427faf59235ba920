// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Shrink and expand over tiles of tokens that share a slot, with FMA in f32.
//
// A tile's tokens read each weight once. A token's sums are formed in an order that depends on the layer's shape alone, so its
// result has the same bits whatever else is in the batch, wherever in a tile it stands, and however the input is split.
//
//   shrink: grid (tiles, splits, slices * rank tiles); each warp dots rows of A with the tile's input, a lane 16 bytes at a time.
//           Shared: ARIL_TOKENS_PER_TILE * ARIL_K_PER_CHUNK floats = 16 KB.
//   expand: grid (tiles, output tiles of all slices); each thread has one row of B, one output of every token of the tile.
//           Shared: ARIL_TOKENS_PER_TILE * padded(max_rank) floats, at most 32 KB. Rounds once, at the store.
//
// Blocks beyond what the routing and the table really hold leave at once: grids are upper bounds, fit to be captured.
#pragma once

#include "../aril.h"
#include "../common/vec.cuh"

namespace aril::detail {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
static_assert(kThreads == ARIL_OUT_PER_TILE, "expand has a thread for each row of B");

struct Tile {
  int slot, count;
  const int32_t* tokens;

  // This block's tile, with no tokens where the routing or the table has none for it.
  __device__ __forceinline__ Tile(const aril_routing& routing, const aril_weights& weights) : slot(0), count(0) {
    if (blockIdx.x >= *routing.num_tiles) return;
    const aril_tile tile = routing.tiles[blockIdx.x];
    if (tile.slot >= weights.num_slots) return;
    slot = tile.slot;
    count = tile.count;
    tokens = routing.tokens + tile.begin;
  }
};

// A slot's module; rank 0 where it has none.
__device__ __forceinline__ aril_descriptor module_of(const aril_weights& weights, int slot, int slice) {
  aril_descriptor module = weights.table[int64_t{slot} * weights.num_entries + slice];
  if (module.rank < 0 || module.rank > weights.max_rank) module.rank = 0;
  return module;
}

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, distance);
  }
  return value;
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 2) shrink_kernel(const __grid_constant__ aril_linear_args p) {
  constexpr int kRowsPerWarp = ARIL_RANKS_PER_TILE / kWarps;
  constexpr int kVecs = ARIL_K_PER_CHUNK / (32 * Vec<T>::kSize);
  static_assert(ARIL_TOKENS_PER_TILE <= 32, "a lane keeps a token's sums");
  __shared__ float x_chunk[ARIL_TOKENS_PER_TILE][ARIL_K_PER_CHUNK];

  const Tile tile(p.routing, p.weights);
  const int rank_tiles = (p.weights.max_rank + ARIL_RANKS_PER_TILE - 1) / ARIL_RANKS_PER_TILE;
  const int slice = blockIdx.z / rank_tiles;
  const int first_row = blockIdx.z % rank_tiles * ARIL_RANKS_PER_TILE;
  if (tile.count == 0) return;
  const aril_descriptor module = module_of(p.weights, tile.slot, slice);
  if (first_row >= module.rank) return;

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const T* x = static_cast<const T*>(p.x);
  const T* a = static_cast<const T*>(module.a);
  const int64_t a_stride = padded<T>(p.in_features);
  const int num_chunks = (p.in_features + ARIL_K_PER_CHUNK - 1) / ARIL_K_PER_CHUNK;
  const int first_chunk = p.num_splits == 1 ? 0 : blockIdx.y;
  const int last_chunk = p.num_splits == 1 ? num_chunks : first_chunk + 1;

  float sums[kRowsPerWarp] = {};  // lane t has those of the tile's token t
  for (int chunk = first_chunk; chunk < last_chunk; ++chunk) {
    const int first_k = chunk * ARIL_K_PER_CHUNK;
    __syncthreads();
    for (int i = threadIdx.x; i < tile.count * ARIL_K_PER_CHUNK; i += kThreads) {
      const int t = i / ARIL_K_PER_CHUNK, k = first_k + i % ARIL_K_PER_CHUNK;
      const int token = tile.tokens[t];
      const bool inside = k < p.in_features && token < p.num_tokens;
      x_chunk[t][i % ARIL_K_PER_CHUNK] = inside ? to_float(x[int64_t{token} * p.x_stride + k]) : 0.0f;
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
        if (k < p.in_features) {
          a_vecs[v] = Vec<T>::load(a + row * a_stride + k, p.in_features - k);
        } else {
          a_vecs[v] = {};
        }
      }
      for (int t = 0; t < tile.count; ++t) {
        float sum = 0.0f;
#pragma unroll
        for (int v = 0; v < kVecs; ++v) {
          const float* x_values = &x_chunk[t][(v * 32 + lane) * Vec<T>::kSize];
#pragma unroll
          for (int j = 0; j < Vec<T>::kSize; ++j) sum += a_vecs[v].values[j] * x_values[j];
        }
        sum = warp_sum(sum);
        if (lane == t) sums[i] += sum;
      }
    }
  }

  const int token = lane < tile.count ? tile.tokens[lane] : p.num_tokens;
  if (token >= p.num_tokens) return;
  const int64_t v_stride = int64_t{p.num_slices} * p.weights.max_rank;
  float* v = p.planes + (int64_t{blockIdx.y} * p.num_tokens + token) * v_stride + slice * p.weights.max_rank;
#pragma unroll
  for (int i = 0; i < kRowsPerWarp; ++i) {
    const int row = first_row + i * kWarps + warp;
    if (row < module.rank) v[row] = sums[i];
  }
}

// y[token, first_out + thread] += B v for the tile's tokens; v_of(t, token, r) gives v, scaled. Tokens at or beyond num_tokens,
// or that `skip` names, are left alone.
template <typename T, typename V, typename Skip>
__device__ __forceinline__ void expand_tile(const Tile& tile, const aril_descriptor& module, int out, int num_outs,
                                            T* y, int64_t y_stride, int num_tokens, V v_of, Skip skip) {
  extern __shared__ float v_tile[];  // [count, padded rank]
  const int v_stride = static_cast<int>(padded<T>(module.rank));
  for (int i = threadIdx.x; i < tile.count * v_stride; i += kThreads) {
    const int r = i % v_stride, token = tile.tokens[i / v_stride];
    v_tile[i] = r < module.rank && token < num_tokens && !skip(token) ? v_of(token, r) : 0.0f;
  }
  __syncthreads();
  if (out >= num_outs) return;

  const T* b = static_cast<const T*>(module.b) + out * int64_t{v_stride};
  float deltas[ARIL_TOKENS_PER_TILE] = {};
  for (int r = 0; r < v_stride; r += Vec<T>::kSize) {
    const Vec<T> b_vec = Vec<T>::load(b + r, module.rank - r);
#pragma unroll
    for (int t = 0; t < ARIL_TOKENS_PER_TILE; ++t) {
      if (t >= tile.count) break;
#pragma unroll
      for (int j = 0; j < Vec<T>::kSize; ++j) deltas[t] += b_vec.values[j] * v_tile[t * v_stride + r + j];
    }
  }
#pragma unroll
  for (int t = 0; t < ARIL_TOKENS_PER_TILE; ++t) {
    if (t >= tile.count) break;
    const int token = tile.tokens[t];
    if (token >= num_tokens || skip(token)) continue;
    T* element = y + int64_t{token} * y_stride + out;
    *element = from_float<T>(to_float(*element) + deltas[t]);
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads) expand_kernel(const __grid_constant__ aril_linear_args p) {
  const Tile tile(p.routing, p.weights);
  if (tile.count == 0) return;
  int slice = 0, out_tile = blockIdx.y;
  T* y = static_cast<T*>(p.y);
  for (; slice < p.num_slices - 1; ++slice) {
    const int slice_tiles = (p.out_features[slice] + ARIL_OUT_PER_TILE - 1) / ARIL_OUT_PER_TILE;
    if (out_tile < slice_tiles) break;
    out_tile -= slice_tiles;
    y += p.out_features[slice];
  }
  const aril_descriptor module = module_of(p.weights, tile.slot, slice);
  if (module.rank == 0) return;

  const int64_t v_stride = int64_t{p.num_slices} * p.weights.max_rank;
  const float* v = p.planes + slice * p.weights.max_rank;
  const auto v_of = [&](int token, int r) {
    float sum = 0.0f;
    for (int split = 0; split < p.num_splits; ++split) {
      sum += v[(int64_t{split} * p.num_tokens + token) * v_stride + r];
    }
    return sum * (module.scaling * p.routing.scales[token]);
  };
  expand_tile(tile, module, out_tile * ARIL_OUT_PER_TILE + static_cast<int>(threadIdx.x), p.out_features[slice], y,
              p.y_stride, p.num_tokens, v_of, [](int) { return false; });
}

template <typename T>
__global__ void __launch_bounds__(kThreads) embedding_kernel(const __grid_constant__ aril_embedding_args p) {
  const Tile tile(p.routing, p.weights);
  if (tile.count == 0) return;
  const aril_descriptor module = module_of(p.weights, tile.slot, 0);
  if (module.rank == 0) return;

  const T* a = static_cast<const T*>(module.a);
  const int64_t a_stride = padded<T>(module.rank);
  const auto v_of = [&](int token, int r) {
    return to_float(a[p.token_ids[token] * a_stride + r]) * (module.scaling * p.routing.scales[token]);
  };
  const auto outside_vocab = [&](int token) { return p.token_ids[token] < 0 || p.token_ids[token] >= p.vocab; };
  expand_tile(tile, module, blockIdx.y * ARIL_OUT_PER_TILE + static_cast<int>(threadIdx.x), p.hidden,
              static_cast<T*>(p.y), p.y_stride, p.num_tokens, v_of, outside_vocab);
}

}  // namespace aril::detail
