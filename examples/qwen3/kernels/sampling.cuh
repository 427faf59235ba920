// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The choice of a token from each row of logits, by temperature, top_k, top_p and a place in the
// unit interval that the host draws: the tokens that may be chosen divide the interval by their
// probabilities, the most probable first if there is a bound, in their own order otherwise.
//
// Nothing is sorted. The token at a place is found by its logit's bits, three of them in a pass
// over the row: how much do the tokens weigh that have at least this logit? Weights are integers,
// in units of 2^-40 of the largest, so that a sum does not depend on its order.
//
// A row has a cluster of blocks (one block before sm_90). A warp has consecutive logits.
// Bound: passes over the row, from L2, 4 to 20 of them.
#pragma once

#include <float.h>
#include <stdint.h>

#include "../../../csrc/ptx/tma.cuh"

#if __CUDA_ARCH__ >= 900
#define DRAW_CLUSTER __cluster_dims__(8, 1, 1)
#else
#define DRAW_CLUSTER
#endif

namespace {

constexpr int kDrawBlocks = 8;
constexpr int kDrawThreads = 512;
constexpr int kDrawWarps = kDrawThreads / 32;
constexpr int kDrawBits = 3;
constexpr int kThresholds = (1 << kDrawBits) - 1;

// How a row's token is chosen. As `Draw` of device.rs.
struct Draw {
  float temperature;  // 0: the largest logit
  float top_p;
  uint64_t top_k;  // 0: all
  double place;    // in [0, 1)
};

// Logits as integers in the same order, equal for the two zeros.
template <typename T>
struct Keys {
  static constexpr int kBits = 16;
  static __device__ __forceinline__ uint32_t of(T value) {
    const uint16_t stored = *reinterpret_cast<const uint16_t*>(&value);
    const uint32_t bits = stored == 0x8000 ? 0 : stored;
    return bits >> 15 ? ~bits & 0xffff : bits | 0x8000;
  }
  static __device__ __forceinline__ float value(uint32_t key) {
    const auto bits = static_cast<uint16_t>(key >> 15 ? key & 0x7fff : ~key);
    return static_cast<float>(*reinterpret_cast<const T*>(&bits));
  }
};
template <>
struct Keys<float> {
  static constexpr int kBits = 32;
  static __device__ __forceinline__ uint32_t of(float value) {
    const uint32_t bits = __float_as_uint(value + 0.0f);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
  }
  static __device__ __forceinline__ float value(uint32_t key) {
    return __uint_as_float(key >> 31 ? key & 0x7fffffff : ~key);
  }
};

// A block's part in a cluster: sums and maxima over all blocks of a row.
class Cluster {
 public:
  struct Shared {
    uint64_t of_warps[kDrawWarps][kThresholds];
    // By turns, so that a block may be one exchange ahead.
    uint64_t of_blocks[2][kDrawBlocks][kThresholds];
  };

  __device__ __forceinline__ explicit Cluster(Shared& shared) : shared_(shared) {
    synchronize();
  }

  // Waits for all threads of the row, and makes what they wrote visible.
  static __device__ __forceinline__ void synchronize() {
#if __CUDA_ARCH__ >= 900
    // The barrier of a cluster is for warps whose lanes have converged.
    __syncwarp();
    aril::sync_cluster();
#else
    __syncthreads();
#endif
  }

  static constexpr int kBlocks =
#if __CUDA_ARCH__ >= 900
      kDrawBlocks;
#else
      1;
#endif

