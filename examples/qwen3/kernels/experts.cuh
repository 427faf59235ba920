// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The part of kernels.cu that a Qwen3 with experts needs: the router's choice, the order of routes
// by expert, and a GEMM over all experts in one launch, whose sizes nothing on the host has to
// know.
//
// A route is a (token, expert) pair, numbered token * top_k + k. Matrices of routes have as many
// rows, the rows of an expert together: bounds[e] is the first of expert e. With expert
// parallelism, `experts` are those of this rank; routes to others have no row.
#pragma once

#include <float.h>
#include <limits.h>
#include <stdint.h>

#include "../../../csrc/ptx/mma.cuh"

namespace {

// The expert of the larger weight, the first of equals.
struct Choice {
  float weight;
  int32_t expert;
};

__device__ __forceinline__ bool comes_before(Choice a, Choice b) {
  return a.weight > b.weight || (a.weight == b.weight && a.expert < b.expert);
}

// The first of all lanes' choices, in every lane.
__device__ __forceinline__ Choice warp_first(Choice first) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    const Choice other = {__shfl_xor_sync(0xffffffffu, first.weight, distance),
                          __shfl_xor_sync(0xffffffffu, first.expert, distance)};
    if (comes_before(other, first)) first = other;
  }
  return first;
}

// An element that another block of this kernel may have written.
template <typename T>
__device__ __forceinline__ T load_past_l1(const T* from) {
  return __ldcg(from);
}

// choose_experts of one token, by a warp. One lane calls `store` with each place among the chosen,
// from the largest on, and its expert.
template <typename T, typename F>
__device__ void choose_among_many(const T* scores, float* weights, int64_t experts, int64_t top_k,
                                  int32_t normalized, F store) {
  const int lane = threadIdx.x % 32;
  Choice first = {-INFINITY, INT_MAX};
  for (int64_t e = lane; e < experts; e += 32) {
    const Choice choice = {static_cast<float>(scores[e]), static_cast<int32_t>(e)};
    if (comes_before(choice, first)) first = choice;
  }
  const float largest = warp_first(first).weight;
  float sum = 0.0f;
  for (int64_t e = lane; e < experts; e += 32) {
    sum += expf(static_cast<float>(scores[e]) - largest);
  }
  sum = warp_sum(sum);

  // Each is the first that comes after the one before.
  Choice last = {INFINITY, -1};
  float chosen = 0.0f;
  for (int64_t k = 0; k < top_k; ++k) {
    Choice next = {-INFINITY, INT_MAX};
    for (int64_t e = lane; e < experts; e += 32) {
      const Choice choice = {expf(static_cast<float>(scores[e]) - largest) / sum,
                             static_cast<int32_t>(e)};
      if (comes_before(last, choice) && comes_before(choice, next)) next = choice;
    }
    last = warp_first(next);
    chosen += last.weight;
    if (lane == 0) {
      // With a NaN among the scores, no expert comes next. Any will do to make the output NaN, too.
      const bool is_none = last.expert == INT_MAX;
      store(static_cast<int>(k), is_none ? static_cast<int>(k) : last.expert);
      weights[k] = is_none ? NAN : last.weight;
    }
  }
  __syncwarp();
  for (int64_t k = lane; k < top_k; k += 32) {
    weights[k] = round_to<T>(normalized ? weights[k] / chosen : weights[k]);
  }
}

// The same for up to kFewExperts experts, whose weights are in registers, and up to kFewTopK
// chosen.
constexpr int kFewExperts = 256;
constexpr int kFewTopK = 32;

template <typename T, typename F>
__device__ __forceinline__ void choose_among_few(const T* scores, float* weights, int experts,
                                                 int top_k, int32_t normalized, F store) {
  constexpr int kEach = kFewExperts / 32;  // experts of a lane
  const int lane = threadIdx.x % 32;
  float values[kEach];
  float largest = -INFINITY;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int e = lane + 32 * i;
    values[i] = e < experts ? static_cast<float>(load_past_l1(scores + e)) : -INFINITY;
    if (values[i] > largest) largest = values[i];
  }
  largest = warp_first({largest, 0}).weight;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (lane + 32 * i >= experts) continue;
    values[i] = expf(values[i] - largest);
    sum += values[i];
  }
  sum = warp_sum(sum);
  // The bits of numbers that are not negative are in their order. -1: chosen, or no expert.
  int32_t keys[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    keys[i] = lane + 32 * i < experts ? __float_as_int(values[i] / sum) : -1;
  }
  const bool is_unknown = isnan(sum);
  float chosen = 0.0f, weight = 0.0f;
  for (int k = 0; k < top_k; ++k) {
    int32_t best = -1, expert = INT_MAX;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (keys[i] > best) {
        best = keys[i];
        expert = lane + 32 * i;
      }
    }
    const int32_t largest_key = __reduce_max_sync(0xffffffffu, best);
    expert = __reduce_min_sync(0xffffffffu, best == largest_key ? expert : INT_MAX);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (expert == lane + 32 * i) keys[i] = -1;
    }
    const float own = is_unknown ? NAN : __int_as_float(largest_key);
    chosen += own;
    if (lane == k) {
      weight = own;
      store(k, is_unknown ? k : expert);
    }
  }
  if (lane < top_k) weights[lane] = round_to<T>(normalized ? weight / chosen : weight);
}

