// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The fused linear of decode, y = x W^T + bias + scaling * B (A x), in one launch: how its thread
// blocks share the work, and their shared memory.
//
// Bound: the bytes of W, once, and of A and B of each adapter of the batch, once; x and v = A x
// come from L2. So the first loads are issued before anything waits: W into a ring of stages that
// the copy engine fills, and A of a block's first partials. B comes while a block waits for v.
//
// A cluster of `splits` thread blocks owns some strips of a slice of W, and each of its blocks a
// range of the input features. The warps of a block have three roles:
// - Producers fill the ring: one thread with W, which waits for no predecessor, one with x.
// - Multipliers compute x W^T by mma.sync, W's rows as M and the tokens as N (multiply.cuh).
// - The delta's warps compute their share of v, pass it through the mailbox, gather all of v,
//   and leave scaling * B v of the block's own rows for the multipliers to add before the only
//   store of y (delta.cuh).
//
// A block occupies a multiprocessor, with a ring of up to 200 KB, and starts when one of the launch
// before exits. So the time from a block's start to its first load of W counts: that thread waits
// for nobody.
//
// Words: a *strip* is 16 rows of W, half a unit of outputs; a *box* 64 input features of some rows,
// 128 bytes a row; a *pass* the strips that a block multiplies at a time; a *segment* up to eight
// tokens of one slot; a *part* a quarter of the input features, for which v is summed apart.
#pragma once

#include <cuda.h>

#include "../../device/descriptor.cuh"
#include "../../device/mailbox.cuh"
#include "../../device/math.cuh"
#include "../../ptx/tma.cuh"

namespace aril::detail {

constexpr int kStripRows = ARIL_FORWARD_STRIP_ROWS;
constexpr int kMaxStrips = ARIL_FORWARD_STRIPS;
constexpr int kMaxSplitStrips = ARIL_FORWARD_SPLIT_STRIPS;
constexpr int kBoxFeatures = ARIL_FORWARD_BOX_FEATURES;
constexpr int kStepBoxes = 2;  // splits share the features in steps of two boxes
constexpr int kStripBoxBytes = kStripRows * kBoxFeatures * 2;
constexpr int kTokenTile = 8;  // mma.sync's N
constexpr int kTokenBoxBytes = kTokenTile * kBoxFeatures * 2;
constexpr int kStripSumsBytes = kStripRows * kTokenTile * 4;
constexpr int kMaxTeams = 2;  // of multipliers
constexpr int kProducers = 2;
constexpr int kDeltaWarps = ARIL_FORWARD_DELTA_WARPS;
constexpr int kParts = ARIL_FORWARD_PARTS;
constexpr int kPairRanks = 16;           // two tiles of A: mma.sync's M
constexpr int kPairBytes = kATileBytes;  // of 128 features of a pair
constexpr int kAPlaces = 2;              // buffers of A of a warp
constexpr int kHalves = kDeltaWarps;     // of a step of A: a warp sums 128 features
constexpr int kPanelRanks = 32;          // of B, eight for each lane of four
constexpr int kMaxPanelPlaces = 8;       // buffers of B of a warp, in the memory of A
constexpr int kSumRanks = 64;  // ranks whose products are added up before others join them
constexpr int kMaxStages = ARIL_FORWARD_STAGES;

// How the launch divides the work.
struct FusedGrid {
  int first_cluster[ARIL_MAX_SLICES + 1];  // of each slice; then the number of clusters
  int strips;                              // of a cluster
  int pass_strips, passes;
  int boxes, split_boxes;  // along the features: of a row of W, and of a split
  int stage_boxes;         // of a stage of the ring, along the features
  int stages;
  int first_stages;
  int trigger;  // stages before its last at which a block lets dependents begin
};

// The sums of the two halves of each box stay apart until the end, whatever the number of tokens.
// With up to 16 tokens a warp computes both halves of one strip. With more, two teams take one half
// each and a warp has two strips, so that it loads fragments of x once for both.
__host__ __device__ __forceinline__ constexpr int teams(int token_tiles) {
  return token_tiles > 2 ? kMaxTeams : 1;
}
__host__ __device__ __forceinline__ constexpr int strips_per_warp(int token_tiles) {
  return teams(token_tiles);
}

__host__ __device__ __forceinline__ constexpr int team_warps(int pass_strips, int token_tiles) {
  return ceil_div(pass_strips, strips_per_warp(token_tiles));
}

__host__ __device__ __forceinline__ constexpr int multiplier_warps(int pass_strips,
                                                                   int token_tiles) {
  return teams(token_tiles) * team_warps(pass_strips, token_tiles);
}

// Whether a block requests its first A before the rest of its ring. Behind the copies of a full
// ring A comes up to 5 us later, if a launch starts that shortly before its x is there.
__host__ __device__ __forceinline__ constexpr bool requests_a_first(int token_tiles) {
  return token_tiles == 1;
}

__host__ __device__ __forceinline__ constexpr int fused_warps(int pass_strips, int token_tiles) {
  return multiplier_warps(pass_strips, token_tiles) + kProducers + kDeltaWarps;
}

// A partial of v: of 16 ranks of a module over a part of the input features, for a segment.
struct DeltaPartial {
  const char* a;     // of the ranks, in the part's first K tile
  int k_tile_bytes;  // from one K tile to the next
  int first_k_tile, num_k_tiles;
  bool two;  // tiles of eight ranks
  int part, segment, slice, first_rank, rank;
};

// The batch in this launch: its segments and their modules.
struct DeltaShared {
  static constexpr int kPitch = 20;    // floats of a token's sums: spreads tokens over the banks
  static constexpr int kPartials = 8;  // looked up at a time
  static constexpr int kSums = kHalves * ARIL_SEGMENT_TOKENS * kPitch;  // floats of a partial