  // Combines kCount values of all threads; returns those of each block, which the next call but one
  // overwrites.
  template <int kCount, typename F>
  __device__ __forceinline__ const uint64_t (*exchange(uint64_t (&values)[kCount],
                                                       F combine))[kThresholds] {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
#pragma unroll
      for (int distance = 16; distance > 0; distance /= 2) {
        values[i] = combine(values[i], __shfl_xor_sync(0xffffffffu, values[i], distance));
      }
      if (lane == 0) shared_.of_warps[warp][i] = values[i];
    }
    __syncthreads();
    turn_ ^= 1;
    // A thread gives one value to one block.
    if (threadIdx.x < kBlocks * kCount) {
      const int to = threadIdx.x / kCount, i = threadIdx.x % kCount;
      uint64_t value = shared_.of_warps[0][i];
      for (int w = 1; w < kDrawWarps; ++w) value = combine(value, shared_.of_warps[w][i]);
#if __CUDA_ARCH__ >= 900
      const uint32_t address = aril::cluster_address(&shared_.of_blocks[turn_][blockIdx.x][i], to);
      asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(address), "l"(value) : "memory");
#else
      shared_.of_blocks[turn_][to][i] = value;
#endif
    }
    synchronize();
    return shared_.of_blocks[turn_];
  }

  // Replaces values by their sums over all threads of the row.
  template <int kCount>
  __device__ __forceinline__ void add(uint64_t (&values)[kCount]) {
    const auto blocks = exchange(values, [](uint64_t a, uint64_t b) { return a + b; });
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      values[i] = 0;
      for (int block = 0; block < kBlocks; ++block) values[i] += blocks[block][i];
    }
  }

  __device__ __forceinline__ uint64_t largest(uint64_t value) {
    uint64_t values[1] = {value};
    const auto blocks = exchange(values, [](uint64_t a, uint64_t b) { return max(a, b); });
    for (int block = 0; block < kBlocks; ++block) value = max(value, blocks[block][0]);
    return value;
  }

  // The sum of the blocks before this one and of the warps before this one. `value` is the
  // thread's, `own` becomes the warp's.
  __device__ __forceinline__ uint64_t before(uint64_t value, uint64_t& own) {
    uint64_t values[1] = {value};
    const auto blocks = exchange(values, [](uint64_t a, uint64_t b) { return a + b; });
    own = values[0];
    uint64_t sum = 0;
    if constexpr (kBlocks > 1) {
      for (int block = 0; block < static_cast<int>(blockIdx.x); ++block) sum += blocks[block][0];
    }
    for (int w = 0; w < static_cast<int>(threadIdx.x) / 32; ++w) sum += shared_.of_warps[w][0];
    return sum;
  }

 private:
  Shared& shared_;
  int turn_ = 0;
};

// The logits of a row that a warp has.
template <typename T>
class Logits {
 public:
  __device__ __forceinline__ Logits(const T* row, int64_t vocab)
      : row_(row), has_vectors_(vocab % kWide<T> == 0) {
    constexpr int kStep = 32 * kWide<T>;
    constexpr int kWarpsOfRow = Cluster::kBlocks * kDrawWarps;
    const int count = static_cast<int>(vocab);
    const int each = (count + kWarpsOfRow * kStep - 1) / (kWarpsOfRow * kStep) * kStep;
    const int block = Cluster::kBlocks == 1 ? 0 : blockIdx.x;
    first_ = min((block * kDrawWarps + static_cast<int>(threadIdx.x) / 32) * each, count);
    end_ = min(first_ + each, count);
  }

  // Calls f for each of the lane's vectors, with its elements, how many of them exist, and the
  // index of the first. All lanes call f equally often.
  template <typename F>
  __device__ __forceinline__ void each_vector(F f) const {
    const int lane = threadIdx.x % 32;
    for (int at = first_ + lane * kWide<T>; at - lane * kWide<T> < end_; at += 32 * kWide<T>) {
      Vector<T, kWide<T>> vec = {};
      // With `count == kWide<T>`, nvcc 13.0 takes the first branch where nothing is left, too.
      const int left = end_ - at, count = max(min(left, kWide<T>), 0);
      if (left >= kWide<T> && has_vectors_) {
        vec = *reinterpret_cast<const Vector<T, kWide<T>>*>(row_ + at);
      } else {
        for (int i = 0; i < count; ++i) vec.elements[i] = row_[at + i];
      }
      f(vec.elements, count, at);
    }
  }

