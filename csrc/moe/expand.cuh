// SPDX-License-Identifier: MIT OR Apache-2.0
//
// A projection of experts in bf16 and f16: shrink and expand in one launch, with mma.sync.
//
// Most tiles have one or two routes, so this is about streaming weights: as many bytes as possible
// have to be on their way. A tile has up to 8 routes of one slot to one expert. Four warps of
// shrink have 8 ranks of a slice and a group of lanes, one each, and meet to add these up; a warp
// of expand has some outputs of a slice. They have one tile after the other, and bring what the
// next one needs meanwhile: A to registers, x, B and y to shared memory. Expand takes v from the
// mailbox as blocks of few.cuh do. Where all experts share A, and x is by token, A x is summed up
// once for a token, and expand reads it for all its routes.
//
// Where another block sorts the routes (sort.cuh), it publishes how many tiles there are beside the
// launch's tag, for expand; shrink finds its own (own_tiles.cuh). No weights are fetched before the
// wait: what the router chose is not known before.
#pragma once

#include <type_traits>

#include "../device/descriptor.cuh"
#include "../device/product.cuh"
#include "../host/launch.cuh"
#include "../linear/small_m.cuh"
#include "../ptx/mma.cuh"
#include "../ptx/pdl.cuh"
#include "route_tiles.cuh"