  alignas(16) aril_segments segments;
  float scales[ARIL_FORWARD_TOKENS];
  int32_t num_segments;  // of this launch's tokens
  int32_t num_partials;  // of all blocks
  int32_t slice_rank;    // the largest of this block's slice
  int32_t place_bits;    // of the number of a buffer of B
  int32_t missing;  // a partial that did not arrive in time, by its order for this block, or -1
  int32_t polls;    // left for the next one
  uint32_t epoch;
  uint32_t ticket;                                     // how many blocks started before this one
  TransactionBarrier a[kDeltaWarps][kAPlaces];         // a warp's buffers of A, and
  TransactionBarrier b[kDeltaWarps][kMaxPanelPlaces];  // of B, at the same place
  DeltaPartial partials[kPartials];
};

static_assert(sizeof(DeltaShared) == ARIL_FORWARD_BATCH_BYTES);

struct FusedParams {
  CUtensorMap w[ARIL_MAX_SLICES];
  CUtensorMap x;
  aril_forward_args args;
  FusedGrid grid;
  aril_forward_ring smem;
  int splits;
  int num_k_tiles, part_k_tiles, num_parts;  // of A
};

// A thread block's share of W.
struct Share {
  int split, slice;
  int first_out;             // of the slice, in the bias
  int begin, end;            // strips of the slice
  int first_box, num_boxes;  // of the features

  __device__ __forceinline__ void init(const FusedParams& p) {
    slice = 0;
    first_out = 0;
    split = p.splits == 1 ? 0 : blockIdx.x % 2;
    const int cluster = p.splits == 1 ? blockIdx.x : blockIdx.x / 2;
    while (slice + 1 < p.args.num_slices && cluster >= p.grid.first_cluster[slice + 1]) {
      first_out += p.args.out_features[slice++];
    }
    begin = (cluster - p.grid.first_cluster[slice]) * p.grid.strips;
    end = min(begin + p.grid.strips, slice_strips(p.args.out_features[slice]));
    first_box = split * p.grid.split_boxes;
    num_boxes = max(0, min(p.grid.boxes - first_box, p.grid.split_boxes));
  }

  // Stages of a pass.
  __device__ __forceinline__ int num_items(const FusedGrid& grid) const {
    static_assert(kStepBoxes == 2);
    return grid.stage_boxes == kStepBoxes ? ceil_div(num_boxes, kStepBoxes) : num_boxes;
  }

  // Strips of a slice, padded to whole units.
  __host__ __device__ __forceinline__ static int slice_strips(int out_features) {
    return ceil_div(out_features, ARIL_OUT_UNIT) * (ARIL_OUT_UNIT / kStripRows);
  }
};

// The units whose y a thread block stores: every `splits`th from `first` on, by their number in the
// slice.
struct OwnUnits {
  int first, splits;

  __device__ __forceinline__ OwnUnits(int first_unit, int splits, int split)
      : first(first_unit + (splits == 1 ? 0 : (first_unit % 2) ^ split)), splits(splits) {}

  // How many are before `end`.
  __device__ __forceinline__ int count(int end) const {
    const int units = max(0, end - first);
    return splits == 1 ? units : ceil_div(units, 2);
  }

  __device__ __forceinline__ int index_of(int unit) const {
    return splits == 1 ? unit - first : (unit - first) / 2;
  }
};

// The state that a block's roles share, beside the dynamic shared memory.
struct FusedShared {
  TransactionBarrier full[kMaxStages], empty[kMaxStages];  // of the ring's stages
  TransactionBarrier handover[kMaxTeams * kMaxStrips];     // the other team's sums of a strip are
  TransactionBarrier taken[kMaxTeams * kMaxStrips];        // there, and have been read
  TransactionBarrier inbox[kMaxSplitStrips];               // the other block's sums of a strip
  TransactionBarrier counted;                              // the block is, in its launch's epoch
  TransactionBarrier deltas_full, deltas_empty;
  Share share;
};
static_assert(sizeof(FusedShared) <= ARIL_FORWARD_STATIC_BYTES);

}  // namespace aril::detail
