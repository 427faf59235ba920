// SPDX-License-Identifier: MIT OR Apache-2.0
//
// A projection of experts in bf16 and f16: shrink and expand in one launch, with mma.sync.
//
// Most tiles have one or two routes, so this is about streaming weights, from global memory to
// registers. A tile has up to 8 routes of one slot to one expert, and where there are many routes
// up to 16, of which each lane has two. The first block groups the routes where no one has, and
// publishes how many tiles there are beside the launch's tag: all others wait for it. Four warps of
// shrink have 8 ranks of a slice and a group of lanes, one each, and meet to add these up; a warp
// of expand has some outputs of a slice. They have one tile after the other. Expand takes v from
// the exchange as blocks of few.cuh do. Where all experts share A, and x is by token, A x is summed
// up once for a token, and expand reads it for all its routes.
//
// Nothing is fetched before the wait: what the router chose is not known before.
#pragma once

#include "../common/mma.cuh"
#include "../common/pdl.cuh"
#include "few.cuh"
#include "group.cuh"
#include "product.cuh"
#include "tile.cuh"

namespace aril::detail {

constexpr int kExpertsWarps = 8;
constexpr int kExpertsThreads = 32 * kExpertsWarps;

struct ExpertsGrid {
  int first_shrink;  // blocks before those of shrink: the one that groups, if any
  int shrink_blocks;
  int rank_tiles, groups;  // a slice's pieces of shrink
  int outs;                // a slice's pieces of expand
};

__device__ __forceinline__ Planes planes_of(const aril_experts_args& p) {
  const int64_t num_routes = int64_t{p.num_tokens} * p.top_k.top_k;
  return Planes(num_routes + (p.from_tokens ? p.num_tokens : 0), p.num_slices, p.weights.max_rank);
}

// How many tiles there are, as soon as they are grouped.
class GroupedTiles {
 public:
  // With `all`, those that have no slot, too.
  __device__ __forceinline__ GroupedTiles(const aril_experts_args& p, const ExpertsGrid& grid,
                                          uint32_t tag, bool all) {
    if (grid.first_shrink == 0) {
      count = __ldcg(p.groups.num_tiles + all);
      return;
    }
    // One thread of a block looks: thousands of warps would hold each other up.
    __shared__ int num_tiles;
    if (threadIdx.x == 0) {
      TaggedSums sums;
      do sums = load_tagged(word(p));
      while (sums.tag0 != tag);
      __threadfence();
      const uint32_t both = __float_as_uint(sums.sum0);
      num_tiles = all ? both >> 16 : both & 0xffff;
    }
    __syncthreads();
    count = num_tiles;
  }

  // By the block that groups.
  __device__ __forceinline__ static void publish(const aril_experts_args& p, uint32_t tag,
                                                 const int2& num_tiles) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x != 0) return;
    p.groups.num_tiles[0] = num_tiles.x;
    p.groups.num_tiles[1] = num_tiles.y;
    store_tagged(word(p), __uint_as_float(num_tiles.y << 16 | num_tiles.x), tag);
  }

  __device__ __forceinline__ static int4 tile(const aril_experts_args& p, int i) {
    return __ldcg(reinterpret_cast<const int4*>(p.groups.tiles) + i);
  }

  int count;

 private:
  __device__ __forceinline__ static void* word(const aril_experts_args& p) {
    return static_cast<char*>(p.exchange) + ARIL_EXCHANGE_HEADER / 2;
  }
};

// What a warp needs of a tile, in the order in which it is loaded: each step takes what the one
// before has loaded, and leaves its own loads on their way.
template <int kHalves>
struct TileLoads {
  static constexpr int kOfTokens = -1;  // for an expert: a tile of tokens

  // Slot, expert, where its routes or tokens begin, how many; a slot of -1 is none.
  int4 tile = {-1, 0, 0, 0};
  aril_descriptor own = {}, shared = {};
  // Rows t and t + 8 of the tile: an aril_route_entry, or, in a tile of tokens, the token.
  int4 routes[kHalves];