// The experts of the top_k largest scores of a token and what they weigh: their softmax over all
// experts, divided by its sum over the chosen if normalized, rounded. An id is relative to the
// first of the held experts, and -1 for all others. One warp of the block does it.
template <typename T>
__device__ void choose_experts(const T* scores,  // [tokens, experts]
                               int32_t* ids,     // [tokens, top_k]
                               float* weights,   // [tokens, top_k]
                               int64_t experts, int64_t first_held, int64_t num_held, int64_t top_k,
                               int32_t normalized) {
  if (threadIdx.x >= 32) return;
  const auto store = [&](int k, int expert) {
    const int64_t place = expert - first_held;
    ids[k] = 0 <= place && place < num_held ? static_cast<int32_t>(place) : -1;
  };
  scores += blockIdx.x * experts;
  ids += blockIdx.x * top_k;
  weights += blockIdx.x * top_k;
  if (experts <= kFewExperts && top_k <= kFewTopK) {
    choose_among_few(scores, weights, static_cast<int>(experts), static_cast<int>(top_k),
                     normalized, store);
  } else {
    choose_among_many(scores, weights, experts, top_k, normalized, store);
  }
}

// The rows of an expert's routes: in the order of their numbers, behind those of the experts before
// it. A block for each expert, and one more for the routes whose experts are not here. These have
// row -1, and as many rows at the end have token -1.
__device__ void sort_routes(const int32_t* ids,     // [routes]
                            int32_t* row_of_route,  // [routes]
                            int32_t* token_of_row,  // [routes]
                            int32_t* bounds,        // [experts + 1]
                            int64_t routes, int64_t experts, int64_t top_k) {
  __shared__ int32_t counts[kWarps];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // As an unsigned number, -1 is greater than all experts.
  const uint32_t expert = blockIdx.x;
  const auto group_of = [&](int64_t route) {
    return min(static_cast<uint32_t>(ids[route]), static_cast<uint32_t>(experts));
  };
  int32_t before = 0;
  for (int64_t route = threadIdx.x; route < routes; route += kThreads) {
    before += group_of(route) < expert;
  }
  before = __reduce_add_sync(0xffffffffu, before);
  if (lane == 0) counts[warp] = before;
  __syncthreads();
  int32_t row = 0;
  for (int w = 0; w < kWarps; ++w) row += counts[w];
  if (threadIdx.x == 0) bounds[expert] = row;

  for (int64_t first = 0; first < routes; first += kThreads) {
    const int64_t route = first + threadIdx.x;
    const bool is_mine = route < routes && group_of(route) == expert;
    const uint32_t mine = __ballot_sync(0xffffffffu, is_mine);
    // All threads are done with the counts of the previous round.
    __syncthreads();
    if (lane == 0) counts[warp] = __popc(mine);
    __syncthreads();
    int32_t place = row + __popc(mine & ((1u << lane) - 1));
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) place += counts[w];
      row += counts[w];
    }
    if (is_mine) {
      const bool is_here = expert < experts;
      row_of_route[route] = is_here ? place : -1;
      token_of_row[place] = is_here ? static_cast<int32_t>(route / top_k) : -1;
    }
  }
}

