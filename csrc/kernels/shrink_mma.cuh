// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Shrink of bf16 and f16 with mma.sync: v[token] = A x[token], f32 sums.
//
// Tokens are the 16 rows of the product, ranks its columns, 8 at a time. The order of the input
// features within 32 of them is of no consequence to a dot product, so each lane takes 8 that stand
// together: weights and input go from memory to the registers of the instruction 16 bytes at a
// time, with no staging between.
//
// The order of a token's sums is that of the layer's shape alone: 32 features in two instructions,
// eight of those one after the other for a chunk, then the chunks as tile.cuh says. So its result
// has the same bits whatever else is in the batch, and in both kernels:
//
//   shrink_lanes_kernel: few tokens. Grid (tiles, splits, column tiles); the warps share a chunk,
//   32 features each.
//       Shared: 8 * 16 * (64 + 8) floats = 36 KB.
//   shrink_rows_kernel:  many tokens. Grid (tiles, 1, column tiles); a warp for each group of
//   lanes, a chunk at a time.
//       Shared: 4 * 16 * (64 + 8) floats = 18 KB.
#pragma once

#include "../common/mma.cuh"
#include "../common/pdl.cuh"
#include "../common/vec.cuh"
#include "tile.cuh"

namespace aril::detail {

constexpr int kColumns = 8;                                   // ranks of one instruction
constexpr int kColumnTiles = ARIL_RANKS_PER_TILE / kColumns;  // instructions side by side in a warp
constexpr int kStepFeatures = 32;                             // input features of two instructions
constexpr int kStepsPerChunk = ARIL_K_PER_CHUNK / kStepFeatures;
constexpr int kStride =
    ARIL_RANKS_PER_TILE + 8;  // floats between rows in shared memory, against conflicts
constexpr int kLanesThreads = 32 * kStepsPerChunk;
constexpr int kGroups = ARIL_SUM_LANES / ARIL_LANES_PER_GROUP;
constexpr int kRowsThreads = 32 * kGroups;

// Where a lane's rows of A are, for the column tiles that this block works on: those of all slices,
// one after the other.
template <typename T>
struct Columns {
  const T* a[kColumnTiles];  // this lane's row, or null
  int count;                 // of column tiles

  __device__ __forceinline__ Columns(const aril_linear_args& p, int slot, int first_tile)
      : count(0) {
    const int g = threadIdx.x % 32 / 4;
    const int64_t a_stride = padded<T>(p.in_features);
    int tile = -first_tile;
#pragma unroll
    for (int i = 0; i < kColumnTiles; ++i) a[i] = nullptr;
    for (int slice = 0; slice < p.num_slices; ++slice) {
      const aril_descriptor module = module_of(p.weights, slot, slice);
      const int tiles = ceil_div(module.rank, kColumns);
#pragma unroll
      for (int i = 0; i < kColumnTiles; ++i) {
        const int row = (i - tile) * kColumns + g;
        if (i < tile || i >= tile + tiles) continue;
        count = i + 1;
        if (row < module.rank) a[i] = static_cast<const T*>(module.a) + row * a_stride;
      }
      tile += tiles;
    }
  }
};

// Writes the sums of a block's tokens to a plane. `sum(t, column)` gives that of the tile's token
// t.
template <int kThreads, typename Sum>
__device__ __forceinline__ void store_sums(const aril_linear_args& p, const Tile& tile,
                                           int first_tile, int plane, Sum sum) {
  const Planes planes(p);
  float* v = p.planes + plane * planes.plane_stride;
  int first_column = -first_tile * kColumns;
  for (int slice = 0; slice < p.num_slices; ++slice) {
    const int rank = module_of(p.weights, tile.slot, slice).rank;
    const int begin = max(0, -first_column), end = min(rank, ARIL_RANKS_PER_TILE - first_column);
    const int rows = max(0, end - begin);
    for (int i = threadIdx.x; i < tile.count * rows; i += kThreads) {
      const int t = i / rows, row = begin + i % rows, token = tile.tokens[t];
      if (token < p.num_tokens)
        v[token * planes.token_stride + slice * planes.slice_stride + row] =
            sum(t, first_column + row);
    }
    first_column += ceil_div(rank, kColumns) * kColumns;
  }
}

// The input of a tile's tokens g and g + 8.
template <typename T>
struct Input {
  const T* rows[2];
  int in_features;
  bool aligned;

  __device__ __forceinline__ Input(const aril_linear_args& p, const Tile& tile)
      : in_features(p.in_features) {
    const int g = threadIdx.x % 32 / 4;
    const T* x = static_cast<const T*>(p.x);
    aligned = (reinterpret_cast<uintptr_t>(x) | (p.x_stride * sizeof(T))) % 16 == 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int t = g + 8 * i;
      const int token = t < tile.count ? tile.tokens[t] : p.num_tokens;
      rows[i] = token < p.num_tokens ? x + token * p.x_stride : nullptr;
    }
  }

