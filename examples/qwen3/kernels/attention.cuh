// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Attention over a paged cache on tensor cores, for 16-bit elements: the online softmax of
// FlashAttention-2 (Dao 2023) in f32, whose weights are rounded to T before they meet the values.
//
// attend_decode: tokens that are the only ones of their sequence in a step. The keys of a sequence
// are divided into splits, whose boundaries depend on its length alone. A block has a kv head and a
// split; a query head is a row of its products, so that keys and values are read once for all heads
// of the group. The block that finishes a sequence's last split combines the splits. Cache rows are
// found before the wait for the kernels in front, keys and values are read behind it.
// Bound: the bytes of keys and values.
//
// attend_prefill: tokens that follow each other in a sequence. A block has a kv head and a tile of
// rows; a row is a query head of a token, and a tile's tokens may be of several sequences.
// Bound: mma.sync.
//
// Neither kernel's result depends on other sequences. Keys beyond a sequence's length are not read:
// their products count as zero, whatever the cache holds there.
#pragma once

#include <float.h>
#include <stdint.h>

#include "../../../csrc/ptx/approximate.cuh"
#include "../../../csrc/ptx/async.cuh"
#include "../../../csrc/ptx/mma.cuh"
#include "../../../csrc/ptx/pdl.cuh"
#include "../../../csrc/ptx/tma.cuh"

namespace {

// Query heads of a kv head: the rows of a product.
constexpr int kMaxGroup = 16;

template <typename T>
struct Attention {
  const T* qkv;               // [tokens, cols]: query heads first
  const T* keys;              // [cache rows, kv_heads * dim]
  const T* values;            // [cache rows, kv_heads * dim]
  const int32_t* positions;   // [tokens]
  const int32_t* sequences;   // [tokens]
  const int32_t* first_rows;  // [sequences, columns]: of each block
  int64_t columns, block_rows;
  T* out;  // [tokens, query_heads * dim]
  int64_t cols, query_heads, kv_heads;
  float scale;

  __device__ __forceinline__ int group() const {
    return static_cast<int>(query_heads) / static_cast<int>(kv_heads);
  }

  // The cache row of a sequence's key.
  __device__ __forceinline__ int row_of(int sequence, int key) const {
    const auto rows = static_cast<uint32_t>(block_rows), at = static_cast<uint32_t>(key);
    return __ldcg(first_rows + sequence * columns + at / rows) + static_cast<int>(at % rows);
  }

  // Softmax is computed with powers of 2.
  __device__ __forceinline__ float exponent_scale() const { return scale * 1.44269504f; }
};

// As ldmatrix_x4, of the cores' transposes.
__device__ __forceinline__ uint4 ldmatrix_x4_transposed(const void* row) {
  uint4 cores;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(cores.x), "=r"(cores.y), "=r"(cores.z), "=r"(cores.w)
               : "r"(aril::shared_address(row))
               : "memory");
  return cores;
}

// Two values, rounded to T.
template <typename T>
__device__ __forceinline__ uint32_t pack(float low, float high);
template <>
__device__ __forceinline__ uint32_t pack<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
template <>
__device__ __forceinline__ uint32_t pack<__half>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// As aril::copy_async, of what the whole device reads at about the same time and not again in the
// step: keys and values, and weights of experts. L2 gives them up first, and keeps what the next
// layers read: code, descriptors of adapters, routers.
__device__ __forceinline__ void copy_once(void* shared, const void* global, int valid) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(
                   aril::shared_address(shared)),
               "l"(global), "r"(valid), "l"(aril::kEvictFirst)
               : "memory");
#else
  aril::copy_async(shared, global, valid);
#endif
}

// A matrix in shared memory with rows of kDim elements. Their chunks of 16 bytes are permuted so
// that ldmatrix meets every bank once.
template <typename T, int kDim>
struct SharedRows {
  static constexpr int kChunks = kDim / 8;

  T* data;

