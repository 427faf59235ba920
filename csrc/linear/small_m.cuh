// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Few tokens in bf16 and f16: shrink and expand in one launch, with mma.sync.
//
// A block of shrink has a tile of 16 tokens, 16 ranks and a group of lanes; each of its 8 warps
// sums up a lane for 8 of the ranks. A block of expand has a tile of tokens and some outputs of a
// slice, 32 at a time for each warp. Weights are on their way to shared memory before a block waits
// for predecessors; what is left then is x, two short products with a trip through L2 between them,
// and y.
//
// Expand waits for shrink through the mailbox (mailbox.cuh). Blocks of shrink come first in the
// grid, and wait for nobody.
#pragma once

#include "../device/descriptor.cuh"
#include "../device/mailbox.cuh"
#include "../device/product.cuh"
#include "../device/vec.cuh"
#include "../ptx/async.cuh"
#include "../ptx/mma.cuh"
#include "../ptx/pdl.cuh"

namespace aril::detail {

constexpr int kSmallMWarps = ARIL_WARPS;
constexpr int kSmallMThreads = 32 * kSmallMWarps;
constexpr int kSmallMRankTiles = kSmallMWarps / ARIL_K_TILES_PER_SLAB;  // 8 ranks each, of a block
constexpr int kOutsPerUnit = ARIL_OUT_UNIT;

// A grid for few tokens: `shrink` blocks, then those of expand.
struct SmallMGrid {
  int columns;  // blocks of shrink for a tile and group
  int groups;
  int shrink;
  int outs;    // blocks of expand for a tile
  bool apart;  // shrink was another launch
};

// 8 ranks of one of a slot's modules. Those of all slices stand one after the other.
struct RankTile {
  const char* a;     // in the first lane of features; null if there is no such column
  int k_tile_bytes;  // to the next
  int slice, first_rank, rank;
  int count;  // of all the slot's columns

