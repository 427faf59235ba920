// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Many tokens in bf16 and f16: shrink and expand of tiles of 64 tokens, a launch each.
//
// On sm_90a products are wgmma's, but for expand in f16, whose B enters as two terms; elsewhere
// mma.sync's, with the same bits. Shrink goes through x and A in stages of 64 features, which
// cp.async brings. Expand goes through a block's outputs in chunks of 128, of which bulk copies
// bring B and y to shared memory, and y back: so y moves in pieces of 256 bytes, and none of it
// waits in registers.
#pragma once

#include "../device/descriptor.cuh"
#include "../device/product.cuh"
#include "../device/vec.cuh"
#include "../host/launch.cuh"
#include "../ptx/async.cuh"
#include "../ptx/mma.cuh"
#include "../ptx/pdl.cuh"
#include "../ptx/wgmma.cuh"
#include "small_m.cuh"

namespace aril::detail {

constexpr int kWarpgroupThreads = 128;  // of a warpgroup, which has a tile of tokens
constexpr int kStageFeatures = 64;      // a chain
constexpr int kInputBytes = ARIL_WIDE_TILE * kStageFeatures * 2;
constexpr int kColumnBytes = ARIL_RANK_TILE * kStageFeatures * 2;
constexpr int kStages = 4;
constexpr int kMaxColumns = ARIL_MAX_COLUMNS;
constexpr int kMaxWarpgroups = 3;

// Adds up sums of 64 by 64 by 8 * kColumns on one warpgroup: x's rows of 128 bytes are swizzled,
// A's cores stand one behind the other.
template <typename T, int kColumns>
__device__ __forceinline__ void multiply_chain(float (&sums)[kColumns][4], const unsigned char* x,
                                               const unsigned char* a) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  fence_operands(sums);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kStageFeatures / 16; ++step) {
    wgmma_k16<T>(sums, swizzled_descriptor(x + step * 32),
                 core_descriptor(a + step * 256, 128, kColumnBytes), step > 0);
  }
  wgmma_commit();
#else
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
#pragma unroll
    for (int e = 0; e < 4; ++e) sums[c][e] = 0.0f;
  }
  const int row = warp * 16 + lane % 16;
#pragma unroll 1
  for (int step = 0; step < kStageFeatures / 16; ++step) {
    const uint4 rows = ldmatrix_x4(x + row * 128 + ((step * 2 + lane / 16) ^ (row % 8)) * 16);
#pragma unroll
    for (int c = 0; c < kColumns; c += 2) {
      const uint4 cores =
          ldmatrix_x4(a + (c + lane / 16) * kColumnBytes + step * 256 + lane % 16 * 16);
      mma_m16n8k16<T>(sums[c], rows, cores.x, cores.y);
      mma_m16n8k16<T>(sums[c + 1], rows, cores.z, cores.w);
    }
  }
#endif
}

template <int kColumns>
__device__ __forceinline__ void wait_for_chain(float (&sums)[kColumns][4]) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  wgmma_wait();
  fence_operands(sums);
#endif
}

template <int kColumns>
struct Sums {
  float all[kColumns][4] = {};

  __device__ __forceinline__ void add(const Sums& other) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        all[c][e] += other.all[c][e];
      }
    }
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
#pragma unroll
      for (int e = 0; e < 4; ++e) all[c][e] = 0.0f;
    }
  }
};

template <int kColumns>
constexpr int shrink_threads =
    kColumns == kMaxColumns ? kMaxWarpgroups * kWarpgroupThreads : kWarpgroupThreads;
template <int kColumns>
constexpr int shrink_blocks = kColumns == kMaxColumns ? 1 : 4;

// A row that a block of shrink works on; both are -1 where there is nothing to do.
struct ShrinkRow {
  int x, v;
};

