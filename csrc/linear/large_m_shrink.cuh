// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Shrink of wide tiles (64 rows) in bf16 and f16: wgmma on sm_90a, otherwise mma.sync, with the
// same bits.
//
// A block has a wide tile, some rank tiles and a range of K tiles. Each warpgroup multiplies all 64
// rows by kRankTiles rank tiles of its own; the warpgroups share x. x and A pass through a ring of
// kStages stages of 64 features, one chain each, filled by cp.async. Slabs, or spans, are added to
// the block's partial in global memory, so only the sums of one slab stay in registers.
//
// The loop over a K tile's stages is unrolled, so that places in the ring are constants. Code for
// rows that are not aligned is short, for the sake of the instruction cache.
//
// Bound: x through L2, once for each block of rank tiles, and A once for each wide tile. A's first
// stages are requested before the wait for predecessors.
#pragma once

#include "../device/descriptor.cuh"
#include "../device/product.cuh"
#include "../device/reduction.cuh"
#include "../device/token_tile.cuh"
#include "../device/vec.cuh"
#include "../ptx/async.cuh"
#include "../ptx/mma.cuh"
#include "../ptx/pdl.cuh"
#include "../ptx/wgmma.cuh"

namespace aril::detail {

constexpr int kWarpgroupThreads = 128;
constexpr int kStageFeatures = 64;
constexpr int kStages = ARIL_K_TILE / kStageFeatures;  // so the stages of all K tiles are alike
constexpr int kInputBytes = ARIL_WIDE_TILE * kStageFeatures * 2;       // of x in a stage
constexpr int kStageATileBytes = ARIL_RANK_TILE * kStageFeatures * 2;  // of a rank tile in a stage
constexpr int kMaxRankTiles = ARIL_MAX_RANK_TILES;                     // of a warpgroup
constexpr int kMaxWarpgroups = ARIL_MAX_WARPGROUPS;

template <int kRankTiles>
constexpr int shrink_threads =
    kRankTiles == kMaxRankTiles ? kMaxWarpgroups * kWarpgroupThreads : kWarpgroupThreads;
// Blocks on a multiprocessor, as far as registers allow.
template <int kRankTiles>
constexpr int shrink_blocks = 4;
template <>
inline constexpr int shrink_blocks<2> = 5;
template <>
inline constexpr int shrink_blocks<kMaxRankTiles> = 1;

// Shared memory of a block of so many warpgroups.
template <int kRankTiles>
constexpr int large_m_shrink_smem_bytes(int warpgroups) {
  return kStages * (kInputBytes + warpgroups * kRankTiles * kStageATileBytes);
}

// sums = x A^T of a chain: 64 rows, 64 features, kRankTiles rank tiles, by a warpgroup. x has rows
// of 128 bytes in the 128-byte swizzle; A's cores are contiguous.
template <typename T, int kRankTiles>
__device__ __forceinline__ void multiply_chain(float (&sums)[kRankTiles][4], const unsigned char* x,
                                               const unsigned char* a) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  fence_operands(sums);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kStageFeatures / 16; ++step) {
    wgmma_k16<T>(sums, swizzled_descriptor(x + step * 32),
                 core_descriptor(a + step * 256, 128, kStageATileBytes), step > 0);
  }
  wgmma_commit();
#else
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  set_zero(sums);
  const int row = warp * 16 + lane % 16;
#pragma unroll 1
  for (int step = 0; step < kStageFeatures / 16; ++step) {
    const uint4 rows = ldmatrix_x4(x + row * 128 + ((step * 2 + lane / 16) ^ (row % 8)) * 16);
#pragma unroll
    for (int c = 0; c < kRankTiles; c += 2) {
      const uint4 cores =
          ldmatrix_x4(a + (c + lane / 16) * kStageATileBytes + step * 256 + lane % 16 * 16);
      mma_m16n8k16<T>(sums[c], rows, cores.x, cores.y);
      mma_m16n8k16<T>(sums[c + 1], rows, cores.z, cores.w);
    }
  }