  // Column `index` of the modules that the first lanes have, by a whole warp.
  __device__ __forceinline__ RankTile(const aril_descriptor& module, int index) {
    static_assert(ARIL_MAX_SLICES <= 8, "three steps");
    const int lane = threadIdx.x % 32;
    const int tiles = ceil_div(module.rank, ARIL_RANK_TILE);
    int end = tiles;
#pragma unroll
    for (int distance = 1; distance < ARIL_MAX_SLICES; distance *= 2) {
      const int before = __shfl_up_sync(0xffffffffu, end, distance);
      if (lane >= distance) end += before;
    }
    count = __shfl_sync(0xffffffffu, end, ARIL_MAX_SLICES - 1);
    const unsigned owner = __ballot_sync(0xffffffffu, index >= end - tiles && index < end);
    slice = owner == 0 ? 0 : __ffs(owner) - 1;
    const int tile_in_slice = index - __shfl_sync(0xffffffffu, end - tiles, slice);
    rank = __shfl_sync(0xffffffffu, module.rank, slice);
    a = reinterpret_cast<const char*>(
        __shfl_sync(0xffffffffu, reinterpret_cast<uintptr_t>(module.a), slice));
    if (owner == 0) {
      a = nullptr;
    } else {
      a += tile_in_slice * kPieceBytes;
    }
    first_rank = tile_in_slice * ARIL_RANK_TILE;
    k_tile_bytes = ceil_div(rank, ARIL_RANK_TILE) * kPieceBytes;
  }
};

// Starts copying features [k, k + 8) of a row of x, zero beyond in_features. Rows that are not
// aligned to 16 bytes are copied on the spot.
template <typename T>
__device__ __forceinline__ void copy_input(void* shared, const T* row, int k, int in_features,
                                           bool aligned) {
  const int valid = max(0, min(in_features - k, Vec<T>::kSize));
  if (aligned) {
    copy_async(shared, valid > 0 ? row + k : row, valid * static_cast<int>(sizeof(T)));
  } else {
    *static_cast<uint4*>(shared) = Vec<T>::load_from_anywhere(row + k, valid, false).bits;
  }
}

constexpr int kSlabFeatures = ARIL_K_TILE * ARIL_K_TILES_PER_SLAB;
constexpr int kSlabRowBytes = kSlabFeatures * 2 + 16;  // of x; eight rows touch every bank once

template <typename T>
__device__ __forceinline__ void small_m_shrink(const aril_linear_args& p, const SmallMGrid& grid,
                                               uint32_t& tag, unsigned char* shared) {
  constexpr int kChains = 4, kSteps = 4;  // of 64 features in a lane, of 16 in a chain
  __shared__ TransactionBarrier barriers[kSmallMWarps];
  __shared__ float2 k_tile_sums[kSmallMWarps][ARIL_TOKENS_PER_TILE * ARIL_RANK_TILE / 2];
  __shared__ int32_t tokens[ARIL_TOKENS_PER_TILE];  // -1 where there is none
  if (threadIdx.x == 0) tag = begin_epoch(p.mailbox);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first_column = blockIdx.x % grid.columns * kSmallMRankTiles;
  const int group = blockIdx.x / grid.columns % grid.groups;
  const TokenTile tile(p, blockIdx.x / grid.columns / grid.groups);
  const RankTile column(module_of_lane(p.weights, tile.slot, p.num_slices),
                        first_column + warp / ARIL_K_TILES_PER_SLAB);
  if (first_column >= column.count) {
    if (is_first_block()) wait_for_predecessors();
    return;
  }
  const int k_tile = group * ARIL_K_TILES_PER_SLAB + warp % ARIL_K_TILES_PER_SLAB;
  const bool active = column.a != nullptr && k_tile * ARIL_K_TILE < p.in_features;
  unsigned char* const piece = shared + warp * kPieceBytes;
  bulk_load(barriers[warp], piece, column.a + int64_t{k_tile} * column.k_tile_bytes,
            active ? kPieceBytes : 0, lane, 32);
  if (threadIdx.x < ARIL_TOKENS_PER_TILE) {
    tokens[threadIdx.x] = tile.token(threadIdx.x, p.num_tokens);
  }
  __syncthreads();
  wait_for_predecessors();

  unsigned char* const x = shared + kSmallMWarps * kPieceBytes;
  {
    constexpr int kVecs = kSlabFeatures / Vec<T>::kSize, kRowsAtOnce = kSmallMThreads / kVecs;
    const T* input = static_cast<const T*>(p.x);
    const bool aligned = is_aligned(input, p.x_stride);
    const int vec = threadIdx.x % kVecs;
#pragma unroll
    for (int i = 0; i < ARIL_TOKENS_PER_TILE / kRowsAtOnce; ++i) {
      const int row = threadIdx.x / kVecs + i * kRowsAtOnce;
      if (row >= tile.count) break;
      if (tokens[row] >= 0) {
        copy_input(x + row * kSlabRowBytes + vec * 16, input + tokens[row] * p.x_stride,
                   group * kSlabFeatures + vec * Vec<T>::kSize, p.in_features, aligned);
      }
    }
    commit_copies();
    wait_for_copies<0>();
  }
  __syncthreads();
  float sums[kChains][4] = {};
  if (active) {
    // Rows of x without a token hold anything: their sums go nowhere.
    const int row = min(lane % 16, min(p.num_tokens, ARIL_TOKENS_PER_TILE) - 1);
    const unsigned char* const x_row =
        x + row * kSlabRowBytes + warp % ARIL_K_TILES_PER_SLAB * ARIL_K_TILE * 2 + lane / 16 * 16;
    const unsigned char* const a_row = piece + lane * 16;
    barriers[warp].wait(0);
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
  k_tile_sums[warp][lane] = make_float2(sums[0][0], sums[0][1]);
  k_tile_sums[warp][32 + lane] = make_float2(sums[0][2], sums[0][3]);
  __syncthreads();
  // A thread for each token and rank.
  constexpr int kSums = ARIL_TOKENS_PER_TILE * ARIL_RANK_TILE;
  static_assert(kSmallMRankTiles * kSums == kSmallMThreads);
  const int i = threadIdx.x % kSums, token = tokens[i / ARIL_RANK_TILE];
  if (column.a == nullptr || token < 0) return;
  float sum = 0.0f;
#pragma unroll
  for (int l = 0; l < ARIL_K_TILES_PER_SLAB; ++l) {
    sum += reinterpret_cast<const float*>(
        k_tile_sums[threadIdx.x / kSums * ARIL_K_TILES_PER_SLAB + l])[i];
  }
  const int rank = column.first_rank + i % ARIL_RANK_TILE;
  const PartialLayout partials(p);
  store_tagged(tagged_words(p.mailbox) + group * partials.partial_stride +
                   token * partials.token_stride + column.slice * partials.slice_stride + rank,
               rank < column.rank ? sum : 0.0f, tag);
}

// A token's v: shrink's sums of groups, as soon as they are there.
struct MailboxSums {
  const uint64_t* first_partial;
  PartialLayout partials;
  int groups;
  bool apart;
  uint32_t tag;

  __device__ __forceinline__ MailboxSums(void* mailbox, const PartialLayout& partials, int groups,
                                         bool apart, int slice, uint32_t tag)
      : first_partial(tagged_words(mailbox) + slice * partials.slice_stride),
        partials(partials),
        groups(groups),
        apart(apart),
        tag(tag) {}

  __device__ __forceinline__ bool lacks(int) const { return false; }

  // Two spans' sums of ranks r and r + 1, from group `first_group` up to `last_group`. By a whole
  // warp: where some lanes go on while others wait, they wait for microseconds.
  __device__ __forceinline__ void load_spans(float2 (&spans)[2], const uint64_t* source,
                                             int first_group, int last_group) const {
    constexpr int kAtOnce = 2 * ARIL_K_SLABS_PER_SPAN;
    TaggedPair sums[kAtOnce];
    PollLimit polls;
    bool all;
    do {
      polls.count();
      all = true;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        sums[i] = {0.0f, tag, 0.0f, tag};
        if (first_group + i < last_group) {
          sums[i] = load_tagged(source + (first_group + i) * partials.partial_stride);
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) all = all && sums[i].tag0 == tag && sums[i].tag1 == tag;
    } while (!apart && !__all_sync(0xffffffffu, all));
#pragma unroll
    for (int span = 0; span < 2; ++span) {
      spans[span] = make_float2(0.0f, 0.0f);
#pragma unroll
      for (int i = 0; i < ARIL_K_SLABS_PER_SPAN; ++i) {
        const TaggedPair& s = sums[span * ARIL_K_SLABS_PER_SPAN + i];
        spans[span] = spans[span] + make_float2(s.value0, s.value1);
      }
    }
  }

  // Ranks r and r + 1 of a token, by kTeam neighbouring threads of whole warps; zero for token -1.
  template <int kTeam>
  __device__ __forceinline__ float2 load2(int token, int r) const {
    constexpr int kAtOnce = 2 * ARIL_K_SLABS_PER_SPAN;
    const uint64_t* source = first_partial + token * partials.token_stride + r;
    const int last_group = token < 0 ? 0 : groups;
    const int member = static_cast<int>(threadIdx.x) % kTeam;
    float2 total = make_float2(0.0f, 0.0f);
    for (int first = 0; first < groups; first += kTeam * kAtOnce) {
      float2 spans[2];
      load_spans(spans, source, first + member * kAtOnce, last_group);
      if constexpr (kTeam == 1) {
        total = total + spans[0] + spans[1];
      } else {
#pragma unroll
        for (int i = 0; i < 2 * kTeam; ++i) {
          total = total + make_float2(__shfl_sync(0xffffffffu, spans[i % 2].x, i / 2, kTeam),
                                      __shfl_sync(0xffffffffu, spans[i % 2].y, i / 2, kTeam));
        }
      }
    }
    return total;
  }
};

// Adds B v to a block's outputs, for `count` rows, which make_row(t) gives. Once predecessors have
// ended, v.load2(row, r) gives ranks r and r + 1 of v, not yet scaled. Rows that v lacks are left
// alone. B is brought to shared memory if kStaged, otherwise read where it is.
template <typename T, bool kStaged, typename MakeRow, typename MakeV>
__device__ __forceinline__ void small_m_expand(int count, const MakeRow& make_row,
                                               const aril_descriptor& module,
                                               const BlockOuts<T>& outs, unsigned char* shared,
                                               const MakeV& make_v) {
  constexpr int kAhead = 2;  // units whose y is on its way
  __shared__ TransactionBarrier barrier;
  __shared__ ExpandRow rows[ARIL_TOKENS_PER_TILE];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const int rank_tiles = ceil_div(module.rank, ARIL_RANK_TILE);
  const int steps = ceil_div(module.rank, kRanksPerStep);
  const int out_tile_bytes = rank_tiles * ARIL_OUT_TILE * 16;
  // B, then v's operands, [steps][terms].
  const int b_bytes = kStaged ? ceil_div(outs.count, ARIL_OUT_TILE) * out_tile_bytes : 0;
  uint4* const v_operands = reinterpret_cast<uint4*>(shared + b_bytes);
  const char* const b =
      static_cast<const char*>(module.b) + int64_t{outs.first / ARIL_OUT_TILE} * out_tile_bytes;
  if constexpr (kStaged) bulk_load(barrier, shared, b, b_bytes, threadIdx.x, kSmallMThreads);
  if (threadIdx.x < ARIL_TOKENS_PER_TILE) rows[threadIdx.x] = make_row(threadIdx.x);
  __syncthreads();
  wait_for_predecessors();

  const int units = ceil_div(outs.count, kOutsPerUnit);
  const bool aligned = outs.step == 1 && is_aligned(outs.y, outs.y_stride);
  T* const y = outs.y + outs.first * outs.step;
  OutVec<T> bases[kAhead][2];
  const auto for_outs = [&](int unit, auto f) {
    const int out = unit * kOutsPerUnit + 8 * q;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = unit < units ? rows[g + 8 * half].y : -1;
      if (row >= 0) {
        f(half, y + row * outs.y_stride + out * outs.step, outs.count - out, rows[g + 8 * half].v);
      }
    }
  };
  const auto load_bases = [&](OutVec<T>(&bases)[2], int unit) {
    for_outs(unit, [&](int half, T* y, int valid, int) {
      if (!outs.overwrites) bases[half].load(y, valid, aligned);
    });
  };
#pragma unroll
  for (int i = 0; i < kAhead; ++i) load_bases(bases[i], warp + i * kSmallMWarps);

  // Four threads bring together two ranks of a token's v if that leaves none idle, otherwise one;
  // eight such pairs are 16 ranks.
  const auto v = make_v();
  constexpr int kTeam = 4, kPairs = kRanksPerStep / 2;
  const auto gather = [&](auto team_size) {
    constexpr int kMembers = decltype(team_size)::value;
    constexpr int kInWarp = 32 / (kPairs * kMembers);  // tokens and steps
    const int pair = threadIdx.x / kMembers % kPairs * 2;
    for (int first = warp * kInWarp; first < count * steps; first += kSmallMWarps * kInWarp) {
      const int i = first + lane / (kPairs * kMembers);
      const bool valid = i < count * steps;
      const int t = valid ? i / steps : 0, step = valid ? i - t * steps : 0;
      const int r = step * kRanksPerStep + pair;
      const bool has = valid && r < rank_tiles * ARIL_RANK_TILE;
      float2 v_pair = v.template load2<kMembers>(has ? rows[t].v : -1, r);
      if (valid && threadIdx.x % kMembers == 0) {
        v_pair = make_float2(v_pair.x * rows[t].factor, v_pair.y * rows[t].factor);
        store_v(v_operands + step * kTerms * 32, t, pair, v_pair);
      }
    }
  };
  if (count * steps * kPairs * kTeam <= kSmallMThreads) {
    gather(std::integral_constant<int, kTeam>{});
  } else {
    gather(std::integral_constant<int, 1>{});
  }
  if constexpr (kStaged) wait_for_copies<0>();
  __syncthreads();
  if constexpr (kStaged) barrier.wait(0);
  const auto cores_of = [&](const auto* tile) {
    if constexpr (kStaged) {
      return ldmatrix_x4(tile + lane * 16);
    } else {
      const auto* words = reinterpret_cast<const uint32_t*>(tile) + lane;
      return make_uint4(words[0], words[32], words[64], words[96]);
    }
  };

  for (int first = warp; first < units; first += kAhead * kSmallMWarps) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int unit = first + i * kSmallMWarps;
      if (unit >= units) break;
      constexpr int kHalfBytes = kOutsPerUnit * 16, kTileBytes = 2 * kHalfBytes;
      const char* tiles = (kStaged ? reinterpret_cast<const char*>(shared) : b) +
                          int64_t{unit / 2} * out_tile_bytes + unit % 2 * kHalfBytes;
      float deltas[4][4] = {};
#pragma unroll 1
      for (int step = 0; step < steps; ++step) {
        uint4 terms[kTerms];
#pragma unroll
        for (int term = 0; term < kTerms; ++term) {
          terms[term] = v_operands[(step * kTerms + term) * 32 + lane];
        }
        const uint4 b0 = cores_of(tiles + 2 * step * kTileBytes);
        uint4 b1 = make_uint4(0, 0, 0, 0);
        if (2 * step + 1 < rank_tiles) b1 = cores_of(tiles + (2 * step + 1) * kTileBytes);
        mma_terms<T>(deltas[0], terms, b0.x, b1.x);
        mma_terms<T>(deltas[1], terms, b0.y, b1.y);
        mma_terms<T>(deltas[2], terms, b0.z, b1.z);
        mma_terms<T>(deltas[3], terms, b0.w, b1.w);
      }
      for_outs(unit, [&](int half, T* y, int valid, int v_row) {
        if (!v.lacks(v_row)) {
          bases[i][half].add(y, outs.step, deltas, half, valid, aligned, outs.overwrites);
        }
      });
      load_bases(bases[i], unit + kAhead * kSmallMWarps);
    }
  }
}

