// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Expand of wide tiles (64 rows) in bf16 and f16, at ranks up to ARIL_STAGED_RANK. Products are
// wgmma's on sm_90a in bf16, otherwise mma.sync's, with the same bits.
//
// A block has a wide tile and a range of outputs, in chunks of 128. B and y of a chunk share a
// stage of shared memory; bulk copies bring them, and y back, in pieces of 256 bytes per row, so no
// y waits in registers. v's terms are converted once per block. Warpgroup i multiplies output tile
// i of a chunk. Before sm_90 cp.async brings B, and loads and stores move y.
//
// Bound: the bytes of y in and out; B comes from L2 for all wide tiles of a slot but the first.
//
// large_m_expand() is one long body: moving the addition to y out of it changes the machine code.
// Loops outside the products are not unrolled: short code starts sooner.
#pragma once

#include "../device/descriptor.cuh"
#include "../device/product.cuh"
#include "../device/reduction.cuh"
#include "../device/token_tile.cuh"
#include "../device/vec.cuh"
#include "../ptx/async.cuh"
#include "../ptx/pdl.cuh"
#include "large_m_shrink.cuh"

namespace aril::detail {

constexpr int kChunkOuts = 2 * ARIL_OUT_TILE;
constexpr int kChunkRowBytes = kChunkOuts * 2 + 64;  // of y; padded so that 2 rows hit all banks
constexpr int kMaxExpandStages = 4;
#if __CUDA_ARCH__ >= 900
constexpr bool kBulk = true;
#else
constexpr bool kBulk = false;
#endif
constexpr int kExpandThreads = 2 * kWarpgroupThreads;
// Blocks on a multiprocessor, as far as registers allow. In f16 both terms of B take registers.
template <typename T>
constexpr int kLargeMExpandBlocks = std::is_same_v<T, __nv_bfloat16> ? 3 : 2;

// Whether the terms of v stand behind the stages instead of before them. Of an odd number of rank
// tiles, the last wgmma reads B's last tile twice, which compute-sanitizer takes for a read of what
// is behind it. Behind the last stage that must be shared memory, too.
template <typename T>
constexpr bool kTermsLast = std::is_same_v<T, __nv_bfloat16>;

// The least shared memory of a block: the terms of v, and a stage. The plan gives it room for more
// (src/plan/shared_memory.rs).
inline int large_m_expand_smem_bytes(const aril_weights& weights) {
  return rank_steps(weights) * kTerms * kTermBytes + ARIL_WIDE_TILE * kChunkRowBytes +
         kChunkOuts * rank_tiles(weights) * 16;
}

// Copies `count` adjacent outputs. Those that are `whole` move 16 bytes at a time, or in bulk
// copies and not here.
template <typename T>
__device__ __forceinline__ void copy_outs(T* to, const T* from, int count, bool whole) {
  constexpr int kSize = Vec<T>::kSize;
  if (!kBulk && whole) {
    for (int i = 0; i < count; i += kSize) {
      *reinterpret_cast<uint4*>(to + i) = *reinterpret_cast<const uint4*>(from + i);
    }
  } else {
#pragma unroll 1
    for (int i = 0; i < count; ++i) to[i] = from[i];
  }
}

// How many stages fit in so many bytes, one at least. Comparing takes less time than dividing.
__device__ __forceinline__ int stages_in(int bytes, int stage_bytes) {
  int stages = 1;
#pragma unroll
  for (int i = 2; i <= kMaxExpandStages; ++i) stages += i * stage_bytes <= bytes;
  return stages;
}

// The barriers of a block's stages, and the phase that each is in.
class ExpandBarriers {
 public:
  // All threads call it, before any other use.
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

// The row of a wide tile that a thread copies: the first lanes of each warp copy one each. Adjacent
// rows belong to different warps, since a warp issues its bulk copies one after the other.
// ARIL_WIDE_TILE: none. The last thread, which has no row, copies B.
__device__ __forceinline__ int copied_row(int lane) {
  constexpr int kWarps = kExpandThreads / 32;
  return lane < ARIL_WIDE_TILE / kWarps ? lane * kWarps + static_cast<int>(threadIdx.x) / 32
                                        : ARIL_WIDE_TILE;
}

// Where the terms of v have ranks [quad, quad + 4) of a step of row t. Terms are cores
// [steps][kTerms][2][8].
__device__ __forceinline__ uint2* wide_terms_at(unsigned char* terms, int step, int t, int quad) {
  return reinterpret_cast<uint2*>(terms + step * kTerms * kTermBytes + quad / 8 * 1024 + t * 16 +
                                  quad % 8 * 2);
}

// Gathers v of the first `count` rows, scales it, and stores its terms. ranks_of(t, step) gives
// what v.load4() is asked for. A thread gathers four ranks of a step, of kAtOnce rows at once.
template <int kAtOnce, typename V, typename RanksOf>
__device__ __forceinline__ void gather_wide_terms(unsigned char* terms, int count, int steps,
                                                  const RanksOf& ranks_of, const V& v) {
  if (steps == 0) return;
  constexpr int kQuads = kRanksPerStep / 4;
  const int threads_of_row = steps * kQuads;
  const int rows_at_once = kExpandThreads / threads_of_row;
  const int first_row = static_cast<int>(threadIdx.x) / threads_of_row;
  const int thread = static_cast<int>(threadIdx.x) - first_row * threads_of_row;
  const int step = thread / kQuads, rank = thread % kQuads * 4;
  if (first_row >= rows_at_once) return;
  for (int first = first_row; first < count; first += kAtOnce * rows_at_once) {
    int rows[kAtOnce], ranks[kAtOnce];
    float factors[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int t = first + i * rows_at_once;
      const StepRanks of_step = ranks_of(min(t, count - 1), step);
      rows[i] = t < count && rank < of_step.count ? of_step.row : -1;
      ranks[i] = of_step.first + rank;
      factors[i] = of_step.factor;
    }
    float4 sums[kAtOnce];
    v.load4(sums, rows, ranks);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int t = first + i * rows_at_once;
      if (t >= count) break;
      const float4 scaled = rows[i] < 0 ? sums[i] : sums[i] * factors[i];
      uint2* const words = wide_terms_at(terms, step, t, rank);
      uint2 high, low;
      to_bf16_terms(scaled.x, scaled.y, high.x, low.x);
      to_bf16_terms(scaled.z, scaled.w, high.y, low.y);
      words[0] = high;
      words[kTermBytes / 8] = low;
    }
  }
}

// Adds B v to the outputs `outs` of `rows`; those from `count` on are -1. v.load4() gives four
// ranks of some rows, unscaled; v.lacks(row) says that y of a row must stay as it is. As many
// stages as fit in `smem_bytes` are in flight.
template <typename T, typename V>
__device__ __forceinline__ void large_m_expand(int count, const ExpandRow (&rows)[ARIL_WIDE_TILE],
                                               const aril_descriptor& module,
                                               const BlockOuts<T>& outs, unsigned char* shared,
                                               int smem_bytes, ExpandBarriers& barriers,
                                               const V& v) {
  const int warpgroup = threadIdx.x / kWarpgroupThreads, warp = threadIdx.x / 32 % 4;
  const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const int rank_tiles = ceil_div(module.rank, ARIL_RANK_TILE);
  const int steps = ceil_div(module.rank, kRanksPerStep);
  const int out_tile_bytes = rank_tiles * kBTileBytes;
  const int chunks = ceil_div(outs.count, kChunkOuts);
  // The terms of v, and the stages: y, B.
  const int v_bytes = steps * kTerms * kTermBytes;
  unsigned char* const ring = shared + (kTermsLast<T> ? 0 : v_bytes);
  const int outs_bytes = ceil_div(count, 16) * 16 * kChunkRowBytes;  // a warp has 16 rows
  const int stage_bytes = outs_bytes + 2 * out_tile_bytes;
  const int stages = stages_in(smem_bytes - v_bytes, stage_bytes);
  unsigned char* const terms = shared + (kTermsLast<T> ? stages * stage_bytes : 0);
  const char* b =
      static_cast<const char*>(module.b) + int64_t{outs.first / ARIL_OUT_TILE} * out_tile_bytes;
  const int own_row = copied_row(lane);
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
      copy_outs(to, row + chunk * kChunkOuts, outs_of(chunk), whole);
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
      copy_outs(row + chunk * kChunkOuts, from, outs_of(chunk), whole);
    }
  };