  // The descriptors of a slice, and the lane's rows.
  __device__ __forceinline__ void load_all(const aril_experts_args& p, int slice, int t) {
    own = shared = {};
    const bool has_slot = tile.x >= 0 && tile.x < p.weights.num_slots;
    if (has_slot && tile.y < p.top_k.num_experts) {
      const aril_descriptor* table =
          p.weights.table + int64_t{tile.x} * p.weights.num_entries + slice;
      own = table[(1 + tile.y) * p.num_slices];
      if (p.from_tokens && tile.y != kOfTokens) shared = *table;
    }
#pragma unroll
    for (int half = 0; half < kHalves; ++half, t += 8) {
      routes[half] = {-1, -1, 0, 0};
      if (t >= tile.w) continue;
      if (tile.y == kOfTokens) {
        routes[half].x = p.routing.tokens[tile.z + t];
      } else {
        routes[half] = __ldcg(reinterpret_cast<const int4*>(p.groups.routes) + tile.z + t);
      }
    }
  }

  // Whether A x of the slice is summed up by token.
  __device__ __forceinline__ bool shares_a(const aril_experts_args& p) const {
    return is_valid(p, shared) && shared.a != nullptr;
  }

  // The slice's rank; 0 where the slot has no such module.
  __device__ __forceinline__ int rank(const aril_experts_args& p) const {
    return is_valid(p, own) ? own.rank : 0;
  }

 private:
  __device__ __forceinline__ static bool is_valid(const aril_experts_args& p,
                                                  const aril_descriptor& module) {
    return module.rank > 0 && module.rank <= p.weights.max_rank;
  }
};

// Whether all slots of the batch have the same A for all experts, so that there is nothing to sum
// up by route. By a whole warp.
__device__ __forceinline__ bool all_share_a(const aril_experts_args& p, int slice) {
  const int tiles = *p.routing.tiles.count;
  bool all = true;
  for (int i = threadIdx.x % 32; i < tiles; i += 32) {
    const int slot = p.routing.tiles.all[i].slot;
    if (slot < 0 || slot >= p.weights.num_slots) continue;
    const aril_descriptor shared = module_of(p.weights, slot, slice);
    all = all && shared.rank > 0 && shared.a != nullptr;
  }
  return __all_sync(0xffffffffu, all);
}

// Four bytes that are read once.
__device__ __forceinline__ uint32_t load_once(const void* pointer) {
  uint32_t word;
  asm volatile("ld.global.L1::no_allocate.b32 %0, [%1];" : "=r"(word) : "l"(pointer));
  return word;
}

// Two neighbouring elements; zero at and beyond `valid`.
template <typename T>
__device__ __forceinline__ uint32_t load_pair(const T* source, int valid, bool aligned) {
  uint32_t word = 0;
  if (aligned && valid >= 2) {
    asm volatile("ld.global.b32 %0, [%1];" : "=r"(word) : "l"(source));
  } else {
    T pair[2];
    for (int i = 0; i < 2; ++i) pair[i] = i < valid ? source[i] : from_float<T>(0.0f);
    memcpy(&word, pair, sizeof(word));
  }
  return word;
}

constexpr int kChainFeatures = 64;
constexpr int kChainCores = kChainFeatures / ARIL_CORE;
constexpr int kChains = ARIL_LANE_FEATURES / kChainFeatures;
constexpr int kShrinkSets = kExpertsWarps / ARIL_LANES_PER_GROUP;

// Lets the warps of a set meet.
__device__ __forceinline__ void meet(int set) {
  asm volatile("bar.sync %0, %1;" ::"r"(set + 1), "n"(ARIL_LANES_PER_GROUP * 32) : "memory");
}