  __device__ __forceinline__ void load(Vec<T> (&vecs)[2], int k) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      vecs[i] = Vec<T>::load_from_anywhere(rows[i] + k, rows[i] == nullptr ? 0 : in_features - k,
                                           aligned);
    }
  }
};

// c += 32 features of the tile's tokens with those of 8 rows of A.
template <typename T>
__device__ __forceinline__ void step(float (&c)[4], const Vec<T> (&x)[2], const Vec<T>& a) {
  mma_m16n8k16<T>(c, x[0].bits.x, x[1].bits.x, x[0].bits.y, x[1].bits.y, a.bits.x, a.bits.y);
  mma_m16n8k16<T>(c, x[0].bits.z, x[1].bits.z, x[0].bits.w, x[1].bits.w, a.bits.z, a.bits.w);
}

__device__ __forceinline__ void store_tile(float (&sums)[ARIL_TOKENS_PER_TILE][kStride],
                                           int column_tile, const float (&c)[4]) {
  const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
  *reinterpret_cast<float2*>(&sums[g][column_tile * kColumns + 2 * q]) = make_float2(c[0], c[1]);
  *reinterpret_cast<float2*>(&sums[g + 8][column_tile * kColumns + 2 * q]) =
      make_float2(c[2], c[3]);
}

__device__ __forceinline__ void add_tile(float (&sums)[ARIL_TOKENS_PER_TILE][kStride],
                                         int column_tile, const float (&c)[4]) {
  const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
  float2& upper = *reinterpret_cast<float2*>(&sums[g][column_tile * kColumns + 2 * q]);
  float2& lower = *reinterpret_cast<float2*>(&sums[g + 8][column_tile * kColumns + 2 * q]);
  upper = make_float2(upper.x + c[0], upper.y + c[1]);
  lower = make_float2(lower.x + c[2], lower.y + c[3]);
}

template <typename T>
__global__ void __launch_bounds__(kLanesThreads, 2)
    shrink_lanes_kernel(const __grid_constant__ aril_linear_args p) {
  constexpr int kItems =
      ARIL_TOKENS_PER_TILE * ARIL_RANKS_PER_TILE / kLanesThreads;  // sums of a thread
  __shared__ float sums[kStepsPerChunk][ARIL_TOKENS_PER_TILE][kStride];
  const Tile tile(p.routing, p.weights, blockIdx.x, p.max_tiles);
  const int first_tile = blockIdx.z * kColumnTiles;
  const Columns<T> columns(p, tile.slot, first_tile);
  const Lanes lanes(p, blockIdx.y);
  const int warp = threadIdx.x / 32, q = threadIdx.x % 4;
  const bool idle = tile.count == 0 || columns.count == 0;

  Vec<T> a[kColumnTiles], x[2];
  const auto k_of = [&](int chunk) {
    return chunk * ARIL_K_PER_CHUNK + warp * kStepFeatures + q * 8;
  };
  const auto fetch_weights = [&](int chunk) {
    const int k = k_of(chunk);
#pragma unroll
    for (int i = 0; i < kColumnTiles; ++i) {
      a[i] =
          Vec<T>::load(columns.a[i] + k, idle || columns.a[i] == nullptr ? 0 : p.in_features - k);
    }
  };
  fetch_weights(lanes.begin);
  wait_for_predecessors();
  let_dependents_begin();
  if (idle) return;

  const Input<T> input(p, tile);
  input.load(x, k_of(lanes.begin));
  const int num_items = tile.count * ARIL_RANKS_PER_TILE;
  float totals[kItems] = {}, group_sums[kItems] = {};
  for (int sum_lane = lanes.begin; sum_lane < lanes.end; ++sum_lane) {
    float lane_sums[kItems] = {};
    for (int chunk = sum_lane; chunk < lanes.num_chunks; chunk += ARIL_SUM_LANES) {
#pragma unroll
      for (int i = 0; i < kColumnTiles; ++i) {
        if (i >= columns.count) break;
        float c[4] = {};
        step(c, x, a[i]);
        store_tile(sums[warp], i, c);
      }
      // What comes next is on its way while these sums are taken.
      const bool same_lane = chunk + ARIL_SUM_LANES < lanes.num_chunks;
      if (same_lane || sum_lane + 1 < lanes.end) {
        const int next = same_lane ? chunk + ARIL_SUM_LANES : sum_lane + 1;
        fetch_weights(next);
        input.load(x, k_of(next));
      }
      __syncthreads();
#pragma unroll
      for (int item = 0; item < kItems; ++item) {
        const int i = threadIdx.x + item * kLanesThreads;
        if (i >= num_items) break;
        const int t = i / ARIL_RANKS_PER_TILE, column = i % ARIL_RANKS_PER_TILE;
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < kStepsPerChunk; ++w) sum += sums[w][t][column];
        lane_sums[item] += sum;
      }
      __syncthreads();
    }
    const bool group_ends = (sum_lane + 1) % ARIL_LANES_PER_GROUP == 0 || sum_lane + 1 == lanes.end;
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
      group_sums[item] += lane_sums[item];
      if (group_ends) {
        totals[item] += group_sums[item];
        group_sums[item] = 0.0f;
      }
    }
  }
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
    const int i = threadIdx.x + item * kLanesThreads;
    sums[0][i / ARIL_RANKS_PER_TILE][i % ARIL_RANKS_PER_TILE] = totals[item];
  }
  __syncthreads();
  store_sums<kLanesThreads>(p, tile, first_tile, blockIdx.y,
                            [&](int t, int column) { return sums[0][t][column]; });
}

