// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Residual addition and RMSNorm behind a linear layer, with the layer's expand:
// residual += y + B v; out = weight * residual / rms(residual).
//
// The formula and its roundings are those of Qwen3DecoderLayer and Qwen3RMSNorm of Hugging Face
// (transformers, models/qwen3/modeling_qwen3.py): the sum is rounded to the element type, the norm
// of the rounded sum is computed in f32 and rounded, and its product with the weight is rounded.
//
// 16 tokens of one slot are a cluster's (from sm_90 on; one block's before): each of its blocks has
// a range of the features, so that B is spread over as many multiprocessors, and the rounded sums
// stay in registers between the two passes over a row. The blocks pass each other the sums of
// squares of their rows through shared memory. B is requested before the wait for predecessors.
//
// The order of a row's sum of squares depends on the number of features and of blocks alone: a
// lane's features in order, four lanes, the warps, and the blocks.
//
// Bound: the bytes of B, y, residual and out; in small batches the chain v, product, sums of the
// blocks.
#pragma once

#include "../device/descriptor.cuh"
#include "../device/f32.cuh"
#include "../device/product.cuh"
#include "../device/reduction.cuh"
#include "../device/token_tile.cuh"
#include "../device/vec.cuh"
#include "../host/launch.cuh"
#include "../ptx/async.cuh"
#include "../ptx/pdl.cuh"
#include "../ptx/tma.cuh"
#include "small_m_expand.cuh"

namespace aril::detail {

constexpr int kNormBlocks = 8;  // of a cluster

// Features of a block, a multiple of ARIL_OUT_TILE.
__host__ __device__ __forceinline__ int norm_features(int features, int blocks) {
  return ceil_div(ceil_div(features, blocks), ARIL_OUT_TILE) * ARIL_OUT_TILE;
}

__device__ __forceinline__ float norm_scale(float squares, int features, float eps) {
  return __frsqrt_rn(__fadd_rn(__fdiv_rn(squares, static_cast<float>(features)), eps));
}

template <typename T>
__device__ __forceinline__ T normalized(float sum, float scale, float weight) {
  return from_float<T>(weight * to_float(from_float<T>(sum * scale)));
}

// Stores the `valid` first of eight elements.
template <typename T>
__device__ __forceinline__ void store_vec(T* to, const Vec<T>& vec, int valid, bool whole) {
  if (__builtin_expect(whole, true)) {
    *reinterpret_cast<uint4*>(to) = vec.bits;
    return;
  }
  T elements[Vec<T>::kSize];
  memcpy(elements, &vec.bits, sizeof(elements));
#pragma unroll
  for (int e = 0; e < Vec<T>::kSize; ++e) {
    if (e < valid) to[e] = elements[e];
  }
}

// The sums of squares of a block's rows over all blocks of its cluster, in turns.
//
// Blocks of a cluster may be a turn apart: a block that has the sums of turn t has those of all
// blocks, which have read the sums of turn t - 1. So two places for sums suffice.
template <bool kTakesTurns>
class RowSquares {
 public:
  static constexpr int kRows = ARIL_TOKENS_PER_TILE, kPlaces = kTakesTurns ? 2 : 1;

  struct Shared {
    TransactionBarrier arrivals[kPlaces];
    alignas(16) float of_warps[kSmallMWarps][kRows];
    alignas(16) float of_blocks[kPlaces][kNormBlocks][kRows];
  };

  // All threads call it, at the beginning.
  __device__ __forceinline__ RowSquares(Shared& shared, int block, int blocks)
      : shared_(shared), block_(block), blocks_(blocks) {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x == 0) {
#pragma unroll
      for (TransactionBarrier& arrival : shared.arrivals) {
        arrival.init();
        arrival.expect(sizeof(shared.of_blocks[0]));
      }
    }
    arrive_at_cluster();
#endif
  }

  // Adds up `squares` of the lane's rows g and g + 8. All threads call it once in each turn.
  __device__ __forceinline__ void add(const float (&squares)[2], int turn) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = squares[half];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      if (lane % 4 == 0) shared_.of_warps[warp][lane / 4 + 8 * half] = sum;
    }
    __syncthreads();
#if __CUDA_ARCH__ >= 900
    if (turn == 0) wait_for_cluster();
