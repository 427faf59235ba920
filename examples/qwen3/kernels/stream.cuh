// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The grouped GEMM of decode: few rows for an expert, so the time is that of its weights' bytes.
//
// A *unit* is kOuts outputs of a tile of up to kRows rows of an expert. Units are in the order of
// experts, then of outputs, then of tiles, so that tiles with the same weights follow each other
// and find them in L2. They are divided evenly among the blocks, and those of a block among its
// warps. A warp keeps a ring of stages full, across the ends of units, and waits for no other warp.
// It multiplies its stages by mma.sync, weights as M and rows as N. All sums are in the order of
// the columns, as those of GroupedGemm, and have the same bits.
//
// Bound: the bytes of the weights of the experts that occur.
#pragma once

#include "../../../csrc/ptx/pdl.cuh"
#include "experts.cuh"

namespace {

// With kGated, outputs are activated: y = silu(gate) * up of the rounded products, rounded once.
template <typename T, bool kGated, int kRows = 16, int kWarpsPerBlock = 4, int kStages = 8>
struct StreamGemm {
  static constexpr int kOuts = 32;
  static constexpr int kHalf = kOuts / 2;  // with kGated, of gates and of ups
  static constexpr int kColsPerStage = 64;
  static constexpr int kMaxExperts = 1024;
  using Rows = SharedRows<T, kColsPerStage>;
  static constexpr int kThreadsPerBlock = 32 * kWarpsPerBlock;
  static constexpr int kStageElems = (kRows + kOuts) * kColsPerStage;
  static constexpr int kSharedBytes =
      kWarpsPerBlock * kStages * kStageElems * static_cast<int>(sizeof(T));
  static constexpr int kRowsAtOnce = 32 / Rows::kChunks;  // that a warp copies
  static constexpr int kTokenTiles = kRows / 8;
  static_assert(kRows == 16, "ldmatrix_x4 loads two tiles of rows");

  // Where the rows and the units of experts begin.
  struct Shared {
    int32_t rows[kMaxExperts + 1];
    int32_t units[kMaxExperts + 1];
  };

  static __device__ __forceinline__ int tiles_of(int num_rows) {
    return (num_rows + kRows - 1) / kRows;
  }

  struct Unit {
    int expert, first_row, num_rows, part;
  };

  // What the block computes.
  struct Share {
    const Shared& shared;
    int experts;
    int end;  // of the block's units

    // A unit of an expert from `expert` on.
    __device__ __forceinline__ Unit find(int unit, int expert) const {
      const int lane = threadIdx.x % 32;
      uint32_t beyond;
      while (true) {
        beyond = __ballot_sync(0xffffffffu,
                               expert + lane < experts && shared.units[expert + lane + 1] > unit);
        if (beyond != 0) break;
        expert += 32;
      }
      expert += __ffs(beyond) - 1;
      const int first = shared.rows[expert], num_rows = shared.rows[expert + 1] - first;
      const int inside = unit - shared.units[expert], tiles = tiles_of(num_rows);
      const int part = inside / tiles, skipped = (inside - part * tiles) * kRows;
      return {expert, first + skipped, min(num_rows - skipped, kRows), part};
    }
  };

