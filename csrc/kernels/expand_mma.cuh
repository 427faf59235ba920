// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Expand of bf16 and f16 with mma.sync: y[token] += B v[token], from shrink's planes or from the
// rows of an embedding's A. Rounds once, at the store.
//
// Tokens are the 16 rows of the product, outputs its columns. v enters as two bf16 terms, which
// leave out less than 2^-17 of it; f16's B, too, as two, which are exact. The columns of four
// instructions are arranged so that a lane has eight neighbouring outputs of its tokens: y moves 16
// bytes at a time.
//
// Grid (tiles x blocks of outputs of all slices; see aril_expand_plan). B is on its way to shared
// memory before the wait; that of ranks beyond ARIL_STAGED_RANK is read where it is, for 16 tokens
// at a time. Shared, in bytes: kTokens * 4 for every rank, padded to 16, and, where B is staged,
// slots * 512 for every rank, padded to 8.
#pragma once

#include <type_traits>

#include "../common/async.cuh"
#include "../common/mma.cuh"
#include "../common/pdl.cuh"
#include "../common/vec.cuh"
#include "shrink_mma.cuh"
#include "tile.cuh"

namespace aril::detail {

constexpr int kExpandWarps = ARIL_EXPAND_WARPS;
constexpr int kExpandThreads = 32 * kExpandWarps;
constexpr int kRanksPerStep = 16;                              // of an instruction
constexpr int kTerms = 2;                                      // of v
constexpr int kOutTiles = ARIL_OUTS_PER_WARP / ARIL_OUT_TILE;  // that a warp takes at once

// Two values as bf16, and what that leaves out, as bf16 again.
__device__ __forceinline__ void split(float v0, float v1, uint32_t& high, uint32_t& low) {
  const __nv_bfloat162 rounded = __floats2bfloat162_rn(v0, v1);
  const float2 back = __bfloat1622float2(rounded);
  const __nv_bfloat162 rest = __floats2bfloat162_rn(v0 - back.x, v1 - back.y);
  memcpy(&high, &rounded, sizeof(high));
  memcpy(&low, &rest, sizeof(low));
}

__device__ __forceinline__ float2 operator+(const float2& a, const float2& b) {
  return make_float2(a.x + b.x, a.y + b.y);
}

// c += v b, for both terms of v.
template <typename T>
__device__ __forceinline__ void multiply(float (&c)[4], const uint4 (&v)[kTerms], uint32_t b0,
                                         uint32_t b1) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
#pragma unroll
    for (int term = 0; term < kTerms; ++term) {
      mma_m16n8k16<T>(c, v[term].x, v[term].y, v[term].z, v[term].w, b0, b1);
    }
  } else {
    uint32_t high[2], low[2];
    const auto split_half2 = [](uint32_t b, uint32_t& high, uint32_t& low) {
      __half2 values;
      memcpy(&values, &b, sizeof(b));
      const float2 wide = __half22float2(values);
      split(wide.x, wide.y, high, low);
    };
    split_half2(b0, high[0], low[0]);
    split_half2(b1, high[1], low[1]);
    multiply<__nv_bfloat16>(c, v, high[0], high[1]);
    multiply<__nv_bfloat16>(c, v, low[0], low[1]);
  }
}

// Puts ranks r and r + 1 of token t among the operands of 16 tokens and 16 ranks, [terms] of 16
// bytes a lane.
__device__ __forceinline__ void store_v(uint4* operands, int t, int r, float2 v) {
  uint32_t* word =
      reinterpret_cast<uint32_t*>(operands + t % 8 * 4 + r % 8 / 2) + r / 8 * 2 + t / 8;
  split(v.x, v.y, word[0], word[32 * 4]);
}