  template <typename F>
  __device__ __forceinline__ void each(F f) const {
    each_vector([&](const T(&elements)[kWide<T>], int count, int at) {
#pragma unroll
      for (int i = 0; i < kWide<T>; ++i) {
        if (i < count) f(elements[i], at + i);
      }
    });
  }

 private:
  const T* row_;
  bool has_vectors_;
  int first_, end_;
};

// A place among tokens by their logits.
struct Rank {
  uint32_t key;
  uint64_t above;  // what tokens of larger keys weigh together
};

// The largest key with which the tokens of at least this key weigh `target`, or more.
template <typename T, typename Weight>
__device__ Rank find_key(Cluster& cluster, const Logits<T>& logits, uint64_t target,
                         Weight weight) {
  Rank rank = {0, 0};
  for (int left = Keys<T>::kBits; left > 0;) {
    const int bits = min(left, kDrawBits);
    left -= bits;
    const int thresholds = (1 << bits) - 1;
    uint64_t sums[kThresholds] = {};
    logits.each([&](T logit, int) {
      const uint32_t key = Keys<T>::of(logit);
      const uint32_t digit = key < rank.key ? 0 : (key - rank.key) >> left;
      if (digit == 0) return;
      const uint64_t value = weight(logit, key);
#pragma unroll
      for (int i = 0; i < kThresholds; ++i) sums[i] += digit > i ? value : 0;
    });
    cluster.add(sums);
    int digit = 0;
#pragma unroll
    for (int i = 0; i < kThresholds; ++i) {
      if (i < thresholds && sums[i] >= target) digit = i + 1;
    }
#pragma unroll
    for (int i = 0; i < kThresholds; ++i) {
      if (i == digit && i < thresholds) rank.above = sums[i];
    }
    rank.key += static_cast<uint32_t>(digit) << left;
  }
  return rank;
}

// Sets `index` to the first token with which the tokens up to it weigh `target`, or more.
template <typename T, typename Weight>
__device__ void find_index(Cluster& cluster, const Logits<T>& logits, uint64_t target,
                           Weight weight, int32_t* index) {
  uint64_t sum = 0, own;
  logits.each([&](T logit, int) { sum += weight(logit, Keys<T>::of(logit)); });
  uint64_t before = cluster.before(sum, own);
  if (before >= target || before + own < target) return;
  const int lane = threadIdx.x % 32;
  logits.each_vector([&](const T(&elements)[kWide<T>], int count, int at) {
    uint64_t weights[kWide<T>], sum = 0;
#pragma unroll
    for (int i = 0; i < kWide<T>; ++i) {
      weights[i] = i < count ? weight(elements[i], Keys<T>::of(elements[i])) : 0;
      sum += weights[i];
    }
    uint64_t up_to = sum;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const uint64_t others = __shfl_up_sync(0xffffffffu, up_to, distance);
      if (lane >= distance) up_to += others;
    }
    uint64_t place = before + up_to - sum;
#pragma unroll
    for (int i = 0; i < kWide<T>; ++i) {
      if (place < target && place + weights[i] >= target) *index = at + i;
      place += weights[i];
    }
    before += __shfl_sync(0xffffffffu, up_to, 31);
  });
}