// choose_experts and sort_routes by one block, with a thread for each route and for each group of
// routes.
template <int kBlockThreads, typename T>
__device__ void route_tokens(const T* scores,        // [tokens, experts]
                             int32_t* ids,           // [tokens, top_k]
                             float* weights,         // [tokens, top_k]
                             int32_t* row_of_route,  // [tokens, top_k]
                             int32_t* token_of_row,  // [tokens * top_k]
                             int32_t* bounds,        // [num_held + 1]
                             int64_t tokens, int64_t num_experts, int64_t first_held,
                             int64_t num_held, int64_t num_chosen, int32_t normalized) {
  constexpr int kGroups = kFewExperts + 1;  // the last one: of routes whose experts are not here
  constexpr int kBlockWarps = kBlockThreads / 32;
  static_assert(kGroups <= kBlockThreads, "each group has a thread");
  __shared__ int32_t groups[kBlockThreads];
  __shared__ uint16_t counts[kBlockWarps][kGroups];
  __shared__ int32_t firsts[kGroups], sums_of_warps[kBlockWarps];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int experts = static_cast<int>(num_experts), held = static_cast<int>(num_held);
  const int top_k = static_cast<int>(num_chosen), routes = static_cast<int>(tokens) * top_k;
  const int warps = (routes + 31) / 32;  // that have routes
  for (int i = threadIdx.x; i < warps * kGroups; i += kBlockThreads) {
    counts[i / kGroups][i % kGroups] = 0;
  }
  for (int token = warp; token < tokens; token += kBlockWarps) {
    choose_among_few(scores + token * num_experts, weights + token * top_k, experts, top_k,
                     normalized, [&](int k, int expert) {
                       const int place = expert - static_cast<int>(first_held);
                       const bool is_here = 0 <= place && place < held;
                       ids[token * top_k + k] = is_here ? place : -1;
                       groups[token * top_k + k] = is_here ? place : held;
                     });
  }
  __syncthreads();

  // A route's place among those of its warp and group, and how many there are.
  const int route = threadIdx.x;
  const int group = route < routes ? groups[route] : -1;
  const uint32_t same = __match_any_sync(0xffffffffu, group);
  const int before = __popc(same & ((1u << lane) - 1));
  if (group >= 0 && before == 0) counts[warp][group] = static_cast<uint16_t>(__popc(same));
  __syncthreads();
  // Those of the warps before, and those of the groups before.
  int32_t own = 0;
  if (threadIdx.x <= held) {
    for (int w = 0; w < warps; ++w) {
      const int32_t count = counts[w][threadIdx.x];
      counts[w][threadIdx.x] = static_cast<uint16_t>(own);
      own += count;
    }
  }
  int32_t first = own;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int32_t others = __shfl_up_sync(0xffffffffu, first, distance);
    if (lane >= distance) first += others;
  }
  if (lane == 31) sums_of_warps[warp] = first;
  __syncthreads();
  if (threadIdx.x <= held) {
    first -= own;
    for (int w = 0; w < warp; ++w) first += sums_of_warps[w];
    firsts[threadIdx.x] = first;
    bounds[threadIdx.x] = first;
  }
  __syncthreads();
  if (group < 0) return;
  const int place = firsts[group] + counts[warp][group] + before;
  row_of_route[route] = group < held ? place : -1;
  token_of_row[place] = group < held ? route / top_k : -1;
}

// The router's scores of few tokens, and route_tokens by the last block that has computed some. A
// block has 16 experts, and a warp every kRouterWarps-th 16 columns. Sums are in an order that
// depends on the number of columns alone. If `adds`, they are added to what the scores hold.
constexpr int kRouterThreads = 512;
constexpr int kRouterWarps = kRouterThreads / 32;
constexpr int kRouterExperts = 16;
constexpr int kRouterTiles = 2;  // of eight tokens

template <typename T>
__device__ void route_few(const T* x,       // [tokens, cols]
                          const T* router,  // [experts, cols]
                          T* scores,        // [tokens, experts]
                          int32_t* ids, float* weights, int32_t* row_of_route,
                          int32_t* token_of_row, int32_t* bounds,
                          int32_t* arrivals,  // 0 between launches
                          int64_t cols, int64_t tokens, int64_t experts, int64_t first_held,
                          int64_t num_held, int64_t top_k, int32_t normalized, int32_t adds) {
  constexpr int kSteps = 8;  // of 16 columns, loaded at once
  __shared__ float sums_of_warps[kRouterWarps][kRouterExperts][8 + 1];
  __shared__ bool is_last;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const int first_expert = blockIdx.x * kRouterExperts, steps = static_cast<int>(cols / 16);
  const int tiles = static_cast<int>((tokens + 7) / 8);
  const auto pair = [&](const T* row, int step, int half) {
    return *reinterpret_cast<const uint32_t*>(row + step * 16 + half * 8 + q * 2);
  };
  float sums[kRouterTiles][4] = {};
  for (int first = 0; first < steps; first += kSteps * kRouterWarps) {
    uint4 a[kSteps];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int step = first + i * kRouterWarps + warp;
      a[i] = {};
      if (step >= steps) continue;
      const int64_t low = first_expert + g, high = low + 8;
      if (low < experts) {
        a[i].x = pair(router + low * cols, step, 0);
        a[i].z = pair(router + low * cols, step, 1);
      }
      if (high < experts) {
        a[i].y = pair(router + high * cols, step, 0);
        a[i].w = pair(router + high * cols, step, 1);
      }
    }
    // The router is a weight. All else is from the kernels before.
    if (first == 0) aril::wait_for_predecessors();
#pragma unroll
    for (int tile = 0; tile < kRouterTiles; ++tile) {
      if (tile >= tiles) break;
      const int64_t token = tile * 8 + g;
      uint2 b[kSteps];
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const int step = first + i * kRouterWarps + warp;
        b[i] = {};
        if (step < steps && token < tokens) {
          b[i] = {pair(x + token * cols, step, 0), pair(x + token * cols, step, 1)};
        }
      }
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        aril::mma_m16n8k16<T>(sums[tile], a[i], b[i].x, b[i].y);
      }
    }
  }
  aril::launch_dependents();

