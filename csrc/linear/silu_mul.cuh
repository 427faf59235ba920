// SPDX-License-Identifier: MIT OR Apache-2.0
//
// SiLU and product of a gate_up layer, with the layer's expand: out = silu(gate) * up of y + B v.
// Base rows take the same path without a product, so they have the same bits whether or not other
// rows have adapters.
//
// Many tokens, for which it is: the pipeline of large_m_expand.cuh, with chunks of 128 features of
// both slices; a warpgroup multiplies 64 of each, and bulk copies move y and out in pieces of 256
// bytes per row. B is requested before the wait for predecessors, y and v after it.
// Few tokens, and ranks above ARIL_STAGED_RANK: a block has a range of features of both slices for
// 16 tokens at a time; a warp takes 32 features of both, which stay in registers from y to out, and
// reads B in place.
//
// Bound: the bytes of B, y and out. An expand apart would move y twice more.
#pragma once

#include "../device/activation.cuh"
#include "../device/descriptor.cuh"
#include "../device/f32.cuh"
#include "../device/product.cuh"
#include "../device/reduction.cuh"
#include "../device/token_tile.cuh"
#include "../device/vec.cuh"
#include "../ptx/async.cuh"
#include "../ptx/pdl.cuh"
#include "large_m_expand.cuh"
#include "small_m_expand.cuh"

namespace aril::detail {

// The modules of gate and up that a token tile has.
struct GateUp {
  aril_descriptor modules[2];

  __device__ __forceinline__ GateUp(const aril_weights& weights, int slot)
      : modules{module_of(weights, slot, 0), module_of(weights, slot, 1)} {}

  __device__ __forceinline__ int rank_tiles(int slice) const {
    return ceil_div(modules[slice].rank, ARIL_RANK_TILE);
  }

  // Of gate alone, and of both.
  __device__ __forceinline__ int gate_steps() const { return steps(0); }
  __device__ __forceinline__ int steps() const { return steps(0) + steps(1); }

  // What a step of both multiplies, of which `row` and scale are given.
  __device__ __forceinline__ StepRanks ranks(int row, float scale, int step,
                                             const PartialLayout& layout) const {
    const bool is_up = step >= steps(0);
    const int first = (is_up ? step - steps(0) : step) * kRanksPerStep;
    return {row, (is_up ? layout.slice_stride : 0) + first,
            (is_up ? rank_tiles(1) : rank_tiles(0)) * ARIL_RANK_TILE - first,
            (is_up ? modules[1] : modules[0]).scaling * scale};
  }

  // Where B of a slice begins for output `out`, the first of an output tile.
  __device__ __forceinline__ const char* b(int slice, int out) const {
    return static_cast<const char*>(modules[slice].b) +
           int64_t{out / ARIL_OUT_TILE} * rank_tiles(slice) * kBTileBytes;
  }