  __device__ __forceinline__ T* chunk(int row, int chunk) const {
    constexpr int kRowsOfLine = kChunks < 8 ? 8 / kChunks : 1;  // in 128 bytes
    constexpr int kMask = (kChunks < 8 ? kChunks : 8) - 1;
    return data + (row * kChunks + (chunk ^ (row / kRowsOfLine & kMask))) * 8;
  }

  // The operand a of rows first..first + 16 and columns 16 k..16 k + 16.
  __device__ __forceinline__ uint4 a(int first, int k) const {
    const int lane = threadIdx.x % 32;
    return aril::ldmatrix_x4(chunk(first + lane % 16, 2 * k + lane / 16));
  }

  // The operands b of two products, whose columns are rows first.. and first + 8.. and whose rows
  // are columns 16 k..16 k + 16: x and y are the first's, z and w the second's.
  __device__ __forceinline__ uint4 b(int first, int k) const {
    const int lane = threadIdx.x % 32;
    return aril::ldmatrix_x4(chunk(first + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
  }

  // The same with columns 16 k.. and 16 k + 8.., and rows first..first + 16.
  __device__ __forceinline__ uint4 b_transposed(int first, int k) const {
    const int lane = threadIdx.x % 32;
    return ldmatrix_x4_transposed(chunk(first + lane % 16, 2 * k + lane / 16));
  }
};

// The largest, or the sum, of the four lanes that share rows of a product.
__device__ __forceinline__ float quad_max(float value) {
  value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 1));
  return fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 2));
}
__device__ __forceinline__ float quad_sum(float value) {
  value += __shfl_xor_sync(0xffffffffu, value, 1);
  return value + __shfl_xor_sync(0xffffffffu, value, 2);
}

// The state of an online softmax over 16 rows, of which a lane has two: g = lane / 4 and g + 8.
template <typename T, int kDim>
struct OnlineSoftmax {
  float largest[2] = {-INFINITY, -INFINITY};
  float sum[2] = {};  // of this lane's columns
  float out[kDim / 8][4] = {};

  // Turns the scores of kTiles * 8 keys into weights and scales what was summed before. The first
  // call has a finite score in each row.
  template <int kTiles>
  __device__ __forceinline__ void weigh(float (&scores)[kTiles][4], float scale) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top = largest[half];
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        top = fmaxf(top, fmaxf(scores[n][2 * half], scores[n][2 * half + 1]));
      }
      top = quad_max(top);
      const float factor = aril::approximate_exp2((largest[half] - top) * scale);
      const float offset = top * scale;
      largest[half] = top;
      float added = 0.0f;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
          scores[n][i] = aril::approximate_exp2(fmaf(scores[n][i], scale, -offset));
          added += scores[n][i];
        }
      }
      sum[half] = sum[half] * factor + added;
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) {
        out[n][2 * half] *= factor;
        out[n][2 * half + 1] *= factor;
      }
    }
  }
};

// ---- Decode

constexpr int kDecodeWarps = 4;
constexpr int kDecodeThreads = 32 * kDecodeWarps;
constexpr int kDecodeKeys = 16;  // of a warp at a time
// Copies in flight: enough for a multiprocessor together with those of the other blocks on it, or
// of a block that is alone there.
constexpr int kDecodeStages = 2;
constexpr int kDeepDecodeStages = 5;
constexpr int kMaxSplits = 32;  // one for each lane of a warp
constexpr int kMinSplitKeys = 512;

// Keys of a split.
__device__ __forceinline__ int split_keys(int num_keys) {
  const int keys = (num_keys + kMaxSplits - 1) / kMaxSplits;
  return max((keys + 63) / 64 * 64, kMinSplitKeys);
}

template <typename T, int kDim, int kStages>
constexpr int kDecodeSharedBytes =
    kDecodeWarps * kStages * 2 * kDecodeKeys * kDim * static_cast<int>(sizeof(T));