  // Fills `shared`, by all threads, and finds the block's units. Returns the first.
  static __device__ __forceinline__ int share_out(const int32_t* bounds, int experts, int parts,
                                                  Shared& shared, int& end) {
    // Several loads at once, past the L1 cache, which may hold the bounds of an earlier layer.
    constexpr int kAtOnce = 4;
    for (int base = threadIdx.x; base <= experts; base += kAtOnce * kThreadsPerBlock) {
      int32_t loaded[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        loaded[i] = __ldcg(bounds + min(base + i * kThreadsPerBlock, experts));
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int expert = base + i * kThreadsPerBlock;
        if (expert <= experts) shared.rows[expert] = loaded[i];
      }
    }
    __syncthreads();
    if (threadIdx.x < 32) {
      // A lane has consecutive experts.
      const int lane = threadIdx.x, each = (experts + 31) / 32;
      const int begin = min(lane * each, experts), end = min(begin + each, experts);
      int32_t own = 0;
      for (int e = begin; e < end; ++e) {
        own += tiles_of(shared.rows[e + 1] - shared.rows[e]) * parts;
      }
      int32_t units = own;
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const int32_t others = __shfl_up_sync(0xffffffffu, units, distance);
        if (lane >= distance) units += others;
      }
      units -= own;
      for (int e = begin; e < end; ++e) {
        shared.units[e] = units;
        units += tiles_of(shared.rows[e + 1] - shared.rows[e]) * parts;
      }
      if (lane == 31) shared.units[experts] = units;
    }
    __syncthreads();
    const int64_t total = shared.units[experts];
    end = static_cast<int>(total * (blockIdx.x + 1) / gridDim.x);
    return static_cast<int>(total * blockIdx.x / gridDim.x);
  }

  static __device__ __forceinline__ void run(
      const T* x,             // [tokens or routes, cols]
      const int32_t* tokens,  // [routes]: the row of x of each row; null if it is the same
      const T* weights,       // [experts, outs, cols]
      const int32_t* bounds,  // [experts + 1]
      T* y,                   // [routes, outs], or [routes, outs / 2] with kGated
      int64_t experts, int64_t outs, int64_t cols,
      int32_t bounds_are_old  // this kernel starts when those that write them have ended
  ) {
    extern __shared__ __align__(128) unsigned char dynamic[];
    __shared__ Shared shared;
    if (!bounds_are_old) {
      aril::wait_for_predecessors();
      aril::launch_dependents();
    }
    const int width = static_cast<int>(kGated ? outs / 2 : outs);  // of y
    const int num_cols = static_cast<int>(cols);
    constexpr int kPart = kGated ? kHalf : kOuts;  // outputs of y of a unit
    Share share = {shared, static_cast<int>(experts), 0};
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int first =
        share_out(bounds, share.experts, (width + kPart - 1) / kPart, shared, share.end) + warp;
    T* const ring = reinterpret_cast<T*>(dynamic) + warp * kStages * kStageElems;
    const int chunk = lane % Rows::kChunks, copied_row = lane / Rows::kChunks;

    // The stages that are loaded next, in order.
    struct {
      int unit, col, expert, counts[2];
      const T* halves[2];
    } of_weights = {first, 0, 0, {}, {}};
    struct {
      int unit, col, expert, num_rows;
      int64_t rows[kRows / kRowsAtOnce];
    } of_rows = {first, 0, 0, 0, {}};

    const auto load_weights = [&](int stage) {
      auto& next = of_weights;
      if (next.unit >= share.end) return;
      if (next.col == 0) {
        const Unit unit = share.find(next.unit, next.expert);
        next.expert = unit.expert;
        const int out = unit.part * kPart;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int from = kGated ? half * width + out : out + half * kHalf;
          next.counts[half] = kGated ? width - out : width - from;
          next.halves[half] = weights + (unit.expert * outs + from + copied_row) * cols + chunk * 8;
        }
      }
      const Rows to{ring + stage * kStageElems};
      const bool has_col = next.col + chunk * 8 < num_cols;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < kHalf / kRowsAtOnce; ++i) {
          const int row = i * kRowsAtOnce + copied_row;
          const bool is_there = has_col && row < next.counts[half];
          const T* from = next.halves[half] + i * kRowsAtOnce * cols + next.col;
          aril::copy_async(to.chunk(half * kHalf + row, chunk), is_there ? from : weights,
                           is_there ? 16 : 0);
        }
      }
      next.col += kColsPerStage;
      if (next.col >= num_cols) {
        next.col = 0;
        next.unit += kWarpsPerBlock;
      }
    };
    const auto load_rows = [&](int stage) {
      auto& next = of_rows;
      if (next.unit < share.end) {
        if (next.col == 0) {
          const Unit unit = share.find(next.unit, next.expert);
          next.expert = unit.expert;
          next.num_rows = unit.num_rows;
#pragma unroll
          for (int i = 0; i < kRows / kRowsAtOnce; ++i) {
            const int row = min(i * kRowsAtOnce + copied_row, unit.num_rows - 1) + unit.first_row;
            next.rows[i] = tokens == nullptr ? row : __ldcg(tokens + row);
          }
        }
        const Rows to{ring + stage * kStageElems + kOuts * kColsPerStage};
        const int col = next.col + chunk * 8;
#pragma unroll
        for (int i = 0; i < kRows / kRowsAtOnce; ++i) {
          if (i * kRowsAtOnce >= next.num_rows) break;
          aril::copy_async(to.chunk(i * kRowsAtOnce + copied_row, chunk),
                           x + next.rows[i] * cols + (col < num_cols ? col : 0),
                           col < num_cols ? 16 : 0);
        }
        next.col += kColsPerStage;
        if (next.col >= num_cols) {
          next.col = 0;
          next.unit += kWarpsPerBlock;
        }
      }
      aril::commit_copies();
    };
    // The first rows are found while weights are on their way.
    constexpr int kLead = 3;