// A set of warps has 8 ranks of a slice and a group of lanes, each warp one of these.
template <typename T, int kHalves>
__device__ __forceinline__ void experts_shrink(const aril_experts_args& p, const ExpertsGrid& grid,
                                               uint32_t tag) {
  constexpr int kInputsAhead = std::is_same_v<T, __nv_bfloat16> && kHalves == 1 ? 2 : 1;  // chains
  constexpr int kRows = 8 * kHalves, kParts = ARIL_TOKENS_PER_TILE / kRows;
  using Loads = TileLoads<kHalves>;
  __shared__ float2 lane_sums[2][kExpertsWarps][kHalves][32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const int set = warp / ARIL_LANES_PER_GROUP;
  const int index = (blockIdx.x - grid.first_shrink) * kShrinkSets + set;
  const int pieces = p.num_slices * grid.rank_tiles * grid.groups;
  const int stride = grid.shrink_blocks * kShrinkSets / pieces;  // of tiles
  const int slice = index % pieces % p.num_slices, piece = index % pieces / p.num_slices;
  const int group = piece % grid.groups, rank_tile = piece / grid.groups;
  const int sum_lane = group * ARIL_LANES_PER_GROUP + warp % ARIL_LANES_PER_GROUP;
  const int num_routes = p.num_tokens * p.top_k.top_k;
  const T* const input = static_cast<const T*>(p.x) + sum_lane * ARIL_LANE_FEATURES + 2 * q;
  const int features = p.in_features - sum_lane * ARIL_LANE_FEATURES - 2 * q;
  const bool has_lane = sum_lane * ARIL_LANE_FEATURES < p.in_features;
  const bool aligned = (reinterpret_cast<uintptr_t>(input) | p.x_stride * sizeof(T)) % 4 == 0;
  const Planes planes = planes_of(p);
  uint64_t* const plane = tagged_planes(p.exchange) + group * planes.plane_stride +
                          slice * planes.slice_stride + rank_tile * ARIL_RANK_TILE + 2 * q;
  const int token_tiles = p.from_tokens ? *p.routing.tiles.count * kParts : 0;
  const bool has_routes = !p.from_tokens || !all_share_a(p, slice);
  const int num_tiles = GroupedTiles(p, grid, tag, false).count;
  const int last = token_tiles + (has_routes ? num_tiles : 0);
  if (index / pieces >= stride) return;

  const auto load_tile = [&](int i) {
    if (i >= last) return make_int4(-1, 0, 0, 0);
    if (i >= token_tiles) return GroupedTiles::tile(p, i - token_tiles);
    const aril_tile& tile = p.routing.tiles.all[i / kParts];
    const int first = i % kParts * kRows;
    return make_int4(tile.slot, Loads::kOfTokens, tile.begin + first,
                     min(tile.count - first, kRows));
  };
  // What the warp streams for a tile.
  struct Source {
    int rank;             // 0: the set has nothing to do
    const char* a;        // null likewise, for the warp
    const T* x[kHalves];  // null if the lane has no such row
    int v_row[kHalves];
  };
  const auto source_of = [&](const Loads& loads) {
    Source source = {0, nullptr, {}, {}};
    const int rank = loads.rank(p);
    if (rank_tile * ARIL_RANK_TILE >= rank || loads.own.a == nullptr || loads.shares_a(p)) {
      return source;
    }
    source.rank = rank;
    if (has_lane) {
      const int64_t lane_bytes = ceil_div(rank, ARIL_RANK_TILE) * kPieceBytes;
      source.a = static_cast<const char*>(loads.own.a) + sum_lane * lane_bytes +
                 rank_tile * kPieceBytes + lane * 4;
    }
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const int4& route = loads.routes[half];
      int row = -1;
      source.v_row[half] = -1;
      if (loads.tile.y == Loads::kOfTokens) {
        if (route.x >= 0 && route.x < p.num_tokens) row = route.x;
        if (row >= 0) source.v_row[half] = num_routes + row;
      } else if (route.x >= 0) {
        row = p.from_tokens ? route.x / p.top_k.top_k : route.y;
        source.v_row[half] = route.x;
      }
      source.x[half] = row >= 0 && has_lane ? input + row * p.x_stride : nullptr;
    }
    return source;
  };
  uint32_t weights[kChains][kChainCores] = {}, inputs[kInputsAhead][kHalves][kChainCores] = {};
  const auto fetch_weights = [&](const Source& source, int chain) {
    if (source.a == nullptr) return;
#pragma unroll
    for (int core = 0; core < kChainCores; ++core) {
      weights[chain][core] = load_once(source.a + (chain * kChainCores + core) * kCoreElems * 2);
    }
  };
  const auto fetch_inputs = [&](const Source& source, int chain) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
#pragma unroll
      for (int core = 0; core < kChainCores; ++core) {
        const int k = chain * kChainFeatures + core * ARIL_CORE;
        inputs[chain % kInputsAhead][half][core] =
            source.x[half] == nullptr ? 0 : load_pair(source.x[half] + k, features - k, aligned);
      }
    }
  };

  Loads loads;
  loads.tile = load_tile(index / pieces);
  loads.load_all(p, slice, g);
  int4 after = load_tile(index / pieces + stride);
  Source source = source_of(loads);
#pragma unroll
  for (int chain = 0; chain < kChains; ++chain) fetch_weights(source, chain);