// The sums of a warp's keys, in tiles of kDecodeKeys that the warps take in turns.
template <typename T, int kDim, int kStages>
__device__ __forceinline__ void attend_keys(OnlineSoftmax<T, kDim>& state, const Attention<T>& a,
                                            const T* queries, T* stages, int sequence,
                                            int kv_head, int first, int end) {
  using Rows = SharedRows<T, kDim>;
  constexpr int kTile = kDecodeKeys * kDim;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t kv_stride = a.kv_heads * kDim;
  const T* const keys = a.keys + kv_head * kDim;
  const T* const values = a.values + kv_head * kDim;
  first += warp * kDecodeKeys;
  constexpr int kStep = kDecodeWarps * kDecodeKeys;

  // A lane finds the row of key lane % 16. Rows are found before they are needed.
  const auto find_row = [&](int tile) {
    return tile < end ? a.row_of(sequence, min(tile + lane % kDecodeKeys, end - 1)) : 0;
  };
  int rows[kStages];  // of the next tiles to load
#pragma unroll
  for (int i = 0; i < kStages; ++i) rows[i] = find_row(first + i * kStep);
  aril::wait_for_predecessors();
  const auto load = [&](int tile, int stage) {
    if (tile < end) {
      const Rows key_rows{stages + stage * 2 * kTile}, value_rows{key_rows.data + kTile};
#pragma unroll
      for (int i = lane; i < kDecodeKeys * Rows::kChunks; i += 32) {
        const int at = i / Rows::kChunks, chunk = i % Rows::kChunks;
        const int64_t row = __shfl_sync(0xffffffffu, rows[0], at);
        const int valid = tile + at < end ? 16 : 0;
        copy_once(key_rows.chunk(at, chunk), keys + row * kv_stride + chunk * 8, valid);
        copy_once(value_rows.chunk(at, chunk), values + row * kv_stride + chunk * 8, valid);
      }
    }
    aril::commit_copies();
#pragma unroll
    for (int i = 1; i < kStages; ++i) rows[i - 1] = rows[i];
    rows[kStages - 1] = find_row(tile + kStages * kStep);
  };
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) load(first + stage * kStep, stage);
  uint4 query[kDim / 16];
#pragma unroll
  for (int k = 0; k < kDim / 16; ++k) {
    const auto pair = [&](int head, int col) {
      return head < a.group() ? *reinterpret_cast<const uint32_t*>(queries + head * kDim + col)
                              : 0u;
    };
    const int g = lane / 4, col = k * 16 + lane % 4 * 2;
    query[k] = {pair(g, col), pair(g + 8, col), pair(g, col + 8), pair(g + 8, col + 8)};
  }

  const float scale = a.exponent_scale();
  int stage = 0;
  for (int tile = first; tile < end; tile += kStep) {
    load(tile + (kStages - 1) * kStep, stage == 0 ? kStages - 1 : stage - 1);
    aril::wait_for_copies<kStages - 1>();
    __syncwarp();
    const Rows key_rows{stages + stage * 2 * kTile}, value_rows{key_rows.data + kTile};
    float scores[2][4] = {};
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      const uint4 b = key_rows.b(0, k);
      aril::mma_m16n8k16<T>(scores[0], query[k], b.x, b.y);
      aril::mma_m16n8k16<T>(scores[1], query[k], b.z, b.w);
    }
    if (tile + kDecodeKeys > end) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (tile + i / 4 * 8 + lane % 4 * 2 + i % 2 >= end) scores[i / 4][i % 4] = -INFINITY;
      }
    }
    state.weigh(scores, scale);
    const uint4 weights = {pack<T>(scores[0][0], scores[0][1]), pack<T>(scores[0][2], scores[0][3]),
                           pack<T>(scores[1][0], scores[1][1]),
                           pack<T>(scores[1][2], scores[1][3])};