 private:
  __device__ __forceinline__ int steps(int slice) const {
    return ceil_div(modules[slice].rank, kRanksPerStep);
  }
};

// Shared memory of a block of plain_silu_mul_kernel: the terms of v.
inline int plain_silu_mul_smem_bytes(const aril_weights& weights) {
  return 2 * small_m_expand_smem_bytes(weights, 0, false);
}

// A block's features [first, first + outs_per_block) of up to ARIL_TOKENS_PER_TILE tokens.
// v.load2(row, r) gives ranks r and r + 1 of the row's sums of both slices.
template <typename T, typename V>
__device__ __forceinline__ void plain_silu_mul(const aril_silu_mul_args& p, const TokenTile& tile,
                                               const GateUp& gate_up, int first,
                                               unsigned char* shared, const V& v) {
  __shared__ int rows[ARIL_TOKENS_PER_TILE];  // -1: none
  __shared__ float scales[ARIL_TOKENS_PER_TILE];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const int outs = min(p.layer.plan.outs_per_block, p.layer.out_features[0] - first);
  const int steps = gate_up.steps(), gate_steps = gate_up.gate_steps();
  uint4* const operands = reinterpret_cast<uint4*>(shared);
  if (threadIdx.x < ARIL_TOKENS_PER_TILE) {
    const int token = tile.token(threadIdx.x, p.layer.num_tokens);
    rows[threadIdx.x] = token;
    scales[threadIdx.x] = token < 0 ? 0.0f : p.layer.routing.scales[token];
  }
  __syncthreads();
  wait_for_predecessors();

  const T* const gate_y = static_cast<const T*>(p.layer.y[0].first) + first;
  const T* const up_y = static_cast<const T*>(p.layer.y[1].first) + first;
  T* const out = static_cast<T*>(p.out) + first;
  const bool aligned = is_aligned(gate_y, p.layer.y[0].stride) &&
                       is_aligned(up_y, p.layer.y[1].stride) && is_aligned(out, p.out_stride);
  if (steps > 0) {
    const PartialLayout layout(p.layer);
    const auto ranks_of = [&](int t, int step) {
      return gate_up.ranks(rows[t], scales[t], step, layout);
    };
    gather_terms(operands, tile.count, steps, ranks_of, v, warp, lane);
    __syncthreads();
  }
  for (int unit = warp; unit < ceil_div(outs, ARIL_OUT_UNIT); unit += kSmallMWarps) {
    float deltas[2][4][4];
#pragma unroll
    for (int slice = 0; slice < 2; ++slice) {
      const int rank_tiles = gate_up.rank_tiles(slice);
      if (rank_tiles == 0) {
        fill(deltas[slice], kNoDelta);
      } else {
        multiply_small_m<T, false>(
            deltas[slice], operands + slice * gate_steps * kTerms * 32,
            unit_at(gate_up.b(slice, first), unit * ARIL_OUT_UNIT, rank_tiles, 0), rank_tiles);
      }
    }
    const int feature = unit * ARIL_OUT_UNIT + 8 * q, valid = outs - feature;
    // The lane's rows g and g + 8.
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = rows[g + 8 * half];
      if (row < 0) continue;
      const auto gate =
          Vec<T>::load_from_anywhere(gate_y + row * p.layer.y[0].stride + feature, valid, aligned);
      const auto up =
          Vec<T>::load_from_anywhere(up_y + row * p.layer.y[1].stride + feature, valid, aligned);
      T values[Vec<T>::kSize];
#pragma unroll
      for (int e = 0; e < Vec<T>::kSize; ++e) {
        values[e] = from_float<T>(silu_mul<T>(gate[e] + deltas[0][e / 2][2 * half + e % 2],
                                              up[e] + deltas[1][e / 2][2 * half + e % 2]));
      }
      T* const to = out + row * p.out_stride + feature;
      if (aligned && valid >= Vec<T>::kSize) {
        uint4 bits;
        memcpy(&bits, values, sizeof(bits));
        *reinterpret_cast<uint4*>(to) = bits;
        continue;
      }
#pragma unroll
      for (int e = 0; e < Vec<T>::kSize; ++e) {
        if (e < valid) to[e] = values[e];
      }
    }
  }
}

// On any tiles and at any rank. Grid: tiles x blocks of features.
template <typename T, bool kLargeM>
__global__ void __launch_bounds__(kSmallMThreads, 2)
    plain_silu_mul_kernel(const __grid_constant__ aril_silu_mul_args p, int out_blocks) {
  extern __shared__ __align__(128) unsigned char shared[];
  launch_dependents();
  TokenTile tile(p.layer, blockIdx.x / out_blocks);
  if (tile.count == 0) {
    if (is_first_block()) wait_for_predecessors();
    return;
  }
  const GateUp gate_up(p.layer.weights, tile.slot);
  const int first = blockIdx.x % out_blocks * p.layer.plan.outs_per_block;
  const auto v = [&] {
    if constexpr (kLargeM) {
      return PartialSums(p.layer, 0);
    } else {
      const int slabs = ceil_div(p.layer.in_features, kSlabFeatures);
      return MailboxSums(p.layer.mailbox, PartialLayout(p.layer), slabs, true, 0, 0);
    }
  }();
  const int count = tile.count;
  const int32_t* const tokens = tile.tokens;
  for (int done = 0; done < count; done += ARIL_TOKENS_PER_TILE) {
    if (done > 0) __syncthreads();
    tile.tokens = tokens + done;
    tile.count = min(count - done, ARIL_TOKENS_PER_TILE);
    plain_silu_mul<T>(p, tile, gate_up, first, shared, v);
  }
}

constexpr int kSiluMulRowBytes = 2 * kChunkOuts * 2 + 64;  // padded so that 2 rows hit all banks

// The least shared memory of a block: the terms of v, and a stage.
inline int large_m_silu_mul_smem_bytes(const aril_weights& weights) {
  return 2 * rank_steps(weights) * kTerms * kTermBytes + ARIL_WIDE_TILE * kSiluMulRowBytes +
         2 * kChunkOuts * rank_tiles(weights) * 16;
}