// Grid: (kDrawBlocks, rows).
template <typename T>
__device__ void draw(const T* logits,    // [rows, vocab]
                     const Draw* draws,  // [rows]
                     int32_t* tokens,    // [rows]: -1 if a logit is NaN
                     float* logprobs,    // [rows]: that of the token, before temperature and bounds
                     int64_t vocab) {
  if (blockIdx.x >= Cluster::kBlocks) return;
  __shared__ Cluster::Shared shared;
  Cluster cluster(shared);
  const T* const row = logits + blockIdx.y * vocab;
  const Logits<T> own(row, vocab);
  const Draw how = draws[blockIdx.y];
  int32_t* const token = tokens + blockIdx.y;

  uint64_t top = 0;
  own.each([&](T logit, int at) {
    top = max(top, ordered(static_cast<float>(logit), static_cast<uint32_t>(at)));
  });
  top = cluster.largest(top);
  const auto first = static_cast<int32_t>(UINT32_MAX - static_cast<uint32_t>(top));
  const bool is_first_thread = blockIdx.x == 0 && threadIdx.x == 0;
  if (top >> 32 == UINT32_MAX) {
    if (is_first_thread) {
      *token = -1;
      logprobs[blockIdx.y] = NAN;
    }
    return;
  }
  const float largest = static_cast<float>(row[first]);
  constexpr float kOne = 1099511627776.0f;  // 2^40
  const float factor = how.temperature == 0.0f ? 1.0f : 1.0f / how.temperature;
  const auto weigh = [&](float logit, float factor) {
    // If the largest is infinite, it has all the weight.
    const float distance = logit == largest ? 0.0f : (logit - largest) * factor;
    return static_cast<uint64_t>(expf(distance) * kOne);
  };
  const auto weight = [&](T logit, uint32_t) { return weigh(static_cast<float>(logit), factor); };

  uint64_t totals[2] = {};  // of the model's distribution, and at this temperature
  own.each([&](T logit, int) {
    totals[0] += weigh(static_cast<float>(logit), 1.0f);
    totals[1] += weight(logit, 0);
  });
  cluster.add(totals);
  uint64_t total = totals[1];
  const auto place_in = [&](uint64_t total) {
    return min(static_cast<uint64_t>(how.place * static_cast<double>(total)), total - 1) + 1;
  };
  // How many tokens of a key it takes to weigh `target` together with all above them.
  const auto count = [&](const Rank& rank, uint64_t target) {
    const uint64_t each = weigh(Keys<T>::value(rank.key), factor);
    return (target - rank.above + each - 1) / each;
  };
  if (how.temperature == 0.0f) {
    if (is_first_thread) *token = first;
  } else if (how.top_k == 0 && how.top_p >= 1.0f) {
    find_index(cluster, own, place_in(total), weight, token);
  } else {
    if (how.top_k > 0 && how.top_k < vocab) {
      const auto one = [](T, uint32_t) { return uint64_t{1}; };
      const Rank rank = find_key(cluster, own, how.top_k, one);
      uint64_t above[1] = {};
      own.each([&](T logit, int) {
        if (Keys<T>::of(logit) > rank.key) above[0] += weight(logit, 0);
      });
      cluster.add(above);
      total = above[0] + (how.top_k - rank.above) * weigh(Keys<T>::value(rank.key), factor);
    }
    if (how.top_p < 1.0f) {
      const auto part =
          static_cast<uint64_t>(static_cast<double>(how.top_p) * static_cast<double>(total));
      const uint64_t wanted = max(part, uint64_t{1});
      const Rank rank = find_key(cluster, own, wanted, weight);
      total = rank.above + count(rank, wanted) * weigh(Keys<T>::value(rank.key), factor);
    }
    const uint64_t target = place_in(total);
    const Rank rank = find_key(cluster, own, target, weight);
    const auto is_equal = [&](T, uint32_t key) { return uint64_t{key == rank.key}; };
    find_index(cluster, own, count(rank, target), is_equal, token);
  }
  // The token may be another block's.
  Cluster::synchronize();
  if (!is_first_thread) return;
  const float chosen = static_cast<float>(row[*reinterpret_cast<volatile int32_t*>(token)]);
  const float distance = chosen == largest ? 0.0f : chosen - largest;
  logprobs[blockIdx.y] = distance - logf(static_cast<float>(totals[0]) / kOne);
}

}  // namespace