#pragma unroll
    for (int n = 0; n < kDim / 16; ++n) {
      const uint4 b = value_rows.b_transposed(0, n);
      aril::mma_m16n8k16<T>(state.out[2 * n], weights, b.x, b.y);
      aril::mma_m16n8k16<T>(state.out[2 * n + 1], weights, b.z, b.w);
    }
    __syncwarp();
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
  aril::wait_for_copies<0>();
}

// Of a split and a query head: the sum of weights times values, which belongs to the softmax with
// this largest score and this sum of weights.
struct SplitStats {
  float largest, sum;
};

// Grid: (tokens * kv_heads, splits at a time). Neither the grid nor the stages change a bit.
template <typename T, int kDim, int kStages>
__device__ void attend_decode(const Attention<T>& a,
                              const int32_t* alone,  // the tokens, or null for 0, 1, 2, ..
                              float* partials,    // [sequences, kv_heads, max_splits, group, kDim]
                              SplitStats* stats,  // [sequences, kv_heads, max_splits, group]
                              int32_t* arrivals,  // [sequences, kv_heads]: zero before and behind
                              int64_t max_splits) {
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ float warp_largest[kDecodeWarps][kMaxGroup], warp_sums[kDecodeWarps][kMaxGroup];
  __shared__ float factors[kMaxSplits][kMaxGroup], totals[kMaxGroup];  // 1 / sum of weights
  __shared__ bool is_last;
  aril::launch_dependents();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const int kv_heads = static_cast<int>(a.kv_heads), group = a.group();
  const int index = blockIdx.x / kv_heads, kv_head = blockIdx.x % kv_heads;
  const int token = alone == nullptr ? index : __ldcg(alone + index);
  const int num_keys = __ldcg(a.positions + token) + 1, sequence = __ldcg(a.sequences + token);
  const int keys = split_keys(num_keys);
  const int splits = (num_keys + keys - 1) / keys;
  if (static_cast<int>(blockIdx.y) >= splits) return;

  const int64_t first_head = static_cast<int64_t>(kv_head) * group;
  const T* const queries = a.qkv + token * a.cols + first_head * kDim;
  T* const out = a.out + (token * a.query_heads + first_head) * kDim;
  T* const stages = reinterpret_cast<T*>(shared) + warp * kStages * 2 * kDecodeKeys * kDim;
  // Behind the keys, the sums of each warp.
  float* const sums = reinterpret_cast<float*>(shared);
  constexpr int kSums = kMaxGroup * kDim;
  static_assert(kDecodeWarps * kSums * static_cast<int>(sizeof(float)) <=
                    kDecodeSharedBytes<T, kDim, kStages>,
                "the sums have room");
  const int64_t pair = static_cast<int64_t>(sequence) * kv_heads + kv_head;
  partials += pair * max_splits * group * kDim;
  stats += pair * max_splits * group;
  int done = 0;
  for (int split = blockIdx.y; split < splits; split += gridDim.y, ++done) {
    OnlineSoftmax<T, kDim> state;
    attend_keys<T, kDim, kStages>(state, a, queries, stages, sequence, kv_head, split * keys,
                                  min(split * keys + keys, num_keys));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = quad_sum(state.sum[half]);
      if (q == 0) {
        warp_largest[warp][g + 8 * half] = state.largest[half];
        warp_sums[warp][g + 8 * half] = sum;
      }
    }
    __syncthreads();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int head = g + 8 * half;
      float largest = -INFINITY;
#pragma unroll
      for (int w = 0; w < kDecodeWarps; ++w) largest = fmaxf(largest, warp_largest[w][head]);
      const float factor =
          aril::approximate_exp2((state.largest[half] - largest) * a.exponent_scale());
      if (head < group) {
        if (warp == 0 && q == 0) {
          float sum = 0.0f;
#pragma unroll
          for (int w = 0; w < kDecodeWarps; ++w) {
            sum += warp_sums[w][head] *
                   aril::approximate_exp2((warp_largest[w][head] - largest) * a.exponent_scale());
          }
          totals[head] = 1.0f / sum;
          if (splits > 1) stats[split * group + head] = {largest, sum};
        }
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n) {
          *reinterpret_cast<float2*>(sums + warp * kSums + head * kDim + n * 8 + q * 2) =
              make_float2(state.out[n][2 * half] * factor, state.out[n][2 * half + 1] * factor);
        }
      }
    }
    __syncthreads();
    for (int i = threadIdx.x * 2; i < group * kDim; i += kDecodeThreads * 2) {
      float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
      for (int w = 0; w < kDecodeWarps; ++w) {
        const float2 of_warp = *reinterpret_cast<const float2*>(sums + w * kSums + i);
        sum.x += of_warp.x;
        sum.y += of_warp.y;
      }
      if (splits == 1) {
        const float factor = totals[i / kDim];
        *reinterpret_cast<uint32_t*>(out + i) = pack<T>(sum.x * factor, sum.y * factor);
      } else {
        *reinterpret_cast<float2*>(partials + split * group * kDim + i) = sum;
      }
    }
    __syncthreads();
  }
  if (splits == 1) return;

  // The block that arrives last has all splits.
  if (threadIdx.x == 0) {
    __threadfence();
    is_last = atomicAdd(arrivals + pair, done) + done == splits;
    if (is_last) arrivals[pair] = 0;
    __threadfence();
  }
  __syncthreads();
  if (!is_last) return;
  for (int first = threadIdx.x * 4; first - static_cast<int>(threadIdx.x) * 4 < group * kDim;
       first += kDecodeThreads * 4) {
    // Splits that are loaded before it is known what they weigh.
    constexpr int kEarly = 16;
    const int i = min(first, group * kDim - 4), head = i / kDim;
    const auto part = [&](int split) {
      return __ldcg(reinterpret_cast<const float4*>(partials + split * group * kDim + i));
    };
    float4 parts[kEarly];
#pragma unroll
    for (int split = 0; split < kEarly; ++split) parts[split] = part(min(split, splits - 1));
    if (first < kDecodeThreads * 4) {
      for (int head = warp; head < group; head += kDecodeWarps) {
        SplitStats own = {-INFINITY, 0.0f};
        if (lane < splits) {
          own.largest = __ldcg(&stats[lane * group + head].largest);
          own.sum = __ldcg(&stats[lane * group + head].sum);
        }
        float largest = own.largest;
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2) {
          largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
        }
        const float factor = aril::approximate_exp2((own.largest - largest) * a.exponent_scale());
        const float total = warp_sum(factor * own.sum);
        factors[lane][head] = factor;
        if (lane == 0) totals[head] = 1.0f / total;
      }
      __syncthreads();
    }
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    const auto add = [&](int split, const float4& part) {
      const float factor = factors[split][head];
      sum.x = fmaf(factor, part.x, sum.x);
      sum.y = fmaf(factor, part.y, sum.y);
      sum.z = fmaf(factor, part.z, sum.z);
      sum.w = fmaf(factor, part.w, sum.w);
    };