// deltas[i] = B v of the i-th of kOutTiles neighbouring tiles of outputs: of instruction j of the
// four that stand side by side, a lane has outputs 2j and 2j + 1 of its eight, for tokens g and
// g + 8. `b` and `v` are where the lane's operands begin; of B, `tiles` are there.
template <typename T>
__device__ __forceinline__ void multiply_tiles(float (&deltas)[kOutTiles][4][4], const uint4* b,
                                               const uint4* v, int steps, int rank_tiles,
                                               int tiles) {
#pragma unroll
  for (int i = 0; i < kOutTiles; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) deltas[i][j][e] = 0.0f;
    }
  }
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    uint4 terms[kTerms];
#pragma unroll
    for (int term = 0; term < kTerms; ++term) terms[term] = v[(step * kTerms + term) * 32];
#pragma unroll
    for (int i = 0; i < kOutTiles; ++i) {
      const uint4* tile = b + min(i, tiles - 1) * rank_tiles * 32;
      const uint4 b0 = tile[2 * step * 32];
      uint4 b1 = make_uint4(0, 0, 0, 0);
      if (2 * step + 1 < rank_tiles) b1 = tile[(2 * step + 1) * 32];
      multiply<T>(deltas[i][0], terms, b0.x, b1.x);
      multiply<T>(deltas[i][1], terms, b0.y, b1.y);
      multiply<T>(deltas[i][2], terms, b0.z, b1.z);
      multiply<T>(deltas[i][3], terms, b0.w, b1.w);
    }
  }
}

// Eight neighbouring outputs of a token, of which `valid` are there.
template <typename T>
struct Outs {
  uint4 bits;

  // Whether they move 16 bytes at a time. Others are read when they are written: a choice here
  // would have every load waited for where its ways meet.
  __device__ __forceinline__ static bool whole(int valid, bool aligned) {
    return aligned && valid >= Vec<T>::kSize;
  }

  __device__ __forceinline__ void load(const T* y, int valid, bool aligned) {
    if (whole(valid, aligned)) bits = *reinterpret_cast<const uint4*>(y);
  }

  // Adds a lane's eight deltas of token g (half 0) or g + 8 (half 1), and stores.
  __device__ __forceinline__ void add(T* y, const float (&deltas)[4][4], int half, int valid,
                                      bool aligned) const {
    const auto delta = [&](int i) { return deltas[i / 2][2 * half + i % 2]; };
    if (whole(valid, aligned)) {
      const Vec<T> base{bits};
      T sums[Vec<T>::kSize];
#pragma unroll
      for (int i = 0; i < Vec<T>::kSize; ++i) sums[i] = from_float<T>(base[i] + delta(i));
      uint4 result;
      memcpy(&result, sums, sizeof(result));
      *reinterpret_cast<uint4*>(y) = result;
      return;
    }
#pragma unroll
    for (int i = 0; i < Vec<T>::kSize; ++i) {
      if (i < valid) y[i] = from_float<T>(to_float(y[i]) + delta(i));
    }
  }
};