#pragma unroll
  for (int tile = 0; tile < kRouterTiles; ++tile) {
    if (tile >= tiles) break;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sums_of_warps[warp][g + i / 2 * 8][q * 2 + i % 2] = sums[tile][i];
    }
    __syncthreads();
    const int expert = threadIdx.x % kRouterExperts, at = threadIdx.x / kRouterExperts;
    const int token = tile * 8 + at;
    if (at < 8 && token < tokens && first_expert + expert < experts) {
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < kRouterWarps; ++w) sum += sums_of_warps[w][expert][at];
      T* score = scores + token * experts + first_expert + expert;
      *score = static_cast<T>(adds ? static_cast<float>(*score) + sum : sum);
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    // Of all threads' scores.
    __threadfence();
    is_last = atomicAdd(arrivals, 1) == static_cast<int>(gridDim.x) - 1;
    __threadfence();
    if (is_last) *arrivals = 0;
  }
  __syncthreads();
  if (!is_last) return;
  route_tokens<kRouterThreads>(scores, ids, weights, row_of_route, token_of_row, bounds, tokens,
                               experts, first_held, num_held, top_k, normalized);
}

// The sum of the outputs of a token's experts that are here, each times its weight, rounded once.
template <typename T>
__device__ void combine(const T* x,                   // [routes, cols]
                        const float* weights,         // [tokens, top_k]
                        const int32_t* row_of_route,  // [tokens, top_k]; -1 for experts elsewhere
                        T* out,                       // [tokens, cols]
                        int64_t cols, int64_t top_k) {
  weights += blockIdx.x * top_k;
  row_of_route += blockIdx.x * top_k;
  // Routes are complete: between them and this kernel is a grouped GEMM, which lets no kernel start
  // before it has waited for them.
  constexpr int kAtOnce = 8;
  float factors[kAtOnce];
  int64_t rows[kAtOnce];
  const auto load_routes = [&](int64_t first) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      rows[i] = first + i < top_k ? __ldcg(row_of_route + first + i) : -1;
      factors[i] = first + i < top_k ? __ldcg(weights + first + i) : 0.0f;
    }
  };
  load_routes(0);
  aril::wait_for_predecessors();
  aril::launch_dependents();
  for_part<T>(cols, [&](int64_t col, auto width) {
    constexpr int kWidth = decltype(width)::value;
    using Vec = Vector<T, kWidth>;
    float sums[kWidth] = {};
    for (int64_t first = 0; first < top_k; first += kAtOnce) {
      if (top_k > kAtOnce) load_routes(first);
      Vec values[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        values[i] = Vec{};
        if (rows[i] >= 0) values[i] = *reinterpret_cast<const Vec*>(x + rows[i] * cols + col);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (rows[i] < 0) continue;
#pragma unroll
        for (int e = 0; e < kWidth; ++e) {
          sums[e] = fmaf(factors[i], static_cast<float>(values[i].elements[e]), sums[e]);
        }
      }
    }
    Vec result;
#pragma unroll
    for (int e = 0; e < kWidth; ++e) result.elements[e] = static_cast<T>(sums[e]);
    *reinterpret_cast<Vec*>(out + blockIdx.x * cols + col) = result;
  });
}

// The tile of a block of the grouped GEMM, and the depth of a step.
constexpr int kTileRows = 32;
constexpr int kTileOuts = 64;
constexpr int kDepth = 32;
// What a thread copies at a time; a word of weights in 4 bits.
constexpr int kChunk = 8;
constexpr int kChunks = kDepth / kChunk;