namespace aril::detail {

// Four bytes that are read once.
__device__ __forceinline__ uint32_t load_once(const void* pointer) {
  uint32_t word;
  asm volatile("ld.global.L1::no_allocate.b32 %0, [%1];" : "=r"(word) : "l"(pointer));
  return word;
}

constexpr int kChainFeatures = 64;
constexpr int kChainCores = kChainFeatures / ARIL_CORE;
constexpr int kChains = ARIL_K_TILE / kChainFeatures;
constexpr int kShrinkSets = kExpertsWarps / ARIL_K_TILES_PER_SLAB;

// Lets the warps of a set meet.
__device__ __forceinline__ void meet(int set) {
  asm volatile("bar.sync %0, %1;" ::"r"(set + 1), "n"(ARIL_K_TILES_PER_SLAB * 32) : "memory");
}

constexpr int kInputRowBytes = ARIL_K_TILE * 2 + 16;  // eight rows touch every bank once
constexpr int kInputStageBytes = ARIL_ROUTES_PER_TILE * kInputRowBytes;
constexpr int kExpertsShrinkBytes = kExpertsWarps * 2 * kInputStageBytes;

// A set of warps has 8 ranks of a slice and a group of lanes, each warp one of these.
template <typename T, typename Tiles>
__device__ __forceinline__ void experts_shrink(const aril_experts_args& p, const ExpertsGrid& grid,
                                               uint32_t tag, const Tiles& tiles,
                                               const Sharing& sharing, unsigned char* shared) {
  constexpr int kRows = ARIL_ROUTES_PER_TILE, kParts = ARIL_TOKENS_PER_TILE / kRows;
  __shared__ float2 k_tile_sums[2][kExpertsWarps][32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const int set = warp / ARIL_K_TILES_PER_SLAB;
  const int index = (static_cast<int>(blockIdx.x) - grid.first_shrink) * kShrinkSets + set;
  const int pieces = p.num_slices * grid.rank_tiles * grid.groups;
  const int stride = grid.shrink_blocks * kShrinkSets / pieces;  // of tiles
  const int slice = index % pieces % p.num_slices, piece = index % pieces / p.num_slices;
  const int group = piece % grid.groups, rank_tile = piece / grid.groups;
  const int k_tile = group * ARIL_K_TILES_PER_SLAB + warp % ARIL_K_TILES_PER_SLAB;
  const int num_routes = p.num_tokens * p.top_k.top_k;
  const T* const input = static_cast<const T*>(p.x);
  const bool has_k_tile = k_tile * ARIL_K_TILE < p.in_features;
  const bool aligned = is_aligned(input, p.x_stride);
  const PartialLayout partials = partial_layout(p);
  uint64_t* const plane = tagged_words(p.mailbox) + group * partials.partial_stride +
                          slice * partials.slice_stride + rank_tile * ARIL_RANK_TILE + 2 * q;
  const int token_tiles = p.from_tokens ? sharing.tiles * kParts : 0;
  const bool has_experts = !p.from_tokens || !sharing.all();
  const int last = token_tiles + (has_experts ? tiles.count(false) : 0);
  if (index / pieces >= stride) return;

  const auto load_tile = [&](int i) {
    if (i >= last) return make_int4(-1, 0, 0, 0);
    if (i >= token_tiles) return tiles.shrink_tile(i - token_tiles);
    const aril_tile& tile = p.routing.tiles.all[i / kParts];
    const int first = i % kParts * kRows;
    return make_int4(tile.slot, TileLoads::kOfTokens, tile.begin + first,
                     min(tile.count - first, kRows));
  };
  // What the warp streams for a tile.
  struct Source {
    int rank;          // 0: the set has nothing to do
    const char* a;     // null likewise, for the warp
    int count;         // of rows
    int x_row, v_row;  // of lane (g, q) the g-th, -1 if there is none
  };
  const auto source_of = [&](const TileLoads& loads) {
    Source source = {0, nullptr, 0, -1, -1};
    const int rank = loads.rank(p);
    if (rank_tile * ARIL_RANK_TILE >= rank || loads.own.a == nullptr || loads.shares_a(p)) {
      return source;
    }
    source.rank = rank;
    if (has_k_tile) {
      const int64_t k_tile_bytes = ceil_div(rank, ARIL_RANK_TILE) * kPieceBytes;
      source.a = static_cast<const char*>(loads.own.a) + k_tile * k_tile_bytes +
                 rank_tile * kPieceBytes + lane * 4;
    }
    source.count = loads.tile.w;
    const int route = loads.route.route;
    if (loads.tile.y == TileLoads::kOfTokens) {
      if (route >= 0 && route < p.num_tokens) source.x_row = route;
      if (source.x_row >= 0) source.v_row = num_routes + route;
    } else if (route >= 0) {
      source.x_row = p.from_tokens ? route / p.top_k.top_k : loads.route.row;
      source.v_row = route;
    }
    return source;
  };
  uint32_t weights[kChains][kChainCores] = {};
  const auto fetch_weights = [&](const Source& source, int chain) {
    if (source.a == nullptr) return;
#pragma unroll
    for (int core = 0; core < kChainCores; ++core) {
      weights[chain][core] = load_once(source.a + (chain * kChainCores + core) * kCoreElems * 2);
    }
  };
  unsigned char* const inputs = shared + warp * 2 * kInputStageBytes;
  const auto fetch_inputs = [&](const Source& source, int stage) {
    unsigned char* to = inputs + stage * kInputStageBytes + lane * 16;
    const int k = k_tile * ARIL_K_TILE + lane * Vec<T>::kSize;
#pragma unroll 1
    for (int t = 0; t < source.count; ++t, to += kInputRowBytes) {
      const int row = __shfl_sync(0xffffffffu, source.x_row, t * 4);
      if (row < 0 || !has_k_tile) continue;
      copy_input(to, input + row * p.x_stride, k, p.in_features, aligned);
    }
    commit_copies();
  };

  TileQueue<TileLoads::kOfTokens, Tiles, decltype(load_tile)> queue(p, tiles, slice, g, load_tile,
                                                                    index / pieces);
  queue.advance(index / pieces + stride);
  Source source = source_of(queue.loads);
  queue.advance(index / pieces + 2 * stride);
#pragma unroll
  for (int chain = 0; chain < kChains; ++chain) fetch_weights(source, chain);
  fetch_inputs(source, 0);
  int parity = 0;
  for (int i = index / pieces; i < last; i += stride) {
    const Source next = source_of(queue.loads);
    queue.advance(i + 3 * stride);
    fetch_inputs(next, parity ^ 1);
    wait_for_copies<1>();
    __syncwarp();
    // Lane i names a row of 16 bytes. Rows of the operand that are not there are copies of others.
    const unsigned char* x = inputs + parity * kInputStageBytes + lane % 8 * kInputRowBytes +
                             lane / 16 * (ARIL_CORE * 2);
    float2 k_tile_sum = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int chain = 0; chain < kChains; ++chain) {
      if (source.a != nullptr) {
        float sums[4] = {};
#pragma unroll
        for (int core = 0; core < kChainCores; core += 2) {
          const uint4 rows = ldmatrix_x4(x + (chain * kChainCores + core) * ARIL_CORE * 2);
          mma_m16n8k16<T>(sums, rows, weights[chain][core], weights[chain][core + 1]);
        }
        k_tile_sum = k_tile_sum + make_float2(sums[0], sums[1]);
      }
      fetch_weights(next, chain);
    }
    if (source.rank > 0) k_tile_sums[parity][warp][lane] = k_tile_sum;
    // For every tile, so that nobody writes what is still read, two tiles later.
    meet(set);
    if (source.rank > 0 && warp % ARIL_K_TILES_PER_SLAB == 0) {
      float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
      for (int l = 0; l < ARIL_K_TILES_PER_SLAB; ++l) {
        sum = sum + k_tile_sums[parity][set * ARIL_K_TILES_PER_SLAB + l][lane];
      }
      const int r = rank_tile * ARIL_RANK_TILE + 2 * q;
      if (source.v_row >= 0) {
        store_tagged2(plane + source.v_row * partials.token_stride, r < source.rank ? sum.x : 0.0f,
                      r + 1 < source.rank ? sum.y : 0.0f, tag);
      }
    }
    parity ^= 1;
    source = next;
  }
}

// v of a row, ranks r, r + 1, r + 8 and r + 9, once shrink has left them; zero for row -1. By a
// whole warp.
__device__ __forceinline__ float4 load_v(const uint64_t* plane, const PartialLayout& partials,
                                         int groups, int row, bool has_second, uint32_t tag) {
  constexpr int kAtOnce = 2;
  float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f), span = total;
  const uint64_t* source = plane + row * partials.token_stride;
  for (int first = 0; first < groups; first += kAtOnce) {
    TaggedPair sums[kAtOnce][2];
    PollLimit polls;
    bool all;
    do {
      polls.count();
      all = true;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          sums[i][half] = {0.0f, tag, 0.0f, tag};
          if (row >= 0 && first + i < groups && (half == 0 || has_second)) {
            sums[i][half] =
                load_tagged(source + (first + i) * partials.partial_stride + half * ARIL_RANK_TILE);
          }
          all = all && sums[i][half].tag0 == tag && sums[i][half].tag1 == tag;
        }
      }
    } while (!__all_sync(0xffffffffu, all));
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      span = span + make_float4(sums[i][0].value0, sums[i][0].value1, sums[i][1].value0,
                                sums[i][1].value1);
    }
    if ((first + kAtOnce) % ARIL_K_SLABS_PER_SPAN != 0 && first + kAtOnce < groups) continue;
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