#pragma unroll
  for (int chain = 0; chain < kInputsAhead; ++chain) fetch_inputs(source, chain);
  loads.tile = after;
  loads.load_all(p, slice, g);
  after = load_tile(index / pieces + 2 * stride);
  int parity = 0;
  for (int i = index / pieces; i < last; i += stride) {
    const Source next = source_of(loads);
    loads.tile = after;
    loads.load_all(p, slice, g);
    after = load_tile(i + 3 * stride);
    float2 lane_sum[kHalves] = {};
#pragma unroll
    for (int chain = 0; chain < kChains; ++chain) {
      const auto& x = inputs[chain % kInputsAhead];
      float sums[4] = {};
#pragma unroll
      for (int core = 0; core < kChainCores; core += 2) {
        const uint4 rows = kHalves == 1 ? make_uint4(x[0][core], 0, x[0][core + 1], 0)
                                        : make_uint4(x[0][core], x[kHalves - 1][core],
                                                     x[0][core + 1], x[kHalves - 1][core + 1]);
        mma_m16n8k16<T>(sums, rows, weights[chain][core], weights[chain][core + 1]);
      }
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        lane_sum[half] = lane_sum[half] + make_float2(sums[2 * half], sums[2 * half + 1]);
      }
      fetch_weights(next, chain);
      if (chain + kInputsAhead < kChains) {
        fetch_inputs(source, chain + kInputsAhead);
      } else {
        fetch_inputs(next, chain + kInputsAhead - kChains);
      }
    }
    if (source.rank > 0) {
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        lane_sums[parity][warp][half][lane] =
            source.a == nullptr ? make_float2(0.0f, 0.0f) : lane_sum[half];
      }
      meet(set);
      // The set's first warps take a half each.
      const int half = warp % ARIL_LANES_PER_GROUP;
      if (half < kHalves) {
        const int v_row = half == 0 ? source.v_row[0] : source.v_row[kHalves - 1];
        float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
        for (int l = 0; l < ARIL_LANES_PER_GROUP; ++l) {
          sum = sum + lane_sums[parity][set * ARIL_LANES_PER_GROUP + l][half][lane];
        }
        const int r = rank_tile * ARIL_RANK_TILE + 2 * q;
        if (v_row >= 0) {
          store_tagged2(plane + v_row * planes.token_stride, r < source.rank ? sum.x : 0.0f,
                        r + 1 < source.rank ? sum.y : 0.0f, tag);
        }
      }
      parity ^= 1;
    }
    source = next;
  }
}

// v of a row, ranks r, r + 1, r + 8 and r + 9, once shrink has left them; zero for row -1. By a
// whole warp.
__device__ __forceinline__ float4 load_v(const uint64_t* plane, const Planes& planes, int groups,
                                         int row, bool has_second, uint32_t tag) {
  constexpr int kAtOnce = 2;
  float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f), span = total;
  const uint64_t* source = plane + row * planes.token_stride;
  for (int first = 0; first < groups; first += kAtOnce) {
    TaggedSums sums[kAtOnce][2];
    bool all;
    do {
      all = true;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          sums[i][half] = {0.0f, tag, 0.0f, tag};
          if (row >= 0 && first + i < groups && (half == 0 || has_second)) {
            sums[i][half] =
                load_tagged(source + (first + i) * planes.plane_stride + half * ARIL_RANK_TILE);
          }
          all = all && sums[i][half].tag0 == tag && sums[i][half].tag1 == tag;
        }
      }
    } while (!__all_sync(0xffffffffu, all));
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      span = span + make_float4(sums[i][0].sum0, sums[i][0].sum1, sums[i][1].sum0, sums[i][1].sum1);
    }
    if ((first + kAtOnce) % ARIL_GROUPS_PER_SPAN != 0 && first + kAtOnce < groups) continue;
    total = total + span;
    span = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
  return total;
}

// The outputs that the warps of expand have, where they have them of `last` tiles or tokens: more
// of them instead of several tiles.
class ExpandShare {
 public:
  __device__ __forceinline__ ExpandShare(const aril_experts_args& p, const ExpertsGrid& grid,
                                         int last) {
    constexpr int kMaxUnits = 8;
    const int first_block = grid.first_shrink + grid.shrink_blocks;
    const int warps = (gridDim.x - first_block) * kExpertsWarps;
    const int at_once = warps / ceil_div(p.out_features, p.outs_per_block);
    const int outs = p.outs_per_block * min(max(ceil_div(last, at_once), 1), kMaxUnits);
    const int pieces = ceil_div(p.out_features, outs);
    const int index = (blockIdx.x - first_block) * kExpertsWarps + threadIdx.x / 32;
    stride = warps / pieces;
    // Warps that are left over have nothing.
    first = index / pieces < stride ? index / pieces : last;
    begin = index % pieces * outs;
    end = min(begin + outs, p.out_features);
  }