#pragma unroll
    for (int split = 0; split < kEarly; ++split) {
      if (split < splits) add(split, parts[split]);
    }
#pragma unroll 4
    for (int split = kEarly; split < splits; ++split) add(split, part(split));
    const float factor = totals[head];
    if (first == i) {
      *reinterpret_cast<uint2*>(out + i) = make_uint2(pack<T>(sum.x * factor, sum.y * factor),
                                                      pack<T>(sum.z * factor, sum.w * factor));
    }
  }
}

// ---- Prefill

constexpr int kPrefillWarps = 4;
constexpr int kPrefillThreads = 32 * kPrefillWarps;
constexpr int kPrefillRows = 128;
constexpr int kPrefillKeys = 64;
constexpr int kWarpTiles = kPrefillRows / kPrefillWarps / 16;  // of 16 rows

template <typename T, int kDim>
constexpr int kPrefillSharedBytes =
    (kPrefillRows + 4 * kPrefillKeys) * kDim * static_cast<int>(sizeof(T));

// The first token behind `start` that is of another sequence, or `last`.
__device__ __forceinline__ int end_of_run(const int32_t* sequences, int start, int last) {
  const int lane = threadIdx.x % 32;
  const int32_t sequence = sequences[start];
  for (int first = start; first < last; first += 32) {
    const int token = first + lane;
    const uint32_t others =
        __ballot_sync(0xffffffffu, token >= last || sequences[token] != sequence);
    if (others != 0) return min(first + __ffs(others) - 1, last);
  }
  return last;
}

