// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The operations of a Qwen3 beside GEMMs and the library. attention.cuh has attention on tensor
// cores; experts.cuh has what only a model with experts needs, and delta_net.cuh what a Qwen3.5 has
// beside these.
//
// Here, every kernel has blocks of kThreads. blockIdx.x is a row of its output; blockIdx.y, where
// there is one, is a part of the row. Matrices are row-major and dense, and start at multiples of
// 16 bytes. All compute in f32 and round where device.rs says. Indices are the caller's to keep in
// bounds.
//
// A kernel whose result a linear layer of the library reads lets it start early: until the kernel
// has completed, the layer loads weights. A kernel that reads the result of such a layer may start
// early too. Until the kernels before it have completed, it loads nothing but weights, and inputs
// of the step that none of them writes.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <float.h>
#include <stdint.h>

#include <type_traits>

#include "../../../csrc/device/activation.cuh"
#include "../../../csrc/ptx/pdl.cuh"

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

// Consecutive elements of a row, which move in one instruction.
template <typename T, int kWidth>
struct alignas(sizeof(T) * kWidth) Vector {
  T elements[kWidth];
};

// Elements of 16 bytes.
template <typename T>
constexpr int kWide = 16 / sizeof(T);

// Calls f with the first column of each vector of the block's part of a row that is this thread's,
// and with the vector's width: that of 16 bytes, or 1 in rows that do not start at multiples of it.
template <typename T, typename F>
__device__ __forceinline__ void for_part(int64_t cols, F f) {
  if (cols % kWide<T> == 0) {
    const int64_t col = (int64_t{blockIdx.y} * kThreads + threadIdx.x) * kWide<T>;
    if (col < cols) f(col, std::integral_constant<int, kWide<T>>());
  } else {
    for (int i = 0; i < kWide<T>; ++i) {
      const int64_t col = (int64_t{blockIdx.y} * kWide<T> + i) * kThreads + threadIdx.x;
      if (col < cols) f(col, std::integral_constant<int, 1>());
    }
  }
}

// A value of a row, divided by the row's root mean square, times its weight: to be rounded. If
// something is added to the weight, the first factor is not. A Qwen3 has kernels of its own
// (`kIsQwen3`), where nothing is: in a step of few tokens, the GEMMs' weights drive all
// instructions out of the caches, and one kernel for both took 3 us longer.
template <typename T, bool kIsQwen3>
__device__ __forceinline__ float normalized(float value, T weight, float offset) {
  const float factor = static_cast<float>(weight);
  const bool has_offset = !kIsQwen3 && offset != 0.0f;
  return has_offset ? value * (factor + offset) : round_to<T>(value) * factor;
}

// x += y, rounded, if there is a y; out = x / rms(x), rounded, times weight, rounded, as
// `normalized` has it.
template <typename T, int kWidth, bool kIsQwen3>
__device__ void add_rms_norm_of(T* x,             // [rows, cols]
                                const T* y,       // [rows, y_stride], or null
                                const T* weight,  // [cols]
                                T* out,           // [rows, cols]
                                int64_t cols, int64_t y_stride, float eps, float offset) {
  using Vec = Vector<T, kWidth>;
  constexpr int kHeld = 4;  // sums of a thread that stay in registers
  Vec* const sums = reinterpret_cast<Vec*>(x + blockIdx.x * cols);
  const Vec* const added = reinterpret_cast<const Vec*>(y + blockIdx.x * y_stride);
  const Vec* const weights = reinterpret_cast<const Vec*>(weight);
  Vec* const results = reinterpret_cast<Vec*>(out + blockIdx.x * cols);
  const int64_t vectors = cols / kWidth;

  float squares = 0.0f;
  const auto add = [&](int64_t at) {
    Vec sum = sums[at];
    if (y != nullptr) {
      const Vec more = added[at];
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        sum.elements[i] = static_cast<T>(static_cast<float>(sum.elements[i]) +
                                         static_cast<float>(more.elements[i]));
      }
      sums[at] = sum;
    }
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const float value = static_cast<float>(sum.elements[i]);
      squares += value * value;
    }
    return sum;
  };
  Vec held[kHeld];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int64_t at = threadIdx.x + i * kThreads;
    if (at < vectors) held[i] = add(at);
  }
  for (int64_t at = threadIdx.x + kHeld * kThreads; at < vectors; at += kThreads) add(at);

  const float scale = 1.0f / sqrtf(block_sum(squares) / static_cast<float>(cols) + eps);
  const auto normalize = [&](int64_t at, const Vec& sum) {
    const Vec factors = weights[at];
    Vec result;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const float value = static_cast<float>(sum.elements[i]) * scale;
      result.elements[i] =
          static_cast<T>(normalized<T, kIsQwen3>(value, factors.elements[i], offset));
    }
    results[at] = result;
  };
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int64_t at = threadIdx.x + i * kThreads;
    if (at < vectors) normalize(at, held[i]);
  }
  for (int64_t at = threadIdx.x + kHeld * kThreads; at < vectors; at += kThreads) {
    normalize(at, sums[at]);
  }
}