#endif
    place_ = turn % kPlaces;
    // A thread gives four rows to one block.
    const int to = threadIdx.x / kQuads, row = threadIdx.x % kQuads * 4;
    if (to < blocks_) {
      float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
      for (int w = 0; w < kSmallMWarps; ++w) {
        sum = sum + *reinterpret_cast<const float4*>(&shared_.of_warps[w][row]);
      }
#if __CUDA_ARCH__ >= 900
      store_cluster(cluster_address(&shared_.of_blocks[place_][block_][row], to), sum,
                    cluster_address(&shared_.arrivals[place_], to));
#else
      *reinterpret_cast<float4*>(&shared_.of_blocks[place_][block_][row]) = sum;
#endif
    }
#if __CUDA_ARCH__ >= 900
    shared_.arrivals[place_].wait(turn / kPlaces % 2);
    // For the turn after the next, for which no block stores before it has this one's next sums.
    if (kTakesTurns && threadIdx.x == 0) {
      shared_.arrivals[place_].expect(sizeof(shared_.of_blocks[0]));
    }
#else
    __syncthreads();
#endif
  }

  __device__ __forceinline__ float of_row(int row) const {
    float sum = 0.0f;
    for (int block = 0; block < blocks_; ++block) sum += shared_.of_blocks[place_][block][row];
    return sum;
  }

 private:
  static constexpr int kQuads = kRows / 4;

  Shared& shared_;
  int block_, blocks_;
  int place_ = 0;
};

// Shared memory of a block: the norm's weight, then B if staged, then the terms of v.
inline int add_rms_norm_smem_bytes(const aril_linear_args& layer, int blocks, bool staged) {
  const int features = norm_features(layer.out_features[0], blocks);
  return features * 2 + small_m_expand_smem_bytes(layer.weights, features, staged);
}

