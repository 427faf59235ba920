// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The operations of a Qwen3 beside GEMMs and the library: simple kernels for the example, not tuned ones.
//
// Every kernel has a block of kThreads for each row of its output, blockIdx.x, and, where it works
// on heads apart, for each head of it, blockIdx.y. Matrices are row-major and dense. All compute in
// f32 and round where device.rs says. Indices are the caller's to keep in bounds.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <float.h>
#include <stdint.h>

namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

// The value rounded to T.
template <typename T>
__device__ __forceinline__ float round_to(float x) {
  return static_cast<float>(static_cast<T>(x));
}

// The sum of all lanes' values, in every lane.
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, distance);
  }
  return value;
}

// The sum of all threads' values, in every thread.
__device__ __forceinline__ float block_sum(float value) {
  __shared__ float sums[kWarps];
  value = warp_sum(value);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = value;
  __syncthreads();
  float sum = 0.0f;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) sum += sums[warp];
  return sum;
}

// x / rms(x), rounded, times weight, rounded: of the heads that follow first_head, each apart. A
// whole row is one head.
template <typename T>
__device__ void normalize(T* x,             // [rows, cols]
                          const T* weight,  // [dim]
                          int64_t cols, int64_t first_head, int64_t dim, float eps) {
  T* head = x + blockIdx.x * cols + (first_head + blockIdx.y) * dim;
  float squares = 0.0f;
  for (int64_t i = threadIdx.x; i < dim; i += kThreads) {
    const float value = static_cast<float>(head[i]);
    squares += value * value;
  }
  const float scale = 1.0f / sqrtf(block_sum(squares) / static_cast<float>(dim) + eps);
  for (int64_t i = threadIdx.x; i < dim; i += kThreads) {
    const float value = round_to<T>(static_cast<float>(head[i]) * scale);
    head[i] = static_cast<T>(value * static_cast<float>(weight[i]));
  }
}

// Rotates the pairs (i, i + dim / 2) of the heads that follow first_head.
template <typename T>
__device__ void rotate(T* qkv,                    // [tokens, cols]
                       const T* cos,              // [positions, dim / 2]
                       const T* sin,              // [positions, dim / 2]
                       const int32_t* positions,  // [tokens]
                       int64_t cols, int64_t first_head, int64_t dim) {
  const int64_t half = dim / 2;
  const int64_t angles = positions[blockIdx.x] * half;
  T* low = qkv + blockIdx.x * cols + (first_head + blockIdx.y) * dim;
  T* high = low + half;
  for (int64_t i = threadIdx.x; i < half; i += kThreads) {
    const float l = static_cast<float>(low[i]), h = static_cast<float>(high[i]);
    const float c = static_cast<float>(cos[angles + i]), s = static_cast<float>(sin[angles + i]);
    // __fmul_rn, as a fused multiply-add would skip the rounding of the product in f32.
    low[i] = static_cast<T>(round_to<T>(__fmul_rn(l, c)) - round_to<T>(__fmul_rn(h, s)));
    high[i] = static_cast<T>(round_to<T>(__fmul_rn(h, c)) + round_to<T>(__fmul_rn(l, s)));
  }
}

// Copies each token's k and v to its row of the cache.
template <typename T>
__device__ void append(const T* qkv,         // [tokens, query_features + 2 * kv_features]
                       const int32_t* rows,  // [tokens]
                       T* keys,              // [cache rows, kv_features]
                       T* values,            // [cache rows, kv_features]
                       int64_t query_features, int64_t kv_features) {
  const T* k = qkv + blockIdx.x * (query_features + 2 * kv_features) + query_features;
  const T* v = k + kv_features;
  const int64_t row = rows[blockIdx.x] * kv_features;
  for (int64_t i = threadIdx.x; i < kv_features; i += kThreads) {
    keys[row + i] = k[i];
    values[row + i] = v[i];
  }
}

// q·k, rounded, times scale, rounded; in every lane of the warp.
template <typename T>
__device__ __forceinline__ float score_of(const T* query, const T* key, int64_t dim, float scale) {
  float sum = 0.0f;
  for (int64_t i = threadIdx.x % 32; i < dim; i += 32) {
    sum += static_cast<float>(query[i]) * static_cast<float>(key[i]);
  }
  return round_to<T>(round_to<T>(warp_sum(sum)) * scale);
}