// Adds B v to the num_outs outputs of a slice, as far as they are the block's, for the tile's
// tokens. Once predecessors have ended, v.load(token, r) gives ranks r and r + 1 of v, not yet
// scaled, and zero beyond the rank. Tokens that v lacks are left alone.
template <typename T, int kTokens, bool kStaged, typename V>
__device__ __forceinline__ void expand_tile(const Tile& tile, const aril_descriptor& module,
                                            const float* scales, int block, int num_outs,
                                            const aril_expand_plan& plan, T* y, int64_t y_stride,
                                            int num_tokens, const V& v) {
  constexpr int kParts = kTokens / 16;  // units that have the same outputs
  constexpr int kAhead = 2;             // units whose y is on its way
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ int32_t tokens[kTokens];  // -1 where there is nothing to do
  __shared__ float factors[kTokens];
  __shared__ Supply::State supplies[kExpandWarps];
  if (tile.count == 0 || module.rank == 0) {
    if (is_first_block()) wait_for_predecessors();
    return;
  }
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const int rank_tiles = ceil_div(module.rank, ARIL_RANK_TILE);
  const int steps = ceil_div(module.rank, kRanksPerStep);
  const int out_tiles = ceil_div(num_outs, ARIL_OUT_TILE);
  const int slots = plan.slots;
  // v's operands, [row tiles][steps][terms], then each warp's supply.
  uint4* v_operands = reinterpret_cast<uint4*>(shared);
  uint4* supplied = v_operands + kTokens / 16 * steps * kTerms * 32;
  const uint4* b = static_cast<const uint4*>(module.b);

  // The blocks of a slice take turns, so that what they are at of y is in one place at any time;
  // the warps of a block likewise. This warp's i-th tiles:
  const int blocks = ceil_div(num_outs, plan.outs_per_block);
  const auto tile_of = [&](int i) {
    return ((block + i * blocks) * kExpandWarps + warp) * kOutTiles;
  };
  const int tile_bytes = rank_tiles * 32 * 16;
  Supply supply(supplies[warp], supplied + warp * slots * kOutTiles * rank_tiles * 32, slots,
                kOutTiles * tile_bytes);
  supply.prepare();
  const uint4* next_b = b + int64_t{tile_of(0)} * rank_tiles * 32;
  int left = out_tiles - tile_of(0);
  const auto start = [&] {
    supply.start(next_b, max(0, min(left, kOutTiles)) * tile_bytes);
    next_b += int64_t{blocks} * kExpandWarps * kOutTiles * rank_tiles * 32;
    left -= blocks * kExpandWarps * kOutTiles;
  };
  if constexpr (kStaged) {
    for (int i = 0; i < slots; ++i) start();
  }
  // Where B is staged, a tile has no more than kTokens.
  for (int first = 0; first < tile.count; first += kTokens) {
    if (first > 0) __syncthreads();
    if (threadIdx.x < kTokens) {
      const int token = tile.token(first + threadIdx.x, num_tokens);
      tokens[threadIdx.x] = token;
      if (token >= 0) factors[threadIdx.x] = module.scaling * scales[token];
    }
    __syncthreads();
    // kTeam threads bring together two ranks of a token's v if that leaves none idle, otherwise
    // one; eight such pairs are 16 ranks.
    constexpr int kTeam = 4, kPairs = kRanksPerStep / 2;
    const int count = min(tile.count - first, kTokens);
    const int team = count * steps * kPairs * kTeam <= kExpandThreads ? kTeam : 1;
    const int at_once = kExpandThreads / (kPairs * team), group = threadIdx.x / (kPairs * team);
    const int pair = threadIdx.x / team % kPairs * 2;
    const int stride_t = at_once / steps, stride_step = at_once % steps;
    int t = group / steps, step = group % steps;
    if (first == 0) wait_for_predecessors();

    // A unit of this warp's work is a pair of tiles of outputs and 16 of the tokens.
    const int units =
        max(0, ceil_div(out_tiles - tile_of(0), blocks * kExpandWarps * kOutTiles)) * kParts;
    const bool aligned = is_aligned(y, y_stride);
    Outs<T> bases[kAhead][2][kOutTiles];
    const auto for_outs = [&](int unit, auto f) {
      const int out = tile_of(unit / kParts) * ARIL_OUT_TILE + 8 * q;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int token = unit < units ? tokens[unit % kParts * 16 + g + 8 * half] : -1;
        if (token < 0) continue;
        T* row = y + token * y_stride + out;
#pragma unroll
        for (int i = 0; i < kOutTiles; ++i) {
          f(half, i, row + i * ARIL_OUT_TILE, num_outs - out - i * ARIL_OUT_TILE, token);
        }
      }
    };
    const auto load_bases = [&](Outs<T>(&bases)[2][kOutTiles], int unit) {
      for_outs(unit, [&](int half, int i, T* y, int valid, int) {
        bases[half][i].load(y, valid, aligned);
      });
    };
#pragma unroll
    for (int i = 0; i < kAhead; ++i) load_bases(bases[i], i);

    while (t < count) {
      const int token = tokens[t], r = step * kRanksPerStep + pair;
      float2 v_pair = make_float2(0.0f, 0.0f);
      if (token >= 0 && r < rank_tiles * ARIL_RANK_TILE && !v.lacks(token)) {
        v_pair = team == 1 ? v.load(token, r) : v.template load_together<kTeam>(token, r);
      }
      v_pair = make_float2(v_pair.x * factors[t], v_pair.y * factors[t]);
      if (threadIdx.x % team == 0) {
        store_v(v_operands + (t / 16 * steps + step) * kTerms * 32, t % 16, pair, v_pair);
      }
      t += stride_t;
      step += stride_step;
      if (step >= steps) {
        step -= steps;
        ++t;
      }
    }
    __syncthreads();

    const uint4* b_tile = b;
    for (int first_unit = 0; first_unit < units; first_unit += kAhead) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int unit = first_unit + i, part = unit % kParts;
        if (unit >= units) break;
        if constexpr (!kStaged) {
          b_tile = b + int64_t{tile_of(unit / kParts)} * rank_tiles * 32 + lane;
        } else if (part == 0) {
          b_tile = static_cast<const uint4*>(supply.next()) + lane;
        }
        float deltas[kOutTiles][4][4];
        multiply_tiles<T>(deltas, b_tile, v_operands + part * steps * kTerms * 32 + lane, steps,
                          rank_tiles, out_tiles - tile_of(unit / kParts));
        if (kStaged && part == kParts - 1) {
          __syncwarp();
          start();
        }
        for_outs(unit, [&](int half, int tile, T* y, int valid, int token) {
          if (!v.lacks(token)) bases[i][half][tile].add(y, deltas[tile], half, valid, aligned);
        });
        load_bases(bases[i], unit + kAhead);
      }
    }
  }
}

