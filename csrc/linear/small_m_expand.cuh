// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Expand of a token tile of 16 rows in bf16 and f16, with mma.sync: y += B v.
//
// A block has a token tile and a range of outputs of a slice; a warp takes a unit of 32 outputs at
// a time. Before the wait for predecessors the block requests B (kStaged: to shared memory, ranks
// up to ARIL_STAGED_RANK; otherwise B is read in place). After it, the y of two units per warp is
// requested, v is gathered and converted to operands, and the units are multiplied, added to y and
// stored.
//
// Bound: the bytes of B and y; v is a round trip to L2 after shrink's last store.
#pragma once

#include <type_traits>

#include "../device/descriptor.cuh"
#include "../device/product.cuh"
#include "../device/token_tile.cuh"
#include "../ptx/async.cuh"
#include "../ptx/pdl.cuh"
#include "small_m_shrink.cuh"

namespace aril::detail {

// Shared memory of a block of expand: B if staged, then the terms of v.
__host__ __device__ __forceinline__ int small_m_expand_smem_bytes(const aril_weights& weights,
                                                                  int outs_per_block, bool staged) {
  const int out_tiles = ceil_div(outs_per_block, ARIL_OUT_TILE);
  const int b = out_tiles * ARIL_OUT_TILE * ceil_div(weights.max_rank, ARIL_RANK_TILE) * 16;
  return (staged ? b : 0) + rank_steps(weights) * kTerms * 32 * 16;
}

// The cores of a unit's rank tile, in global memory.
__device__ __forceinline__ uint4 unit_cores(const char* rank_tile) {
  const auto* words = reinterpret_cast<const uint32_t*>(rank_tile) + threadIdx.x % 32;
  return make_uint4(words[0], words[32], words[64], words[96]);
}

// deltas = B v of a unit, whose first rank tile is at `b`: in shared memory if kStaged, otherwise
// in place. `operands` are the terms of v. There is at least one rank tile.
template <typename T, bool kStaged>
__device__ __forceinline__ void multiply_small_m(float (&deltas)[4][4], const uint4* operands,
                                                 const char* b, int rank_tiles) {
  const int lane = threadIdx.x % 32;
  set_zero(deltas);
  const uint4* of_lane = operands + lane;
  if constexpr (kStaged) b += lane / 16 * (kCoreElems * 2) + lane % 8 * 16;
#pragma unroll 1
  for (int left = rank_tiles; left > 0; left -= 2) {
    uint4 terms[kTerms];
#pragma unroll
    for (int term = 0; term < kTerms; ++term) terms[term] = of_lane[term * 32];
    const bool has_second = left > 1;
    if constexpr (kStaged) {
      multiply_unit_of_tiles<T>(deltas, terms, b + (has_second ? lane / 8 % 2 * kBTileBytes : 0),
                                has_second);
    } else {
      const uint4 b0 = unit_cores(b);
      uint4 b1 = make_uint4(0, 0, 0, 0);
      if (has_second) b1 = unit_cores(b + kBTileBytes);
      multiply_unit<T>(deltas, terms, b0, b1);
    }
    of_lane += kTerms * 32;
    b += 2 * kBTileBytes;
  }
}

// Gathers v of `count` rows, scales it, and stores its terms as operands [steps][kTerms][32 lanes].
// ranks_of(t, step) gives what v.load2() is asked for. Eight pairs of ranks make a step; four
// threads gather a pair if there are enough, otherwise one.
template <typename V, typename RanksOf>
__device__ __forceinline__ void gather_terms(uint4* operands, int count, int steps,
                                             const RanksOf& ranks_of, const V& v, int warp,
                                             int lane) {
  constexpr int kTeam = 4, kPairs = kRanksPerStep / 2;
  const auto gather = [&](auto team_size) {
    constexpr int kMembers = decltype(team_size)::value;
    constexpr int kInWarp = 32 / (kPairs * kMembers);  // steps of a row that a warp gathers at once
    const int pair = threadIdx.x / kMembers % kPairs * 2;
    for (int first = warp * kInWarp; first < count * steps; first += kSmallMWarps * kInWarp) {
      const int i = first + lane / (kPairs * kMembers);
      const bool valid = i < count * steps;
      const int t = !valid ? 0 : steps == 1 ? i : i / steps, step = valid ? i - t * steps : 0;
      const StepRanks ranks = ranks_of(t, step);
      const bool has = valid && pair < ranks.count;
      float2 v_pair = v.template load2<kMembers>(has ? ranks.row : -1, ranks.first + pair);
      if (valid && threadIdx.x % kMembers == 0) {
        // Rounded: the compiler may not fuse it with the subtraction that gives the second term.
        v_pair = make_float2(__fmul_rn(v_pair.x, ranks.factor), __fmul_rn(v_pair.y, ranks.factor));
        store_terms(operands + step * kTerms * 32, t, pair, v_pair);
      }
    }
  };
  if (count * steps * kPairs * kTeam <= kSmallMThreads) {
    gather(std::integral_constant<int, kTeam>{});
  } else {
    gather(std::integral_constant<int, 1>{});
  }
}

// Adds B v to the outputs `outs` of `count` rows: make_row(t) gives the t-th. make_v(), called
// after the wait for predecessors, gives an object whose load2(row, r) returns ranks r and r + 1 of
// v, unscaled, and whose lacks(row) says that y of a row must stay as it is. y of kAhead units of a
// warp is in flight. `turn` counts the block's calls.
template <typename T, bool kStaged, int kAhead = 2, typename MakeRow, typename MakeV>
__device__ __forceinline__ void small_m_expand(int count, const MakeRow& make_row,
                                               const aril_descriptor& module,
                                               const BlockOuts<T>& outs, unsigned char* shared,
                                               const MakeV& make_v, int turn = 0) {
  __shared__ TransactionBarrier barrier;
  __shared__ ExpandRow rows[ARIL_TOKENS_PER_TILE];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const int rank_tiles = ceil_div(module.rank, ARIL_RANK_TILE);
  const int steps = ceil_div(module.rank, kRanksPerStep);
  const int out_tile_bytes = rank_tiles * kBTileBytes;
  const int b_bytes = kStaged ? ceil_div(outs.count, ARIL_OUT_TILE) * out_tile_bytes : 0;
  uint4* const operands = reinterpret_cast<uint4*>(shared + b_bytes);
  const char* const b =
      static_cast<const char*>(module.b) + int64_t{outs.first / ARIL_OUT_TILE} * out_tile_bytes;
  if constexpr (kStaged) {
    bulk_load(barrier, shared, b, b_bytes, threadIdx.x, kSmallMThreads, turn == 0);
  }
  if (threadIdx.x < ARIL_TOKENS_PER_TILE) rows[threadIdx.x] = make_row(threadIdx.x);
  __syncthreads();
  wait_for_predecessors();

  const int units = ceil_div(outs.count, ARIL_OUT_UNIT);
  const bool aligned = outs.step == 1 && is_aligned(outs.y, outs.y_stride);
  T* const y = outs.y + outs.first * outs.step;
  OutVec<T> bases[kAhead][2];
  // Calls f for the lane's rows g and g + 8 of a unit.
  const auto for_rows = [&](int unit, auto f) {
    const int out = unit * ARIL_OUT_UNIT + 8 * q;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = unit < units ? rows[g + 8 * half].y : -1;
      if (row >= 0) {
        f(half, y + row * outs.y_stride + out * outs.step, outs.count - out, rows[g + 8 * half].v);
      }
    }
  };
  const auto load_bases = [&](OutVec<T>(&bases)[2], int unit) {
    for_rows(unit, [&](int half, T* y, int valid, int) {
      if (!outs.overwrites) bases[half].load(y, valid, aligned);
    });
  };
#pragma unroll
  for (int i = 0; i < kAhead; ++i) load_bases(bases[i], warp + i * kSmallMWarps);

  const auto v = make_v();
  const auto ranks_of = [&](int t, int step) {
    const int first = step * kRanksPerStep;
    return StepRanks{rows[t].v, first, rank_tiles * ARIL_RANK_TILE - first, rows[t].factor};
  };
  gather_terms(operands, count, steps, ranks_of, v, warp, lane);
  if constexpr (kStaged) wait_for_copies<0>();
  __syncthreads();
  if constexpr (kStaged) barrier.wait(turn % 2);
  for (int first = warp; first < units; first += kAhead * kSmallMWarps) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int unit = first + i * kSmallMWarps;
      if (unit >= units) break;
      const char* const block_b = kStaged ? reinterpret_cast<const char*>(shared) : b;
      float deltas[4][4];
      multiply_small_m<T, kStaged>(
          deltas, operands, unit_at(block_b, unit * ARIL_OUT_UNIT, rank_tiles, 0), rank_tiles);
      for_rows(unit, [&](int half, T* y, int valid, int v_row) {
        if (!v.lacks(v_row)) {
          bases[i][half].add(y, outs.step, deltas, half, valid, aligned, outs.overwrites);
        }
      });
      load_bases(bases[i], unit + kAhead * kSmallMWarps);
    }
  }
}

}  // namespace aril::detail