// Rank tiles of B that come for all of a warp's outputs at once, up to: as far as registers go, and
// f16 has B's terms to hold, too.
template <typename T>
constexpr int kWholeRankTiles = std::is_same_v<T, __nv_bfloat16> ? 4 : 2;

// What a warp of expand has in shared memory: two stages, of B and y, and the terms of v. Of more
// ranks B comes for one unit of outputs after the other, in chunks.
struct ExpandStages {
  static constexpr int kRankTiles = 6;                                   // of a chunk, up to
  static constexpr int kPieceBytes = kOutsPerUnit * ARIL_RANK_TILE * 2;  // of B: a rank tile
  static constexpr int kBaseBytes = 32 * 16;                             // of y: a unit

  int whole_rank_tiles = 0, b_bytes = 0, bytes = 0, of_warp = 0;

  constexpr ExpandStages(int max_whole_rank_tiles, int max_rank, int outs) {
    const int all_rank_tiles = ceil_div(max_rank, ARIL_RANK_TILE);
    const int rank_tiles = all_rank_tiles < kRankTiles ? all_rank_tiles : kRankTiles;
    const int units = outs / kOutsPerUnit;
    whole_rank_tiles = rank_tiles <= max_whole_rank_tiles ? rank_tiles : 2;
    const int pieces = units * whole_rank_tiles;
    b_bytes = (pieces > rank_tiles ? pieces : rank_tiles) * kPieceBytes;
    bytes = b_bytes + units * kBaseBytes;
    // Where all ranks are whole, the terms of the first step stay in registers.
    const int steps = ceil_div(rank_tiles, 2) - (rank_tiles == whole_rank_tiles);
    of_warp = 2 * bytes + steps * 32 * static_cast<int>(sizeof(uint4));
  }
};

