// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Trained rows: embeddings and logits of tokens whose adapter has rows of its own in the place of
// the base model's.
#pragma once

#include "../device/token_tile.cuh"
#include "../device/vec.cuh"

namespace aril::detail {

constexpr int kRowsThreads = 256;

// The trained rows of a slot.
template <typename T>
struct TrainedRows {
  int count = 0;
  const int32_t* ids = nullptr;
  const T* rows = nullptr;
  int64_t stride;

  __device__ __forceinline__ TrainedRows(const aril_rows_args& p, int slot)
      : stride(ceil_div(p.hidden, ARIL_OUT_TILE) * ARIL_OUT_TILE) {
    if (slot < 0 || slot >= p.weights.num_slots) return;
    const aril_descriptor module = p.weights.table[int64_t{slot} * p.weights.num_entries];
    count = module.rank;
    ids = static_cast<const int32_t*>(module.a);
    rows = static_cast<const T*>(module.b);
  }

  // An id has the place of two elements.
  __device__ __forceinline__ int id(int row) const {
    return ids[int64_t{row} * (2 * sizeof(T) / sizeof(int32_t))];
  }

  __device__ __forceinline__ const T* row(int row) const { return rows + row * stride; }

  // The row of an id; -1 if there is none.
  __device__ __forceinline__ int find(int wanted) const {
    int first = 0, end = count;
    while (first < end) {
      const int middle = first + (end - first) / 2;
      if (id(middle) < wanted) {
        first = middle + 1;
      } else {
        end = middle;
      }
    }
    return first < count && id(first) == wanted ? first : -1;
  }
};

// A block for each token.
template <typename T>
__global__ void __launch_bounds__(kRowsThreads)
    replace_embeddings_kernel(const __grid_constant__ aril_rows_args p) {
  launch_dependents();
  const int token = blockIdx.x;
  const bool is_routed = token < *p.routing.num_tokens;
  const TrainedRows<T> rows(p, is_routed ? p.routing.slots[token] : -1);
  if (rows.count > 0 || is_first_block()) wait_for_predecessors();
  if (rows.count <= 0) return;
  const int row = rows.find(p.token_ids[token]);
  if (row < 0) return;
  T* const y = static_cast<T*>(p.y) + token * p.y_stride;
  for (int i = threadIdx.x; i < p.hidden; i += kRowsThreads) y[i] = rows.row(row)[i];
}

// The blocks of a token tile share its slot's rows. A warp computes one row at a time, for some
// tokens at once: a lane adds the products of its vectors of features, then the warp the sums. The
// order does not depend on the batch.
template <typename T>
__global__ void __launch_bounds__(kRowsThreads)
    replace_logits_kernel(const __grid_constant__ aril_rows_args p) {
  constexpr int kWarps = kRowsThreads / 32, kTokens = 8, kSize = Vec<T>::kSize;
  launch_dependents();
  const TokenTile tile(p.routing, p.routing.tiles, p.max_tiles, p.weights.num_slots,
                       blockIdx.x / p.blocks);
  const TrainedRows<T> rows(p, tile.count > 0 ? tile.slot : -1);
  const int first_row = blockIdx.x % p.blocks * kWarps + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (first_row < rows.count || is_first_block()) wait_for_predecessors();
  const bool aligned = reinterpret_cast<uintptr_t>(p.x) % sizeof(uint4) == 0 &&
                       p.x_stride * sizeof(T) % sizeof(uint4) == 0;
  for (int row = first_row; row < rows.count; row += p.blocks * kWarps) {
    const int id = rows.id(row);
    if (id < 0 || id >= p.outputs) continue;
    for (int first = 0; first < tile.count; first += kTokens) {
      int tokens[kTokens];
      float sums[kTokens];
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
        tokens[t] = tile.token(first + t, p.num_tokens);
        sums[t] = 0.0f;
      }
      for (int k = lane * kSize; k < p.hidden; k += 32 * kSize) {
        const Vec<T> weights = Vec<T>::load(rows.row(row) + k);
#pragma unroll
        for (int t = 0; t < kTokens; ++t) {
          if (tokens[t] < 0) continue;
          const T* const x = static_cast<const T*>(p.x) + tokens[t] * p.x_stride + k;
          const Vec<T> features = Vec<T>::load_from_anywhere(x, p.hidden - k, aligned);
#pragma unroll
          for (int i = 0; i < kSize; ++i) sums[t] = fmaf(features[i], weights[i], sums[t]);
        }
      }
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2) {
          sums[t] += __shfl_xor_sync(0xffffffffu, sums[t], distance);
        }
        if (lane == 0 && tokens[t] >= 0) {
          static_cast<T*>(p.y)[tokens[t] * p.y_stride + id] = from_float<T>(sums[t]);
        }
      }
    }
  }
}

}  // namespace aril::detail