// What a block of shrink works on: some columns of the modules that the first lanes of its warps
// have, a warpgroup for every kColumns of them. make_row(t) gives its rows, `plane` is where it
// leaves the sums of its lanes.
template <typename T, int kColumns, typename MakeRow>
__device__ __forceinline__ void large_m_shrink(const T* x, int64_t x_stride, int in_features,
                                               const aril_descriptor& module, int first_column,
                                               const KTiles& lanes, const MakeRow& make_row,
                                               float* plane, const PartialLayout& partials,
                                               unsigned char* shared) {
  constexpr int kStagesPerKTile = ARIL_K_TILE / kStageFeatures;
  constexpr int kStagesPerSlab = kStagesPerKTile * ARIL_K_TILES_PER_SLAB;
  constexpr int kMostColumns = kColumns * kMaxWarpgroups;
  __shared__ const char* pieces[kMostColumns];  // in the first lane of features
  __shared__ int k_tile_bytes[kMostColumns];    // to the next
  __shared__ int2 sums_at[kMostColumns];        // in a plane; ranks that are left there
  const int warpgroup = threadIdx.x / kWarpgroupThreads, warp = threadIdx.x / 32 % 4,
            lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const int threads = blockDim.x, columns = threads / kWarpgroupThreads * kColumns;
  // What rows there are is loaded while the columns are.
  constexpr int kRowVecs = kStageFeatures / Vec<T>::kSize;
  constexpr int kMostRows = ARIL_WIDE_TILE / (kWarpgroupThreads / kRowVecs);
  const int vec = threadIdx.x % kRowVecs, first_row = threadIdx.x / kRowVecs;
  const int rows_at_once = threads / kRowVecs;
  int x_rows[kMostRows];
#pragma unroll
  for (int i = 0; i < kMostRows; ++i) {
    const int row = first_row + i * rows_at_once;
    x_rows[i] = row < ARIL_WIDE_TILE ? make_row(row).x : -1;
  }
  const int upper_row = make_row(warp * 16 + g).v, lower_row = make_row(warp * 16 + g + 8).v;
  int count, i = threadIdx.x / 32;
  do {
    const RankTile column(module, first_column + i);
    if (lane == 0 && i < columns) {
      pieces[i] = column.a;
      k_tile_bytes[i] = column.k_tile_bytes;
      sums_at[i] = make_int2(column.slice * partials.slice_stride + column.first_rank,
                             column.rank - column.first_rank);
    }
    count = min(column.count - first_column, columns);
    i += threads / 32;
  } while (i < columns);
  __syncthreads();
  if (count <= 0) {
    if (is_first_block()) wait_for_predecessors();
    return;
  }
  const int stages = (lanes.end - lanes.begin) * kStagesPerKTile;
  const int stage_bytes = kInputBytes + columns * kColumnBytes;

  // A: a thread's 16 bytes of some of the columns. Stages are fetched in their order.
  constexpr int kColumnVecs = kColumnBytes / 16;
  constexpr int kCopied = kColumns * kColumnVecs / kWarpgroupThreads;
  const int copied = threadIdx.x / kColumnVecs, copied_stride = threads / kColumnVecs;
  const char* weights[kCopied];
#pragma unroll
  for (int c = 0; c < kCopied; ++c) {
    const int column = min(copied + c * copied_stride, count - 1);
    weights[c] = pieces[column] + int64_t{lanes.begin} * k_tile_bytes[column] +
                 threadIdx.x % kColumnVecs * 16;
  }
  const auto fetch_weights = [&](int stage) {
    unsigned char* a =
        shared + stage % kStages * stage_bytes + kInputBytes + static_cast<int>(threadIdx.x) * 16;
    const bool ends = (stage + 1) % kStagesPerKTile == 0;
#pragma unroll
    for (int c = 0; c < kCopied; ++c) {
      const int column = copied + c * copied_stride;
      if (column < count) copy_async(a + c * threads * 16, weights[c]);
      weights[c] += kColumnBytes;
      if (ends) weights[c] += k_tile_bytes[min(column, count - 1)] - kPieceBytes;
    }
  };
  const int first_feature = lanes.begin * ARIL_K_TILE;
  const bool aligned = is_aligned(x, x_stride);
  const T* rows[kMostRows];
#pragma unroll
  for (int i = 0; i < kMostRows; ++i) {
    rows[i] =
        x_rows[i] < 0 ? nullptr : x + x_rows[i] * x_stride + first_feature + vec * Vec<T>::kSize;
  }
  const auto fetch_input = [&](int stage) {
    // Rows that a thread copies are a multiple of 8 apart.
    unsigned char* to =
        shared + stage % kStages * stage_bytes + first_row * 128 + (vec ^ (first_row % 8)) * 16;
    const int k = stage * kStageFeatures;
    const bool whole = aligned && first_feature + k + kStageFeatures <= in_features;
#pragma unroll
    for (int i = 0; i < kMostRows; ++i, to += rows_at_once * 128) {
      if (rows[i] == nullptr) continue;
      if (whole) {
        copy_async(to, rows[i] + k);
      } else {
        copy_input(to, rows[i], k, in_features - first_feature - vec * Vec<T>::kSize, aligned);
      }
    }
  };
#pragma unroll 1
  for (int stage = 0; stage < kStages - 1; ++stage) {
    if (stage < stages) fetch_weights(stage);
  }
  wait_for_predecessors();
#pragma unroll 1
  for (int stage = 0; stage < kStages - 1; ++stage) {
    if (stage < stages) fetch_input(stage);
    commit_copies();
  }

  Sums<kColumns> chain, k_tile_sums, slab_sums;
  for (int stage = 0; stage < stages; ++stage) {
    wait_for_copies<kStages - 2>();
    fence_async_proxy();
    __syncthreads();
    const unsigned char* inputs = shared + stage % kStages * stage_bytes;
    const unsigned char* a = inputs + kInputBytes + warpgroup * kColumns * kColumnBytes;
    multiply_chain<T, kColumns>(chain.all, inputs, a);
    if (stage + kStages - 1 < stages) {
      fetch_weights(stage + kStages - 1);
      fetch_input(stage + kStages - 1);
    }
    commit_copies();
    wait_for_chain(chain.all);
    k_tile_sums.add(chain);
    const bool ends = stage + 1 == stages;
    if ((stage + 1) % kStagesPerKTile != 0) continue;
    slab_sums.add(k_tile_sums);
    k_tile_sums.clear();
    if ((stage + 1) % kStagesPerSlab != 0 && !ends) continue;
    const bool add = stage >= kStagesPerSlab;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int i = warpgroup * kColumns + c;
      if (i >= count) break;
      const int ranks = sums_at[i].y - 2 * q;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int v_row = half == 0 ? upper_row : lower_row;
        if (v_row < 0) continue;
        float2* v =
            reinterpret_cast<float2*>(plane + v_row * partials.token_stride + sums_at[i].x) + q;
        float2 sum = make_float2(ranks > 0 ? slab_sums.all[c][2 * half] : 0.0f,
                                 ranks > 1 ? slab_sums.all[c][2 * half + 1] : 0.0f);
        if (add) sum = *v + sum;
        *v = sum;
      }
    }
    slab_sums.clear();
  }
}

