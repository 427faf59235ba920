// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Expand: y[token] += B v[token], from shrink's planes or from the rows of an embedding's A. FMA in
// f32; rounds once, at the store.
//
// Grid (tiles, output tiles of all slices); each thread has two neighbouring rows of B, and so two
// neighbouring outputs of every token of the tile. Shared: ARIL_TOKENS_PER_TILE * padded(max_rank)
// floats, at most 32 KB. Weights are fetched before the wait.
#pragma once

#include <type_traits>

#include "../common/pdl.cuh"
#include "../common/vec.cuh"
#include "tile.cuh"

namespace aril::detail {

constexpr int kOutsPerThread = 2;
constexpr int kTokensAtOnce = 8;
constexpr int kExpandThreads = ARIL_OUT_PER_TILE / kOutsPerThread;

// Two neighbouring outputs, which are read and written together where they are aligned to.
template <typename T>
struct Pair {
  using Bits = std::conditional_t<sizeof(T) == 2, uint32_t, uint2>;
  T values[kOutsPerThread];

  __device__ __forceinline__ void load(const T* source, int valid, bool aligned) {
    if (aligned && valid >= kOutsPerThread) {
      const Bits bits = *reinterpret_cast<const Bits*>(source);
      memcpy(values, &bits, sizeof(bits));
      return;
    }
#pragma unroll
    for (int i = 0; i < kOutsPerThread; ++i) {
      if (i < valid) values[i] = source[i];
    }
  }

  __device__ __forceinline__ void store(T* target, int valid, bool aligned) const {
    if (aligned && valid >= kOutsPerThread) {
      Bits bits;
      memcpy(&bits, values, sizeof(bits));
      *reinterpret_cast<Bits*>(target) = bits;
      return;
    }
#pragma unroll
    for (int i = 0; i < kOutsPerThread; ++i) {
      if (i < valid) target[i] = values[i];
    }
  }
};

// Adds B v to outputs [first_out, num_outs) of y for the tile's tokens; v_of(token, r) gives four
// of v from r on, not yet scaled, once predecessors have ended. Tokens at or beyond num_tokens, or
// that `skip` names, are left alone.
template <typename T, typename V, typename Skip>
__device__ __forceinline__ void expand_tile(const Tile& tile, const aril_descriptor& module,
                                            const float* scales, int first_out, int num_outs, T* y,
                                            int64_t y_stride, int num_tokens, V v_of, Skip skip) {
  extern __shared__ __align__(16) float v_tile[];   // [count, padded rank]
  __shared__ int32_t tokens[ARIL_TOKENS_PER_TILE];  // num_tokens where there is nothing to do
  constexpr int kSize = Vec<T>::kSize;
  constexpr int kAhead = 16 / kSize;  // vectors of a row fetched before the wait
  const int out = first_out + static_cast<int>(threadIdx.x) * kOutsPerThread;
  const int valid = tile.count > 0 && module.rank > 0 ? min(num_outs - out, kOutsPerThread) : 0;
  const int v_stride = static_cast<int>(padded<T>(module.rank));
  const T* b = static_cast<const T*>(module.b) + int64_t{out} * v_stride;

  const auto load_b = [&](int row, int r) {
    return Vec<T>::load(b + row * v_stride + r, row < valid ? module.rank - r : 0);
  };
  Vec<T> ahead[kOutsPerThread][kAhead];
#pragma unroll
  for (int row = 0; row < kOutsPerThread; ++row) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) ahead[row][i] = load_b(row, i * kSize);
  }
  wait_for_predecessors();
  let_dependents_begin();
  if (tile.count == 0 || module.rank == 0) return;
  if (threadIdx.x < ARIL_TOKENS_PER_TILE) {
    const int token = threadIdx.x < tile.count ? tile.tokens[threadIdx.x] : num_tokens;
    tokens[threadIdx.x] = token < num_tokens && !skip(token) ? token : num_tokens;
  }
  __syncthreads();

  const bool aligned = (reinterpret_cast<uintptr_t>(y + out) | (y_stride * sizeof(T))) %
                           (kOutsPerThread * sizeof(T)) ==
                       0;
  Pair<T> bases[ARIL_TOKENS_PER_TILE];
#pragma unroll
  for (int t = 0; t < ARIL_TOKENS_PER_TILE; ++t) {
    if (t >= tile.count) break;
    if (tokens[t] < num_tokens) bases[t].load(y + tokens[t] * y_stride + out, valid, aligned);
  }
  const int quads = v_stride / 4;
  for (int i = threadIdx.x; i < tile.count * quads; i += kExpandThreads) {
    const int token = tokens[i / quads], r = i % quads * 4;
    float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (token < num_tokens && r < module.rank) {
      const float scale = module.scaling * scales[token];
      v = v_of(token, r);
      v.x *= scale;
      v.y = r + 1 < module.rank ? v.y * scale : 0.0f;
      v.z = r + 2 < module.rank ? v.z * scale : 0.0f;
      v.w = r + 3 < module.rank ? v.w * scale : 0.0f;
    }
    *reinterpret_cast<float4*>(&v_tile[i * 4]) = v;
  }
  __syncthreads();