template <typename T, bool kIsQwen3>
__device__ void add_rms_norm(T* x, const T* y, const T* weight, T* out, int64_t cols,
                             int64_t y_stride, float eps, float offset) {
  aril::launch_dependents();
  aril::wait_for_predecessors();
  if (cols % kWide<T> == 0 && y_stride % kWide<T> == 0) {
    add_rms_norm_of<T, kWide<T>, kIsQwen3>(x, y, weight, out, cols, y_stride, eps, offset);
  } else {
    add_rms_norm_of<T, 1, kIsQwen3>(x, y, weight, out, cols, y_stride, eps, offset);
  }
}

// The norm of a head, as `normalized` has it; then the rotation of the pairs (i, i + angles) of its
// first 2 * angles features. kHeadLanes lanes do it, of which each has kWidth pairs at a time:
// first those that are rotated, then those of the rest. Lanes without a head take part in the
// exchange.
constexpr int kHeadLanes = 8;

template <typename T, int kWidth, bool kIsQwen3>
__device__ __forceinline__ void rotate(const T* x,     // [dim]
                                       const T* norm,  // [dim]
                                       const T* cos,   // [angles]
                                       const T* sin,   // [angles]
                                       T* to,          // [dim], may be x
                                       int64_t dim, int angles, float eps, float offset,
                                       bool has_head) {
  using Vec = Vector<T, kWidth>;
  const int half = has_head ? static_cast<int>(dim / 2) : 0;
  const int first = threadIdx.x % kHeadLanes * kWidth;
  const auto at = [](const T* from, int i) { return *reinterpret_cast<const Vec*>(from + i); };
  // The features of a pair. A Qwen3 rotates all of them.
  const auto turns_at = [&](int pair) { return kIsQwen3 || pair < angles; };
  const auto low_of = [&](int pair) { return turns_at(pair) ? pair : pair + angles; };
  // From the first feature of a pair to `pair` less than the second.
  const auto gap_of = [&](int pair) { return !kIsQwen3 && turns_at(pair) ? angles : half; };
  // The first pairs of a lane stay in registers: in heads of 128 features all of them, if they are
  // loaded as vectors.
  constexpr int kHeld = 16 / sizeof(T) == kWidth ? sizeof(T) / 2 : 4;
  constexpr int kStep = kHeadLanes * kWidth;
  Vec low[kHeld] = {}, high[kHeld] = {};
  float squares = 0.0f;
  const auto add = [&](const Vec& vec) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const float value = static_cast<float>(vec.elements[i]);
      squares += value * value;
    }
  };
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    if (first + i * kStep < half) {
      low[i] = at(x, low_of(first + i * kStep));
      high[i] = at(x + gap_of(first + i * kStep), first + i * kStep);
    }
  }
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    add(low[i]);
    add(high[i]);
  }
  for (int i = first + kHeld * kStep; i < half; i += kStep) {
    add(at(x, low_of(i)));
    add(at(x + gap_of(i), i));
  }