// Attention of each query over its sequence's keys, from the first to its own. Keys and values are
// in blocks of block_rows consecutive cache rows. blockIdx.y is the query head.
//
// The softmax is rounded before it meets the values, so its denominator comes first: one pass over
// the keys for that, and one more for each kThreads features of the output, in tiles of kThreads
// keys. Shared: 1 KB, whatever the length.
template <typename T>
__device__ void attend(const T* qkv,               // [tokens, cols]
                       const T* keys,              // [cache rows, kv_heads * dim]
                       const T* values,            // [cache rows, kv_heads * dim]
                       const int32_t* positions,   // [tokens]
                       const int32_t* sequences,   // [tokens]
                       const int32_t* first_rows,  // [sequences, columns]: of each block
                       int64_t columns, int64_t block_rows,
                       T* out,  // [tokens, query_heads * dim]
                       int64_t cols, int64_t query_heads, int64_t kv_heads, int64_t dim,
                       float scale) {
  __shared__ float warp_maxima[kWarps], warp_sums[kWarps];
  __shared__ float weights[kThreads];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t token = blockIdx.x, head = blockIdx.y;
  const int64_t kv_head = head / (query_heads / kv_heads);
  const int64_t kv_stride = kv_heads * dim;
  const int64_t num_keys = positions[token] + 1;
  const T* query = qkv + token * cols + head * dim;
  first_rows += sequences[token] * columns;
  keys += kv_head * dim;
  values += kv_head * dim;
  out += (token * query_heads + head) * dim;
  // The offset of a key, and of its value.
  const auto offset_of = [&](int64_t key) {
    const auto at = static_cast<uint32_t>(key), rows = static_cast<uint32_t>(block_rows);
    return (first_rows[at / rows] + at % rows) * kv_stride;
  };

  // The largest score that this warp has seen, and the sum of all exp(score - largest).
  float largest = -FLT_MAX, sum = 0.0f;
  for (int64_t key = warp; key < num_keys; key += kWarps) {
    const float score = score_of(query, keys + offset_of(key), dim, scale);
    if (score > largest) {
      sum *= expf(largest - score);
      largest = score;
    }
    sum += expf(score - largest);
  }
  if (lane == 0) {
    warp_maxima[warp] = largest;
    warp_sums[warp] = sum;
  }
  __syncthreads();
  largest = -FLT_MAX;
  for (int w = 0; w < kWarps; ++w) largest = fmaxf(largest, warp_maxima[w]);
  sum = 0.0f;
  for (int w = 0; w < kWarps; ++w) sum += warp_sums[w] * expf(warp_maxima[w] - largest);

  for (int64_t first_feature = 0; first_feature < dim; first_feature += kThreads) {
    const int64_t feature = first_feature + threadIdx.x;
    float result = 0.0f;
    for (int64_t first_key = 0; first_key < num_keys; first_key += kThreads) {
      const int tile = static_cast<int>(min(num_keys - first_key, int64_t{kThreads}));
      for (int key = warp; key < tile; key += kWarps) {
        const float score = score_of(query, keys + offset_of(first_key + key), dim, scale);
        if (lane == 0) weights[key] = round_to<T>(expf(score - largest) / sum);
      }
      __syncthreads();
      if (feature < dim) {
        for (int key = 0; key < tile; ++key) {
          const T value = values[offset_of(first_key + key) + feature];
          result += weights[key] * static_cast<float>(value);
        }
      }
      __syncthreads();
    }
    if (feature < dim) out[feature] = static_cast<T>(result);
  }
}

// silu(gate), rounded, times up, rounded.
template <typename T>
__device__ void silu_mul(const T* gate_up,  // [rows, 2 * cols]: gates, then ups
                         T* out,            // [rows, cols]
                         int64_t cols) {
  const T* gates = gate_up + blockIdx.x * 2 * cols;
  const T* ups = gates + cols;
  for (int64_t i = threadIdx.x; i < cols; i += kThreads) {
    const float gate = static_cast<float>(gates[i]);
    const float silu = round_to<T>(gate / (1.0f + expf(-gate)));
    out[blockIdx.x * cols + i] = static_cast<T>(silu * static_cast<float>(ups[i]));
  }
}

// y += x, rounded.
template <typename T>
__device__ void add(T* y,        // [rows, cols]
                    const T* x,  // [rows, cols]
                    int64_t cols) {
  for (int64_t i = blockIdx.x * cols + threadIdx.x; i < (blockIdx.x + 1) * cols; i += kThreads) {
    y[i] = static_cast<T>(static_cast<float>(y[i]) + static_cast<float>(x[i]));
  }
}

template <typename T>
__device__ void gather(const T* table,       // [.., cols]
                       const int32_t* rows,  // [blocks]
                       T* out,               // [blocks, cols]
                       int64_t cols) {
  const T* row = table + rows[blockIdx.x] * cols;
  for (int64_t i = threadIdx.x; i < cols; i += kThreads) out[blockIdx.x * cols + i] = row[i];
}

// The index of each row's largest value, the first of equals; -1 where a row has a NaN.
template <typename T>
__device__ void argmax(const T* x,        // [rows, cols]
                       int32_t* indices,  // [rows]
                       int64_t cols) {
  __shared__ float values[kThreads];
  __shared__ int32_t places[kThreads];
  float largest = -INFINITY;
  int32_t place = 0;
  bool has_nan = false;
  for (int64_t i = threadIdx.x; i < cols; i += kThreads) {
    const float value = static_cast<float>(x[blockIdx.x * cols + i]);
    has_nan |= isnan(value);
    if (value > largest) {
      largest = value;
      place = static_cast<int32_t>(i);
    }
  }
  values[threadIdx.x] = largest;
  places[threadIdx.x] = place;
  has_nan = __syncthreads_or(has_nan);
  if (threadIdx.x != 0) return;
  for (int thread = 1; thread < kThreads; ++thread) {
    const bool is_first = values[thread] == largest && places[thread] < place;
    if (values[thread] > largest || is_first) {
      largest = values[thread];
      place = places[thread];
    }
  }
  indices[blockIdx.x] = has_nan ? -1 : place;
}

}  // namespace