static_assert(kTileOuts * kChunks == kThreads, "each thread copies a chunk of the weights");
static_assert(kTileRows / 16 * (kTileOuts / 16) == kWarps, "each warp has 16 rows and 16 outputs");

// Rows of tiles in shared memory: 16 bytes apart from a power of two, so that no two of eight rows
// are in the same banks.
template <typename T>
constexpr int kStride = kDepth + 16 / static_cast<int>(sizeof(T));

// Copies a chunk of a row of `cols` columns to shared memory, padded with zeros.
template <typename T>
__device__ __forceinline__ void copy_chunk(T* shared, const T* row, int64_t col, int64_t cols) {
  constexpr int kVector = 16 / sizeof(T);
  if (cols % kVector == 0 && col + kChunk <= cols) {
#pragma unroll
    for (int i = 0; i < kChunk; i += kVector) {
      *reinterpret_cast<uint4*>(shared + i) = *reinterpret_cast<const uint4*>(row + col + i);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      shared[i] = col + i < cols ? row[col + i] : static_cast<T>(0.0f);
    }
  }
}

template <typename T>
__device__ __forceinline__ void clear_chunk(T* shared) {
#pragma unroll
  for (int i = 0; i < kChunk; ++i) shared[i] = static_cast<T>(0.0f);
}

// The weights of all experts as they are computed with.
template <typename T>
struct Plain {
  const T* weights;  // [experts, outs, cols]

  __device__ void copy(T* shared, int64_t row, int64_t col, int64_t cols) const {
    copy_chunk(shared, weights + row * cols, col, cols);
  }

  __device__ float scale(int64_t, int64_t, int64_t) const { return 1.0f; }
};

// Those in 4 or 8 bits. T holds the integers exactly; the scale of a group comes after the
// products, in f32, so that no weight is rounded. Groups are multiples of kDepth.
template <typename T, int kBits>
struct Packed {
  static constexpr int kPerWord = 32 / kBits;
  const uint32_t* words;  // [experts, outs, cols / kPerWord]
  const float* scales;    // [experts, outs, cols / group]
  int64_t group;

  __device__ void copy(T* shared, int64_t row, int64_t col, int64_t cols) const {
    const uint32_t* const from = words + (row * cols + col) / kPerWord;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      const uint32_t word = from[i / kPerWord] >> (kBits * (i % kPerWord));
      const int integer = static_cast<int>(word & ((1u << kBits) - 1)) - (1 << (kBits - 1));
      shared[i] = static_cast<T>(static_cast<float>(integer));
    }
  }

  __device__ float scale(int64_t row, int64_t col, int64_t cols) const {
    return scales[(row * cols + col) / group];
  }
};

// The rows of a tile.
struct TileRows {
  int64_t expert;  // -1 if there is no such tile
  int64_t first;
  int count;
};

// Finds a tile of `tile_rows` rows by its number among all experts' tiles, in order.
__device__ __forceinline__ TileRows find_tile(const int32_t* bounds, int64_t experts, int tile_rows,
                                              int32_t tile) {
  constexpr int kEach = 4;  // experts of a lane
  const int lane = threadIdx.x % 32;
  for (int64_t base = 0; base < experts; base += 32 * kEach) {
    int32_t firsts[kEach + 1];
#pragma unroll
    for (int i = 0; i <= kEach; ++i) {
      // Past the L1 cache, which may hold the bounds of an earlier layer.
      firsts[i] = __ldcg(bounds + min(base + lane * kEach + i, experts));
    }
    // The tiles of the lane's experts, and of all before.
    int32_t own = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) own += (firsts[i + 1] - firsts[i] + tile_rows - 1) / tile_rows;
    int32_t tiles = own;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int32_t others = __shfl_up_sync(0xffffffffu, tiles, distance);
      if (lane >= distance) tiles += others;
    }
    const uint32_t reached = __ballot_sync(0xffffffffu, tile < tiles);
    if (reached != 0) {
      int32_t skipped = tile - tiles + own, expert = 0;
#pragma unroll
      for (int i = 0; i < kEach - 1; ++i) {
        const int32_t count = (firsts[i + 1] - firsts[i] + tile_rows - 1) / tile_rows;
        if (expert == i && skipped >= count) {
          skipped -= count;
          ++expert;
        }
      }
      int32_t first = firsts[0], end = firsts[1];
#pragma unroll
      for (int i = 1; i < kEach; ++i) {
        if (expert == i) {
          first = firsts[i];
          end = firsts[i + 1];
        }
      }
      first += skipped * tile_rows;
      const int source = __ffs(reached) - 1;
      const int32_t left = __shfl_sync(0xffffffffu, end - first, source);
      return {base + source * kEach + __shfl_sync(0xffffffffu, expert, source),
              __shfl_sync(0xffffffffu, first, source), min(left, tile_rows)};
    }
    tile -= __shfl_sync(0xffffffffu, tiles, 31);
  }
  return {-1, 0, 0};
}