#pragma unroll
  for (int distance = kHeadLanes / 2; distance > 0; distance /= 2) {
    squares += __shfl_xor_sync(0xffffffffu, squares, distance);
  }
  const float scale = 1.0f / sqrtf(squares / static_cast<float>(dim) + eps);
  const auto rotate_at = [&](int place, Vec low, Vec high) {
    const Vec low_norm = at(norm, low_of(place)), high_norm = at(norm + gap_of(place), place);
    const bool turns = turns_at(place);
    const Vec cosines = turns ? at(cos, place) : Vec{}, sines = turns ? at(sin, place) : Vec{};
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const auto of = [&](const Vec& vec, const Vec& weights) {
        const float value = static_cast<float>(vec.elements[i]) * scale;
        return round_to<T>(normalized<T, kIsQwen3>(value, weights.elements[i], offset));
      };
      const float l = of(low, low_norm), h = of(high, high_norm);
      if (!turns) {
        low.elements[i] = static_cast<T>(l);
        high.elements[i] = static_cast<T>(h);
        continue;
      }
      const float c = static_cast<float>(cosines.elements[i]);
      const float s = static_cast<float>(sines.elements[i]);
      // __fmul_rn, as a fused multiply-add would skip the rounding of the product in f32.
      low.elements[i] = static_cast<T>(round_to<T>(__fmul_rn(l, c)) - round_to<T>(__fmul_rn(h, s)));
      high.elements[i] =
          static_cast<T>(round_to<T>(__fmul_rn(h, c)) + round_to<T>(__fmul_rn(l, s)));
    }
    *reinterpret_cast<Vec*>(to + low_of(place)) = low;
    *reinterpret_cast<Vec*>(to + gap_of(place) + place) = high;
  };
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    if (first + i * kStep < half) rotate_at(first + i * kStep, low[i], high[i]);
  }
  for (int i = first + kHeld * kStep; i < half; i += kStep) {
    rotate_at(i, at(x, low_of(i)), at(x + gap_of(i), i));
  }
}