// Of blocks of shrink for `columns`: a warpgroup for every kColumns, as far as shared memory goes.
template <int kColumns>
int32_t wide_shrink_blocks(int columns, int& warpgroups, int& smem_bytes) {
  int max_bytes;
  ARIL_TRY(max_smem_bytes(max_bytes));
  const auto bytes = [](int warpgroups) {
    return kStages * (kInputBytes + warpgroups * kColumns * kColumnBytes);
  };
  warpgroups = 1;
  while (kColumns == kMaxColumns && warpgroups < kMaxWarpgroups &&
         warpgroups * kColumns < columns && bytes(warpgroups + 1) <= max_bytes) {
    ++warpgroups;
  }
  smem_bytes = bytes(warpgroups);
  return 0;
}

// Grid (tiles x blocks of columns, splits).
template <typename T, int kColumns>
__global__ void __launch_bounds__(shrink_threads<kColumns>, shrink_blocks<kColumns>)
    large_m_shrink_kernel(const __grid_constant__ aril_linear_args p, int column_blocks) {
  extern __shared__ __align__(1024) unsigned char stages_shared[];
  launch_dependents();
  const TokenTile tile(p, blockIdx.x / column_blocks);
  const int columns = static_cast<int>(blockDim.x) / kWarpgroupThreads * kColumns;
  const auto make_row = [&](int t) {
    const int token = tile.token(t, p.num_tokens);
    return ShrinkRow{token, token};
  };
  const PartialLayout partials(p);
  large_m_shrink<T, kColumns>(
      static_cast<const T*>(p.x), p.x_stride, p.in_features,
      module_of_lane(p.weights, tile.slot, p.num_slices), blockIdx.x % column_blocks * columns,
      KTiles(p.in_features, p.k_tiles_per_split, blockIdx.y), make_row,
      p.partials + blockIdx.y * partials.partial_stride, partials, stages_shared);
}