  int first, stride;  // of the warp's tiles
  int begin, end;     // of its outputs
};

// The terms of v for a step, of a lane.
template <int kHalves>
struct LaneTerms {
  uint2 high[kHalves], low[kHalves];
};

template <typename T, int kHalves>
__device__ __forceinline__ void experts_expand(const aril_experts_args& p, const ExpertsGrid& grid,
                                               uint32_t tag, unsigned char* shared) {
  // Steps of units whose B is on its way, as far as registers go.
  constexpr int kAhead = std::is_same_v<T, __nv_bfloat16> && kHalves == 1 ? 4 : 2;
  constexpr int kTileBytes = ARIL_OUT_TILE * ARIL_RANK_TILE * 2;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const int blocks = gridDim.x - grid.first_shrink - grid.shrink_blocks;
  const int pieces = p.num_slices * grid.outs;
  const int stride = blocks * kExpertsWarps / pieces;  // of tiles
  const int index = (blockIdx.x - grid.first_shrink - grid.shrink_blocks) * kExpertsWarps + warp;
  int slice;
  const BlockOuts<T> outs(p, index % pieces, slice);
  const bool aligned = outs.step == 1 && is_aligned(outs.y, outs.y_stride);
  const bool overwrites = p.form == ARIL_WRITE;
  const int num_routes = p.num_tokens * p.top_k.top_k;
  const Planes planes = planes_of(p);
  const uint64_t* const plane = tagged_planes(p.exchange) + slice * planes.slice_stride + 2 * q;
  // A lane's own: its terms, [steps], and y as it was, [units][kHalves].
  const int most_units = p.outs_per_block / kOutsPerUnit;
  using Terms = LaneTerms<kHalves>;
  Terms* const terms = reinterpret_cast<Terms*>(shared) + warp * rank_steps(p.weights) * 32 + lane;
  uint4* const bases = reinterpret_cast<uint4*>(reinterpret_cast<Terms*>(shared) +
                                                kExpertsWarps * rank_steps(p.weights) * 32) +
                       warp * most_units * kHalves * 32 + lane;
  const int last = GroupedTiles(p, grid, tag, overwrites).count;
  if (index / pieces >= stride) return;

  const auto load_tile = [&](int i) {
    return i < last ? GroupedTiles::tile(p, i) : make_int4(-1, 0, 0, 0);
  };
  TileLoads<kHalves> next;
  next.tile = load_tile(index / pieces);
  next.load_all(p, slice, g);
  int4 after = load_tile(index / pieces + stride);
  for (int i = index / pieces; i < last; i += stride) {
    const TileLoads<kHalves> tile = next;
    next.tile = after;
    next.load_all(p, slice, g);
    after = load_tile(i + 2 * stride);
    const int rank_tiles = ceil_div(tile.rank(p), ARIL_RANK_TILE);
    if (rank_tiles == 0 && !overwrites) continue;
    const int steps = ceil_div(rank_tiles, 2), units = ceil_div(outs.count, kOutsPerUnit);

    // B's cores, unit by unit, and step by step.
    uint32_t cores[kAhead][2][4];
    const int out_tile_bytes = rank_tiles * kTileBytes;
    const char* b = static_cast<const char*>(tile.own.b) +
                    int64_t{outs.first / ARIL_OUT_TILE} * out_tile_bytes + lane * 4;
    int fetched_unit = 0, fetched_step = 0;
    const auto fetch = [&](uint32_t(&cores)[2][4]) {
      if (fetched_unit >= units || steps == 0) return;
      const char* from = b + fetched_step * 2 * kTileBytes;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const bool is_there = half == 0 || 2 * fetched_step + 1 < rank_tiles;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          cores[half][j] = is_there ? load_once(from + half * kTileBytes + j * kCoreElems * 2) : 0;
        }
      }
      if (++fetched_step < steps) return;
      fetched_step = 0;
      b += fetched_unit % 2 == 0 ? kTileBytes / 2 : out_tile_bytes - kTileBytes / 2;
      ++fetched_unit;
    };