// Of each token: the norms and rotations of the heads of q and k, and the copy of k and v to the
// token's row of the cache. q stays where it is. blockIdx.y is a part of kThreads / kHeadLanes
// heads.
template <typename T, bool kIsQwen3>
__device__ void rotate_and_append(T* qkv,  // [tokens, stride]: (query_heads + 2 kv_heads) * dim
                                  const T* q_norm,           // [dim]
                                  const T* k_norm,           // [dim]
                                  const T* cos,              // [positions, angles]
                                  const T* sin,              // [positions, angles]
                                  const int32_t* positions,  // [tokens]
                                  const int32_t* rows,       // [tokens]
                                  T* keys,                   // [cache rows, kv_heads * dim]
                                  T* values,                 // [cache rows, kv_heads * dim]
                                  int64_t stride, int64_t query_heads, int64_t kv_heads,
                                  int64_t dim, int64_t angles, float eps, float offset) {
  aril::launch_dependents();
  aril::wait_for_predecessors();
  const int64_t token = blockIdx.x, heads = query_heads + 2 * kv_heads;
  const int64_t head = int64_t{blockIdx.y} * (kThreads / kHeadLanes) + threadIdx.x / kHeadLanes;
  T* const x = qkv + token * stride + min(head, heads - 1) * dim;
  const bool is_query = head < query_heads, is_value = head >= query_heads + kv_heads;
  const int64_t row = rows[token] * kv_heads * dim;
  if (is_value && head < heads) {
    T* const to = values + row + (head - query_heads - kv_heads) * dim;
    if (dim % kWide<T> == 0) {
      using Vec = Vector<T, kWide<T>>;
      for (int64_t i = threadIdx.x % kHeadLanes; i < dim / kWide<T>; i += kHeadLanes) {
        reinterpret_cast<Vec*>(to)[i] = reinterpret_cast<const Vec*>(x)[i];
      }
    } else {
      for (int64_t i = threadIdx.x % kHeadLanes; i < dim; i += kHeadLanes) to[i] = x[i];
    }
  }
  if (kIsQwen3) angles = dim / 2;
  const int64_t first_angle = positions[token] * angles;
  const int turned = static_cast<int>(angles);
  const T* const norm = is_query ? q_norm : k_norm;
  T* const to = is_query || is_value ? x : keys + row + (head - query_heads) * dim;
  if (dim / 2 % kWide<T> == 0 && (kIsQwen3 || angles % kWide<T> == 0)) {
    rotate<T, kWide<T>, kIsQwen3>(x, norm, cos + first_angle, sin + first_angle, to, dim, turned,
                                  eps, offset, !is_value);
  } else {
    rotate<T, 1, kIsQwen3>(x, norm, cos + first_angle, sin + first_angle, to, dim, turned, eps,
                           offset, !is_value);
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
// in blocks of block_rows consecutive cache rows. blockIdx.y is the query head. The reference that
// attention.cuh is compared with, for any type and any number of features.
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
                       int64_t cols, int64_t query_heads, int64_t kv_heads, float scale,
                       int64_t dim) {
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
__device__ void silu_mul(const T* gate_up,       // [rows, 2 * cols]: gates, then ups
                         const int32_t* tokens,  // [rows]: -1 leaves out's row as it is; or null
                         T* out,                 // [rows, cols]
                         int64_t cols) {
  aril::launch_dependents();
  aril::wait_for_predecessors();
  if (tokens != nullptr && tokens[blockIdx.x] < 0) return;
  const T* const gates = gate_up + blockIdx.x * 2 * cols;
  for_part<T>(cols, [&](int64_t col, auto width) {
    using Vec = Vector<T, decltype(width)::value>;
    Vec vec = *reinterpret_cast<const Vec*>(gates + col);
    const Vec up = *reinterpret_cast<const Vec*>(gates + cols + col);
#pragma unroll
    for (int i = 0; i < decltype(width)::value; ++i) {
      const float gate = static_cast<float>(vec.elements[i]);
      const float silu = round_to<T>(gate * aril::detail::sigmoid<T>(gate));
      vec.elements[i] = static_cast<T>(silu * static_cast<float>(up.elements[i]));
    }
    *reinterpret_cast<Vec*>(out + blockIdx.x * cols + col) = vec;
  });
}

// y += x, rounded.
template <typename T>
__device__ void add(T* y,        // [rows, cols]
                    const T* x,  // [rows, x_stride]
                    int64_t cols, int64_t x_stride) {
  for_part<T>(cols, [&](int64_t col, auto width) {
    using Vec = Vector<T, decltype(width)::value>;
    Vec* const sums = reinterpret_cast<Vec*>(y + blockIdx.x * cols + col);
    const Vec more = *reinterpret_cast<const Vec*>(x + blockIdx.x * x_stride + col);
    Vec vec = *sums;
#pragma unroll
    for (int i = 0; i < decltype(width)::value; ++i) {
      vec.elements[i] = static_cast<T>(static_cast<float>(vec.elements[i]) +
                                       static_cast<float>(more.elements[i]));
    }
    *sums = vec;
  });
}

template <typename T>
__device__ void gather(const T* table,       // [table_rows, cols]
                       const int32_t* rows,  // [blocks]
                       T* out,               // [blocks, cols]; zeros for rows that the table lacks
                       int64_t table_rows, int64_t cols) {
  const int64_t index = rows[blockIdx.x];
  const bool is_there = index >= 0 && index < table_rows;
  for_part<T>(cols, [&](int64_t col, auto width) {
    using Vec = Vector<T, decltype(width)::value>;
    *reinterpret_cast<Vec*>(out + blockIdx.x * cols + col) =
        is_there ? *reinterpret_cast<const Vec*>(table + index * cols + col) : Vec{};
  });
}

// Orders values as their numbers do: a value, then its place, the first of equals above the others.
// A NaN is above all.
__device__ __forceinline__ uint64_t ordered(float value, uint32_t place) {
  // Adding zero makes the two zeros equal.
  const uint32_t bits = __float_as_uint(value + 0.0f);
  const uint32_t key = bits >> 31 ? ~bits : bits | 0x80000000u;
  return uint64_t{isnan(value) ? UINT32_MAX : key} << 32 | (UINT32_MAX - place);
}

}  // namespace

// Indices that are lower by `first`.
extern "C" __global__ void __launch_bounds__(kThreads)
    subtract(const int32_t* indices, int32_t* out, int64_t count, int32_t first) {
  const int64_t at = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (at < count) out[at] = indices[at] - first;
}

// Overwrites each id that has a source, a row of logits, with the token that was drawn there, or
// with 0 if none was.
extern "C" __global__ void __launch_bounds__(kThreads)
    take_drawn(const int32_t* sources, const int32_t* drawn, int32_t* ids, int64_t tokens) {
  const int64_t token = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (token >= tokens) return;
  const int32_t source = sources[token];
  if (source >= 0) ids[token] = max(drawn[source], 0);
}

// Copies what the host staged over the inputs of a captured step: for each token its id, its source
// as for `take_drawn`, its position, its cache row and its sequence's state; then the places and
// the values of what has changed in the block table.
extern "C" __global__ void __launch_bounds__(kThreads)
    set_inputs(const int32_t* staged,  // [5, tokens], then [2, changes]
               const int32_t* drawn, int32_t* ids, int32_t* positions, int32_t* rows,
               int32_t* states, int32_t* table, int64_t tokens, int64_t changes) {
  const int64_t at = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (at < tokens) {
    const int32_t source = staged[tokens + at];
    ids[at] = source < 0 ? staged[at] : max(drawn[source], 0);
    positions[at] = staged[2 * tokens + at];
    rows[at] = staged[3 * tokens + at];
    states[at] = staged[4 * tokens + at];
  }
  if (at < changes) {
    const int32_t* const places = staged + 5 * tokens;
    table[places[at]] = places[changes + at];
  }
}

#include "attention.cuh"
#include "delta_net.cuh"
#include "experts.cuh"
#include "sampling.cuh"

// The norms and rotations of an element type, then all kernels of one, by the names they are loaded
// by.
#define NORMS(T, name, suffix, is_qwen3)                                                         \
  extern "C" __global__ void __launch_bounds__(kThreads)                                         \
      name##add_rms_norm_##suffix(T* x, const T* y, const T* weight, T* out, int64_t cols,       \
                                  int64_t y_stride, float eps, float offset) {                   \
    add_rms_norm<T, is_qwen3>(x, y, weight, out, cols, y_stride, eps, offset);                   \
  }                                                                                              \
  extern "C" __global__ void __launch_bounds__(kThreads) name##rotate_and_append_##suffix(       \
      T* qkv, const T* q_norm, const T* k_norm, const T* cos, const T* sin,                      \
      const int32_t* positions, const int32_t* rows, T* keys, T* values, int64_t stride,         \
      int64_t query_heads, int64_t kv_heads, int64_t dim, int64_t angles, float eps,             \
      float offset) {                                                                            \
    rotate_and_append<T, is_qwen3>(qkv, q_norm, k_norm, cos, sin, positions, rows, keys, values, \
                                   stride, query_heads, kv_heads, dim, angles, eps, offset);     \
  }