#pragma unroll
    for (int stage = 0; stage < kStages - 1 + kLead; ++stage) {
      if (stage < kStages - 1) load_weights(stage);
      if (stage >= kLead && !bounds_are_old) load_rows(stage - kLead);
    }
    if (bounds_are_old) {
      aril::wait_for_predecessors();
      aril::launch_dependents();
#pragma unroll
      for (int stage = 0; stage < kStages - 1; ++stage) load_rows(stage);
    }

    int stage = 0, expert = 0;
    for (int at = first; at < share.end; at += kWarpsPerBlock) {
      const Unit unit = share.find(at, expert);
      expert = unit.expert;
      float sums[2][kTokenTiles][4] = {};
      for (int col = 0; col < num_cols; col += kColsPerStage) {
        aril::wait_for_copies<kStages - 2>();
        // What is copied next takes the place of what all lanes have multiplied.
        __syncwarp();
        const int free = stage == 0 ? kStages - 1 : stage - 1;
        load_weights(free);
        load_rows(free);
        const Rows w_rows{ring + stage * kStageElems};
        const Rows x_rows{w_rows.data + kOuts * kColsPerStage};
#pragma unroll
        for (int k = 0; k < kColsPerStage / 16; ++k) {
          const uint4 b = x_rows.b(0, k);
          const uint4 a[2] = {w_rows.a(0, k), w_rows.a(kHalf, k)};
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            aril::mma_m16n8k16<T>(sums[half][0], a[half], b.x, b.y);
            if (unit.num_rows > 8) aril::mma_m16n8k16<T>(sums[half][1], a[half], b.z, b.w);
          }
        }
        stage = stage + 1 == kStages ? 0 : stage + 1;
      }

      const int first_out = unit.part * kPart + lane / 4;
#pragma unroll
      for (int n = 0; n < kTokenTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = n * 8 + lane % 4 * 2 + i % 2, out = first_out + i / 2 * 8;
          if (row >= unit.num_rows) continue;
          T* const to = y + int64_t{unit.first_row + row} * width;
          if constexpr (kGated) {
            const float gate = round_to<T>(sums[0][n][i]);
            const float up = round_to<T>(sums[1][n][i]);
            // As the library's activation of experts.
            if (out < width) to[out] = static_cast<T>(gate * aril::detail::sigmoid(gate) * up);
          } else {
            if (out < width) to[out] = static_cast<T>(sums[0][n][i]);
            if (out + kHalf < width) to[out + kHalf] = static_cast<T>(sums[1][n][i]);
          }
        }
      }
    }
    aril::wait_for_copies<0>();
  }
};

}  // namespace
