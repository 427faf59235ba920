// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The part of kernels.cu that a Qwen3 with experts needs: the router's choice, the order of routes
// by expert, and a GEMM over all experts in one launch, whose sizes nothing on the host has to know.
//
// A route is a (token, expert) pair, numbered token * top_k + k. Matrices of routes have a row for
// each, the rows of an expert together: bounds[e] is the first of expert e.
#pragma once

#include <float.h>
#include <limits.h>
#include <stdint.h>

#include "../../../csrc/ptx/mma.cuh"

namespace {

// The expert of the larger weight, the first of equals.
struct Choice {
  float weight;
  int32_t expert;
};

__device__ __forceinline__ bool comes_before(Choice a, Choice b) {
  return a.weight > b.weight || (a.weight == b.weight && a.expert < b.expert);
}

// The first of all lanes' choices, in every lane.
__device__ __forceinline__ Choice warp_first(Choice first) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    const Choice other = {__shfl_xor_sync(0xffffffffu, first.weight, distance),
                          __shfl_xor_sync(0xffffffffu, first.expert, distance)};
    if (comes_before(other, first)) first = other;
  }
  return first;
}

// The experts of the top_k largest scores of a token and what they weigh: their softmax over all
// experts, divided by its sum over the chosen if normalized, rounded. One warp of the block does it.
template <typename T>
__device__ void choose_experts(const T* scores,  // [tokens, experts]
                               int32_t* ids,     // [tokens, top_k]
                               float* weights,   // [tokens, top_k]
                               int64_t experts, int64_t top_k, int32_t normalized) {
  if (threadIdx.x >= 32) return;
  const int lane = threadIdx.x;
  scores += blockIdx.x * experts;
  ids += blockIdx.x * top_k;
  weights += blockIdx.x * top_k;
  Choice first = {-INFINITY, INT_MAX};
  for (int64_t e = lane; e < experts; e += 32) {
    const Choice choice = {static_cast<float>(scores[e]), static_cast<int32_t>(e)};
    if (comes_before(choice, first)) first = choice;
  }
  const float largest = warp_first(first).weight;
  float sum = 0.0f;
  for (int64_t e = lane; e < experts; e += 32) {
    sum += expf(static_cast<float>(scores[e]) - largest);
  }
  sum = warp_sum(sum);

  // Each is the first that comes after the one before.
  Choice last = {INFINITY, -1};
  float chosen = 0.0f;
  for (int64_t k = 0; k < top_k; ++k) {
    Choice next = {-INFINITY, INT_MAX};
    for (int64_t e = lane; e < experts; e += 32) {
      const Choice choice = {expf(static_cast<float>(scores[e]) - largest) / sum,
                             static_cast<int32_t>(e)};
      if (comes_before(last, choice) && comes_before(choice, next)) next = choice;
    }
    last = warp_first(next);
    chosen += last.weight;
    if (lane == 0) {
      // With a NaN among the scores, no expert comes next.
      const bool is_none = last.expert == INT_MAX;
      ids[k] = is_none ? -1 : last.expert;
      weights[k] = is_none ? NAN : last.weight;
    }
  }
  __syncwarp();
  for (int64_t k = lane; k < top_k; k += 32) {
    weights[k] = round_to<T>(normalized ? weights[k] / chosen : weights[k]);
  }
}

// The rows of an expert's routes: in the order of their numbers, behind those of the experts before
// it. A block for each expert, and one more for the routes that have none, whose rows come last.
__device__ void sort_routes(const int32_t* ids,     // [routes]
                            int32_t* row_of_route,  // [routes]
                            int32_t* token_of_row,  // [routes]
                            int32_t* bounds,        // [experts + 1]
                            int64_t routes, int64_t experts, int64_t top_k) {
  __shared__ int32_t counts[kWarps];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // As an unsigned number, -1 is greater than all experts.
  const uint32_t expert = blockIdx.x;
  const auto group_of = [&](int64_t route) {
    return min(static_cast<uint32_t>(ids[route]), static_cast<uint32_t>(experts));
  };
  int32_t before = 0;
  for (int64_t route = threadIdx.x; route < routes; route += kThreads) {
    before += group_of(route) < expert;
  }
  before = __reduce_add_sync(0xffffffffu, before);
  if (lane == 0) counts[warp] = before;
  __syncthreads();
  int32_t row = 0;
  for (int w = 0; w < kWarps; ++w) row += counts[w];
  if (threadIdx.x == 0) bounds[expert] = row;

  for (int64_t first = 0; first < routes; first += kThreads) {
    const int64_t route = first + threadIdx.x;
    const bool is_mine = route < routes && group_of(route) == expert;
    const uint32_t mine = __ballot_sync(0xffffffffu, is_mine);
    // All threads are done with the counts of the previous round.
    __syncthreads();
    if (lane == 0) counts[warp] = __popc(mine);
    __syncthreads();
    int32_t place = row + __popc(mine & ((1u << lane) - 1));
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) place += counts[w];
      row += counts[w];
    }
    if (is_mine) {
      row_of_route[route] = place;
      token_of_row[place] = static_cast<int32_t>(route / top_k);
    }
  }
}

