// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Embeddings in bf16 and f16: y[t] += B A[token_ids[t]], an expand whose v is a row of A.
//
// Grid: token tiles x blocks of outputs. There is no shrink, so one launch does it all; its bound
// is that of the expand it uses.
#pragma once

#include "../device/token_tile.cuh"
#include "../device/vec.cuh"
#include "high_rank.cuh"
#include "large_m_expand.cuh"
#include "small_m_expand.cuh"

namespace aril::detail {

// v of a token: the row of A that its id names. The interface is that of PartialSums.
template <typename T>
class EmbeddingRows {
 public:
  __device__ __forceinline__ EmbeddingRows(const aril_embedding_args& p,
                                           const aril_descriptor& module)
      : p_(p),
        a_(static_cast<const T*>(module.a)),
        stride_(ceil_div(module.rank, ARIL_RANK_TILE) * ARIL_RANK_TILE) {}

  // Whether a token's id is outside the vocabulary.
  __device__ __forceinline__ bool lacks(int token) const {
    return p_.token_ids[token] < 0 || p_.token_ids[token] >= p_.vocab;
  }

  template <int kTeam = 1>
  __device__ __forceinline__ float2 load2(int token, int r) const {
    if (token < 0 || lacks(token)) return make_float2(0.0f, 0.0f);
    const T* row = a_ + p_.token_ids[token] * stride_ + r;
    return make_float2(to_float(row[0]), to_float(row[1]));
  }

  template <int kCount>
  __device__ __forceinline__ void load4(float4 (&sums)[kCount], const int (&tokens)[kCount],
                                        const int (&ranks)[kCount]) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float2 first = load2(tokens[i], ranks[i]), second = load2(tokens[i], ranks[i] + 2);
      sums[i] = make_float4(first.x, first.y, second.x, second.y);
    }
  }

 private:
  const aril_embedding_args& p_;
  const T* a_;
  int64_t stride_;
};

// Which expand a launch uses, by the number of tokens and the rank.
enum class EmbeddingPath { kSmallM, kSmallMHighRank, kLargeM, kLargeMHighRank };

static_assert(kExpandThreads == kSmallMThreads);

template <typename T, EmbeddingPath kPath>
__global__ void __launch_bounds__(kSmallMThreads, kPath == EmbeddingPath::kLargeM ? 1 : 2)
    embedding_kernel(const __grid_constant__ aril_embedding_args p, int out_blocks,
                     int smem_bytes) {
  extern __shared__ __align__(128) unsigned char shared[];
  launch_dependents();
  const TokenTile tile(p, blockIdx.x / out_blocks);
  const aril_descriptor module = module_of(p.weights, tile.slot, 0);
  const BlockOuts<T> outs(p, blockIdx.x % out_blocks, p.plan.outs_per_block);
  if (!outs.begin(tile, module, p.num_tokens)) return;
  const EmbeddingRows<T> rows(p, module);
  if constexpr (kPath == EmbeddingPath::kLargeM) {
    __shared__ TransactionBarrier barriers_shared[kMaxExpandStages];
    __shared__ ExpandRow tile_rows[ARIL_WIDE_TILE];
    if (threadIdx.x < ARIL_WIDE_TILE) {
      tile_rows[threadIdx.x] = tile.expand_rows(module, p)(threadIdx.x);
    }
    ExpandBarriers barriers(barriers_shared);
    large_m_expand<T>(tile.count, tile_rows, module, outs, shared, smem_bytes, barriers, rows);
  } else if constexpr (kPath == EmbeddingPath::kLargeMHighRank) {
    high_rank_expand<T>(tile, module, outs, p, shared, rows);
  } else {
    small_m_expand<T, kPath == EmbeddingPath::kSmallM>(tile.count, tile.expand_rows(module, p),
                                                       module, outs, shared, [&] { return rows; });
  }
}

}  // namespace aril::detail