// A warp's 16 rows and 16 outputs on the tensor cores, over one depth.
template <typename T>
struct Products {
  float sums[2][4] = {};

  __device__ void add(const T* x_tile, const T* w_tile) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const T* x_row = x_tile + (warp % 2 * 16 + lane % 16) * kStride<T> + lane / 16 * 8;
    const T* w_row =
        w_tile + (warp / 2 * 16 + lane / 16 * 8 + lane % 8) * kStride<T> + lane / 8 % 2 * 8;
#pragma unroll
    for (int k = 0; k < kDepth; k += 16) {
      const uint4 a = aril::ldmatrix_x4(x_row + k);
      const uint4 b = aril::ldmatrix_x4(w_row + k);
      aril::mma_m16n8k16<T>(sums[0], a, b.x, b.y);
      aril::mma_m16n8k16<T>(sums[1], a, b.z, b.w);
    }
  }

  // Calls with the row and the output in the tile of each sum.
  template <typename F>
  __device__ void each(F visit) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int row = warp % 2 * 16 + lane / 4, out = warp / 2 * 16 + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        visit(row + i / 2 * 8, out + n * 8 + i % 2, sums[n][i], n * 4 + i);
    }
  }
};

// In f32, by fused multiply-add: an output of eight rows for each thread.
template <>
struct Products<float> {
  float sums[8] = {};

  __device__ void add(const float* x_tile, const float* w_tile) {
    const float* w_row = w_tile + threadIdx.x % kTileOuts * kStride<float>;
    const float* x_row = x_tile + threadIdx.x / kTileOuts * 8 * kStride<float>;
#pragma unroll
    for (int k = 0; k < kDepth; k += 4) {
      const float4 w = *reinterpret_cast<const float4*>(w_row + k);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float4 x = *reinterpret_cast<const float4*>(x_row + i * kStride<float> + k);
        sums[i] += x.x * w.x;
        sums[i] += x.y * w.y;
        sums[i] += x.z * w.z;
        sums[i] += x.w * w.w;
      }
    }
  }

  template <typename F>
  __device__ void each(F visit) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      visit(threadIdx.x / kTileOuts * 8 + i, threadIdx.x % kTileOuts, sums[i], i);
    }
  }
};

// y = x W[expert]ᵀ of every route, rounded once. blockIdx.x is the number of a tile of rows, of
// which there may be fewer than blocks; blockIdx.y is a tile of outputs.
//
// Shared: 7.5 KB for 16 bits, 13.5 KB for f32, and 256 bytes of scales.
template <typename T, typename Weights>
__device__ void grouped_gemm(const T* x,  // [routes, cols]
                             Weights weights,
                             const int32_t* bounds,  // [experts + 1]
                             T* y,                   // [routes, outs]
                             int64_t experts, int64_t outs, int64_t cols) {
  __shared__ __align__(16) T x_tile[kTileRows * kStride<T>];
  __shared__ __align__(16) T w_tile[kTileOuts * kStride<T>];
  __shared__ float scales[kTileOuts];
  const TileRows rows = find_tile(bounds, experts, kTileRows, static_cast<int32_t>(blockIdx.x));
  if (rows.expert < 0) return;
  const int64_t first_out = static_cast<int64_t>(blockIdx.y) * kTileOuts;
  const int chunk_row = threadIdx.x / kChunks, chunk_col = threadIdx.x % kChunks * kChunk;
  const int64_t w_row = rows.expert * outs + first_out + chunk_row;

  float totals[8] = {};
  for (int64_t col = 0; col < cols; col += kDepth) {
    __syncthreads();
    T* shared = w_tile + chunk_row * kStride<T> + chunk_col;
    if (first_out + chunk_row < outs && col + chunk_col < cols) {
      weights.copy(shared, w_row, col + chunk_col, cols);
    } else {
      clear_chunk(shared);
    }
    if (chunk_row < kTileRows) {
      shared = x_tile + chunk_row * kStride<T> + chunk_col;
      if (chunk_row < rows.count && col + chunk_col < cols) {
        copy_chunk(shared, x + (rows.first + chunk_row) * cols, col + chunk_col, cols);
      } else {
        clear_chunk(shared);
      }
    }
    if (chunk_col == 0) {
      scales[chunk_row] = first_out + chunk_row < outs ? weights.scale(w_row, col, cols) : 0.0f;
    }
    __syncthreads();
    Products<T> products;
    products.add(x_tile, w_tile);
    products.each([&](int, int out, float sum, int i) { totals[i] += scales[out] * sum; });
  }
  Products<T>().each([&](int row, int out, float, int i) {
    if (row < rows.count && first_out + out < outs) {
      y[(rows.first + row) * outs + first_out + out] = static_cast<T>(totals[i]);
    }
  });
}