#pragma unroll
    for (int k = 0; k < kAhead; ++k) fetch(cores[k]);
    T* y[kHalves];
    const int valid = outs.num_outs - outs.first - 8 * q;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      y[half] = nullptr;
      if (tile.routes[half].x < 0) continue;
      y[half] = outs.y + tile.routes[half].y * outs.y_stride + (outs.first + 8 * q) * outs.step;
      // y is on its way, too, where it moves 16 bytes at a time.
      for (int unit = 0; !overwrites && unit < units; ++unit) {
        const int out = unit * kOutsPerUnit;
        if (Outs<T>::whole(valid - out, aligned)) {
          copy_async(&bases[(unit * kHalves + half) * 32], y[half] + out);
        }
      }
    }
    commit_copies();

    for (int step = 0; step < steps; ++step) {
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        const int4& route = tile.routes[half];
        const int v_row = route.x < 0        ? -1
                          : tile.shares_a(p) ? num_routes + route.x / p.top_k.top_k
                                             : route.x;
        float factor = tile.own.scaling * __int_as_float(route.z);
        if (p.weighted) factor *= __int_as_float(route.w);
        const float4 v = load_v(plane + step * kRanksPerStep, planes, grid.groups, v_row,
                                2 * step + 1 < rank_tiles, tag) *
                         factor;
        Terms& at = terms[step * 32];
        split(v.x, v.y, at.high[half].x, at.low[half].x);
        split(v.z, v.w, at.high[half].y, at.low[half].y);
      }
    }

    wait_for_copies<0>();

    float deltas[4][4] = {};
    int unit = 0, step = 0;
    while (unit < units) {
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        if (steps > 0) {
          const Terms& at = terms[step * 32];
          const auto operand = [](const uint2(&v)[kHalves]) {
            return kHalves == 1 ? make_uint4(v[0].x, 0, v[0].y, 0)
                                : make_uint4(v[0].x, v[kHalves - 1].x, v[0].y, v[kHalves - 1].y);
          };
          const uint4 both[kTerms] = {operand(at.high), operand(at.low)};
#pragma unroll
          for (int j = 0; j < 4; ++j) multiply<T>(deltas[j], both, cores[k][0][j], cores[k][1][j]);
          fetch(cores[k]);
        }
        if (++step < steps) continue;
        const int left = valid - unit * kOutsPerUnit;
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
          if (y[half] == nullptr || left <= 0) continue;
          Outs<T> base;
          if (!overwrites) base.bits = bases[(unit * kHalves + half) * 32];
          base.add(y[half] + unit * kOutsPerUnit * outs.step, outs.step, deltas, half, left,
                   aligned, overwrites);
        }
        ++unit;
        step = 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
#pragma unroll
          for (int e = 0; e < 4; ++e) deltas[j][e] = 0.0f;
        }
        if (unit >= units) break;
      }
    }
  }
}

// Blocks of a multiprocessor, as far as registers go: f16 has B's terms to hold, too.
template <typename T, int kHalves>
constexpr int kExpertsBlocks = std::is_same_v<T, __half> && kHalves == 2 ? 1 : 2;

// A block of a launch: it groups, has a part of shrink, or calls expand(tag).
template <typename T, int kHalves, typename Expand>
__device__ __forceinline__ void experts_block(const aril_experts_args& p, const ExpertsGrid& grid,
                                              unsigned char* shared, const Expand& expand) {
  __shared__ uint32_t tag;
  if (threadIdx.x == 0) tag = enter(p.exchange);
  __syncthreads();
  wait_for_predecessors();
  const int index = static_cast<int>(blockIdx.x) - grid.first_shrink;
  if (index < 0) {
    RouteSort<kExpertsThreads>& sort = *reinterpret_cast<RouteSort<kExpertsThreads>*>(shared);
    GroupedTiles::publish(p, tag, sort.run(p.top_k, p.routing, p.groups, p.num_tokens));
  } else if (index < grid.shrink_blocks) {
    experts_shrink<T, kHalves>(p, grid, tag);
  } else {
    expand(tag);
  }
}

template <typename T, int kHalves>
__global__ void __launch_bounds__(kExpertsThreads, kExpertsBlocks<T, kHalves>)
    experts_kernel(const __grid_constant__ aril_experts_args p,
                   const __grid_constant__ ExpertsGrid grid) {
  extern __shared__ __align__(128) unsigned char shared[];
  experts_block<T, kHalves>(
      p, grid, shared, [&](uint32_t tag) { experts_expand<T, kHalves>(p, grid, tag, shared); });
}

}  // namespace aril::detail
