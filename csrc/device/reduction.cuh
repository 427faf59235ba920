// SPDX-License-Identifier: MIT OR Apache-2.0
//
// v = A x: the order of its sums, and how expand reads the partial sums that shrink left.
//
// The order of the sum over K (a layer's input features) depends only on the layer's shape, so all
// kernels and all grids give the same bits:
// - a chain of products adds 64 features;
// - four chains, one after the other, are a K tile (ARIL_K_TILE features);
// - ARIL_K_TILES_PER_SLAB K tiles are a slab, ARIL_K_SLABS_PER_SPAN slabs are a span;
// - the spans, one after the other, are v.
// A block of shrink sums whole K tiles, slabs or spans and leaves them as partials; expand adds
// these in the order above. Blocks of one launch pass partials through the mailbox, launches
// through global memory.
#pragma once

#include "../aril.h"
#include "descriptor.cuh"
#include "mailbox.cuh"
#include "math.cuh"

namespace aril::detail {

constexpr int kSlabFeatures = ARIL_K_TILE * ARIL_K_TILES_PER_SLAB;
constexpr int kKTilesPerSpan = ARIL_K_TILES_PER_SLAB * ARIL_K_SLABS_PER_SPAN;

// The K tiles of one split.
struct KTiles {
  int begin, end;

  __device__ __forceinline__ KTiles(int in_features, int k_tiles_per_split, int split) {
    const int num_k_tiles = ceil_div(in_features, ARIL_K_TILE);
    begin = k_tiles_per_split < num_k_tiles ? split * k_tiles_per_split : 0;
    end =
        k_tiles_per_split < num_k_tiles ? min(begin + k_tiles_per_split, num_k_tiles) : num_k_tiles;
  }
};

__host__ __device__ __forceinline__ int num_splits(const aril_linear_args& p) {
  const int num_k_tiles = ceil_div(p.in_features, ARIL_K_TILE);
  return p.plan.k_tiles_per_split < num_k_tiles ? ceil_div(num_k_tiles, p.plan.k_tiles_per_split)
                                                : 1;
}

// Strides of the partials [splits or slabs][rows][slices][ranks], in elements.
struct PartialLayout {
  int slice_stride;
  int64_t row_stride, partial_stride;

  __device__ __forceinline__ PartialLayout(int64_t rows, int num_slices, int max_rank)
      : slice_stride(ceil_div(max_rank, ARIL_RANK_TILE) * ARIL_RANK_TILE),
        row_stride(int64_t{num_slices} * slice_stride),
        partial_stride(rows * row_stride) {}

  __device__ __forceinline__ explicit PartialLayout(const aril_linear_args& p)
      : PartialLayout(p.num_tokens, p.num_slices, p.weights.max_rank) {}
};

// What a step of an expand multiplies: `factor` times `count` ranks of v of a row, from `first` on.
struct StepRanks {
  int row;  // -1: none
  int first, count;
  float factor;
};

// v from the partials of an earlier launch.
class PartialSums {
 public:
  // `splits_are_slabs`: spans are still to be summed; otherwise each split is a multiple of a span,
  // or all there is.
  __device__ __forceinline__ PartialSums(const float* partials, const PartialLayout& layout,
                                         int splits, bool splits_are_slabs, int slice)
      : layout_(layout),
        splits_(splits),
        splits_are_slabs_(splits_are_slabs),
        first_partial_(partials + slice * layout_.slice_stride) {}

  __device__ __forceinline__ PartialSums(const aril_linear_args& p, int slice)
      : PartialSums(p.partials, PartialLayout(p), num_splits(p),
                    p.plan.k_tiles_per_split == ARIL_K_TILES_PER_SLAB, slice) {}

  // Whether a row has no v, and y must stay as it is.
  __device__ __forceinline__ bool lacks(int) const { return false; }

  // sums[i] = ranks [ranks[i], ranks[i] + 4) of rows[i]; zero for row -1.
  template <int kCount>
  __device__ __forceinline__ void load4(float4 (&sums)[kCount], const int (&rows)[kCount],
                                        const int (&ranks)[kCount]) const {
    const float4 zero = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    const float* sources[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      sources[i] = first_partial_ + rows[i] * layout_.row_stride + ranks[i];
      sums[i] = zero;
    }
    // Expand waits for these loads: many are in flight before the first use.
    constexpr int kAtOnce = ARIL_K_SLABS_PER_SPAN;
    for (int first = 0; first < splits_; first += kAtOnce) {
      float4 partials[kAtOnce][kCount];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          partials[k][i] = zero;
          if (first + k < splits_ && rows[i] >= 0) {
            partials[k][i] =
                *reinterpret_cast<const float4*>(sources[i] + (first + k) * layout_.partial_stride);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        float4 span = zero;
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
          span = span + partials[k][i];
          if (splits_are_slabs_ && k + 1 < kAtOnce) continue;
          sums[i] = sums[i] + span;
          span = zero;
        }
      }
    }
  }