// Grid: token tiles (kWide: wide tiles, 16 tokens at a time) x `blocks`, the size of a cluster. If
// it takes turns, it has blocks for `tiles` of the token tiles alone.
template <typename T, bool kStaged, bool kWide, bool kTakesTurns>
__global__ void __launch_bounds__(kSmallMThreads, 2)
    add_rms_norm_kernel(const __grid_constant__ aril_add_rms_norm_args p, int blocks, int slabs,
                        int tiles) {
  static_assert(!(kWide && kTakesTurns));
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ TransactionBarrier b_arrival;
  __shared__ ExpandRow rows[ARIL_TOKENS_PER_TILE];
  __shared__ typename RowSquares<kTakesTurns>::Shared squares_shared;
  launch_dependents();
  constexpr int kHeld = kStaged ? 3 : 2;  // units of a warp whose sums stay in registers
  constexpr int kParts = kWide ? ARIL_WIDE_TILE / ARIL_TOKENS_PER_TILE : 1;
  const int block = blockIdx.x % blocks, part = blockIdx.x / blocks % kParts;
  const EarlyModule early(p.layer.weights, 0);
  int tile_index = blockIdx.x / blocks / kParts;
  TokenTile tile(p.layer, tile_index);
  TileRow row_of_thread(p.layer, kWide ? 0 : tile_index);
  tile.tokens += part * ARIL_TOKENS_PER_TILE;
  tile.count = min(tile.count - part * ARIL_TOKENS_PER_TILE, ARIL_TOKENS_PER_TILE);
  if (tile.count <= 0) {
    if (is_first_block()) wait_for_predecessors();
    return;
  }
  RowSquares<kTakesTurns> squares(squares_shared, block, blocks);
  for (int turn = 0;; ++turn) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    const int num_features = p.layer.out_features[0];
    const int block_features = norm_features(num_features, blocks), first = block * block_features;
    const int features = max(min(num_features - first, block_features), 0);
    const aril_descriptor module = early.of(p.layer.weights, tile.slot);
    const int rank_tiles = ceil_div(module.rank, ARIL_RANK_TILE);
    const int steps = ceil_div(module.rank, kRanksPerStep);
    const char* const b = static_cast<const char*>(module.b) +
                          int64_t{first / ARIL_OUT_TILE} * rank_tiles * kBTileBytes;
    const int b_bytes = kStaged ? ceil_div(features, ARIL_OUT_TILE) * rank_tiles * kBTileBytes : 0;
    const T* const weights = reinterpret_cast<const T*>(shared);
    unsigned char* const staged_b = shared + block_features * sizeof(T);
    uint4* const operands = reinterpret_cast<uint4*>(staged_b + b_bytes);
    if (kTakesTurns && turn > 0) {
      // The last turn's rows, B and v have been read.
      fence_async_proxy();
      __syncthreads();
    }
    if constexpr (kStaged) {
      bulk_load(b_arrival, staged_b, b, b_bytes, threadIdx.x, kSmallMThreads, turn == 0);
    }
    if (threadIdx.x < ARIL_TOKENS_PER_TILE) {
      rows[threadIdx.x] = kWide ? tile.expand_rows(module, p.layer)(threadIdx.x)
                                : row_of_thread.expand_row(tile, module, p.layer);
    }
    __syncthreads();
    wait_for_predecessors();

    const int units = ceil_div(features, ARIL_OUT_UNIT);
    const T* const y = static_cast<const T*>(p.layer.y) + first;
    T* const residual = static_cast<T*>(p.residual) + first;
    T* const out = static_cast<T*>(p.out) + first;
    const bool aligned = is_aligned(y, p.layer.y_stride) &&
                         is_aligned(residual, p.residual_stride) && is_aligned(out, p.out_stride);
    // The first units of a warp are held in registers, unless some elements move one by one.
    const bool holds = aligned && features % ARIL_OUT_UNIT == 0;
    const int first_unheld = warp + (holds ? kHeld * kSmallMWarps : 0);
    // Calls f for the lane's rows g and g + 8 of a unit.
    const auto for_rows = [&](int unit, auto f) {
      const int feature = unit * ARIL_OUT_UNIT + 8 * q;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = rows[g + 8 * half].y;
        if (row >= 0) f(half, row, feature, features - feature);
      }
    };
    struct Unit {
      Vec<T> y[2], sums[2];
    };
    Unit held[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int unit = warp + i * kSmallMWarps;
      if (!holds || unit >= units) continue;
      for_rows(unit, [&](int half, int row, int feature, int) {
        const T* const at = y + row * p.layer.y_stride + feature;
        held[i].y[half].bits = *reinterpret_cast<const uint4*>(at);
        const T* const sums_at = residual + row * p.residual_stride + feature;
        held[i].sums[half].bits = *reinterpret_cast<const uint4*>(sums_at);
      });
    }
    if (turn == 0) {
      const T* const weight = static_cast<const T*>(p.weight) + first;
      // A copy of fewer than 16 bytes counts as one of 16 for compute-sanitizer, beyond the weight.
      const bool weight_aligned = is_aligned(weight, 0) && features % Vec<T>::kSize == 0;
      for (int i = threadIdx.x * Vec<T>::kSize; i < features; i += kSmallMThreads * Vec<T>::kSize) {
        copy_vec_async(shared + i * sizeof(T), weight, i, features, weight_aligned);
      }
      commit_copies();
    }

    if (steps > 0) {
      const auto ranks_of = [&](int t, int step) {
        const int rank = step * kRanksPerStep;
        return StepRanks{rows[t].v, rank, rank_tiles * ARIL_RANK_TILE - rank, rows[t].factor};
      };
      if constexpr (kWide) {
        gather_terms(operands, tile.count, steps, ranks_of, PartialSums(p.layer, 0), warp, lane);
      } else {
        const MailboxSums v(p.layer.mailbox, PartialLayout(p.layer), slabs, true, 0, 0);
        gather_terms(operands, tile.count, steps, ranks_of, v, warp, lane);
      }
      // Before sm_90, B.
      wait_for_copies<0>();
      __syncthreads();
    }
    if constexpr (kStaged) b_arrival.wait(turn % 2);

    // Adds y and the delta to a unit's residual, stores it, and adds its squares.
    float row_squares[2] = {};
    const auto add = [&](Unit& unit_of, int unit, bool holds) {
      float deltas[4][4];
      const char* const block_b = kStaged ? reinterpret_cast<const char*>(staged_b) : b;
      multiply_or_none<T, kStaged>(
          deltas, operands, unit_at(block_b, unit * ARIL_OUT_UNIT, rank_tiles, 0), rank_tiles);
      for_rows(unit, [&](int half, int row, int feature, int valid) {
        T sums[Vec<T>::kSize];
#pragma unroll
        for (int e = 0; e < Vec<T>::kSize; ++e) {
          const float delta = deltas[e / 2][2 * half + e % 2];
          sums[e] = from_float<T>(unit_of.sums[half][e] + (unit_of.y[half][e] + delta));
          // Elements that do not exist are zero, as B's padding is.
          row_squares[half] = fmaf(to_float(sums[e]), to_float(sums[e]), row_squares[half]);
        }
        memcpy(&unit_of.sums[half].bits, sums, sizeof(sums));
        store_vec(residual + row * p.residual_stride + feature, unit_of.sums[half], valid, holds);
      });
    };
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int unit = warp + i * kSmallMWarps;
      if (holds && unit < units) add(held[i], unit, true);
    }
