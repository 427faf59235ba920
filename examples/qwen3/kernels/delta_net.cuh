// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Gated delta nets: the short convolution, the recurrence, and the gates of the attention beside
// them. The tokens of a sequence follow each other, and sequences ascend. What is kept of a
// sequence is where `states` says, so that a captured step runs on any sequences.
#pragma once

namespace {

// 1 / (1 + exp(-x))
__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// q, k and v of a projection whose queries have gates behind them. blockIdx.y is a part of kThreads
// features.
template <typename T>
__device__ void without_gates(const T* x,  // [tokens, stride]: (2 query_heads + 2 kv_heads) * dim
                              T* out,      // [tokens, (query_heads + 2 kv_heads) * dim]
                              int64_t stride, int64_t query_heads, int64_t kv_heads, int64_t dim) {
  const int64_t cols = (query_heads + 2 * kv_heads) * dim;
  const int64_t col = int64_t{blockIdx.y} * kThreads + threadIdx.x;
  if (col >= cols) return;
  const int64_t gates = min(col / dim, query_heads);  // in front of the feature
  out[blockIdx.x * cols + col] = x[blockIdx.x * stride + gates * dim + col];
}

// x times the sigmoid of its gate, rounded, rounded. The gates of `dim` features each are behind as
// many others; with `dim` 0, a row has one. blockIdx.y is a part of kThreads features.
template <typename T>
__device__ void gate(T* x,            // [tokens, x_stride]
                     const T* gates,  // [tokens, stride]
                     int64_t cols, int64_t x_stride, int64_t stride, int64_t dim) {
  const int64_t col = int64_t{blockIdx.y} * kThreads + threadIdx.x;
  if (col >= cols) return;
  const int64_t at = dim == 0 ? 0 : (col / dim * 2 + 1) * dim + col % dim;
  const float factor = round_to<T>(sigmoid(static_cast<float>(gates[blockIdx.x * stride + at])));
  T* const value = x + blockIdx.x * x_stride + col;
  *value = static_cast<T>(static_cast<float>(*value) * factor);
}

// Of each token: the sum of its inputs and of those of the `taps - 1` tokens in front of it, each
// times its weight, rounded; then x * sigmoid(x) of that, rounded. Inputs of tokens in front of the
// step are those that `delta_rule` has kept. blockIdx.y is a part of kThreads features.
template <typename T>
__device__ void convolve(const T* x,                // [tokens, stride]: first `cols` features
                         const T* weights,          // [cols, taps]
                         const T* kept,             // [states, taps - 1, cols]
                         const int32_t* positions,  // [tokens]
                         const int32_t* sequences,  // [tokens]
                         const int32_t* states,     // [sequences]
                         T* out,                    // [tokens, cols]
                         int64_t stride, int64_t cols, int64_t taps) {
  const int64_t token = blockIdx.x, col = int64_t{blockIdx.y} * kThreads + threadIdx.x;
  if (col >= cols) return;
  const int32_t sequence = sequences[token];
  const int64_t position = positions[token];
  kept += states[sequence] * (taps - 1) * cols + col;
  x += col;
  weights += col * taps;
  // The tokens of the sequence in front of this one in the step, up to the number of inputs.
  int64_t near = 0;
  while (near < min(taps - 1, token) && sequences[token - near - 1] == sequence) ++near;
  float sum = 0.0f;
  for (int64_t tap = 0; tap < taps; ++tap) {
    const int64_t back = taps - 1 - tap;
    if (back > position) continue;
    const T input = back <= near ? x[(token - back) * stride] : kept[(tap + near) * cols];
    sum += static_cast<float>(weights[tap]) * static_cast<float>(input);
  }
  sum = round_to<T>(sum);
  out[token * cols + col] = static_cast<T>(sum * sigmoid(sum));
}

struct DeltaHeads {
  int64_t keys, values, key_dim, value_dim, taps;
};

// The first token of a sequence that is not in front of `sequence`.
__device__ __forceinline__ int64_t first_token(const int32_t* sequences, int64_t tokens,
                                               int64_t sequence) {
  int64_t low = 0, high = tokens;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (sequences[middle] < sequence) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// The recurrence of a sequence's value head, its norm and its gate, token by token, behind
// `convolve`; then the inputs that the next step's convolution needs. blockIdx.x is the sequence,
// blockIdx.y the value head. A thread has a feature of the head, so that a column of the state is
// one thread's. Blocks have as many threads as features, in whole warps.
//
// Shared: the state, a query and a key, and the head's results:
// key_dim * value_dim + 2 * key_dim + value_dim floats.
template <typename T>
__device__ void delta_rule(const T* x,                // [tokens, stride]: q, k, v, z, b, a
                           const T* qkv,              // [tokens, cols]: q, k, v behind `convolve`
                           const T* a_log,            // [values]
                           const T* dt_bias,          // [values]
                           const T* norm,             // [value_dim]
                           const int32_t* positions,  // [tokens]
                           const int32_t* sequences,  // [tokens]
                           const int32_t* states,     // [sequences]
                           T* kept,                   // [states, taps - 1, cols]
                           float* matrices,           // [states, values, key_dim, value_dim]
                           T* out,                    // [tokens, values * value_dim]
                           int64_t tokens, int64_t stride, float eps, DeltaHeads heads) {
  extern __shared__ __align__(128) unsigned char shared[];
  const int64_t key_dim = heads.key_dim, value_dim = heads.value_dim, head = blockIdx.y;
  const int64_t first = first_token(sequences, tokens, blockIdx.x);
  const int64_t end =
      first_token(sequences + first, tokens - first, int64_t{blockIdx.x} + 1) + first;
  if (first == end) return;

  float* const matrix = reinterpret_cast<float*>(shared);
  float* const query = matrix + key_dim * value_dim;
  float* const key = query + key_dim;
  float* const results = key + key_dim;
  const int64_t key_features = heads.keys * key_dim, value_features = heads.values * value_dim;
  const int64_t cols = 2 * key_features + value_features;
  const int64_t state = states[blockIdx.x];
  const bool is_new = positions[first] == 0;
  const int lane = threadIdx.x % 32;
  const int64_t feature = threadIdx.x;
  const bool has_feature = feature < value_dim;
  float* const own = matrices + (state * heads.values + head) * key_dim * value_dim;
  for (int64_t i = threadIdx.x; i < key_dim * value_dim; i += blockDim.x) {
    matrix[i] = is_new ? 0.0f : own[i];
  }
  const int64_t key_head = head / (heads.values / heads.keys);
  const float rate = expf(static_cast<float>(a_log[head]));
  const float bias = static_cast<float>(dt_bias[head]);

  for (int64_t token = first; token < end; ++token) {
    const T* const q = qkv + token * cols + key_head * key_dim;
    const T* const k = q + key_features;
    const T* const of_token = x + token * stride + cols;
    // Each warp adds up all squares, so that no sum crosses warps.
    float q_squares = 0.0f, k_squares = 0.0f;
    for (int64_t i = lane; i < key_dim; i += 32) {
      const float q_i = static_cast<float>(q[i]), k_i = static_cast<float>(k[i]);
      q_squares += q_i * q_i;
      k_squares += k_i * k_i;
    }
    const float q_scale = 1.0f / sqrtf(warp_sum(q_squares) + 1e-6f);
    const float k_scale = 1.0f / sqrtf(warp_sum(k_squares) + 1e-6f);
    const float q_factor = 1.0f / sqrtf(static_cast<float>(key_dim));
    // All threads have read the last token's query and key.
    for (int64_t i = threadIdx.x; i < key_dim; i += blockDim.x) {
      query[i] = static_cast<float>(q[i]) * q_scale * q_factor;
      key[i] = static_cast<float>(k[i]) * k_scale;
    }
    __syncthreads();

    float result = 0.0f;
    if (has_feature) {
      const float b = static_cast<float>(of_token[value_features + head]);
      const float a = static_cast<float>(of_token[value_features + heads.values + head]) + bias;
      // Beyond this, f32 has no digit for the difference.
      const float softplus = a > 20.0f ? a : log1pf(expf(a));
      const float decay = expf(-rate * softplus), beta = round_to<T>(sigmoid(b));
      float* const column = matrix + feature;
      float known = 0.0f;
      for (int64_t i = 0; i < key_dim; ++i) known += column[i * value_dim] * decay * key[i];
      const T* const v = qkv + token * cols + 2 * key_features + head * value_dim;
      const float delta = (static_cast<float>(v[feature]) - known) * beta;
      for (int64_t i = 0; i < key_dim; ++i) {
        const float element = column[i * value_dim] * decay + key[i] * delta;
        column[i * value_dim] = element;
        result += element * query[i];
      }
      result = round_to<T>(result);
      results[feature] = result;
    }
    // From here on, no thread reads the query and the key.
    __syncthreads();
    float squares = 0.0f;
    for (int64_t i = lane; i < value_dim; i += 32) squares += results[i] * results[i];
    const float scale = 1.0f / sqrtf(warp_sum(squares) / static_cast<float>(value_dim) + eps);
    if (has_feature) {
      const float normalized =
          round_to<T>(round_to<T>(result * scale) * static_cast<float>(norm[feature]));
      const float z = static_cast<float>(of_token[head * value_dim + feature]);
      out[token * value_features + head * value_dim + feature] =
          static_cast<T>(normalized * (z * sigmoid(z)));
    }
    // The results are overwritten behind the barrier of the next token.
  }

  for (int64_t i = threadIdx.x; i < key_dim * value_dim; i += blockDim.x) own[i] = matrix[i];
  // The blocks of a sequence share its features. A thread reads what it overwrites before it does.
  T* const inputs = kept + state * (heads.taps - 1) * cols;
  const int64_t part = (cols + heads.values - 1) / heads.values;
  for (int64_t col = head * part + threadIdx.x; col < min(cols, (head + 1) * part);
       col += blockDim.x) {
    for (int64_t row = 0; row < heads.taps - 1; ++row) {
      const int64_t token = end - (heads.taps - 1) + row, old = row + (end - first);
      T input = static_cast<T>(0.0f);
      if (token >= first) {
        input = x[token * stride + col];
      } else if (!is_new) {
        input = inputs[old * cols + col];
      }
      inputs[row * cols + col] = input;
    }
  }
}

}  // namespace