  // Ranks r and r + 1 of a row; zero for row -1.
  template <int kTeam = 1>
  __device__ __forceinline__ float2 load2(int row, int r) const {
    float4 sums[1];
    load4(sums, {row}, {r / 4 * 4});
    return r % 4 == 0 ? make_float2(sums[0].x, sums[0].y) : make_float2(sums[0].z, sums[0].w);
  }

 private:
  PartialLayout layout_;
  int splits_;
  bool splits_are_slabs_;
  const float* first_partial_;
};

// v from the slabs in the mailbox, as soon as shrink has stored them.
struct MailboxSums {
  const uint64_t* first_partial;
  PartialLayout layout;
  int slabs;
  bool apart;  // shrink was an earlier launch: its sums are there, under its own epoch
  uint32_t epoch;

  __device__ __forceinline__ MailboxSums(void* mailbox, const PartialLayout& layout, int slabs,
                                         bool apart, int slice, uint32_t epoch)
      : first_partial(tagged_words(mailbox) + slice * layout.slice_stride),
        layout(layout),
        slabs(slabs),
        apart(apart),
        epoch(epoch) {}

  __device__ __forceinline__ bool lacks(int) const { return false; }

  // The sums of two spans of ranks r and r + 1, from slab `first_slab` up to `last_slab`. A whole
  // warp polls together: if some lanes went on alone, the others would be delayed by microseconds.
  __device__ __forceinline__ void load_spans(float2 (&spans)[2], const uint64_t* source,
                                             int first_slab, int last_slab) const {
    constexpr int kAtOnce = 2 * ARIL_K_SLABS_PER_SPAN;
    TaggedPair sums[kAtOnce];
    PollLimit polls;
    for (;;) {
      bool all = true;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        sums[i] = {0.0f, epoch, 0.0f, epoch};
        if (first_slab + i < last_slab) {
          sums[i] = load_tagged(source + (first_slab + i) * layout.partial_stride);
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        all = all && sums[i].epoch0 == epoch && sums[i].epoch1 == epoch;
      }
      if (apart || __all_sync(0xffffffffu, all)) break;
      polls.count();
    }
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

  // Ranks r and r + 1 of a row, by kTeam adjacent threads of whole warps; zero for row -1.
  template <int kTeam>
  __device__ __forceinline__ float2 load2(int row, int r) const {
    constexpr int kAtOnce = 2 * ARIL_K_SLABS_PER_SPAN;
    const uint64_t* source = first_partial + row * layout.row_stride + r;
    const int last_slab = row < 0 ? 0 : slabs;
    const int member = static_cast<int>(threadIdx.x) % kTeam;
    float2 total = make_float2(0.0f, 0.0f);
    for (int first = 0; first < slabs; first += kTeam * kAtOnce) {
      float2 spans[2];
      load_spans(spans, source, first + member * kAtOnce, last_slab);
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

// Ranks r, r + 1, r + 8 and r + 9 of a row's v from the slabs in the mailbox, whose words for rank
// r start at `partials`; zero for row -1. Without `has_second` the last two are zero. A whole warp
// polls together.
__device__ __forceinline__ float4 poll_v(const uint64_t* partials, const PartialLayout& layout,
                                         int slabs, int row, bool has_second, uint32_t epoch) {
  constexpr int kAtOnce = 2;
  float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f), span = total;
  const uint64_t* source = partials + row * layout.row_stride;
  for (int first = 0; first < slabs; first += kAtOnce) {
    TaggedPair sums[kAtOnce][2];
    PollLimit polls;
    for (;;) {
      bool all = true;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          sums[i][half] = {0.0f, epoch, 0.0f, epoch};
          if (row >= 0 && first + i < slabs && (half == 0 || has_second)) {
            sums[i][half] =
                load_tagged(source + (first + i) * layout.partial_stride + half * ARIL_RANK_TILE);
          }
          all = all && sums[i][half].epoch0 == epoch && sums[i][half].epoch1 == epoch;
        }
      }
      if (__all_sync(0xffffffffu, all)) break;
      polls.count();
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      span = span + make_float4(sums[i][0].value0, sums[i][0].value1, sums[i][1].value0,
                                sums[i][1].value1);
    }
    if ((first + kAtOnce) % ARIL_K_SLABS_PER_SPAN != 0 && first + kAtOnce < slabs) continue;
    total = total + span;
    span = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
  return total;
}

}  // namespace aril::detail