#pragma unroll 1
  for (int i = 0; i < stages - 1; ++i) fetch_weights(i, i);
  wait_for_predecessors();
  if (row != nullptr && v.lacks(own.v)) row = nullptr;
#pragma unroll 1
  for (int i = 0; i < stages - 1; ++i) fetch_outs(i, i);

  const auto ranks_of = [&](int t, int step) {
    const int first = step * kRanksPerStep;
    return StepRanks{rows[t].v, first, rank_tiles * ARIL_RANK_TILE - first, rows[t].factor};
  };
  gather_wide_terms<2>(terms, count, steps, ranks_of, v);
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
    multiply_out_tile<T>(deltas, terms, stage + outs_bytes + warpgroup * out_tile_bytes,
                         rank_tiles);
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

// Grid: wide tiles x blocks of outputs.
template <typename T>
__global__ void __launch_bounds__(kExpandThreads, kLargeMExpandBlocks<T>)
    large_m_expand_kernel(const __grid_constant__ aril_linear_args p, int out_blocks,
                          int smem_bytes) {
  extern __shared__ __align__(1024) unsigned char stages_shared[];
  __shared__ TransactionBarrier barriers_shared[kMaxExpandStages];
  __shared__ ExpandRow rows[ARIL_WIDE_TILE];
  launch_dependents();
  const TokenTile tile(p, blockIdx.x / out_blocks);
  int slice;
  const BlockOuts<T> outs(p, blockIdx.x % out_blocks, p.plan.outs_per_block, slice);
  const aril_descriptor module = module_of(p.weights, tile.slot, slice);
  if (!outs.begin(tile, module, p.num_tokens)) return;
  if (threadIdx.x < ARIL_WIDE_TILE) rows[threadIdx.x] = tile.expand_rows(module, p)(threadIdx.x);
  ExpandBarriers barriers(barriers_shared);
  large_m_expand<T>(tile.count, rows, module, outs, stages_shared, smem_bytes, barriers,
                    PartialSums(p, slice));
}

}  // namespace aril::detail
