// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Shrink of bf16 and f16 with mma.sync: v[token] = A x[token], f32 sums.
//
// Tokens are the 16 rows of the product, ranks its columns, 8 at a time. The order of the input
// features within 32 of them is of no consequence to a dot product, so each lane takes 8 that stand
// together: 16 bytes of A and of x are its operands of two instructions.
//
//   shrink_few_kernel:  tiles of 16 tokens, a warp for each column. A block has two lanes
//       of weights on their way to shared memory before it waits for its predecessors; what is left
//       then is x, once there and back, and a short chain of instructions. Shared, in bytes, for
//       each lane of features: 4096 for every 8 ranks, up to 64, but no more than for two lanes,
//       and 8192 for x.
//   shrink_wide_kernel: tiles of 64 tokens, in stages of 64 features; a warp has 16 tokens and all
//       columns. Shared: 4 stages of 16 KB.
//
// Grid of both: (tiles x blocks of 64 ranks of all slices, splits).
#pragma once

#include "../common/async.cuh"
#include "../common/mma.cuh"
#include "../common/pdl.cuh"
#include "../common/vec.cuh"
#include "tile.cuh"

namespace aril::detail {

constexpr int kColumnsPerBlock = 8;  // tiles of 8 ranks, that is
constexpr int kStepsPerLane = ARIL_LANE_FEATURES / ARIL_K_TILE;
constexpr int kStepsPerChain = 2;
constexpr int kStepVecs = kTileElems / 8;              // 16 bytes each, of bf16 and f16
constexpr int kPieceVecs = kStepsPerLane * kStepVecs;  // 8 ranks of a lane of features

// 8 ranks of one of a slot's modules. Those of all slices stand one after the other.
struct Column {
  const uint4* a;  // in the first lane of features
  int lane_vecs;   // to the next
  int slice, first_rank, rank;
};

// The columns of a block.
struct Columns {
  Column all[kColumnsPerBlock];
  int count;

  // By one warp, a lane for each slice.
  __device__ __forceinline__ void list(const aril_linear_args& p, const Tile& tile,
                                       int first_column) {
    static_assert(ARIL_MAX_SLICES <= 32, "a lane for each slice");
    const int slice = threadIdx.x % 32;
    aril_descriptor module = {};
    if (tile.count > 0 && slice < p.num_slices) module = module_of(p.weights, tile.slot, slice);
    const int tiles = ceil_div(module.rank, ARIL_RANK_TILE);
    int end = tiles;
#pragma unroll
    for (int distance = 1; distance < ARIL_MAX_SLICES; distance *= 2) {
      const int before = __shfl_up_sync(0xffffffffu, end, distance);
      if (slice >= distance) end += before;
    }
    const int begin = end - tiles;
    const int last = min(end, first_column + kColumnsPerBlock);
    for (int column = max(begin, first_column); column < last; ++column) {
      const int i = column - begin;
      all[column - first_column] = {static_cast<const uint4*>(module.a) + i * kPieceVecs,
                                    tiles * kPieceVecs, slice, i * ARIL_RANK_TILE, module.rank};
    }
    if (slice == ARIL_MAX_SLICES - 1) count = max(0, min(end - first_column, kColumnsPerBlock));
  }
};

// Where 16 bytes of a row of x stand in shared memory: eight lanes that read four of each of two
// neighbouring rows touch every bank once.
__device__ __forceinline__ int swizzled(int row, int vec) { return vec ^ ((row & 1) << 2); }

// A lane's 16 bytes of a row, at steps from a known one on: two pointers, for even and odd steps,
// leave nothing to be worked out at each.
struct SwizzledRow {
  const uint4* even;
  const uint4* odd;

  __device__ __forceinline__ SwizzledRow(const uint4* vecs, int row) {
    const int q = threadIdx.x % 4, shift = (row & 1) << 2;
    even = vecs + q + shift;
    odd = vecs + q - shift;
  }

  __device__ __forceinline__ const uint4& operator[](int step) const {
    return (step % 2 == 0 ? even : odd)[step * 4];
  }
};

// Starts copying features [k, k + 8) of a row of x, zero beyond in_features. Rows that are not
// aligned to 16 bytes are copied on the spot.
template <typename T>
__device__ __forceinline__ void copy_input(uint4* shared, const T* row, int k, int in_features,
                                           bool aligned) {
  const int valid = max(0, min(in_features - k, Vec<T>::kSize));
  if (aligned) {
    copy_async(shared, valid > 0 ? row + k : row, valid * static_cast<int>(sizeof(T)));
  } else {
    *shared = Vec<T>::load_from_anywhere(row + k, valid, false).bits;
  }
}

template <typename T>
__device__ __forceinline__ bool is_aligned(const T* rows, int64_t stride) {
  return (reinterpret_cast<uintptr_t>(rows) | (stride * sizeof(T))) % 16 == 0;
}

// A chain: 64 features of tokens g and g + 8 with those of 8 ranks. Four make a lane of features.
template <typename T>
struct Chain {
  float sums[4] = {};