inline bool is_staged(const aril_weights& weights) { return weights.max_rank <= ARIL_STAGED_RANK; }

__host__ __device__ __forceinline__ int rank_tiles(const aril_weights& weights) {
  return ceil_div(weights.max_rank, ARIL_RANK_TILE);
}

__host__ __device__ __forceinline__ int rank_steps(const aril_weights& weights) {
  return ceil_div(weights.max_rank, kRanksPerStep);
}

// Of a block of shrink: A, and some rows of x.
__host__ __device__ __forceinline__ int small_m_shrink_smem_bytes(int rows) {
  return kSmallMWarps * kPieceBytes + rows * kSlabRowBytes;
}

// Of a block of expand: B, and v's operands.
__host__ __device__ __forceinline__ int small_m_expand_smem_bytes(const aril_weights& weights,
                                                                  int outs_per_block, bool staged) {
  const int out_tiles = ceil_div(outs_per_block, ARIL_OUT_TILE);
  const int b = out_tiles * ARIL_OUT_TILE * ceil_div(weights.max_rank, ARIL_RANK_TILE) * 16;
  return (staged ? b : 0) + rank_steps(weights) * kTerms * 32 * 16;
}

// Blocks of a multiprocessor, as far as registers go.
template <typename T>
constexpr int small_m_blocks(bool staged) {
#if __CUDA_ARCH__ >= 900
  // f16 has B's terms to hold, too.
  return staged && std::is_same_v<T, __nv_bfloat16> ? 3 : 2;
#else
  return 2;
#endif
}