#define KERNELS(T, suffix)                                                                       \
  NORMS(T, , suffix, true)                                                                       \
  NORMS(T, qwen3_5_, suffix, false)                                                              \
  extern "C" __global__ void __launch_bounds__(kThreads) without_gates_##suffix(                 \
      const T* x, T* out, int64_t stride, int64_t query_heads, int64_t kv_heads, int64_t dim) {  \
    without_gates(x, out, stride, query_heads, kv_heads, dim);                                   \
  }                                                                                              \
  extern "C" __global__ void __launch_bounds__(kThreads) gate_##suffix(                          \
      T* x, const T* gates, int64_t cols, int64_t x_stride, int64_t stride, int64_t dim) {       \
    gate(x, gates, cols, x_stride, stride, dim);                                                 \
  }                                                                                              \
  extern "C" __global__ void __launch_bounds__(kThreads)                                         \
      convolve_##suffix(const T* x, const T* weights, const T* kept, const int32_t* positions,   \
                        const int32_t* sequences, const int32_t* states, T* out, int64_t stride, \
                        int64_t cols, int64_t taps) {                                            \
    convolve(x, weights, kept, positions, sequences, states, out, stride, cols, taps);           \
  }                                                                                              \
  extern "C" __global__ void __launch_bounds__(kThreads) delta_rule_##suffix(                    \
      const T* x, const T* qkv, const T* a_log, const T* dt_bias, const T* norm,                 \
      const int32_t* positions, const int32_t* sequences, const int32_t* states, T* kept,        \
      float* matrices, T* out, int64_t tokens, int64_t stride, float eps, int64_t keys,          \
      int64_t values, int64_t key_dim, int64_t value_dim, int64_t taps) {                        \
    delta_rule(x, qkv, a_log, dt_bias, norm, positions, sequences, states, kept, matrices, out,  \
               tokens, stride, eps, {keys, values, key_dim, value_dim, taps});                   \
  }                                                                                              \
  extern "C" __global__ void __launch_bounds__(kThreads) attend_##suffix(                        \
      const T* qkv, const T* keys, const T* values, const int32_t* positions,                    \
      const int32_t* sequences, const int32_t* first_rows, int64_t columns, int64_t block_rows,  \
      T* out, int64_t cols, int64_t query_heads, int64_t kv_heads, float scale, int64_t dim) {   \
    attend(qkv, keys, values, positions, sequences, first_rows, columns, block_rows, out, cols,  \
           query_heads, kv_heads, scale, dim);                                                   \
  }                                                                                              \
  extern "C" __global__ void __launch_bounds__(kThreads)                                         \
      silu_mul_##suffix(const T* gate_up, const int32_t* tokens, T* out, int64_t cols) {         \
    silu_mul(gate_up, tokens, out, cols);                                                        \
  }                                                                                              \
  extern "C" __global__ void __launch_bounds__(kThreads)                                         \
      add_##suffix(T* y, const T* x, int64_t cols, int64_t x_stride) {                           \
    add(y, x, cols, x_stride);                                                                   \
  }                                                                                              \
  extern "C" __global__ void __launch_bounds__(kThreads) gather_##suffix(                        \
      const T* table, const int32_t* rows, T* out, int64_t table_rows, int64_t cols) {           \
    gather(table, rows, out, table_rows, cols);                                                  \
  }                                                                                              \
  extern "C" __global__ void DRAW_CLUSTER __launch_bounds__(kDrawThreads) draw_##suffix(         \
      const T* logits, const Draw* draws, int32_t* tokens, float* logprobs, int64_t vocab) {     \
    draw(logits, draws, tokens, logprobs, vocab);                                                \
  }                                                                                              \
  extern "C" __global__ void __launch_bounds__(kThreads) choose_experts_##suffix(                \
      const T* scores, int32_t* ids, float* weights, int64_t experts, int64_t first_held,        \
      int64_t num_held, int64_t top_k, int32_t normalized) {                                     \
    choose_experts(scores, ids, weights, experts, first_held, num_held, top_k, normalized);      \
  }                                                                                              \
  extern "C" __global__ void __launch_bounds__(kThreads)                                         \
      sort_routes_##suffix(const int32_t* ids, int32_t* row_of_route, int32_t* token_of_row,     \
                           int32_t* bounds, int64_t routes, int64_t experts, int64_t top_k) {    \
    sort_routes(ids, row_of_route, token_of_row, bounds, routes, experts, top_k);                \
  }                                                                                              \
  extern "C" __global__ void __launch_bounds__(kThreads)                                         \
      combine_##suffix(const T* x, const float* weights, const int32_t* row_of_route, T* out,    \
                       int64_t cols, int64_t top_k) {                                            \
    combine(x, weights, row_of_route, out, cols, top_k);                                         \
  }                                                                                              \
  extern "C" __global__ void __launch_bounds__(kThreads)                                         \
      grouped_gemm_##suffix(const T* x, const T* weights, const int32_t* bounds, T* y,           \
                            int64_t experts, int64_t outs, int64_t cols) {                       \
    grouped_gemm(x, Plain<T>{weights}, bounds, y, experts, outs, cols);                          \
  }                                                                                              \
  extern "C" __global__ void __launch_bounds__(kThreads) grouped_gemm_int4_##suffix(             \
      const T* x, const uint32_t* words, const float* scales, int64_t group,                     \
      const int32_t* bounds, T* y, int64_t experts, int64_t outs, int64_t cols) {                \
    grouped_gemm(x, Packed<T, 4>{words, scales, group}, bounds, y, experts, outs, cols);         \
  }                                                                                              \
  extern "C" __global__ void __launch_bounds__(kThreads) grouped_gemm_int8_##suffix(             \
      const T* x, const uint32_t* words, const float* scales, int64_t group,                     \
      const int32_t* bounds, T* y, int64_t experts, int64_t outs, int64_t cols) {                \
    grouped_gemm(x, Packed<T, 8>{words, scales, group}, bounds, y, experts, outs, cols);         \
  }