#endif
}

template <int kRankTiles>
__device__ __forceinline__ void wait_for_chain(float (&sums)[kRankTiles][4]) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  wgmma_wait();
  fence_operands(sums);
#endif
}

template <int kRankTiles>
struct Sums {
  float all[kRankTiles][4] = {};

  __device__ __forceinline__ void add(const Sums& other) {
#pragma unroll
    for (int c = 0; c < kRankTiles; ++c) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        all[c][e] += other.all[c][e];
      }
    }
  }

  __device__ __forceinline__ void clear() { set_zero(all); }
};

// A row of a shrink: v[v] = A x[x]. Both are -1 where there is no work.
struct ShrinkRow {
  int x, v;
};

// The rank tiles of a block, in shared memory.
template <int kMost>
struct BlockRankTiles {
  const char* (&a)[kMost];     // the first K tile
  int (&k_tile_bytes)[kMost];  // from one K tile to the next
  int2 (&partial)[kMost];      // offset of the first rank in a row of the partial; ranks left there

  // Loads rank tiles [first, first + most), and returns how many the slot has of them; 0 or less
  // for none. The whole block calls it; lane i of each warp passes the module of slice i.
  __device__ __forceinline__ int load(const aril_descriptor& module, int first, int most,
                                      const PartialLayout& layout) const {
    const int lane = threadIdx.x % 32, threads = blockDim.x;
    int count, i = threadIdx.x / 32;
    do {
      const RankTile rank_tile(module, first + i);
      if (lane == 0 && i < most) {
        a[i] = rank_tile.a;
        k_tile_bytes[i] = rank_tile.k_tile_bytes;
        partial[i] = make_int2(rank_tile.slice * layout.slice_stride + rank_tile.first_rank,
                               rank_tile.rank - rank_tile.first_rank);
      }
      count = min(rank_tile.count - first, most);
      i += threads / 32;
    } while (i < most);
    __syncthreads();
    return count;
  }
};

// A warpgroup's sums of a slab, to its rows of a partial: stored, or added.
template <int kRankTiles>
__device__ __forceinline__ void store_slab(const Sums<kRankTiles>& slab_sums,
                                           const int2 (&ranks_at)[kRankTiles * kMaxWarpgroups],
                                           int warpgroup, int q, int count, int upper_row,
                                           int lower_row, float* partial,
                                           const PartialLayout& layout, bool adds) {
#pragma unroll
  for (int c = 0; c < kRankTiles; ++c) {
    const int i = warpgroup * kRankTiles + c;
    if (i >= count) break;
    const int ranks = ranks_at[i].y - 2 * q;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int v_row = half == 0 ? upper_row : lower_row;
      if (v_row < 0) continue;
      float2* v =
          reinterpret_cast<float2*>(partial + v_row * layout.row_stride + ranks_at[i].x) + q;
      float2 sum = make_float2(ranks > 0 ? slab_sums.all[c][2 * half] : 0.0f,
                               ranks > 1 ? slab_sums.all[c][2 * half + 1] : 0.0f);
      if (adds) sum = *v + sum;
      *v = sum;
    }
  }
}