// Grid: wide tiles x blocks of features.
template <typename T>
__global__ void __launch_bounds__(kExpandThreads, 2)
    large_m_silu_mul_kernel(const __grid_constant__ aril_silu_mul_args p, int out_blocks,
                            int smem_bytes) {
  extern __shared__ __align__(1024) unsigned char stages_shared[];
  __shared__ TransactionBarrier barriers_shared[kMaxExpandStages];
  __shared__ int rows[ARIL_WIDE_TILE];
  __shared__ const char* block_b[2];  // spares registers: few threads copy B
  launch_dependents();
  const TokenTile tile(p.layer, blockIdx.x / out_blocks);
  if (tile.count == 0) {
    if (is_first_block()) wait_for_predecessors();
    return;
  }
  const GateUp gate_up(p.layer.weights, tile.slot);
  const int first = blockIdx.x % out_blocks * p.layer.plan.outs_per_block;
  if (threadIdx.x < ARIL_WIDE_TILE) rows[threadIdx.x] = tile.token(threadIdx.x, p.layer.num_tokens);
  if (threadIdx.x == 0) {
    block_b[0] = gate_up.b(0, first);
    block_b[1] = gate_up.b(1, first);
  }
  ExpandBarriers barriers(barriers_shared);

  const int warpgroup = threadIdx.x / kWarpgroupThreads, warp = threadIdx.x / 32 % 4;
  const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const int features = p.layer.out_features[0];
  const int outs = min(p.layer.plan.outs_per_block, features - first);
  const int chunks = ceil_div(outs, kChunkOuts);
  const int steps = gate_up.steps(), gate_steps = gate_up.gate_steps();
  const int tile_bytes[2] = {gate_up.rank_tiles(0) * kBTileBytes,
                             gate_up.rank_tiles(1) * kBTileBytes};
  // The terms of v, and the stages: y of both slices, B of gate, B of up.
  const int v_bytes = steps * kTerms * kTermBytes;
  unsigned char* const ring = stages_shared + (kTermsLast<T> ? 0 : v_bytes);
  const int rows_bytes = ceil_div(tile.count, 16) * 16 * kSiluMulRowBytes;  // a warp has 16 rows
  const int stage_bytes = rows_bytes + 2 * (tile_bytes[0] + tile_bytes[1]);
  const int stages = stages_in(smem_bytes - v_bytes, stage_bytes);
  unsigned char* const terms = stages_shared + (kTermsLast<T> ? stages * stage_bytes : 0);
  const int own_row = copied_row(lane);
  const bool whole = features % Vec<T>::kSize == 0 &&
                     is_aligned(static_cast<const T*>(p.layer.y[0].first), p.layer.y[0].stride) &&
                     is_aligned(static_cast<const T*>(p.layer.y[1].first), p.layer.y[1].stride) &&
                     is_aligned(static_cast<const T*>(p.out), p.out_stride);
  const auto outs_of = [&](int chunk) { return min(outs - chunk * kChunkOuts, kChunkOuts); };
  const auto fetch_weights = [&](int chunk, int stage) {
    if (chunk >= chunks) return;
    const int out_tiles = ceil_div(outs_of(chunk), ARIL_OUT_TILE);
    unsigned char* to = ring + stage * stage_bytes + rows_bytes;
    if (kBulk && threadIdx.x == kExpandThreads - 1) {
      barriers[stage].expect(out_tiles * (tile_bytes[0] + tile_bytes[1]));
    }
#pragma unroll
    for (int slice = 0; slice < 2; ++slice) {
      const int bytes = out_tiles * tile_bytes[slice];
      const char* from = block_b[slice] + int64_t{chunk} * 2 * tile_bytes[slice];
      if constexpr (kBulk) {
        if (threadIdx.x == kExpandThreads - 1 && bytes > 0) barriers[stage].copy(to, from, bytes);
      } else {
        for (int at = threadIdx.x * 16; at < bytes; at += kExpandThreads * 16) {
          copy_async(to + at, from + at);
        }
      }
      to += 2 * tile_bytes[slice];
    }
    if constexpr (!kBulk) commit_copies();
  };
  const auto fetch_rows = [&](int chunk, int stage) {
    if (own_row >= ARIL_WIDE_TILE || chunk >= chunks) return;
    T* to = reinterpret_cast<T*>(ring + stage * stage_bytes + own_row * kSiluMulRowBytes);
    const int own = rows[own_row];
    const auto from = [&](int slice) {
      const aril_outputs& y = p.layer.y[slice];
      return static_cast<const T*>(y.first) + own * y.stride + first + chunk * kChunkOuts;
    };
    const int count = outs_of(chunk);
    const bool bulk = kBulk && whole && own >= 0;
    if (!bulk && own >= 0) {
      copy_outs(to, from(0), count, whole);
      copy_outs(to + kChunkOuts, from(1), count, whole);
    }
    TransactionBarrier& barrier = barriers[stage];
    barrier.expect(bulk ? count * 4 : 0);
    if (bulk) {
      barrier.copy(to, from(0), count * 2);
      barrier.copy(to + kChunkOuts, from(1), count * 2);
    }
  };
  const auto store_rows = [&](int chunk, int stage) {
    const int own = own_row < ARIL_WIDE_TILE ? rows[own_row] : -1;
    if (own < 0) return;
    const T* from =
        reinterpret_cast<const T*>(ring + stage * stage_bytes + own_row * kSiluMulRowBytes);
    T* out = static_cast<T*>(p.out) + own * p.out_stride + first + chunk * kChunkOuts;
    if (kBulk && whole) {
      bulk_store(out, from, outs_of(chunk) * 2);
    } else {
      copy_outs(out, from, outs_of(chunk), whole);
    }
  };
#pragma unroll 1
  for (int i = 0; i < stages - 1; ++i) fetch_weights(i, i);
  wait_for_predecessors();
#pragma unroll 1
  for (int i = 0; i < stages - 1; ++i) fetch_rows(i, i);

  const PartialLayout layout(p.layer);
  const auto ranks_of = [&](int t, int step) {
    const int row = rows[t];
    return gate_up.ranks(row, row < 0 ? 0.0f : p.layer.routing.scales[row], step, layout);
  };
  gather_wide_terms<4>(terms, tile.count, steps, ranks_of, PartialSums(p.layer, 0));
  fence_async_proxy();
  __syncthreads();

  const auto next_of = [&](int stage) { return stage + 1 < stages ? stage + 1 : 0; };
  int at = 0, ahead = stages - 1;
  for (int chunk = 0; chunk < chunks; ++chunk, at = next_of(at), ahead = next_of(ahead)) {
    unsigned char* const stage = ring + at * stage_bytes;
    wait_for_bulk_store_reads();
    fetch_weights(chunk + stages - 1, ahead);
    fetch_rows(chunk + stages - 1, ahead);
    barriers.wait(at);
    if constexpr (!kBulk) {
      wait_for_copies<0>();
      __syncthreads();
    }
    float deltas[2][8][4];
#pragma unroll
    for (int slice = 0; slice < 2; ++slice) {
      if (tile_bytes[slice] == 0) {
        fill(deltas[slice], kNoDelta);
      } else {
        multiply_out_tile<T>(
            deltas[slice], terms + slice * gate_steps * kTerms * kTermBytes,
            stage + rows_bytes + slice * 2 * tile_bytes[0] + warpgroup * tile_bytes[slice],
            gate_up.rank_tiles(slice));
      }
    }
#pragma unroll
    for (int half = 0; half < 2 && warp * 16 < tile.count; ++half) {
      unsigned char* const row_at = stage + (warp * 16 + g + half * 8) * kSiluMulRowBytes +
                                    warpgroup * ARIL_OUT_TILE * 2 + q * 16;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint4* const eight = reinterpret_cast<uint4*>(row_at + i * 64);
        const Vec<T> gate{*eight}, up{*(eight + kChunkOuts / Vec<T>::kSize)};
        T values[8];
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          const int c = i * 4 + e / 2, r = 2 * half + e % 2;
          values[e] =
              from_float<T>(silu_mul<T>(gate[e] + deltas[0][c][r], up[e] + deltas[1][c][r]));
        }
        uint4 bits;
        memcpy(&bits, values, sizeof(bits));
        *eight = bits;
      }
    }
    fence_async_proxy();
    __syncthreads();
    store_rows(chunk, at);
  }
  wait_for_bulk_stores();
}