// Grid: (kv_heads, tiles of kPrefillRows / group tokens). Tokens that are alone are left to
// attend_decode.
template <typename T, int kDim>
__device__ void attend_prefill(const Attention<T>& a, int64_t tokens) {
  using Rows = SharedRows<T, kDim>;
  extern __shared__ __align__(128) unsigned char shared[];
  aril::launch_dependents();
  const Rows query_rows{reinterpret_cast<T*>(shared)};
  T* const stages = query_rows.data + kPrefillRows * kDim;
  constexpr int kTile = kPrefillKeys * kDim;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const int group = a.group(), kv_head = blockIdx.x;
  const int64_t kv_stride = a.kv_heads * kDim;
  const T* const keys = a.keys + kv_head * kDim;
  const T* const values = a.values + kv_head * kDim;
  const float scale = a.exponent_scale();
  const int tile_tokens = kPrefillRows / group;
  // The last tiles of a sequence have the most keys, so they come first.
  const int first = static_cast<int>(gridDim.y - 1 - blockIdx.y) * tile_tokens;
  const int last = min(first + tile_tokens, static_cast<int>(tokens));

  for (int start = first, stop; start < last; start = stop) {
    const int sequence = a.sequences[start];
    stop = end_of_run(a.sequences, start, last);
    const bool follows = start > 0 && a.sequences[start - 1] == sequence;
    const bool is_followed = stop < tokens && a.sequences[stop] == sequence;
    if (stop - start == 1 && !follows && !is_followed) continue;
    const int num_keys = a.positions[stop - 1] + 1, num_rows = (stop - start) * group;
    __syncthreads();
    for (int i = threadIdx.x; i < kPrefillRows * Rows::kChunks; i += kPrefillThreads) {
      const int row = i / Rows::kChunks, chunk = i % Rows::kChunks;
      const int at = min(row, num_rows - 1), token = start + at / group;
      const int head = kv_head * group + at % group;
      aril::copy_async(query_rows.chunk(row, chunk),
                       a.qkv + token * a.cols + head * kDim + chunk * 8, row < num_rows ? 16 : 0);
    }
    const auto load = [&](int tile, int stage) {
      if (tile < num_keys) {
        const Rows key_rows{stages + stage * 2 * kTile}, value_rows{key_rows.data + kTile};
        // Threads of a row of keys find it together.
        static_assert(kPrefillThreads % Rows::kChunks == 0, "a thread has one chunk of rows");
        const int chunk = threadIdx.x % Rows::kChunks;
#pragma unroll
        for (int i = 0; i < kPrefillKeys * Rows::kChunks / kPrefillThreads; ++i) {
          const int at = threadIdx.x / Rows::kChunks + i * (kPrefillThreads / Rows::kChunks);
          const int64_t row = a.row_of(sequence, min(tile + at, num_keys - 1));
          const int valid = tile + at < num_keys ? 16 : 0;
          aril::copy_async(key_rows.chunk(at, chunk), keys + row * kv_stride + chunk * 8, valid);
          aril::copy_async(value_rows.chunk(at, chunk), values + row * kv_stride + chunk * 8,
                           valid);
        }
      }
      aril::commit_copies();
    };
    load(0, 0);

    // The last key of each of the lane's rows; rows that do not exist have all keys.
    int limits[kWarpTiles][2];
#pragma unroll
    for (int i = 0; i < 2 * kWarpTiles; ++i) {
      const int row = warp * 16 * kWarpTiles + i * 8 + g;
      limits[i / 2][i % 2] = row < num_rows ? a.positions[start + row / group] : num_keys - 1;
    }
    const int least = a.positions[start];

    OnlineSoftmax<T, kDim> states[kWarpTiles];
    for (int tile = 0, stage = 0; tile < num_keys; tile += kPrefillKeys, stage ^= 1) {
      load(tile + kPrefillKeys, stage ^ 1);
      aril::wait_for_copies<1>();
      __syncthreads();
      const Rows key_rows{stages + stage * 2 * kTile}, value_rows{key_rows.data + kTile};
      float scores[kWarpTiles][kPrefillKeys / 8][4] = {};
#pragma unroll
      for (int k = 0; k < kDim / 16; ++k) {
        uint4 query[kWarpTiles];
#pragma unroll
        for (int i = 0; i < kWarpTiles; ++i) {
          query[i] = query_rows.a((warp * kWarpTiles + i) * 16, k);
        }
#pragma unroll
        for (int n = 0; n < kPrefillKeys / 16; ++n) {
          const uint4 b = key_rows.b(n * 16, k);
#pragma unroll
          for (int i = 0; i < kWarpTiles; ++i) {
            aril::mma_m16n8k16<T>(scores[i][2 * n], query[i], b.x, b.y);
            aril::mma_m16n8k16<T>(scores[i][2 * n + 1], query[i], b.z, b.w);
          }
        }
      }
      if (tile + kPrefillKeys - 1 > least) {
#pragma unroll
        for (int i = 0; i < kWarpTiles; ++i) {
#pragma unroll
          for (int n = 0; n < kPrefillKeys / 8; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              if (tile + n * 8 + q * 2 + e % 2 > limits[i][e / 2]) scores[i][n][e] = -INFINITY;
            }
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kWarpTiles; ++i) states[i].weigh(scores[i], scale);
#pragma unroll
      for (int k = 0; k < kPrefillKeys / 16; ++k) {
        uint4 weights[kWarpTiles];
#pragma unroll
        for (int i = 0; i < kWarpTiles; ++i) {
          const auto& s = scores[i];
          weights[i] = {pack<T>(s[2 * k][0], s[2 * k][1]), pack<T>(s[2 * k][2], s[2 * k][3]),
                        pack<T>(s[2 * k + 1][0], s[2 * k + 1][1]),
                        pack<T>(s[2 * k + 1][2], s[2 * k + 1][3])};
        }
#pragma unroll
        for (int n = 0; n < kDim / 16; ++n) {
          const uint4 b = value_rows.b_transposed(k * 16, n);
#pragma unroll
          for (int i = 0; i < kWarpTiles; ++i) {
            aril::mma_m16n8k16<T>(states[i].out[2 * n], weights[i], b.x, b.y);
            aril::mma_m16n8k16<T>(states[i].out[2 * n + 1], weights[i], b.z, b.w);
          }
        }
      }
      __syncthreads();
    }
    aril::wait_for_copies<0>();

#pragma unroll
    for (int i = 0; i < kWarpTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float factor = 1.0f / quad_sum(states[i].sum[half]);
        const int row = (warp * kWarpTiles + i) * 16 + half * 8 + g;
        if (row >= num_rows) continue;
        const int64_t token = start + row / group, head = kv_head * group + row % group;
        T* const out = a.out + (token * a.query_heads + head) * kDim + q * 2;
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n) {
          *reinterpret_cast<uint32_t*>(out + n * 8) =
              pack<T>(states[i].out[n][2 * half] * factor, states[i].out[n][2 * half + 1] * factor);
        }
      }
    }
  }
}

}  // namespace