template <typename T>
__global__ void __launch_bounds__(kRowsThreads, 2)
    shrink_rows_kernel(const __grid_constant__ aril_linear_args p) {
  __shared__ float sums[kGroups][ARIL_TOKENS_PER_TILE][kStride];
  const Tile tile(p.routing, p.weights, blockIdx.x, p.max_tiles);
  const int first_tile = blockIdx.z * kColumnTiles;
  const Columns<T> columns(p, tile.slot, first_tile);
  wait_for_predecessors();
  let_dependents_begin();
  if (tile.count == 0 || columns.count == 0) return;

  const Input<T> input(p, tile);
  const int group = threadIdx.x / 32, q = threadIdx.x % 4;
  const int num_chunks = ceil_div(p.in_features, ARIL_K_PER_CHUNK);
  const int end_lane = min((group + 1) * ARIL_LANES_PER_GROUP, min(num_chunks, ARIL_SUM_LANES));
  // The chunk after this one: the lane's, or the first of the group's next lane, or none.
  const auto after = [&](int chunk) {
    if (chunk + ARIL_SUM_LANES < num_chunks) return chunk + ARIL_SUM_LANES;
    const int lane = chunk % ARIL_SUM_LANES + 1;
    return lane < end_lane ? lane : num_chunks;
  };
  Vec<T> a[2][kColumnTiles], x[2][2];
  const auto fetch = [&](int buffer, int chunk, int step) {
    const int k = chunk * ARIL_K_PER_CHUNK + step * kStepFeatures + q * 8;
    const int valid = p.in_features - k;
#pragma unroll
    for (int j = 0; j < kColumnTiles; ++j) {
      a[buffer][j] = Vec<T>::load(columns.a[j] + k, columns.a[j] == nullptr ? 0 : valid);
    }
    input.load(x[buffer], k);
  };

#pragma unroll
  for (int j = 0; j < kColumnTiles; ++j) store_tile(sums[group], j, {0.0f, 0.0f, 0.0f, 0.0f});
  float lane_sums[kColumnTiles][4] = {};
  int chunk = group * ARIL_LANES_PER_GROUP;
  if (chunk < num_chunks) fetch(0, chunk, 0);
  while (chunk < num_chunks) {
    const int following = after(chunk);
    float chunk_sums[kColumnTiles][4] = {};
#pragma unroll 2
    for (int i = 0; i < kStepsPerChunk; i += 2) {
#pragma unroll
      for (int buffer = 0; buffer < 2; ++buffer) {
        // What comes next is on its way while this is multiplied; past the end, nothing is read.
        if (i + buffer + 1 < kStepsPerChunk) {
          fetch(1 - buffer, chunk, i + buffer + 1);
        } else {
          fetch(1 - buffer, following, 0);
        }
#pragma unroll
        for (int j = 0; j < kColumnTiles; ++j) {
          if (j >= columns.count) break;
          float c[4] = {};
          step(c, x[buffer], a[buffer][j]);
#pragma unroll
          for (int e = 0; e < 4; ++e) chunk_sums[j][e] += c[e];
        }
      }
    }
    const bool lane_ends =
        following % ARIL_SUM_LANES != chunk % ARIL_SUM_LANES || following == num_chunks;
#pragma unroll
    for (int j = 0; j < kColumnTiles; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) lane_sums[j][e] += chunk_sums[j][e];
      if (lane_ends) {
        add_tile(sums[group], j, lane_sums[j]);
#pragma unroll
        for (int e = 0; e < 4; ++e) lane_sums[j][e] = 0.0f;
      }
    }
    chunk = following;
  }
  __syncthreads();
  store_sums<kRowsThreads>(p, tile, first_tile, 0, [&](int t, int column) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kGroups; ++i) sum += sums[i][t][column];
    return sum;
  });
}

}  // namespace aril::detail