#pragma unroll
  for (int first = 0; first < ARIL_TOKENS_PER_TILE; first += kTokensAtOnce) {
    if (first >= tile.count) break;
    float deltas[kTokensAtOnce][kOutsPerThread] = {};
    const auto accumulate = [&](const Vec<T>& b0, const Vec<T>& b1, int r) {
      float b_values[kOutsPerThread][kSize];
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        b_values[0][j] = b0[j];
        b_values[1][j] = b1[j];
      }
#pragma unroll
      for (int t = 0; t < kTokensAtOnce; ++t) {
        if (first + t >= tile.count) break;
#pragma unroll
        for (int j = 0; j < kSize; j += 4) {
          const float4 v =
              *reinterpret_cast<const float4*>(&v_tile[(first + t) * v_stride + r + j]);
#pragma unroll
          for (int row = 0; row < kOutsPerThread; ++row) {
            deltas[t][row] += b_values[row][j] * v.x;
            deltas[t][row] += b_values[row][j + 1] * v.y;
            deltas[t][row] += b_values[row][j + 2] * v.z;
            deltas[t][row] += b_values[row][j + 3] * v.w;
          }
        }
      }
    };
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (i * kSize < v_stride) accumulate(ahead[0][i], ahead[1][i], i * kSize);
    }
    for (int r = kAhead * kSize; r < v_stride; r += kSize)
      accumulate(load_b(0, r), load_b(1, r), r);

#pragma unroll
    for (int t = 0; t < kTokensAtOnce; ++t) {
      const int token = tokens[first + t];
      if (token >= num_tokens) continue;
      Pair<T> sums;
#pragma unroll
      for (int i = 0; i < kOutsPerThread; ++i) {
        sums.values[i] = from_float<T>(to_float(bases[first + t].values[i]) + deltas[t][i]);
      }
      sums.store(y + token * y_stride + out, valid, aligned);
    }
  }
}

__device__ __forceinline__ void add(float4& sum, const float4& other) {
  sum = make_float4(sum.x + other.x, sum.y + other.y, sum.z + other.z, sum.w + other.w);
}

template <typename T>
__global__ void __launch_bounds__(kExpandThreads, sizeof(T) == 2 ? 4 : 3)
    expand_kernel(const __grid_constant__ aril_linear_args p) {
  const Tile tile(p.routing, p.weights, blockIdx.x, p.max_tiles);
  int slice = 0, out_tile = blockIdx.y;
  T* y = static_cast<T*>(p.y);
  for (; slice < p.num_slices - 1; ++slice) {
    const int slice_tiles = ceil_div(p.out_features[slice], ARIL_OUT_PER_TILE);
    if (out_tile < slice_tiles) break;
    out_tile -= slice_tiles;
    y += p.out_features[slice];
  }
  const aril_descriptor module = module_of(p.weights, tile.slot, slice);
  const Planes planes(p);
  const int splits = num_splits(p);
  const float* first_plane = p.planes + slice * planes.slice_stride;
  const auto v_of = [&](int token, int r) {
    const float* source = first_plane + token * planes.token_stride + r;
    const bool lanes_apart = p.lanes_per_split == 1;
    float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f), group = total;
    // Many loads before the first use: they are what this kernel waits for.
    constexpr int kAtOnce = 8;
    for (int first = 0; first < splits; first += kAtOnce) {
      float4 sums[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        sums[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (first + i < splits)
          sums[i] = *reinterpret_cast<const float4*>(source + (first + i) * planes.plane_stride);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (lanes_apart) {
          add(group, sums[i]);
          if ((i + 1) % ARIL_LANES_PER_GROUP == 0) {
            add(total, group);
            group = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
          }
        } else {
          add(total, sums[i]);
        }
      }
    }
    return total;
  };
  expand_tile(tile, module, p.routing.scales, out_tile * ARIL_OUT_PER_TILE, p.out_features[slice],
              y, p.y_stride, p.num_tokens, v_of, [](int) { return false; });
}

template <typename T>
__global__ void __launch_bounds__(kExpandThreads, sizeof(T) == 2 ? 4 : 3)
    embedding_kernel(const __grid_constant__ aril_embedding_args p) {
  const Tile tile(p.routing, p.weights, blockIdx.x, p.max_tiles);
  const aril_descriptor module = module_of(p.weights, tile.slot, 0);
  const T* a = static_cast<const T*>(module.a);
  const int64_t a_stride = padded<T>(module.rank);
  const auto v_of = [&](int token, int r) {
    const T* row = a + p.token_ids[token] * a_stride + r;
    return make_float4(to_float(row[0]), to_float(row[1]), to_float(row[2]), to_float(row[3]));
  };
  const auto outside_vocab = [&](int token) {
    return p.token_ids[token] < 0 || p.token_ids[token] >= p.vocab;
  };
  expand_tile(tile, module, p.routing.scales, blockIdx.y * ARIL_OUT_PER_TILE, p.hidden,
              static_cast<T*>(p.y), p.y_stride, p.num_tokens, v_of, outside_vocab);
}

}  // namespace aril::detail