// Blocks of a multiprocessor, as far as registers go.
template <typename T>
constexpr int expand_blocks(int tokens, bool staged) {
  const int blocks = tokens == ARIL_TOKENS_PER_TILE && staged ? 4 : 3;
  return std::is_same_v<T, __nv_bfloat16> ? blocks : blocks - 1;  // f16 has B's terms to hold, too
}

// A layer's slice and the outputs in it that a block works on.
struct OutBlock {
  int slice = 0, index, first_column = 0;  // of the slice in y

  __device__ __forceinline__ OutBlock(const aril_linear_args& p, int block, int outs_per_block) {
    for (; slice < p.num_slices - 1; ++slice) {
      const int blocks = ceil_div(p.out_features[slice], outs_per_block);
      if (block < blocks) break;
      block -= blocks;
      first_column += p.out_features[slice];
    }
    index = block;
  }
};

// A token's v: shrink's planes, summed up in their order.
struct PlaneSums {
  const float* first_plane;
  Planes planes;
  int splits;
  bool lanes_apart;

  __device__ __forceinline__ PlaneSums(const aril_linear_args& p, int slice)
      : planes(p), splits(num_splits(p)), lanes_apart(p.lanes_per_split == 1) {
    first_plane = p.planes + slice * planes.slice_stride;
  }

  __device__ __forceinline__ bool lacks(int) const { return false; }

  // Ranks r and r + 1 of a token.
  __device__ __forceinline__ float2 load(int token, int r) const {
    const float* source = first_plane + token * planes.token_stride + r;
    float2 total = make_float2(0.0f, 0.0f), group = total;
    // Many loads before the first use: they are what expand waits for.
    constexpr int kAtOnce = 8;
    for (int first = 0; first < splits; first += kAtOnce) {
      float2 sums[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        sums[i] = make_float2(0.0f, 0.0f);
        if (first + i < splits) sums[i] = plane(source, first + i);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        group = group + sums[i];
        if (!lanes_apart || (i + 1) % ARIL_LANES_PER_GROUP == 0) {
          total = total + group;
          group = make_float2(0.0f, 0.0f);
        }
      }
    }
    return total;
  }