constexpr int kChunkOuts = 2 * ARIL_OUT_TILE;                   // of a stage of expand
constexpr int kChunkRowBytes = kChunkOuts * 2 + 64;             // two rows touch every bank once
constexpr int kTermBytes = ARIL_WIDE_TILE * kRanksPerStep * 2;  // of v in a step
constexpr int kMaxExpandStages = 4;
#if __CUDA_ARCH__ >= 900
constexpr bool kBulk = true;
#else
constexpr bool kBulk = false;
#endif
constexpr int kExpandThreads = 2 * kWarpgroupThreads;  // a warpgroup for each half of a chunk
// Blocks of a multiprocessor, as far as registers go: f16 has B's terms to hold, too.
template <typename T>
constexpr int kLargeMExpandBlocks = std::is_same_v<T, __nv_bfloat16> ? 3 : 2;

// deltas = B v of 64 tokens and 64 outputs.
template <typename T>
__device__ __forceinline__ void multiply_outs(float (&deltas)[8][4], const unsigned char* v,
                                              const unsigned char* b, int rank_tiles) {
  constexpr int kTileBytes = ARIL_OUT_TILE * 16;
  const int steps = ceil_div(rank_tiles, 2);
#pragma unroll
  for (int c = 0; c < 8; ++c) {
#pragma unroll
    for (int e = 0; e < 4; ++e) deltas[c][e] = 0.0f;
  }
#if __CUDA_ARCH_FEAT_SM90_ALL
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    fence_operands(deltas);
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      // v is zero where there is no second tile of ranks: any finite B will do.
      const int to_ranks = 2 * step + 1 < rank_tiles ? kTileBytes : 0;
      wgmma_fence();
#pragma unroll
      for (int term = 0; term < kTerms; ++term) {
        wgmma_k16<T>(deltas, core_descriptor(v + (step * kTerms + term) * kTermBytes, 1024, 128),
                     core_descriptor(b + 2 * step * kTileBytes, to_ranks, 128), true);
      }
      wgmma_commit();
    }
    wgmma_wait();
    fence_operands(deltas);
    return;
  }
#endif
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    uint4 terms[kTerms];
#pragma unroll
    for (int term = 0; term < kTerms; ++term) {
      terms[term] = ldmatrix_x4(v + (step * kTerms + term) * kTermBytes + lane / 16 * 1024 +
                                warp * 256 + lane % 16 * 16);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const unsigned char* tile = b + 2 * step * kTileBytes + half * 512 + lane * 16;
      const uint4 b0 = ldmatrix_x4(tile);
      uint4 b1 = make_uint4(0, 0, 0, 0);
      if (2 * step + 1 < rank_tiles) b1 = ldmatrix_x4(tile + kTileBytes);
      mma_terms<T>(deltas[half * 4 + 0], terms, b0.x, b1.x);
      mma_terms<T>(deltas[half * 4 + 1], terms, b0.y, b1.y);
      mma_terms<T>(deltas[half * 4 + 2], terms, b0.z, b1.z);
      mma_terms<T>(deltas[half * 4 + 3], terms, b0.w, b1.w);
    }
  }
}

// Moves neighbouring outputs, 16 bytes at a time if they are `whole`.
template <typename T>
__device__ __forceinline__ void move_outs(T* to, const T* from, int count, bool whole) {
  constexpr int kSize = Vec<T>::kSize;
  if (whole) {
    for (int i = 0; i < count; i += kSize) {
      *reinterpret_cast<uint4*>(to + i) = *reinterpret_cast<const uint4*>(from + i);
    }
  } else {
    for (int i = 0; i < count; ++i) to[i] = from[i];
  }
}

// Of blocks of expand: v's operands, and the stages, of which there is one of 64 rows where two do
// not fit. The last product of an odd number of rank tiles has an operand that ends one tile
// further.
inline int32_t large_m_expand_smem(const aril_weights& weights, int& ring_bytes, int& smem_bytes) {
  int max_bytes;
  ARIL_TRY(max_smem_bytes(max_bytes));
  const int v = rank_steps(weights) * kTerms * kTermBytes;
  const int stage = ARIL_WIDE_TILE * kChunkRowBytes + kChunkOuts * rank_tiles(weights) * 16;
  ring_bytes = v + 2 * stage <= max_bytes ? 2 * stage : stage;
  smem_bytes = v + ring_bytes + rank_tiles(weights) % 2 * ARIL_OUT_TILE * 16;
  return 0;
}

// Where the stages of a block of expand arrive.
class ExpandBarriers {
 public:
  // By all threads, before anything else.
  __device__ __forceinline__ explicit ExpandBarriers(TransactionBarrier* barriers)
      : barriers_(barriers) {
    if (threadIdx.x < kMaxExpandStages) barriers[threadIdx.x].init(ARIL_WIDE_TILE + 1);
    __syncthreads();
  }