  // The next 32 features.
  __device__ __forceinline__ void step(const uint4& upper, const uint4& lower, const uint4& a) {
    mma_m16n8k16<T>(sums, upper.x, lower.x, upper.y, lower.y, a.x, a.y);
    mma_m16n8k16<T>(sums, upper.z, lower.z, upper.w, lower.w, a.z, a.w);
  }
};

__device__ __forceinline__ void add_to(float (&total)[4], const float (&sums)[4]) {
#pragma unroll
  for (int e = 0; e < 4; ++e) total[e] += sums[e];
}

__device__ __forceinline__ void clear(float (&sums)[4]) {
#pragma unroll
  for (int e = 0; e < 4; ++e) sums[e] = 0.0f;
}

// Writes a lane's two sums of a token to its plane, zero beyond the rank; adds to it if the plane
// has the sum of earlier groups.
__device__ __forceinline__ void store_sums(float* plane, const Planes& planes, const Column& column,
                                           int token, float sum0, float sum1, bool add) {
  if (token < 0) return;
  const int rank = column.first_rank + 2 * static_cast<int>(threadIdx.x % 4);
  float2* v = reinterpret_cast<float2*>(plane + token * planes.token_stride +
                                        column.slice * planes.slice_stride + rank);
  float2 sums = make_float2(rank < column.rank ? sum0 : 0.0f, rank + 1 < column.rank ? sum1 : 0.0f);
  if (add) {
    const float2 earlier = *v;
    sums = make_float2(earlier.x + sums.x, earlier.y + sums.y);
  }
  *v = sums;
}

constexpr int kFewWarps = kColumnsPerBlock;
constexpr int kFewThreads = 32 * kFewWarps;
constexpr int kFewSlots = 2;  // lanes of features that a warp has ahead

template <typename T>
__global__ void __launch_bounds__(kFewThreads, 3)
    shrink_few_kernel(const __grid_constant__ aril_linear_args p, int column_blocks) {
  constexpr int kRows = ARIL_TOKENS_PER_TILE / kFewWarps;  // of x that a warp copies
  constexpr int kChains = kStepsPerLane / kStepsPerChain;
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ Columns columns;
  __shared__ Supply::State supplies[kFewWarps];
  __shared__ int32_t tokens[ARIL_TOKENS_PER_TILE];  // -1 where there is none
  let_dependents_begin();
  const Tile tile(p, blockIdx.x / column_blocks);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4;
  const Lanes lanes(p, blockIdx.y);

  // x stands first, [16][features], then each warp's supply of A.
  const int num_lanes = lanes.end - lanes.begin;
  const int row_vecs = num_lanes * ARIL_LANE_FEATURES / Vec<T>::kSize;
  uint4* x = reinterpret_cast<uint4*>(shared);
  const int slots = min(num_lanes, kFewSlots);
  const auto slots_of = [&](int warp) {
    return x + ARIL_TOKENS_PER_TILE * row_vecs + warp * slots * kPieceVecs;
  };
  if (warp == 0) {
#if __CUDA_ARCH__ >= 900
    if (lane < kFewWarps) Supply::prepare(supplies[lane], slots);
#endif
    columns.list(p, tile, blockIdx.x % column_blocks * kColumnsPerBlock);
#if __CUDA_ARCH__ >= 900
    __syncwarp();
    if (lane < columns.count) {
      const Column& column = columns.all[lane];
      Supply::begin(supplies[lane], slots_of(lane), slots, kPieceVecs * 16,
                    column.a + int64_t{lanes.begin} * column.lane_vecs,
                    int64_t{column.lane_vecs} * 16);
    }
#endif
  }
  if (threadIdx.x < ARIL_TOKENS_PER_TILE) {
    tokens[threadIdx.x] = tile.token(threadIdx.x, p.num_tokens);
  }
  __syncthreads();
  if (columns.count == 0) {
    if (is_first_block()) wait_for_predecessors();
    return;
  }
  const bool has_column = warp < columns.count;
  const Column& column = columns.all[has_column ? warp : 0];
  Supply supply(supplies[warp], slots_of(warp), slots, kPieceVecs * 16);
  const uint4* next = column.a + int64_t{lanes.begin} * column.lane_vecs;
  int left = has_column ? num_lanes : 0;
#if __CUDA_ARCH__ >= 900
  next += int64_t{slots} * column.lane_vecs;
  left -= slots;
#endif
  const auto start = [&] {
    supply.start(next, left > 0 ? kPieceVecs * 16 : 0);
    next += column.lane_vecs;
    --left;
  };
#if __CUDA_ARCH__ < 900
  for (int i = 0; i < slots; ++i) start();
#endif
  const T* input = static_cast<const T*>(p.x);
  const bool aligned = is_aligned(input, p.x_stride);
  wait_for_predecessors();

#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int row = warp + i * kFewWarps, token = tokens[row];
    for (int vec = lane; token >= 0 && vec < row_vecs; vec += 32) {
      copy_input(x + row * row_vecs + swizzled(row, vec), input + token * p.x_stride,
                 lanes.begin * ARIL_LANE_FEATURES + vec * Vec<T>::kSize, p.in_features, aligned);
    }
  }
  commit_copies();
  wait_for_copies<0>();
  __syncthreads();
  if (!has_column) return;
  float sums[4] = {};
#pragma unroll 1
  for (int i = 0; i < num_lanes; ++i) {
    const uint4* weights = static_cast<const uint4*>(supply.next()) + lane;
    const SwizzledRow upper(x + g * row_vecs + i * kStepsPerLane * 4, g);
    const SwizzledRow lower(x + (g + 8) * row_vecs + i * kStepsPerLane * 4, g);
    Chain<T> chains[kChains];
#pragma unroll
    for (int j = 0; j < kStepsPerChain; ++j) {
#pragma unroll
      for (int chain = 0; chain < kChains; ++chain) {
        const int step = chain * kStepsPerChain + j;
        chains[chain].step(upper[step], lower[step], weights[step * kStepVecs]);
      }
    }
#pragma unroll
    for (int chain = 1; chain < kChains; ++chain) add_to(chains[0].sums, chains[chain].sums);
    add_to(sums, chains[0].sums);
    __syncwarp();
    start();
  }
  const Planes planes(p);
  float* plane = p.planes + blockIdx.y * planes.plane_stride;
  store_sums(plane, planes, column, tokens[g], sums[0], sums[1], false);
  store_sums(plane, planes, column, tokens[g + 8], sums[2], sums[3], false);
}