  // The same by kTeam neighbouring threads: each sums up a group, then they add the groups up.
  template <int kTeam>
  __device__ __forceinline__ float2 load_together(int token, int r) const {
    const float* source = first_plane + token * planes.token_stride + r;
    const int per_group = lanes_apart ? ARIL_LANES_PER_GROUP : 1;
    const unsigned team = ((1u << kTeam) - 1) << (threadIdx.x % 32 / kTeam * kTeam);
    float2 total = make_float2(0.0f, 0.0f);
    for (int first = 0; first < splits; first += kTeam * per_group) {
      const int begin = first + static_cast<int>(threadIdx.x) % kTeam * per_group;
      float2 sums[ARIL_LANES_PER_GROUP];
#pragma unroll
      for (int i = 0; i < ARIL_LANES_PER_GROUP; ++i) {
        sums[i] = make_float2(0.0f, 0.0f);
        if (i < per_group && begin + i < splits) sums[i] = plane(source, begin + i);
      }
      const float2 group = sums[0] + sums[1] + sums[2] + sums[3];
#pragma unroll
      for (int i = 0; i < kTeam; ++i) {
        total = total + make_float2(__shfl_sync(team, group.x, i, kTeam),
                                    __shfl_sync(team, group.y, i, kTeam));
      }
    }
    return total;
  }

  __device__ __forceinline__ float2 plane(const float* source, int i) const {
    return *reinterpret_cast<const float2*>(source + i * planes.plane_stride);
  }
};

template <typename T, int kTokens, bool kStaged>
__global__ void __launch_bounds__(kExpandThreads, expand_blocks<T>(kTokens, kStaged))
    expand_kernel(const __grid_constant__ aril_linear_args p, int out_blocks) {
  let_dependents_begin();
  const Tile tile(p, blockIdx.x / out_blocks);
  const OutBlock block(p, blockIdx.x % out_blocks, p.expand.outs_per_block);
  const aril_descriptor module = module_of(p.weights, tile.slot, block.slice);
  expand_tile<T, kTokens, kStaged>(tile, module, p.routing.scales, block.index,
                                   p.out_features[block.slice], p.expand,
                                   static_cast<T*>(p.y) + block.first_column, p.y_stride,
                                   p.num_tokens, PlaneSums(p, block.slice));
}

// The row of an embedding's A that a token names.
template <typename T>
struct EmbeddingRows {
  const aril_embedding_args& p;
  const T* a;
  int64_t stride;

  __device__ __forceinline__ EmbeddingRows(const aril_embedding_args& args,
                                           const aril_descriptor& module)
      : p(args),
        a(static_cast<const T*>(module.a)),
        stride(ceil_div(module.rank, ARIL_RANK_TILE) * ARIL_RANK_TILE) {}

  // Whether a token's id is not in the vocabulary.
  __device__ __forceinline__ bool lacks(int token) const {
    return p.token_ids[token] < 0 || p.token_ids[token] >= p.vocab;
  }

  __device__ __forceinline__ float2 load(int token, int r) const {
    const T* row = a + p.token_ids[token] * stride + r;
    return make_float2(to_float(row[0]), to_float(row[1]));
  }

  template <int kTeam>
  __device__ __forceinline__ float2 load_together(int token, int r) const {
    return load(token, r);
  }
};

template <typename T, int kTokens, bool kStaged>
__global__ void __launch_bounds__(kExpandThreads, expand_blocks<T>(kTokens, kStaged))
    embedding_kernel(const __grid_constant__ aril_embedding_args p, int out_blocks) {
  let_dependents_begin();
  const Tile tile(p, blockIdx.x / out_blocks);
  const aril_descriptor module = module_of(p.weights, tile.slot, 0);
  expand_tile<T, kTokens, kStaged>(tile, module, p.routing.scales, blockIdx.x % out_blocks,
                                   p.hidden, p.expand, static_cast<T*>(p.y), p.y_stride,
                                   p.num_tokens, EmbeddingRows<T>(p, module));
}

}  // namespace aril::detail