// The sum of a token's expert outputs, each times its weight, rounded once.
template <typename T>
__device__ void combine(const T* x,                   // [routes, cols]
                        const float* weights,         // [tokens, top_k]
                        const int32_t* row_of_route,  // [tokens, top_k]
                        T* out,                       // [tokens, cols]
                        int64_t cols, int64_t top_k) {
  weights += blockIdx.x * top_k;
  row_of_route += blockIdx.x * top_k;
  for (int64_t i = threadIdx.x; i < cols; i += kThreads) {
    float sum = 0.0f;
    for (int64_t k = 0; k < top_k; ++k) {
      sum += weights[k] * static_cast<float>(x[row_of_route[k] * cols + i]);
    }
    out[blockIdx.x * cols + i] = static_cast<T>(sum);
  }
}

// The tile of a block of the grouped GEMM, and the depth of a step.
constexpr int kTileRows = 32;
constexpr int kTileOuts = 64;
constexpr int kDepth = 32;
// What a thread copies at a time; a word of weights in 4 bits.
constexpr int kChunk = 8;
constexpr int kChunks = kDepth / kChunk;

static_assert(kTileOuts * kChunks == kThreads, "each thread copies a chunk of the weights");
static_assert(kTileRows / 16 * (kTileOuts / 16) == kWarps, "each warp has 16 rows and 16 outputs");

// Rows of tiles in shared memory: 16 bytes apart from a power of two, so that no two of eight rows
// are in the same banks.
template <typename T>
constexpr int kStride = kDepth + 16 / static_cast<int>(sizeof(T));

// Copies a chunk of a row of `cols` columns to shared memory, padded with zeros.
template <typename T>
__device__ __forceinline__ void copy_chunk(T* shared, const T* row, int64_t col, int64_t cols) {
  constexpr int kVector = 16 / sizeof(T);
  if (cols % kVector == 0 && col + kChunk <= cols) {
#pragma unroll
    for (int i = 0; i < kChunk; i += kVector) {
      *reinterpret_cast<uint4*>(shared + i) = *reinterpret_cast<const uint4*>(row + col + i);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      shared[i] = col + i < cols ? row[col + i] : static_cast<T>(0.0f);
    }
  }
}

template <typename T>
__device__ __forceinline__ void clear_chunk(T* shared) {
#pragma unroll
  for (int i = 0; i < kChunk; ++i) shared[i] = static_cast<T>(0.0f);
}

// The weights of all experts as they are computed with.
template <typename T>
struct Plain {
  const T* weights;  // [experts, outs, cols]

  __device__ void copy(T* shared, int64_t row, int64_t col, int64_t cols) const {
    copy_chunk(shared, weights + row * cols, col, cols);
  }

  __device__ float scale(int64_t, int64_t, int64_t) const { return 1.0f; }
};

// Those in 4 bits. T holds the integers exactly; the scale of a group comes after the products, in
// f32, so that no weight is rounded. Groups are multiples of kDepth.
template <typename T>
struct Int4 {
  const uint32_t* words;  // [experts, outs, cols / 8]
  const float* scales;    // [experts, outs, cols / group]
  int64_t group;

  __device__ void copy(T* shared, int64_t row, int64_t col, int64_t cols) const {
    const uint32_t word = words[(row * cols + col) / kChunk];
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      shared[i] = static_cast<T>(static_cast<float>(static_cast<int>(word >> (4 * i) & 0xf) - 8));
    }
  }

  __device__ float scale(int64_t row, int64_t col, int64_t cols) const {
    return scales[(row * cols + col) / group];
  }
};

// The rows of a tile.
struct TileRows {
  int64_t expert;  // -1 if there is no such tile
  int64_t first;
  int count;
};

// Finds a tile by its number among all experts' tiles, in order.
__device__ __forceinline__ TileRows find_tile(const int32_t* bounds, int64_t experts, int32_t tile) {
  const int lane = threadIdx.x % 32;
  for (int64_t base = 0; base < experts; base += 32) {
    const int64_t expert = base + lane;
    const int32_t first = bounds[min(expert, experts)];
    const int32_t end = bounds[min(expert + 1, experts)];
    // The tiles of this expert and of the lanes' before.
    int32_t tiles = (end - first + kTileRows - 1) / kTileRows;
    const int32_t own = tiles;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int32_t others = __shfl_up_sync(0xffffffffu, tiles, distance);
      if (lane >= distance) tiles += others;
    }
    const uint32_t reached = __ballot_sync(0xffffffffu, tile < tiles);
    if (reached != 0) {
      const int source = __ffs(reached) - 1;
      const int32_t skipped = (tile - tiles + own) * kTileRows;
      const int32_t tile_first = __shfl_sync(0xffffffffu, first + skipped, source);
      const int32_t left = __shfl_sync(0xffffffffu, end - first - skipped, source);
      return {base + source, tile_first, min(left, kTileRows)};
    }
    tile -= __shfl_sync(0xffffffffu, tiles, 31);
  }
  return {-1, 0, 0};
}