// Shrinks the rows that make_row(t) gives, t below ARIL_WIDE_TILE, by the block's rank tiles from
// `first_rank_tile` on, over `k_tiles`, to a partial for each split of `slabs_per_split`, the first
// of which is `partial`. Lane i of each warp passes the module of
// slice i. The block has a warpgroup for every kRankTiles rank tiles.
template <typename T, int kRankTiles, typename MakeRow>
__device__ __forceinline__ void large_m_shrink(const T* x, int64_t x_stride, int in_features,
                                               const aril_descriptor& module, int first_rank_tile,
                                               const KTiles& k_tiles, int slabs_per_split,
                                               const MakeRow& make_row, float* partial,
                                               const PartialLayout& layout, unsigned char* shared) {
  constexpr int kMostTiles = kRankTiles * kMaxWarpgroups;
  __shared__ const char* tile_a[kMostTiles];
  __shared__ int tile_bytes[kMostTiles];
  __shared__ int2 tile_ranks[kMostTiles];
  const BlockRankTiles<kMostTiles> tiles = {tile_a, tile_bytes, tile_ranks};
  const int warpgroup = threadIdx.x / kWarpgroupThreads, warp = threadIdx.x / 32 % 4,
            lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  constexpr bool kOneWarpgroup = shrink_threads<kRankTiles> == kWarpgroupThreads;
  const int threads = kOneWarpgroup ? kWarpgroupThreads : blockDim.x;
  const int most = threads / kWarpgroupThreads * kRankTiles;
  // The rows are loaded while the rank tiles are.
  constexpr int kRowVecs = kStageFeatures / Vec<T>::kSize;
  constexpr int kMostRows = ARIL_WIDE_TILE / (kWarpgroupThreads / kRowVecs);
  const int vec = threadIdx.x % kRowVecs, first_row = threadIdx.x / kRowVecs;
  const int rows_at_once = threads / kRowVecs;
  const int first_feature = k_tiles.begin * ARIL_K_TILE;
  const T* rows[kMostRows];  // from the K tile on that is fetched
  unsigned present = 0;      // a bit for each
#pragma unroll
  for (int i = 0; i < kMostRows; ++i) {
    const int t = first_row + i * rows_at_once;
    const int row = t < ARIL_WIDE_TILE ? make_row(t).x : -1;
    rows[i] = x + max(row, 0) * x_stride + first_feature + vec * Vec<T>::kSize;
    present |= (row < 0 ? 0u : 1u) << i;
  }
  const int upper_row = make_row(warp * 16 + g).v, lower_row = make_row(warp * 16 + g + 8).v;
  const int count = tiles.load(module, first_rank_tile, most, layout);
  if (count <= 0) {
    if (is_first_block()) wait_for_predecessors();
    return;
  }
  const int num_k_tiles = k_tiles.end - k_tiles.begin;
  const int stage_bytes = kInputBytes + most * kStageATileBytes;

  // A: a thread copies 16 bytes of each of kCopied rank tiles in a stage. Stages come in order.
  constexpr int kTileVecs = kStageATileBytes / 16;
  constexpr int kCopied = kRankTiles * kTileVecs / kWarpgroupThreads;
  const int copied = threadIdx.x / kTileVecs, copied_stride = threads / kTileVecs;
  unsigned char* const to_a = shared + kInputBytes + static_cast<int>(threadIdx.x) * 16;
  const char* weights[kCopied];  // of the K tile that is fetched
#pragma unroll
  for (int c = 0; c < kCopied; ++c) {
    const int i = min(copied + c * copied_stride, count - 1);
    weights[c] =
        tiles.a[i] + int64_t{k_tiles.begin} * tiles.k_tile_bytes[i] + threadIdx.x % kTileVecs * 16;
  }
  const auto fetch_weights = [&](int stage) {
#pragma unroll
    for (int c = 0; c < kCopied; ++c) {
      const int i = copied + c * copied_stride;
      if (i < count) {
        copy_async(to_a + stage * stage_bytes + c * threads * 16,
                   weights[c] + stage * kStageATileBytes);
      }
      if (stage == kStages - 1) weights[c] += tiles.k_tile_bytes[min(i, count - 1)];
    }
  };
  const bool aligned = is_aligned(x, x_stride);
  int features = in_features - first_feature;  // from that K tile on
  // A thread's rows are a multiple of 8 apart, so all have the same swizzle.
  unsigned char* const to_x = shared + first_row * 128 + (vec ^ (first_row % 8)) * 16;
  const auto fetch_input = [&](int stage) {
    unsigned char* to = to_x + stage * stage_bytes;
    const int k = stage * kStageFeatures, left = features - k - vec * Vec<T>::kSize;
    if (!aligned) {
      // Rows are named again: indexed by a loop, those in registers would move to memory.
#pragma unroll 1
      for (int i = 0; i < kMostRows; ++i, to += rows_at_once * 128) {
        if ((present >> i & 1) == 0) continue;
        const T* const row = x + make_row(first_row + i * rows_at_once).x * x_stride;
        copy_vec_async(to, row, in_features - left, in_features, false);
      }
    } else {
      const int bytes = max(0, min(left, Vec<T>::kSize)) * static_cast<int>(sizeof(T));
#pragma unroll
      for (int i = 0; i < kMostRows; ++i, to += rows_at_once * 128) {
        if (present >> i & 1) copy_async(to, bytes > 0 ? rows[i] + k : rows[i], bytes);
      }
    }
    if (stage != kStages - 1) return;
    features -= ARIL_K_TILE;
#pragma unroll
    for (int i = 0; i < kMostRows; ++i) rows[i] += ARIL_K_TILE;
  };
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) fetch_weights(stage);
  wait_for_predecessors();
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) {
    fetch_input(stage);
    commit_copies();
  }

  Sums<kRankTiles> chain, k_tile_sums, slab_sums;
  int slab = 0;  // of the split
  for (int k_tile = 0; k_tile < num_k_tiles; ++k_tile) {
    const bool is_last = k_tile + 1 == num_k_tiles;
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) {
      wait_for_copies<kStages - 2>();
      fence_async_proxy();
      __syncthreads();
      const unsigned char* inputs = shared + stage * stage_bytes;
      const unsigned char* a = inputs + kInputBytes + warpgroup * kRankTiles * kStageATileBytes;
      multiply_chain<T, kRankTiles>(chain.all, inputs, a);
      if (stage == 0 || !is_last) {
        fetch_weights((stage + kStages - 1) % kStages);
        fetch_input((stage + kStages - 1) % kStages);
      }
      commit_copies();
      wait_for_chain(chain.all);
      k_tile_sums.add(chain);
    }
    slab_sums.add(k_tile_sums);
    k_tile_sums.clear();
    if ((k_tile + 1) % ARIL_K_TILES_PER_SLAB != 0 && !is_last) continue;
    store_slab(slab_sums, tile_ranks, warpgroup, q, count, upper_row, lower_row, partial, layout,
               slab > 0);
    slab_sums.clear();
    if (++slab == slabs_per_split) {
      slab = 0;
      partial += layout.partial_stride;
    }
  }
}

