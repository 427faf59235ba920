// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Shrink and expand of a fully sharded layer (S-LoRA): the engine exchanges v between them, in f32.
//
// Shrink has a block for each token tile, slice and rank tile of this rank's share of A. Each of
// its warps takes every kShardedWarps-th K tile, and their sums are added in the order of the
// warps, so that the bits of a row depend on its x and its slot's factors alone. Elements of v
// without a delta are zero, because the engine exchanges them, too. Expand is that of small_m, with
// v from the exchange. Both use token tiles of 16 for any number of tokens.
//
// Bound: of shrink, a round trip for x and A for each K tile of a warp; of expand, B and y.
#pragma once

#include "../device/token_tile.cuh"
#include "expand_f32.cuh"
#include "small_m_expand.cuh"

namespace aril::detail {

constexpr int kShardedWarps = 6;  // of a block of shrink, which then fits on every device
constexpr int kShardedThreads = 32 * kShardedWarps;
constexpr int kShardedRowBytes = ARIL_K_TILE * 2 + 16;  // of x; padded so that 8 rows hit all banks
constexpr int kShardedWarpBytes = kATileBytes + ARIL_TOKENS_PER_TILE * kShardedRowBytes;
constexpr int kShardedSmemBytes = kShardedWarps * kShardedWarpBytes;

// How the ranks of an adapter are shared out: `width` to each tensor-parallel rank, of which this
// one has `count`.
struct SharedRanks {
  int width, count;

  __device__ __forceinline__ SharedRanks(const aril_sharded_args& p, int rank)
      : width(ceil_div(rank, p.tp_size)), count(max(0, min(width, rank - p.tp_rank * width))) {}
};

// A block of shrink: ranks [first, first + ARIL_RANK_TILE) of v of a token tile and a slice.
struct ShrinkTile {
  TokenTile tokens;
  int slice, rank_tile;
  aril_descriptor module;

  __device__ __forceinline__ explicit ShrinkTile(const aril_sharded_args& p, int rank_tiles)
      : tokens(p, blockIdx.x / (p.num_slices * rank_tiles)),
        slice(blockIdx.x / rank_tiles % p.num_slices),
        rank_tile(blockIdx.x % rank_tiles),
        module(module_of(p.weights, tokens.slot, slice)) {}
};

template <typename T>
__global__ void __launch_bounds__(kShardedThreads, 2)
    sharded_shrink_kernel(const __grid_constant__ aril_sharded_args p, int rank_tiles) {
  constexpr int kSums = ARIL_TOKENS_PER_TILE * ARIL_RANK_TILE;
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ float2 warp_sums[kShardedWarps][kSums / 2];
  __shared__ int32_t tokens[ARIL_TOKENS_PER_TILE];  // -1: none
  launch_dependents();
  const ShrinkTile tile(p, rank_tiles);
  const SharedRanks ranks(p, tile.module.rank);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first_rank = tile.rank_tile * ARIL_RANK_TILE;
  if (threadIdx.x < ARIL_TOKENS_PER_TILE) {
    tokens[threadIdx.x] = tile.tokens.token(threadIdx.x, p.num_tokens);
  }
  __syncthreads();
  wait_for_predecessors();
  if (tile.tokens.count == 0) return;

  float sums[4] = {};
  if (first_rank < ranks.count) {
    constexpr int kVecs = ARIL_K_TILE / Vec<T>::kSize;
    static_assert(kVecs == 32, "a warp copies a row of x at once");
    unsigned char* const a = shared + warp * kShardedWarpBytes;
    unsigned char* const x = a + kATileBytes;
    const T* input = static_cast<const T*>(p.x);
    const bool aligned = is_aligned(input, p.x_stride);
    const int k_tiles = ceil_div(p.in_features, ARIL_K_TILE);
    const int k_tile_bytes = ceil_div(ranks.count, ARIL_RANK_TILE) * kATileBytes;
    const char* const a_tiles =
        static_cast<const char*>(tile.module.a) + tile.rank_tile * kATileBytes + lane * 16;
    for (int k_tile = warp; k_tile < k_tiles; k_tile += kShardedWarps) {
#pragma unroll
      for (int i = 0; i < kATileBytes; i += 32 * 16) {
        copy_async(a + i + lane * 16, a_tiles + int64_t{k_tile} * k_tile_bytes + i, 16);
      }
      for (int row = 0; row < tile.tokens.count; ++row) {
        if (tokens[row] < 0) continue;
        copy_vec_async(x + row * kShardedRowBytes + lane * 16, input + tokens[row] * p.x_stride,
                       k_tile * ARIL_K_TILE + lane * Vec<T>::kSize, p.in_features, aligned);
      }
      commit_copies();
      wait_for_copies<0>();
      __syncwarp();
      // Rows of x without a token are uninitialised. Their sums are dropped.
      float products[4][4] = {};
      multiply_k_tile<T>(products, x + lane % 16 * kShardedRowBytes + lane / 16 * 16,
                         a + lane * 16);
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[e] += products[0][e];
      __syncwarp();
    }
  }
  warp_sums[warp][lane] = make_float2(sums[0], sums[1]);
  warp_sums[warp][32 + lane] = make_float2(sums[2], sums[3]);
  __syncthreads();
  if (threadIdx.x >= kSums) return;
  const int token = tokens[threadIdx.x / ARIL_RANK_TILE];
  const int rank = first_rank + threadIdx.x % ARIL_RANK_TILE;
  if (token < 0 || rank >= p.width) return;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kShardedWarps; ++i) {
    sum += reinterpret_cast<const float*>(warp_sums[i])[threadIdx.x];
  }
  p.v[token * p.v_stride + tile.slice * p.width + rank] = rank < ranks.count ? sum : 0.0f;
}