#include "experts.cuh"

// The kernels of an element type, by the names they are loaded by.
#define KERNELS(T, suffix)                                                                        \
  extern "C" __global__ void __launch_bounds__(kThreads) normalize_##suffix(                      \
      T* x, const T* weight, int64_t cols, int64_t first_head, int64_t dim, float eps) {          \
    normalize(x, weight, cols, first_head, dim, eps);                                             \
  }                                                                                               \
  extern "C" __global__ void __launch_bounds__(kThreads)                                          \
      rotate_##suffix(T* qkv, const T* cos, const T* sin, const int32_t* positions, int64_t cols, \
                      int64_t first_head, int64_t dim) {                                          \
    rotate(qkv, cos, sin, positions, cols, first_head, dim);                                      \
  }                                                                                               \
  extern "C" __global__ void __launch_bounds__(kThreads)                                          \
      append_##suffix(const T* qkv, const int32_t* rows, T* keys, T* values,                      \
                      int64_t query_features, int64_t kv_features) {                              \
    append(qkv, rows, keys, values, query_features, kv_features);                                 \
  }                                                                                               \
  extern "C" __global__ void __launch_bounds__(kThreads)                                          \
      attend_##suffix(const T* qkv, const T* keys, const T* values, const int32_t* positions,     \
                      const int32_t* sequences, const int32_t* first_rows, int64_t columns,       \
                      int64_t block_rows, T* out, int64_t cols, int64_t query_heads,              \
                      int64_t kv_heads, int64_t dim, float scale) {                               \
    attend(qkv, keys, values, positions, sequences, first_rows, columns, block_rows, out, cols,   \
           query_heads, kv_heads, dim, scale);                                                    \
  }                                                                                               \
  extern "C" __global__ void __launch_bounds__(kThreads)                                          \
      silu_mul_##suffix(const T* gate_up, T* out, int64_t cols) {                                 \
    silu_mul(gate_up, out, cols);                                                                 \
  }                                                                                               \
  extern "C" __global__ void __launch_bounds__(kThreads)                                          \
      add_##suffix(T* y, const T* x, int64_t cols) {                                              \
    add(y, x, cols);                                                                              \
  }                                                                                               \
  extern "C" __global__ void __launch_bounds__(kThreads)                                          \
      gather_##suffix(const T* table, const int32_t* rows, T* out, int64_t cols) {                \
    gather(table, rows, out, cols);                                                               \
  }                                                                                               \
  extern "C" __global__ void __launch_bounds__(kThreads)                                          \
      argmax_##suffix(const T* x, int32_t* indices, int64_t cols) {                               \
    argmax(x, indices, cols);                                                                     \
  }                                                                                               \
  extern "C" __global__ void __launch_bounds__(kThreads)                                          \
      choose_experts_##suffix(const T* scores, int32_t* ids, float* weights, int64_t experts,     \
                              int64_t top_k, int32_t normalized) {                                \
    choose_experts(scores, ids, weights, experts, top_k, normalized);                             \
  }                                                                                               \
  extern "C" __global__ void __launch_bounds__(kThreads)                                          \
      sort_routes_##suffix(const int32_t* ids, int32_t* row_of_route, int32_t* token_of_row,      \
                           int32_t* bounds, int64_t routes, int64_t experts, int64_t top_k) {     \
    sort_routes(ids, row_of_route, token_of_row, bounds, routes, experts, top_k);                 \
  }                                                                                               \
  extern "C" __global__ void __launch_bounds__(kThreads)                                          \
      combine_##suffix(const T* x, const float* weights, const int32_t* row_of_route, T* out,     \
                       int64_t cols, int64_t top_k) {                                             \
    combine(x, weights, row_of_route, out, cols, top_k);                                          \
  }                                                                                               \
  extern "C" __global__ void __launch_bounds__(kThreads)                                          \
      grouped_gemm_##suffix(const T* x, const T* weights, const int32_t* bounds, T* y,            \
                            int64_t experts, int64_t outs, int64_t cols) {                        \
    grouped_gemm(x, Plain<T>{weights}, bounds, y, experts, outs, cols);                           \
  }                                                                                               \
  extern "C" __global__ void __launch_bounds__(kThreads)                                          \
      grouped_gemm_int4_##suffix(const T* x, const uint32_t* words, const float* scales,          \
                                 int64_t group, const int32_t* bounds, T* y, int64_t experts,     \
                                 int64_t outs, int64_t cols) {                                    \
    grouped_gemm(x, Int4<T>{words, scales, group}, bounds, y, experts, outs, cols);               \
  }

KERNELS(__nv_bfloat16, bf16)
KERNELS(__half, f16)
KERNELS(float, f32)