// Devices of compute capability 8.6 and 8.9 have the least shared memory: 99 KB for a block. So
// many warps with one output tile each have room there.
constexpr bool have_room_everywhere(int max_whole_rank_tiles) {
  constexpr int kBytes = (99 << 10) - kStaticBytes;
  for (int rank = 1; rank <= ARIL_MAX_RANK; ++rank) {
    const ExpandStages stages(max_whole_rank_tiles, rank, ARIL_OUT_TILE);
    if (kExpertsWarps * stages.of_warp > kBytes) return false;
  }
  return kExpertsShrinkBytes <= kBytes;
}
static_assert(have_room_everywhere(kWholeRankTiles<__nv_bfloat16>));
static_assert(have_room_everywhere(kWholeRankTiles<__half>));

template <typename T, typename Tiles>
__device__ __forceinline__ void experts_expand(const aril_experts_args& p, const ExpertsGrid& grid,
                                               const ExpandStages& stages, uint32_t tag,
                                               const Tiles& tiles, const Sharing& sharing,
                                               unsigned char* shared) {
  constexpr int kPieceBytes = ExpandStages::kPieceBytes;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const bool overwrites = p.form == ARIL_WRITE;
  // Tiles of tokens, for slots that share B, come before those of experts.
  const int parts = ceil_div(p.top_k.top_k, ARIL_ROUTES_PER_TILE);
  const int token_tiles = !p.from_tokens && sharing.any() ? sharing.tokens * parts : 0;
  const bool has_experts = p.from_tokens || overwrites || !sharing.all();
  const int last = token_tiles + (has_experts ? tiles.count(overwrites) : 0);
  const int first_block = grid.first_shrink + grid.shrink_blocks;
  const int warps = (gridDim.x - first_block) * kExpertsWarps;
  const int index = (blockIdx.x - first_block) * kExpertsWarps + warp;
  const auto pieces_of = [&](int outs) { return p.num_slices * ceil_div(p.out_features, outs); };
  // Where there are few tiles, more warps have one.
  const bool fit_one_block = int64_t{last} * pieces_of(ARIL_OUT_TILE) <= warps;
  const int outs_per_warp = fit_one_block ? ARIL_OUT_TILE : p.outs_per_block;
  const int pieces = pieces_of(outs_per_warp), stride = warps / pieces;  // of tiles
  if (index / pieces >= stride) return;
  int slice;
  const BlockOuts<T> outs(p, index % pieces, outs_per_warp, slice);
  const bool aligned = outs.step == 1 && is_aligned(outs.y, outs.y_stride);
  const int valid = outs.num_outs - outs.first - 8 * q;
  const PartialLayout partials = partial_layout(p);
  const uint64_t* const plane = tagged_words(p.mailbox) + slice * partials.slice_stride + 2 * q;
  unsigned char* stage = shared + warp * stages.of_warp;
  unsigned char* other = stage + stages.bytes;
  uint4* const terms = reinterpret_cast<uint4*>(stage + 2 * stages.bytes) + lane;

  const auto load_tile = [&](int i) {
    if (i >= last) return make_int4(-1, 0, 0, 0);
    if (i >= token_tiles) return tiles.tile(i - token_tiles);
    const int token = i / parts, first = i % parts * ARIL_ROUTES_PER_TILE;
    return make_int4(p.routing.slots[token], TileLoads::kOfToken, token * p.top_k.top_k + first,
                     min(p.top_k.top_k - first, ARIL_ROUTES_PER_TILE));
  };
  // What the warp has of a tile.
  struct Part {
    const char* b;
    int rank_tiles;
    T* y;  // null where the lane has no row, or there is nothing to do
    int v_row;
    float factor;
  };
  const auto part_of = [&](const TileLoads& loads) {
    Part part = {nullptr, 0, nullptr, -1, 0.0f};
    const bool is_of_token = loads.tile.y == TileLoads::kOfToken;
    if (is_of_token != loads.shares_b(p)) return part;
    const int rank = loads.rank(p);
    part.rank_tiles = ceil_div(is_of_token ? loads.shared.rank : rank, ARIL_RANK_TILE);
    part.b = static_cast<const char*>(is_of_token ? loads.shared.b : loads.own.b) +
             int64_t{outs.first / ARIL_OUT_TILE} * part.rank_tiles * 2 * kPieceBytes;
    if (rank > 0) {
      part.v_row = loads.v_row(p);
      part.factor = loads.factor(p);
    }
    if (loads.route.route >= 0 && (rank > 0 || overwrites)) {
      part.y = outs.y + loads.route.row * outs.y_stride + (outs.first + 8 * q) * outs.step;
    }
    return part;
  };

  // Brings B and y of a stage: all outputs, or those from `out` on, with a chunk of ranks, and y
  // with the last one. y moves 16 bytes at a time, or is read when it is written.
  const auto fetch = [&](const Part& part, int out, int first_rank_tile) {
    const bool whole = part.rank_tiles <= stages.whole_rank_tiles;
    const int count = min(part.rank_tiles - first_rank_tile, ExpandStages::kRankTiles);
    // A unit alone is half of an output tile.
    const char* b = part.b +
                    (out / ARIL_OUT_TILE * part.rank_tiles + first_rank_tile) * 2 * kPieceBytes +
                    out % ARIL_OUT_TILE / kOutsPerUnit * kPieceBytes + lane * 16;
    unsigned char* to = other + lane * 16;
    const int pieces = whole ? ceil_div(outs.count, ARIL_OUT_TILE) * 2 * count : count;
#pragma unroll 2
    for (int i = 0; i < pieces; ++i, b += (whole ? 1 : 2) * kPieceBytes, to += kPieceBytes) {
      copy_async(to, b);
    }
    if (first_rank_tile + count == part.rank_tiles && !overwrites && part.y != nullptr) {
      to = other + stages.b_bytes + lane * 16;
      const int end = whole ? outs.count : out + kOutsPerUnit;
#pragma unroll 1
      for (; out < end; out += kOutsPerUnit, to += ExpandStages::kBaseBytes) {
        if (OutVec<T>::whole(valid - out, aligned)) copy_async(to, part.y + out);
      }
    }
    commit_copies();
  };
  const auto swap_stages = [&] {
    unsigned char* const done = stage;
    stage = other;
    other = done;
  };

  TileQueue<TileLoads::kOfToken, Tiles, decltype(load_tile)> queue(p, tiles, slice, g, load_tile,
                                                                   index / pieces);
  queue.advance(index / pieces + stride);
  Part part = part_of(queue.loads);
  queue.advance(index / pieces + 2 * stride);
  fetch(part, 0, 0);
  swap_stages();
  for (int i = index / pieces; i < last; i += stride) {
    const Part next = part_of(queue.loads);
    queue.advance(i + 3 * stride);
    const auto terms_of = [&](int rank_tile) {
      const float4 v = load_v(plane + rank_tile * ARIL_RANK_TILE, partials, grid.groups, part.v_row,
                              rank_tile + 1 < part.rank_tiles, tag) *
                       part.factor;
      uint4 both;
      to_bf16_terms(v.x, v.y, both.x, both.y);
      to_bf16_terms(v.z, v.w, both.z, both.w);
      return both;
    };
    // A lane names a row of four cores: two of a rank tile and two of the next, which stands
    // `rank_bytes` further, so that they make operands. Where there is no next one, v is zero, and
    // any finite B will do.
    const auto add_products = [&](float(&deltas)[4][4], const uint4& both, const unsigned char* b,
                                  int rank_bytes) {
      // Rows of the operands that are not there have the other term.
      const uint4 operands[kTerms] = {both, make_uint4(both.y, both.x, both.w, both.z)};
      b += lane / 16 * (kCoreElems * 2) + lane % 8 * 16 + (lane / 8 % 2 != 0 ? rank_bytes : 0);
#pragma unroll
      for (int j = 0; j < 4; j += 2) {
        const uint4 cores = ldmatrix_x4(b + j * (kCoreElems * 2));
        mma_terms<T>(deltas[j], operands, cores.x, cores.y);
        mma_terms<T>(deltas[j + 1], operands, cores.z, cores.w);
      }
    };
    const auto finish = [&](const float(&deltas)[4][4], int out, int unit) {
      if (part.y == nullptr || valid <= out) return;
      OutVec<T> base;
      if (!overwrites) {
        base.bits = *reinterpret_cast<const uint4*>(stage + stages.b_bytes +
                                                    unit * ExpandStages::kBaseBytes + lane * 16);
      }
      base.add(part.y + out * outs.step, outs.step, deltas, 0, valid - out, aligned, overwrites);
    };
    if (part.rank_tiles <= stages.whole_rank_tiles) {
      fetch(next, 0, 0);
      const bool has_deltas = part.rank_tiles > 0;
      uint4 both = make_uint4(0, 0, 0, 0);
      if (has_deltas) both = terms_of(0);
      const bool has_more = kWholeRankTiles<T> > 2 && part.rank_tiles > 2;
      if (has_more) terms[0] = terms_of(2);
      wait_for_copies<1>();
      __syncwarp();
      const int rank_bytes = 2 * kPieceBytes, rest_bytes = (part.rank_tiles - 1) * rank_bytes;
      const auto add_outs = [&](auto more) {
        const unsigned char* b = stage;
        for (int out = 0; out < outs.count; out += kOutsPerUnit) {
          float deltas[4][4] = {};
          if (has_deltas) add_products(deltas, both, b, part.rank_tiles > 1 ? rank_bytes : 0);
          if constexpr (decltype(more)::value) {
            add_products(deltas, terms[0], b + 2 * rank_bytes,
                         part.rank_tiles > 3 ? rank_bytes : 0);
          }
          finish(deltas, out, out / kOutsPerUnit);
          b += kPieceBytes + (out % ARIL_OUT_TILE != 0 ? rest_bytes : 0);
        }
      };
      if (has_more) {
        add_outs(std::true_type());
      } else if (has_deltas || overwrites) {
        add_outs(std::false_type());
      }
      __syncwarp();
      swap_stages();
    } else {
      float deltas[4][4] = {};
      for (int out = 0, first = 0; out < outs.count;) {
        const int count = min(part.rank_tiles - first, ExpandStages::kRankTiles);
        const bool is_last = first + count == part.rank_tiles;
        const int next_out = is_last ? out + kOutsPerUnit : out;
        const bool ends = next_out >= outs.count;
        Part from = part;
        if (ends) from = next;
        fetch(from, ends ? 0 : next_out, is_last ? 0 : first + count);
        // Those of all ranks stay for the outputs that follow.
        if (out == 0 || count < part.rank_tiles) {
          for (int r = 0; r < count; r += 2) terms[r / 2 * 32] = terms_of(first + r);
        }
        wait_for_copies<1>();
        __syncwarp();
        for (int r = 0; r < count; r += 2) {
          add_products(deltas, terms[r / 2 * 32], stage + r * kPieceBytes,
                       r + 1 < count ? kPieceBytes : 0);
        }
        if (is_last) {
          finish(deltas, out, 0);
#pragma unroll
          for (int j = 0; j < 4; ++j) {
#pragma unroll
            for (int e = 0; e < 4; ++e) deltas[j][e] = 0.0f;
          }
        }
        __syncwarp();
        swap_stages();
        first = is_last ? 0 : first + count;
        out = next_out;
      }
    }
    part = next;
  }
}