__global__ void __launch_bounds__(kF32Threads)
    sharded_shrink_f32_kernel(const __grid_constant__ aril_sharded_args p, int rank_tiles) {
  launch_dependents();
  wait_for_predecessors();
  const ShrinkTile tile(p, rank_tiles);
  const SharedRanks ranks(p, tile.module.rank);
  const int own_tiles = ceil_div(ranks.count, ARIL_RANK_TILE);
  // A warp for each rank.
  const int rank = tile.rank_tile * ARIL_RANK_TILE + threadIdx.x / 32;
  static_assert(kF32Threads == 32 * ARIL_RANK_TILE);
  for (int t = 0; t < tile.tokens.count; ++t) {
    const int token = tile.tokens.token(t, p.num_tokens);
    if (token < 0 || rank >= p.width) continue;
    const float* x = static_cast<const float*>(p.x) + token * p.x_stride;
    float sum = 0.0f;
    if (rank < ranks.count) {
      sum = multiply_a_row_f32(tile.module.a, own_tiles, rank, x, p.in_features);
    }
    if (threadIdx.x % 32 == 0) p.v[token * p.v_stride + tile.slice * p.width + rank] = sum;
  }
}

// v of a slice after the exchange. The interface is that of PartialSums.
class ExchangedRows {
 public:
  __device__ __forceinline__ ExchangedRows(const aril_sharded_args& p, int slice, int rank)
      : p_(p), ranks_(p, rank), rank_(rank), first_(p.v + slice * p.width) {}

  __device__ __forceinline__ bool lacks(int) const { return false; }

  template <int kTeam = 1>
  __device__ __forceinline__ float2 load2(int token, int r) const {
    return make_float2(load(token, r), load(token, r + 1));
  }

 private:
  // Element `r` is in the rows of the tensor-parallel rank that computed it.
  __device__ __forceinline__ float load(int token, int r) const {
    if (token < 0 || r >= rank_) return 0.0f;
    const int owner = r / ranks_.width;
    const int64_t row = int64_t{owner} * p_.num_tokens + token;
    return first_[row * p_.v_stride + r - owner * ranks_.width];
  }

  const aril_sharded_args& p_;
  SharedRanks ranks_;
  int rank_;
  const float* first_;
};

// In f16 both terms of B take registers.
template <typename T, bool kStaged>
__global__ void __launch_bounds__(kSmallMThreads, std::is_same_v<T, __nv_bfloat16> ? 3 : 2)
    sharded_expand_kernel(const __grid_constant__ aril_sharded_args p, int out_blocks) {
  extern __shared__ __align__(128) unsigned char shared[];
  launch_dependents();
  const TokenTile tile(p, blockIdx.x / out_blocks);
  int slice;
  const BlockOuts<T> outs(p, blockIdx.x % out_blocks, ARIL_OUTS_SMALL_M, slice);
  const aril_descriptor module = module_of(p.weights, tile.slot, slice);
  if (!outs.begin(tile, module, p.num_tokens)) return;
  small_m_expand<T, kStaged>(tile.count, tile.expand_rows(module, p), module, outs, shared,
                             [&] { return ExchangedRows(p, slice, module.rank); });
}

__global__ void __launch_bounds__(kF32Threads)
    sharded_expand_f32_kernel(const __grid_constant__ aril_sharded_args p, int out_blocks) {
  launch_dependents();
  wait_for_predecessors();
  const TokenTile tile(p, blockIdx.x / out_blocks);
  int slice;
  const BlockOuts<float> outs(p, blockIdx.x % out_blocks, kF32Threads, slice);
  const aril_descriptor module = module_of(p.weights, tile.slot, slice);
  expand_f32(tile, module, p.routing.scales, outs, p.num_tokens,
             ExchangedRows(p, slice, module.rank));
}

}  // namespace aril::detail