// Grid (wide tiles x blocks of rank tiles, splits / splits_per_block).
template <typename T, int kRankTiles>
__global__ void __launch_bounds__(shrink_threads<kRankTiles>, shrink_blocks<kRankTiles>)
    large_m_shrink_kernel(const __grid_constant__ aril_linear_args p, int rank_blocks,
                          int splits_per_block) {
  extern __shared__ __align__(1024) unsigned char stages_shared[];
  launch_dependents();
  const TokenTile tile(p, blockIdx.x / rank_blocks);
  const int rank_tiles = static_cast<int>(blockDim.x) / kWarpgroupThreads * kRankTiles;
  const auto make_row = [&](int t) {
    const int token = tile.token(t, p.num_tokens);
    return ShrinkRow{token, token};
  };
  const PartialLayout layout(p);
  large_m_shrink<T, kRankTiles>(
      static_cast<const T*>(p.x), p.x_stride, p.in_features,
      module_of_lane(p.weights, tile.slot, p.num_slices), blockIdx.x % rank_blocks * rank_tiles,
      KTiles(p.in_features, p.plan.k_tiles_per_split * splits_per_block, blockIdx.y),
      p.plan.k_tiles_per_split / ARIL_K_TILES_PER_SLAB, make_row,
      p.partials + blockIdx.y * splits_per_block * layout.partial_stride, layout, stages_shared);
}

}  // namespace aril::detail