constexpr int kWideWarps = ARIL_WIDE_TILE / 16;
constexpr int kWideThreads = 32 * kWideWarps;
constexpr int kStages = 4;
constexpr int kStepsPerStage = kStepsPerChain;
constexpr int kRowVecs = kStepsPerStage * 4;  // of x in a stage
constexpr int kStageVecs =
    ARIL_WIDE_TILE * kRowVecs + kColumnsPerBlock * kStepsPerStage * kStepVecs;
constexpr int kWideSmemBytes = kStages * kStageVecs * 16;

template <typename T>
__global__ void __launch_bounds__(kWideThreads, 3)
    shrink_wide_kernel(const __grid_constant__ aril_linear_args p, int column_blocks) {
  constexpr int kRowsAtOnce = kWideThreads / kRowVecs;    // that all threads copy
  constexpr int kRows = ARIL_WIDE_TILE / kRowsAtOnce;     // that a thread copies
  constexpr int kCopied = kColumnsPerBlock / kWideWarps;  // columns that a warp copies
  constexpr int kStagesPerLane = kStepsPerLane / kStepsPerStage;
  constexpr int kStagesPerGroup = kStagesPerLane * ARIL_LANES_PER_GROUP;
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ Columns columns;
  let_dependents_begin();
  const Tile tile(p, blockIdx.x / column_blocks);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4;
  if (warp == 0) columns.list(p, tile, blockIdx.x % column_blocks * kColumnsPerBlock);
  __syncthreads();
  const int count = columns.count;
  if (count == 0) {
    if (is_first_block()) wait_for_predecessors();
    return;
  }
  const Lanes lanes(p, blockIdx.y);
  const int stages = (lanes.end - lanes.begin) * kStagesPerLane;

  // A stage is x, [64][64], then A, [8 columns][2][8][32]. Stages are fetched in their order.
  uint4* const ring = reinterpret_cast<uint4*>(shared);
  const uint4* weights[kCopied];
  int jump[kCopied];  // from the end of a lane of features to the next
#pragma unroll
  for (int c = 0; c < kCopied; ++c) {
    const Column& column = columns.all[min(warp * kCopied + c, count - 1)];
    weights[c] = column.a + int64_t{lanes.begin} * column.lane_vecs + lane;
    jump[c] = column.lane_vecs - kPieceVecs;
  }
  const auto fetch_weights = [&](int stage) {
    uint4* a = ring + stage % kStages * kStageVecs + ARIL_WIDE_TILE * kRowVecs +
               warp * kCopied * kStepsPerStage * kStepVecs + lane;
#pragma unroll
    for (int c = 0; c < kCopied; ++c) {
      if (warp * kCopied + c < count) {
#pragma unroll
        for (int i = 0; i < kStepsPerStage; ++i) {
          copy_async(a + (c * kStepsPerStage + i) * kStepVecs, weights[c] + i * kStepVecs);
        }
      }
      weights[c] += kStepsPerStage * kStepVecs;
      if ((stage + 1) % kStagesPerLane == 0) weights[c] += jump[c];
    }
  };
  const int first_row = threadIdx.x / kRowVecs, vec = threadIdx.x % kRowVecs;
  const T* rows[kRows];
  const bool aligned = is_aligned(static_cast<const T*>(p.x), p.x_stride);
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int token = tile.token(first_row + i * kRowsAtOnce, p.num_tokens);
    rows[i] = token < 0 ? nullptr : static_cast<const T*>(p.x) + token * p.x_stride;
  }
  int k = lanes.begin * ARIL_LANE_FEATURES + vec * Vec<T>::kSize;
  const auto fetch_input = [&](int stage) {
    uint4* x =
        ring + stage % kStages * kStageVecs + first_row * kRowVecs + swizzled(first_row, vec);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (rows[i] != nullptr) {
        copy_input(x + i * kRowsAtOnce * kRowVecs, rows[i], k, p.in_features, aligned);
      }
    }
    k += kStepsPerStage * ARIL_K_TILE;
  };