#pragma unroll 1
    for (int unit = first_unheld; unit < units; unit += kSmallMWarps) {
      Unit more;
      for_rows(unit, [&](int half, int row, int feature, int valid) {
        more.y[half] =
            Vec<T>::load_from_anywhere(y + row * p.layer.y_stride + feature, valid, aligned);
        more.sums[half] = Vec<T>::load_from_anywhere(residual + row * p.residual_stride + feature,
                                                     valid, aligned);
      });
      add(more, unit, holds);
    }
    wait_for_copies<0>();
    squares.add(row_squares, turn);

    float scales[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      scales[half] = norm_scale(squares.of_row(g + 8 * half), num_features, p.eps);
    }
    const auto normalize = [&](const Unit& unit_of, int unit, bool holds) {
      for_rows(unit, [&](int half, int row, int feature, int valid) {
        const Vec<T> weight{*reinterpret_cast<const uint4*>(weights + feature)};
        T values[Vec<T>::kSize];
#pragma unroll
        for (int e = 0; e < Vec<T>::kSize; ++e) {
          values[e] = normalized<T>(unit_of.sums[half][e], scales[half], weight[e]);
        }
        Vec<T> result;
        memcpy(&result.bits, values, sizeof(values));
        store_vec(out + row * p.out_stride + feature, result, valid, holds);
      });
    };
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int unit = warp + i * kSmallMWarps;
      if (holds && unit < units) normalize(held[i], unit, true);
    }
#pragma unroll 1
    for (int unit = first_unheld; unit < units; unit += kSmallMWarps) {
      Unit more;
      for_rows(unit, [&](int half, int row, int feature, int valid) {
        // What this thread has stored.
        more.sums[half] = Vec<T>::load_from_anywhere(residual + row * p.residual_stride + feature,
                                                     valid, aligned);
      });
      normalize(more, unit, holds);
    }
    tile_index += tiles;
    if (!kTakesTurns || tile_index >= tile.num_tiles) return;
    tile = TokenTile(p.layer, tile_index);
    row_of_thread = TileRow(p.layer, tile_index);
  }
}

// In f32. Grid: tiles. A thread has every kF32Threads-th feature.
__global__ void __launch_bounds__(kF32Threads)
    add_rms_norm_f32_kernel(const __grid_constant__ aril_add_rms_norm_args p) {
  __shared__ float2 v[ARIL_MAX_RANK / 2];
  __shared__ float squares[kF32Threads];
  launch_dependents();
  wait_for_predecessors();
  const TokenTile tile(p.layer, blockIdx.x);
  const aril_descriptor module = module_of(p.layer.weights, tile.slot, 0);
  const int rank_tiles = ceil_div(module.rank, ARIL_RANK_TILE);
  const int features = p.layer.out_features[0];
  const PartialSums partials(p.layer, 0);
  for (int t = 0; t < tile.count; ++t) {
    const int token = tile.token(t, p.layer.num_tokens);
    if (token < 0) continue;
    __syncthreads();
    load_v_f32(v, rank_tiles, partials, token);
    __syncthreads();
    const float* const y = static_cast<const float*>(p.layer.y) + token * p.layer.y_stride;
    float* const residual = static_cast<float*>(p.residual) + token * p.residual_stride;
    float* const out = static_cast<float*>(p.out) + token * p.out_stride;
    const float scaling = rank_tiles > 0 ? module.scaling * p.layer.routing.scales[token] : 0.0f;
    float sum = 0.0f;
    for (int feature = threadIdx.x; feature < features; feature += kF32Threads) {
      float base = y[feature];
      if (rank_tiles > 0) {
        const float* b = f32_b_row(module.b, rank_tiles, feature);
        base += scaling * delta_f32(b, rank_tiles, v);
      }
      const float total = residual[feature] + base;
      residual[feature] = total;
      sum = fmaf(total, total, sum);
    }
    squares[threadIdx.x] = sum;
    for (int distance = kF32Threads / 2; distance > 0; distance /= 2) {
      __syncthreads();
      if (static_cast<int>(threadIdx.x) < distance) {
        squares[threadIdx.x] += squares[threadIdx.x + distance];
      }
    }
    __syncthreads();
    const float scale = norm_scale(squares[0], features, p.eps);
    for (int feature = threadIdx.x; feature < features; feature += kF32Threads) {
      const float weight = static_cast<const float*>(p.weight)[feature];
      out[feature] = normalized<float>(residual[feature], scale, weight);
    }
  }
}

}  // namespace aril::detail