// A warp's 16 rows and 16 outputs on the tensor cores, over one depth.
template <typename T>
struct Products {
  float sums[2][4] = {};

  __device__ void add(const T* x_tile, const T* w_tile) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const T* x_row = x_tile + (warp % 2 * 16 + lane % 16) * kStride<T> + lane / 16 * 8;
    const T* w_row = w_tile + (warp / 2 * 16 + lane / 16 * 8 + lane % 8) * kStride<T> + lane / 8 % 2 * 8;
#pragma unroll
    for (int k = 0; k < kDepth; k += 16) {
      const uint4 a = aril::ldmatrix_x4(x_row + k);
      const uint4 b = aril::ldmatrix_x4(w_row + k);
      aril::mma_m16n8k16<T>(sums[0], a, b.x, b.y);
      aril::mma_m16n8k16<T>(sums[1], a, b.z, b.w);
    }
  }

  // Calls with the row and the output in the tile of each sum.
  template <typename F>
  __device__ void each(F visit) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int row = warp % 2 * 16 + lane / 4, out = warp / 2 * 16 + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) visit(row + i / 2 * 8, out + n * 8 + i % 2, sums[n][i], n * 4 + i);
    }
  }
};

// In f32, by fused multiply-add: an output of eight rows for each thread.
template <>
struct Products<float> {
  float sums[8] = {};

  __device__ void add(const float* x_tile, const float* w_tile) {
    const float* w_row = w_tile + threadIdx.x % kTileOuts * kStride<float>;
    const float* x_row = x_tile + threadIdx.x / kTileOuts * 8 * kStride<float>;
#pragma unroll
    for (int k = 0; k < kDepth; k += 4) {
      const float4 w = *reinterpret_cast<const float4*>(w_row + k);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float4 x = *reinterpret_cast<const float4*>(x_row + i * kStride<float> + k);
        sums[i] += x.x * w.x;
        sums[i] += x.y * w.y;
        sums[i] += x.z * w.z;
        sums[i] += x.w * w.w;
      }
    }
  }

  template <typename F>
  __device__ void each(F visit) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      visit(threadIdx.x / kTileOuts * 8 + i, threadIdx.x % kTileOuts, sums[i], i);
    }
  }
};

// y = x W[expert]ᵀ of every route, rounded once. blockIdx.x is the number of a tile of rows, of
// which there may be fewer than blocks; blockIdx.y is a tile of outputs.
//
// Shared: 7.5 KB for 16 bits, 13.5 KB for f32, and 256 bytes of scales.
template <typename T, typename Weights>
__device__ void grouped_gemm(const T* x,  // [routes, cols]
                             Weights weights,
                             const int32_t* bounds,  // [experts + 1]
                             T* y,                   // [routes, outs]
                             int64_t experts, int64_t outs, int64_t cols) {
  __shared__ __align__(16) T x_tile[kTileRows * kStride<T>];
  __shared__ __align__(16) T w_tile[kTileOuts * kStride<T>];
  __shared__ float scales[kTileOuts];
  const TileRows rows = find_tile(bounds, experts, static_cast<int32_t>(blockIdx.x));
  if (rows.expert < 0) return;
  const int64_t first_out = static_cast<int64_t>(blockIdx.y) * kTileOuts;
  const int chunk_row = threadIdx.x / kChunks, chunk_col = threadIdx.x % kChunks * kChunk;
  const int64_t w_row = rows.expert * outs + first_out + chunk_row;

  float totals[8] = {};
  for (int64_t col = 0; col < cols; col += kDepth) {
    __syncthreads();
    T* shared = w_tile + chunk_row * kStride<T> + chunk_col;
    if (first_out + chunk_row < outs && col + chunk_col < cols) {
      weights.copy(shared, w_row, col + chunk_col, cols);
    } else {
      clear_chunk(shared);
    }
    if (chunk_row < kTileRows) {
      shared = x_tile + chunk_row * kStride<T> + chunk_col;
      if (chunk_row < rows.count && col + chunk_col < cols) {
        copy_chunk(shared, x + (rows.first + chunk_row) * cols, col + chunk_col, cols);
      } else {
        clear_chunk(shared);
      }
    }
    if (chunk_col == 0) {
      scales[chunk_row] = first_out + chunk_row < outs ? weights.scale(w_row, col, cols) : 0.0f;
    }
    __syncthreads();
    Products<T> products;
    products.add(x_tile, w_tile);
    products.each([&](int, int out, float sum, int i) { totals[i] += scales[out] * sum; });
  }
  Products<T>().each([&](int row, int out, float, int i) {
    if (row < rows.count && first_out + out < outs) {
      y[(rows.first + row) * outs + first_out + out] = static_cast<T>(totals[i]);
    }
  });
}

}  // namespace