#pragma unroll 1
  for (int stage = 0; stage < kStages - 1; ++stage) fetch_weights(stage);
  wait_for_predecessors();
#pragma unroll 1
  for (int stage = 0; stage < kStages - 1; ++stage) {
    fetch_input(stage);
    commit_copies();
  }

  const int row = warp * 16 + g;
  const int upper_token = tile.token(row, p.num_tokens);
  const int lower_token = tile.token(row + 8, p.num_tokens);
  const Planes planes(p);
  float* plane = p.planes + blockIdx.y * planes.plane_stride;
  float lane_sums[kColumnsPerBlock][4] = {}, sums[kColumnsPerBlock][4] = {};
  for (int stage = 0; stage < stages; ++stage) {
    wait_for_copies<kStages - 2>();
    __syncthreads();
    if (stage + kStages - 1 < stages) {
      fetch_weights(stage + kStages - 1);
      fetch_input(stage + kStages - 1);
    }
    commit_copies();
    const uint4* x = ring + stage % kStages * kStageVecs + row * kRowVecs;
    const uint4* a = ring + stage % kStages * kStageVecs + ARIL_WIDE_TILE * kRowVecs + lane;
    const SwizzledRow upper_row(x, g), lower_row(x + 8 * kRowVecs, g);
    uint4 upper[kStepsPerStage], lower[kStepsPerStage];
#pragma unroll
    for (int i = 0; i < kStepsPerStage; ++i) {
      upper[i] = upper_row[i];
      lower[i] = lower_row[i];
    }
#pragma unroll
    for (int c = 0; c < kColumnsPerBlock; ++c) {
      if (c >= count) break;
      Chain<T> chain;
#pragma unroll
      for (int i = 0; i < kStepsPerStage; ++i) {
        chain.step(upper[i], lower[i], a[(c * kStepsPerStage + i) * kStepVecs]);
      }
      add_to(lane_sums[c], chain.sums);
    }
    const bool ends = stage + 1 == stages;
    if ((stage + 1) % kStagesPerLane != 0) continue;
#pragma unroll
    for (int c = 0; c < kColumnsPerBlock; ++c) {
      add_to(sums[c], lane_sums[c]);
      clear(lane_sums[c]);
    }
    if ((stage + 1) % kStagesPerGroup != 0 && !ends) continue;
    const bool add = stage >= kStagesPerGroup;
#pragma unroll
    for (int c = 0; c < kColumnsPerBlock; ++c) {
      if (c >= count) break;
      store_sums(plane, planes, columns.all[c], upper_token, sums[c][0], sums[c][1], add);
      store_sums(plane, planes, columns.all[c], lower_token, sums[c][2], sums[c][3], add);
      clear(sums[c]);
    }
  }
}

}  // namespace aril::detail