// The same on tensor cores with copies in flight, for weights of 16 bits and rows that are
// multiples of 16 bytes. A block has kRows rows and kOuts outputs, a warp kWarpRows and kWarpOuts
// of them. All sums are in the order of the columns, so that the shape of a block changes no bit.
//
// With kGated, y = silu(gate) * up of the rounded products, rounded once, as the library's
// activation of experts without adapters. Of each 16 rows of a block's weights, 8 are gates and 8
// their ups, so that a thread has both sums.
//
// Bound with few rows for an expert: the bytes of the weights.
template <typename T, int kRows, int kOuts, int kWarpRows, int kWarpOuts, int kStages>
struct GroupedGemm {
  static constexpr int kColsPerStage = 64;
  using Rows = SharedRows<T, kColsPerStage>;
  static constexpr int kThreadsPerBlock = 32 * (kRows / kWarpRows) * (kOuts / kWarpOuts);
  static constexpr int kStageElems = (kRows + kOuts) * kColsPerStage;
  static constexpr int kSharedBytes = kStages * kStageElems * static_cast<int>(sizeof(T));

  template <bool kGated>
  static __device__ __forceinline__ void run(
      const T* x,             // [tokens or routes, cols]
      const int32_t* tokens,  // [routes]: the row of x of each row; null if it is the same
      const T* weights,       // [experts, outs, cols]
      const int32_t* bounds,  // [experts + 1]
      T* y,                   // [routes, outs], or [routes, outs / 2] with kGated
      int64_t experts, int64_t outs, int64_t cols,
      // 1: this kernel starts when those that write them have ended. 2: and the kernel behind waits
      // for the one in front by itself.
      int32_t bounds_are_old) {
    extern __shared__ __align__(128) unsigned char shared[];
    if (bounds_are_old == 2) aril::launch_dependents();
    if (!bounds_are_old) {
      aril::wait_for_predecessors();
      aril::launch_dependents();
    }
    const TileRows tile = find_tile(bounds, experts, kRows, static_cast<int32_t>(blockIdx.x));
    if (tile.expert < 0) {
      aril::wait_for_predecessors();
      return;
    }
    constexpr int kWidth = kGated ? kOuts / 2 : kOuts;  // outputs of y of a block
    const int64_t width = kGated ? outs / 2 : outs;     // of y
    const int64_t first_out = int64_t{blockIdx.y} * kWidth;
    const int num_outs = static_cast<int>(min(width - first_out, int64_t{kWidth}));
    weights += (tile.expert * outs + first_out) * cols;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int warp_row = warp % (kRows / kWarpRows) * kWarpRows;
    const int warp_out = warp / (kRows / kWarpRows) * kWarpOuts;

    // A thread copies the same chunk of every kRowsAtOnce-th row.
    constexpr int kRowsAtOnce = kThreadsPerBlock / Rows::kChunks;
    static_assert(kRows % kRowsAtOnce == 0 && kOuts % kRowsAtOnce == 0, "all threads copy");
    const int chunk = threadIdx.x % Rows::kChunks, copied_row = threadIdx.x / Rows::kChunks;
    int64_t copied_rows[kRows / kRowsAtOnce];  // of x
#pragma unroll
    for (int i = 0; i < kRows / kRowsAtOnce; ++i) {
      const int64_t row = tile.first + min(i * kRowsAtOnce + copied_row, tile.count - 1);
      copied_rows[i] = tokens == nullptr ? row : tokens[row];
    }
    T* const stages = reinterpret_cast<T*>(shared);
    const auto load_weights = [&](int64_t first_col, int stage) {
      const Rows to{stages + stage * kStageElems + kRows * kColsPerStage};
      const int64_t col = first_col + chunk * 8;
      if (first_col >= cols) return;
#pragma unroll
      for (int i = 0; i < kOuts / kRowsAtOnce; ++i) {
        const int row = i * kRowsAtOnce + copied_row;
        const int out = kGated ? row / 16 * 8 + row % 8 : row;
        const int64_t skipped = kGated ? row / 8 % 2 * width : 0;
        const bool is_there = out < num_outs && col < cols;
        const T* const from = weights + (skipped + min(out, num_outs - 1)) * cols;
        T* const place = to.chunk(row, chunk);
        const T* const weight = from + (col < cols ? col : 0);
        // With more rows, several tiles of an expert read them. (H100, prefill: 3 % slower)
        if constexpr (kRows == 16) {
          copy_once(place, weight, is_there ? 16 : 0);
        } else {
          aril::copy_async(place, weight, is_there ? 16 : 0);
        }
      }
    };
    // Ends the stage's group of copies.
    const auto load_rows = [&](int64_t first_col, int stage) {
      const Rows to{stages + stage * kStageElems};
      const int64_t col = first_col + chunk * 8;
      if (first_col < cols) {
#pragma unroll
        for (int i = 0; i < kRows / kRowsAtOnce; ++i) {
          const int row = i * kRowsAtOnce + copied_row;
          const bool is_there = row < tile.count && col < cols;
          aril::copy_async(to.chunk(row, chunk), x + copied_rows[i] * cols + (col < cols ? col : 0),
                           is_there ? 16 : 0);
        }
      }
      aril::commit_copies();
    };
    // The rows of x are found while the first weights are on their way.
    constexpr int kLead = 2;
#pragma unroll
    for (int stage = 0; stage < kStages - 1 + kLead; ++stage) {
      if (stage < kStages - 1) load_weights(stage * kColsPerStage, stage);
      if (stage >= kLead && !bounds_are_old) {
        load_rows((stage - kLead) * kColsPerStage, stage - kLead);
      }
    }
    if (bounds_are_old) {
      aril::wait_for_predecessors();
      aril::launch_dependents();
#pragma unroll
      for (int stage = 0; stage < kStages - 1; ++stage) load_rows(stage * kColsPerStage, stage);
    }

    float sums[kWarpRows / 16][kWarpOuts / 8][4] = {};
    int stage = 0;
    for (int64_t col = 0; col < cols; col += kColsPerStage) {
      aril::wait_for_copies<kStages - 2>();
      // What is copied next takes the place of what all have multiplied.
      __syncthreads();
      const int free = stage == 0 ? kStages - 1 : stage - 1;
      load_weights(col + (kStages - 1) * kColsPerStage, free);
      load_rows(col + (kStages - 1) * kColsPerStage, free);
      const Rows x_rows{stages + stage * kStageElems};
      const Rows w_rows{x_rows.data + kRows * kColsPerStage};
#pragma unroll
      for (int k = 0; k < kColsPerStage / 16; ++k) {
        uint4 a[kWarpRows / 16];
#pragma unroll
        for (int i = 0; i < kWarpRows / 16; ++i) a[i] = x_rows.a(warp_row + i * 16, k);
#pragma unroll
        for (int n = 0; n < kWarpOuts / 16; ++n) {
          const uint4 b = w_rows.b(warp_out + n * 16, k);
#pragma unroll
          for (int i = 0; i < kWarpRows / 16; ++i) {
            aril::mma_m16n8k16<T>(sums[i][2 * n], a[i], b.x, b.y);
            aril::mma_m16n8k16<T>(sums[i][2 * n + 1], a[i], b.z, b.w);
          }
        }
      }
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    aril::wait_for_copies<0>();

#pragma unroll
    for (int i = 0; i < kWarpRows / 16; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = warp_row + i * 16 + half * 8 + lane / 4;
        if (row >= tile.count) continue;
        T* const to = y + (tile.first + row) * width + first_out;
#pragma unroll
        for (int n = 0; n < kWarpOuts / 8; ++n) {
          if (kGated && n % 2 != 0) continue;
          const int out = (kGated ? warp_out / 2 + n * 4 : warp_out + n * 8) + lane % 4 * 2;
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float value = sums[i][n][2 * half + e];
            if constexpr (kGated) {
              const float gate = round_to<T>(value);
              value = aril::detail::silu_mul<T>(gate, round_to<T>(sums[i][n + 1][2 * half + e]));
            }
            if (out + e < num_outs) to[out + e] = static_cast<T>(value);
          }
        }
      }
    }
  }
};

// Of few routes: small blocks, with more of the weights in flight.
template <typename T>
using FewGemm = GroupedGemm<T, 16, 32, 16, 16, 6>;
template <typename T>
using NarrowGemm = GroupedGemm<T, 16, 64, 16, 16, 5>;
template <typename T>
using MiddleGemm = GroupedGemm<T, 64, 128, 32, 64, 3>;
template <typename T>
using WideGemm = GroupedGemm<T, 128, 128, 32, 64, 3>;

}  // namespace