  __device__ __forceinline__ TransactionBarrier& operator[](int stage) const {
    return barriers_[stage];
  }

  __device__ __forceinline__ void wait(int stage) {
    barriers_[stage].wait(phases_ >> stage & 1);
    phases_ ^= 1u << stage;
  }

 private:
  TransactionBarrier* barriers_;
  uint32_t phases_ = 0;
};

// As few_expand, for tiles of 64 rows, of which those from `count` on are -1: y goes through shared
// memory, in chunks of 128 outputs, as many of which are on their way as fit in `ring_bytes`.
template <typename T, typename V>
__device__ __forceinline__ void large_m_expand(int count, const ExpandRow (&rows)[ARIL_WIDE_TILE],
                                               const aril_descriptor& module,
                                               const BlockOuts<T>& outs, unsigned char* shared,
                                               int ring_bytes, ExpandBarriers& barriers,
                                               const V& v) {
  const int warpgroup = threadIdx.x / kWarpgroupThreads, warp = threadIdx.x / 32 % 4;
  const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const int rank_tiles = ceil_div(module.rank, ARIL_RANK_TILE);
  const int steps = ceil_div(module.rank, kRanksPerStep);
  const int out_tile_bytes = rank_tiles * ARIL_OUT_TILE * 16;
  const int chunks = ceil_div(outs.count, kChunkOuts);
  // v's cores, [steps][terms][2][8]; then the stages: y, B.
  unsigned char* const ring = shared + steps * kTerms * kTermBytes;
  const int outs_bytes = ceil_div(count, 16) * 16 * kChunkRowBytes;  // a warp has 16 rows
  const int stage_bytes = outs_bytes + 2 * out_tile_bytes;
  const int stages = min(ring_bytes / stage_bytes, kMaxExpandStages);
  const char* b =
      static_cast<const char*>(module.b) + int64_t{outs.first / ARIL_OUT_TILE} * out_tile_bytes;
  // The first lanes have a row each, neighbours in different warps, since a warp starts its copies
  // one after the other. The last thread has B.
  constexpr int kWarps = kExpandThreads / 32;
  const int own_row = lane < ARIL_WIDE_TILE / kWarps
                          ? lane * kWarps + static_cast<int>(threadIdx.x) / 32
                          : ARIL_WIDE_TILE;
  const ExpandRow own = own_row < ARIL_WIDE_TILE ? rows[own_row] : ExpandRow{-1, -1, 0.0f};
  const bool whole = is_aligned(outs.y, outs.y_stride) && outs.num_outs % Vec<T>::kSize == 0;
  T* row = own.y < 0 ? nullptr : outs.y + own.y * outs.y_stride + outs.first;
  const auto stage_at = [&](int stage) { return ring + stage * stage_bytes; };
  const auto outs_of = [&](int chunk) { return min(outs.count - chunk * kChunkOuts, kChunkOuts); };
  const auto fetch_weights = [&](int chunk, int stage) {
    if (chunk >= chunks) return;
    const int bytes = ceil_div(outs_of(chunk), ARIL_OUT_TILE) * out_tile_bytes;
    unsigned char* to = stage_at(stage) + outs_bytes;
    const char* from = b + int64_t{chunk} * 2 * out_tile_bytes;
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x == kExpandThreads - 1) {
      barriers[stage].expect(bytes);
      barriers[stage].copy(to, from, bytes);
    }
#else
    for (int at = threadIdx.x * 16; at < bytes; at += kExpandThreads * 16) {
      copy_async(to + at, from + at);
    }
    commit_copies();
#endif
  };
  const auto fetch_outs = [&](int chunk, int stage) {
    if (own_row >= ARIL_WIDE_TILE || chunk >= chunks) return;
    T* to = reinterpret_cast<T*>(stage_at(stage) + own_row * kChunkRowBytes);
    const bool reads = row != nullptr && !outs.overwrites;
    const bool bulk = kBulk && whole && reads;
    if (!bulk && reads) {
      move_outs(to, row + chunk * kChunkOuts, outs_of(chunk), whole);
    }
    TransactionBarrier& barrier = barriers[stage];
    barrier.expect(bulk ? outs_of(chunk) * 2 : 0);
    if (bulk) barrier.copy(to, row + chunk * kChunkOuts, outs_of(chunk) * 2);
  };
  const auto store_outs = [&](int chunk, int stage) {
    if (row == nullptr) return;
    const T* from = reinterpret_cast<T*>(stage_at(stage) + own_row * kChunkRowBytes);
    if (kBulk && whole) {
      bulk_store(row + chunk * kChunkOuts, from, outs_of(chunk) * 2);
    } else {
      move_outs(row + chunk * kChunkOuts, from, outs_of(chunk), whole);
    }
  };
  for (int i = 0; i < stages - 1; ++i) fetch_weights(i, i);
  wait_for_predecessors();
  if (row != nullptr && v.lacks(own.v)) row = nullptr;
  for (int i = 0; i < stages - 1; ++i) fetch_outs(i, i);

  // A thread brings together four ranks of a token.
  constexpr int kQuads = kRanksPerStep / 4;