KERNELS(__nv_bfloat16, bf16)
KERNELS(__half, f16)
KERNELS(float, f32)

// Attention on tensor cores, for an element type of 16 bits and a number of features of a head.
#define ATTEND_DECODE(name, T, dim, stages)                                                      \
  extern "C" __global__ void __launch_bounds__(kDecodeThreads)                                   \
      name(const T* qkv, const T* keys, const T* values, const int32_t* positions,               \
           const int32_t* sequences, const int32_t* first_rows, int64_t columns,                 \
           int64_t block_rows, T* out, int64_t cols, int64_t query_heads, int64_t kv_heads,      \
           float scale, const int32_t* alone, float* partials, SplitStats* stats,                \
           int32_t* arrivals, int64_t max_splits) {                                              \
    attend_decode<T, dim, stages>({qkv, keys, values, positions, sequences, first_rows, columns, \
                                   block_rows, out, cols, query_heads, kv_heads, scale},         \
                                  alone, partials, stats, arrivals, max_splits);                 \
  }
#define ATTENTION(T, suffix, dim)                                                                 \
  ATTEND_DECODE(attend_decode_##dim##_##suffix, T, dim, kDecodeStages)                            \
  ATTEND_DECODE(attend_deep_decode_##dim##_##suffix, T, dim, kDeepDecodeStages)                   \
  extern "C" __global__ void __launch_bounds__(kPrefillThreads) attend_prefill_##dim##_##suffix(  \
      const T* qkv, const T* keys, const T* values, const int32_t* positions,                     \
      const int32_t* sequences, const int32_t* first_rows, int64_t columns, int64_t block_rows,   \
      T* out, int64_t cols, int64_t query_heads, int64_t kv_heads, float scale, int64_t tokens) { \
    attend_prefill<T, dim>({qkv, keys, values, positions, sequences, first_rows, columns,         \
                            block_rows, out, cols, query_heads, kv_heads, scale},                 \
                           tokens);                                                               \
  }

// Grouped GEMMs of weights of 16 bits, by the rows and outputs of a block.
#define GROUPED_GEMM(T, name, Gemm, gated)                                                   \
  extern "C" __global__ void __launch_bounds__(Gemm<T>::kThreadsPerBlock)                    \
      name(const T* x, const int32_t* tokens, const T* weights, const int32_t* bounds, T* y, \
           int64_t experts, int64_t outs, int64_t cols, int32_t bounds_are_old) {            \
    Gemm<T>::run<gated>(x, tokens, weights, bounds, y, experts, outs, cols, bounds_are_old); \
  }
#define GROUPED_GEMMS(T, suffix)                                   \
  GROUPED_GEMM(T, grouped_gemm_16x32_##suffix, FewGemm, false)     \
  GROUPED_GEMM(T, grouped_gemm_16x64_##suffix, NarrowGemm, false)  \
  GROUPED_GEMM(T, grouped_gemm_64x128_##suffix, MiddleGemm, false) \
  GROUPED_GEMM(T, grouped_gemm_128x128_##suffix, WideGemm, false)  \
  GROUPED_GEMM(T, grouped_gemm_silu_16x32_##suffix, FewGemm, true) \
  GROUPED_GEMM(T, grouped_gemm_silu_16x64_##suffix, NarrowGemm, true)

ATTENTION(__nv_bfloat16, bf16, 32)
ATTENTION(__nv_bfloat16, bf16, 64)
ATTENTION(__nv_bfloat16, bf16, 128)
ATTENTION(__half, f16, 32)
ATTENTION(__half, f16, 64)
ATTENTION(__half, f16, 128)

GROUPED_GEMMS(__nv_bfloat16, bf16)
GROUPED_GEMMS(__half, f16)

// The router and the routes of few tokens.
#define ROUTE_FEW(T, suffix)                                                                       \
  extern "C" __global__ void __launch_bounds__(kRouterThreads) route_few_##suffix(                 \
      const T* x, const T* router, T* scores, int32_t* ids, float* weights, int32_t* row_of_route, \
      int32_t* token_of_row, int32_t* bounds, int32_t* arrivals, int64_t cols, int64_t tokens,     \
      int64_t experts, int64_t first_held, int64_t num_held, int64_t top_k, int32_t normalized,    \
      int32_t adds) {                                                                              \
    route_few(x, router, scores, ids, weights, row_of_route, token_of_row, bounds, arrivals, cols, \
              tokens, experts, first_held, num_held, top_k, normalized, adds);                     \
  }

ROUTE_FEW(__nv_bfloat16, bf16)
ROUTE_FEW(__half, f16)
