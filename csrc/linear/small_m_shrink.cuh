// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Shrink of up to ARIL_SMALL_M tokens in bf16 and f16, with mma.sync.
//
// A block computes one slab of v for a token tile of 16 tokens and two rank tiles: each of its 8
// warps multiplies one K tile of x by one rank tile of A. The block adds the K tiles and stores the
// slab in the mailbox. A is requested before the wait for predecessors, x after it.
//
// Bound: the bytes of A, plus one round trip for the descriptor and one for x.
#pragma once

#include "../device/descriptor.cuh"
#include "../device/mailbox.cuh"
#include "../device/math.cuh"
#include "../device/reduction.cuh"
#include "../device/token_tile.cuh"
#include "../device/vec.cuh"
#include "../ptx/async.cuh"
#include "../ptx/mma.cuh"
#include "../ptx/pdl.cuh"

namespace aril::detail {

constexpr int kSmallMWarps = ARIL_WARPS;
constexpr int kSmallMThreads = 32 * kSmallMWarps;
constexpr int kSmallMRankTiles = kSmallMWarps / ARIL_K_TILES_PER_SLAB;  // of a block of shrink
constexpr int kSlabRowBytes = kSlabFeatures * 2 + 16;  // of x; padded so that 8 rows hit all banks

// How blocks of expand share out tiles and outputs.
struct ExpandShares {
  int tiles;           // that a grid has blocks for
  Divisor out_blocks;  // for a tile
  Divisor outs_per_block;
};

// A grid of small_m_kernel: `shrink` blocks, then those of expand.
//
// A routing has as many tiles as the table has slots, at most, and mostly few. Where blocks for
// all of them would be many, nearly all idle, a grid has blocks for some, which take turns: they
// go on to further tiles. Expand then has small blocks for a routing of up to `few_tiles`, so that
// they fill the device, and larger ones for others, so that turns are few.
struct SmallMGrid {
  Divisor rank_blocks;  // blocks of shrink for a token tile and slab
  Divisor slabs;
  int shrink;
  int shrink_tiles;  // that the grid has blocks for
  int few_tiles;
  ExpandShares few, many;
  Divisor num_slices;
  bool apart;  // expand alone: shrink was an earlier launch
};

// Shared memory of a block of shrink: A, and up to `rows` rows of x.
__host__ __device__ __forceinline__ int small_m_shrink_smem_bytes(int rows) {
  return kSmallMWarps * kATileBytes + rows * kSlabRowBytes;
}

// The sums of a K tile: 16 rows of x by a rank tile of A, both in shared memory, by a warp. Four
// chains of 64 features are independent; they are added at the end.
template <typename T>
__device__ __forceinline__ void multiply_k_tile(float (&sums)[4][4], const unsigned char* x_row,
                                                const unsigned char* a_row) {
  constexpr int kChains = 4, kSteps = 4;  // 16 features a step
#pragma unroll
  for (int step = 0; step < kSteps; step += 2) {
#pragma unroll
    for (int chain = 0; chain < kChains; ++chain) {
      const int i = chain * kSteps + step;
      const uint4 a = ldmatrix_x4(a_row + i * 256);
      const uint4 x0 = ldmatrix_x4(x_row + i * 32), x1 = ldmatrix_x4(x_row + (i + 1) * 32);
      mma_m16n8k16<T>(sums[chain], x0, a.x, a.y);
      mma_m16n8k16<T>(sums[chain], x1, a.z, a.w);
    }
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    sums[0][e] = 0.0f + sums[0][e] + sums[1][e] + sums[2][e] + sums[3][e];
  }
}

// A block of shrink. Sets `epoch` for all threads, unless all of them exit early.
template <typename T, bool kTakesTurns>
__device__ __forceinline__ void small_m_shrink(const aril_linear_args& p, const SmallMGrid& grid,
                                               uint32_t& epoch, unsigned char* shared) {
  __shared__ TransactionBarrier barriers[kSmallMWarps];
  __shared__ int32_t tokens[ARIL_TOKENS_PER_TILE];  // -1: none
  const int block = blockIdx.x, thread = threadIdx.x;
  unsigned long long before = 0;
  if (thread == 0) before = count_block(p.mailbox);
  const int warp = thread / 32, lane = thread % 32;
  const EarlyModules modules(p.weights, grid.num_slices);
  const int slabs_before = grid.rank_blocks.quotient(block);
  int tile_index = grid.slabs.quotient(slabs_before);
  const int first_rank_tile = (block - slabs_before * grid.rank_blocks) * kSmallMRankTiles;
  const int slab = slabs_before - tile_index * grid.slabs;
  unsigned char* const a = shared + warp * kATileBytes;
  if constexpr (kTakesTurns) {
    // racecheck reports copies that reuse memory unless the block synchronizes between the
    // initialization of their mbarriers and the first copy.
    if (lane == 0) barriers[warp].init();
    __syncthreads();
  }
  for (int turn = 0;; tile_index += grid.shrink_tiles) {
    const TokenTile tile(p, tile_index);
    const TileRow row_of_thread(p, tile_index);
    const RankTile rank_tile(modules.of_lane(p.weights, tile.slot, p.num_slices),
                             first_rank_tile + warp / ARIL_K_TILES_PER_SLAB);
    const bool is_idle = first_rank_tile >= rank_tile.count;
    const bool is_last =
        !kTakesTurns || tile.slot < 0 || tile_index + grid.shrink_tiles >= tile.num_tiles;
    if (turn > 0) {
      if (is_idle) {
        if (is_last) return;
        continue;
      }
      // The block has read what it shares, and wrote where A comes to.
      fence_async_proxy();
      __syncthreads();
    }
    const int k_tile = slab * ARIL_K_TILES_PER_SLAB + warp % ARIL_K_TILES_PER_SLAB;
    const bool active = rank_tile.a != nullptr && k_tile * ARIL_K_TILE < p.in_features;
    bulk_load(barriers[warp], a, rank_tile.a + int64_t{k_tile} * rank_tile.k_tile_bytes,
              active ? kATileBytes : 0, lane, 32, !kTakesTurns);
    if (turn == 0 && thread == 0) {
      epoch = epoch_of(p.mailbox, before);
      launch_dependents();
    }
    if (is_idle) {
      if (turn == 0 && is_first_block()) wait_for_predecessors();
      if (is_last) return;
      barriers[warp].wait(turn % 2);
      ++turn;
      continue;
    }
    if (thread < ARIL_TOKENS_PER_TILE) {
      tokens[thread] = row_of_thread.token(tile, p.num_tokens);
    }
    __syncthreads();
    wait_for_predecessors();

    unsigned char* const x = shared + kSmallMWarps * kATileBytes;
    {
      constexpr int kVecs = kSlabFeatures / Vec<T>::kSize, kRowsAtOnce = kSmallMThreads / kVecs;
      const T* input = static_cast<const T*>(p.x);
      const bool aligned = is_aligned(input, p.x_stride);
      const int vec = thread % kVecs;
#pragma unroll
      for (int i = 0; i < ARIL_TOKENS_PER_TILE / kRowsAtOnce; ++i) {
        const int row = thread / kVecs + i * kRowsAtOnce;
        if (row >= tile.count) break;
        if (tokens[row] >= 0) {
          copy_vec_async(x + row * kSlabRowBytes + vec * 16, input + tokens[row] * p.x_stride,
                         slab * kSlabFeatures + vec * Vec<T>::kSize, p.in_features, aligned);
        }
      }
      commit_copies();
      wait_for_copies<0>();
    }
    __syncthreads();
    float sums[4][4] = {};
    // A phase without bytes has completed, but synccheck wants every phase to be waited for.
    if (kTakesTurns || active) barriers[warp].wait(turn % 2);
    if (active) {
      // Rows of x without a token are uninitialised. Their sums are dropped.
      const int row = min(lane % 16, min(p.num_tokens, ARIL_TOKENS_PER_TILE) - 1);
      const unsigned char* const x_row =
          x + row * kSlabRowBytes + warp % ARIL_K_TILES_PER_SLAB * ARIL_K_TILE * 2 + lane / 16 * 16;
      const unsigned char* const a_row = a + lane * 16;
      multiply_k_tile<T>(sums, x_row, a_row);
    }
    // In place of its A, which the warp has read.
    __syncwarp();
    float2* const k_tile_sums = reinterpret_cast<float2*>(a);
    k_tile_sums[lane] = make_float2(sums[0][0], sums[0][1]);
    k_tile_sums[32 + lane] = make_float2(sums[0][2], sums[0][3]);
    __syncthreads();
    // One thread for each token and rank.
    constexpr int kSums = ARIL_TOKENS_PER_TILE * ARIL_RANK_TILE;
    static_assert(kSmallMRankTiles * kSums == kSmallMThreads &&
                  kSums * sizeof(float) <= kATileBytes);
    const int i = thread % kSums, token = tokens[i / ARIL_RANK_TILE];
    if (rank_tile.a != nullptr && token >= 0) {
      float sum = 0.0f;
#pragma unroll
      for (int k = 0; k < ARIL_K_TILES_PER_SLAB; ++k) {
        const int of_warp = thread / kSums * ARIL_K_TILES_PER_SLAB + k;
        sum += reinterpret_cast<const float*>(shared + of_warp * kATileBytes)[i];
      }
      const int rank = rank_tile.first_rank + i % ARIL_RANK_TILE;
      const PartialLayout layout(p);
      store_tagged(tagged_words(p.mailbox) + slab * layout.partial_stride +
                       token * layout.row_stride + rank_tile.slice * layout.slice_stride + rank,
                   rank < rank_tile.rank ? sum : 0.0f, epoch);
    }
    if (is_last) return;
    ++turn;
  }
}

}  // namespace aril::detail