#pragma unroll 2
  for (int i = threadIdx.x; i < count * steps * kQuads; i += kExpandThreads) {
    const int quad = i % kQuads * 4, t = i / kQuads / steps, step = i / kQuads - t * steps;
    const int r = step * kRanksPerStep + quad;
    const ExpandRow row = rows[t];
    float4 sums = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (row.v >= 0 && r < rank_tiles * ARIL_RANK_TILE) sums = v.load4(row.v, r) * row.factor;
    uint2* const words = reinterpret_cast<uint2*>(shared + step * kTerms * kTermBytes +
                                                  quad / 8 * 1024 + t * 16 + quad % 8 * 2);
    uint2 high, low;
    to_bf16_terms(sums.x, sums.y, high.x, low.x);
    to_bf16_terms(sums.z, sums.w, high.y, low.y);
    words[0] = high;
    words[kTermBytes / 8] = low;
  }
  fence_async_proxy();
  __syncthreads();

  const auto next_of = [&](int stage) { return stage + 1 < stages ? stage + 1 : 0; };
  int at = 0, ahead = stages - 1;
  for (int chunk = 0; chunk < chunks; ++chunk, at = next_of(at), ahead = next_of(ahead)) {
    unsigned char* const stage = stage_at(at);
    wait_for_bulk_store_reads();
    fetch_weights(chunk + stages - 1, ahead);
    fetch_outs(chunk + stages - 1, ahead);
    barriers.wait(at);
#if __CUDA_ARCH__ < 900
    wait_for_copies<0>();
    __syncthreads();
#endif
    float deltas[8][4];
    multiply_outs<T>(deltas, shared, stage + outs_bytes + warpgroup * out_tile_bytes, rank_tiles);
#pragma unroll
    for (int half = 0; half < 2 && warp * 16 < count; ++half) {
      unsigned char* const outs_at = stage + (warp * 16 + g + half * 8) * kChunkRowBytes +
                                     warpgroup * ARIL_OUT_TILE * 2 + q * 16;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint4* const eight = reinterpret_cast<uint4*>(outs_at + i * 64);
        const Vec<T> base{outs.overwrites ? make_uint4(0, 0, 0, 0) : *eight};
        T sums[8];
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          sums[e] = from_float<T>(base[e] + deltas[i * 4 + e / 2][2 * half + e % 2]);
        }
        uint4 result;
        memcpy(&result, sums, sizeof(result));
        *eight = result;
      }
    }
    fence_async_proxy();
    __syncthreads();
    store_outs(chunk, at);
  }
  wait_for_bulk_stores();
}

template <typename T>
__global__ void __launch_bounds__(kExpandThreads, kLargeMExpandBlocks<T>)
    large_m_expand_kernel(const __grid_constant__ aril_linear_args p, int out_blocks,
                          int ring_bytes) {
  extern __shared__ __align__(1024) unsigned char stages_shared[];
  __shared__ TransactionBarrier barriers_shared[kMaxExpandStages];
  __shared__ ExpandRow rows[ARIL_WIDE_TILE];
  launch_dependents();
  const TokenTile tile(p, blockIdx.x / out_blocks);
  int slice;
  const BlockOuts<T> outs(p, blockIdx.x % out_blocks, p.outs_per_block, slice);
  const aril_descriptor module = module_of(p.weights, tile.slot, slice);
  if (!outs.begin(tile, module, p.num_tokens)) return;
  if (threadIdx.x < ARIL_WIDE_TILE) rows[threadIdx.x] = tile.expand_rows(module, p)(threadIdx.x);
  ExpandBarriers barriers(barriers_shared);
  large_m_expand<T>(tile.count, rows, module, outs, stages_shared, ring_bytes, barriers,
                    PartialSums(p, slice));
}

}  // namespace aril::detail