template <typename T, bool kStaged>
__global__ void __launch_bounds__(kSmallMThreads, small_m_blocks<T>(kStaged))
    small_m_kernel(const __grid_constant__ aril_linear_args p,
                   const __grid_constant__ SmallMGrid grid) {
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ uint32_t tag;
  if (static_cast<int>(blockIdx.x) < grid.shrink) {
    small_m_shrink<T>(p, grid, tag, shared);
    if (!is_first_block()) return;
    __syncthreads();
    return clear_stale_words(p.mailbox, p.mailbox_bytes, tag);
  }
  if (grid.apart) {
    launch_dependents();
  } else if (threadIdx.x == 0) {
    tag = begin_epoch(p.mailbox);
  }
  const int index = blockIdx.x - grid.shrink;
  const TokenTile tile(p, index / grid.outs);
  int slice;
  const BlockOuts<T> outs(p, index % grid.outs, p.outs_per_block, slice);
  const aril_descriptor module = module_of(p.weights, tile.slot, slice);
  if (!outs.begin(tile, module, p.num_tokens)) return;
  small_m_expand<T, kStaged>(tile.count, tile.expand_rows(module, p), module, outs, shared, [&] {
    return MailboxSums(p.mailbox, PartialLayout(p), grid.groups, grid.apart, slice, tag);
  });
}

}  // namespace aril::detail