// A block of a launch: it sorts, has a part of shrink, or calls expand(tag, tiles, sharing), or, of
// an operation that expands tokens, expand(tag).
template <typename T, bool kEachBlock, typename Expand>
__device__ __forceinline__ void experts_block(const aril_experts_args& p, const ExpertsGrid& grid,
                                              unsigned char* shared, const Expand& expand) {
  __shared__ uint32_t tag;
  if (threadIdx.x == 0) tag = begin_epoch(p.mailbox);
  __syncthreads();
  const auto clear_stale = [&] {
    clear_stale_words(p.mailbox, p.mailbox_bytes, tag);
  };
  const int index = static_cast<int>(blockIdx.x) - grid.first_shrink;
  if constexpr (!kEachBlock) {
    if (index < 0) return RouteTiles<kEachBlock>::publish(p, tag, shared);
  }
  const bool shrinks = index < grid.shrink_blocks;
  if constexpr (std::is_invocable_v<Expand, uint32_t>) {
    if (!shrinks) {
      wait_for_predecessors();
      return expand(tag);
    }
  }
  if constexpr (!kEachBlock) {
    if (grid.beside_large_m && takes_large_m(p)) {
      if (!is_first_block()) return;
      wait_for_predecessors();
      return clear_stale();
    }
  }
  const bool may_share = shrinks == (p.from_tokens != 0);
  const Sharing sharing(p, may_share);
  const auto has_routes = [&] {
    return !may_share || !sharing.all() || (!shrinks && p.form == ARIL_WRITE);
  };
  const bool finds_own = !kEachBlock && shrinks && grid.first_shrink > 0;
  const RouteTiles<kEachBlock> tiles(
      p, grid, tag, has_routes,
      finds_own ? reinterpret_cast<LocalTiles*>(shared + kExpertsShrinkBytes) : nullptr, shared,
      kExpertsShrinkBytes);
  if constexpr (!std::is_invocable_v<Expand, uint32_t>) {
    if (!shrinks) return expand(tag, tiles, sharing);
  }
  if (index == 0) clear_stale();
  experts_shrink<T>(p, grid, tag, tiles, sharing, shared);
  if (!kEachBlock && grid.beside_large_m) wait_for_predecessors();
}

constexpr int kExpertsBlocks = 2;  // of a multiprocessor

template <typename T, bool kEachBlock>
__global__ void __launch_bounds__(kExpertsThreads, kExpertsBlocks)
    experts_kernel(const __grid_constant__ aril_experts_args p,
                   const __grid_constant__ ExpertsGrid grid,
                   const __grid_constant__ ExpandStages stages) {
  extern __shared__ __align__(128) unsigned char shared[];
  experts_block<T, kEachBlock>(p, grid, shared,
                               [&](uint32_t tag, const auto& tiles, const Sharing& sharing) {
                                 experts_expand<T>(p, grid, stages, tag, tiles, sharing, shared);
                               });
}

}  // namespace aril::detail