// In f32. Grid: tiles x blocks of kF32Threads features.
__global__ void __launch_bounds__(kF32Threads)
    silu_mul_f32_kernel(const __grid_constant__ aril_silu_mul_args p, int out_blocks) {
  __shared__ float2 v[2][ARIL_MAX_RANK / 2];
  launch_dependents();
  wait_for_predecessors();
  const TokenTile tile(p.layer, blockIdx.x / out_blocks);
  const GateUp gate_up(p.layer.weights, tile.slot);
  const int features = p.layer.out_features[0];
  const int feature = blockIdx.x % out_blocks * kF32Threads + static_cast<int>(threadIdx.x);
  for (int t = 0; t < tile.count; ++t) {
    const int token = tile.token(t, p.layer.num_tokens);
    if (token < 0) continue;
    __syncthreads();
    for (int slice = 0; slice < 2; ++slice) {
      load_v_f32(v[slice], gate_up.rank_tiles(slice), PartialSums(p.layer, slice), token);
    }
    __syncthreads();
    if (feature >= features) continue;
    float values[2];
    for (int slice = 0; slice < 2; ++slice) {
      const aril_descriptor& module = gate_up.modules[slice];
      const aril_outputs y = p.layer.y[slice];
      values[slice] = static_cast<const float*>(y.first)[token * y.stride + feature];
      if (module.rank == 0) continue;
      const int rank_tiles = gate_up.rank_tiles(slice);
      const float* b = f32_b_row(module.b, rank_tiles, feature);
      values[slice] +=
          module.scaling * p.layer.routing.scales[token] * delta_f32(b, rank_tiles, v[slice]);
    }
    static_cast<float*>(p.out)[token * p.out_stride + feature] =
        silu_mul<float>(values[0], values[1]);
  }
}

}  // namespace aril::detail
