// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The fused linear of decode, y = x W^T + bias + scaling * B (A x), in one launch: what its blocks
// share out, and their shared memory.
//
// Bytes: W once, A and B of each adapter in the batch once, x and v = A x from L2. The launch is
// bound by them, so everything is on its way before anything waits for it: W through a ring of
// stages that the copy engine fills, A and B through L2.
//
// A cluster of `splits` blocks owns some units of 16 rows of a slice of W, and each of its blocks a
// range of the input features. A block has three roles:
// - producers fill the ring: one with W, which waits for no predecessor, one with x;
// - multipliers, mma.sync with W's rows as M and the tokens as N (forward_base.cuh);
// - the delta's warps, beside that stream: they compute their share of v, hand it over through the
//   exchange, gather all of v, and leave B v of the block's own outputs for the multipliers to add
//   before the only store (forward_delta.cuh).
#pragma once

#include <cuda.h>

#include "../common/tma.cuh"
#include "tile.cuh"

namespace aril::detail {

constexpr int kUnitRows = ARIL_FORWARD_UNIT_ROWS;
constexpr int kBlockRows = ARIL_FORWARD_BLOCK_ROWS;  // that four cores of B have
constexpr int kMaxUnits = ARIL_FORWARD_UNITS;
constexpr int kBoxFeatures = 64;  // rows of 128 bytes, which the copy engine swizzles
constexpr int kStepBoxes = 2;     // that blocks share out together
constexpr int kUnitBoxBytes = kUnitRows * kBoxFeatures * 2;
constexpr int kTokenTile = 8;  // of mma.sync's N
constexpr int kTokenBoxBytes = kTokenTile * kBoxFeatures * 2;
constexpr int kTeams = 2;  // of multipliers: steps of the features take turns
constexpr int kProducers = 2;  // warps
constexpr int kMaxDeltaWarps = 8;
constexpr int kParts = ARIL_FORWARD_PARTS;
constexpr int kSegmentTokens = 8;  // of one slot, that a warp works on together
constexpr int kPairRanks = 16;     // of two tiles of A: mma.sync's M
constexpr int kPairBytes = kPieceBytes;  // of half a lane of features
constexpr int kAPlaces = 2;  // of a warp
constexpr int kHalves = 8;   // of lanes of features, that a step has, each with a sum of its own
constexpr int kChunkRanks = 32;    // of B, 8 for each lane of four
constexpr int kChunkTileBytes = kBlockRows * ARIL_RANK_TILE * 2;
constexpr int kChunkBytes = kChunkRanks / ARIL_RANK_TILE * kChunkTileBytes;
constexpr int kChunkPlaces = kAPlaces * kPairBytes / kChunkBytes;  // where a warp's A was
constexpr int kSpanRanks = 64;     // whose products are summed up before they are added to others
constexpr int kMaxStages = 24;
constexpr int kMostBlocks = 4095;  // that the exchange counts
constexpr int kMaxSplitUnits = 12;  // of a cluster of two blocks

// How the launch is shared out.
struct ForwardGrid {
  int first_cluster[ARIL_MAX_SLICES + 1];  // of each slice, then their number
  int units;                               // of a cluster
  int pass_units;                          // that it multiplies at a time
  int stage_boxes;                         // along the features
  int stages;
  int trigger;   // stages before its last at which a block lets dependents begin
};

// Multipliers: each has two units of rows and a group of tokens, and a team every second step.
constexpr int kUnitsPerWarp = 2;
constexpr int kMostGroups = 2;

// With more tokens there are two groups, for the tensor cores' sake.
__host__ __device__ __forceinline__ constexpr int token_groups(int token_tiles) {
  return token_tiles > 4 ? kMostGroups : 1;
}

// Warps of a team.
__host__ __device__ __forceinline__ constexpr int team_warps(int pass_units, int token_tiles) {
  return ceil_div(pass_units, kUnitsPerWarp) * token_groups(token_tiles);
}

// Of the deltas; fewer where the multipliers are many.
__host__ __device__ __forceinline__ constexpr int delta_warps(int token_tiles) {
  return token_groups(token_tiles) > 1 ? kMaxDeltaWarps / 2 : kMaxDeltaWarps;
}

__host__ __device__ __forceinline__ constexpr int forward_warps(int pass_units, int token_tiles) {
  return kTeams * team_warps(pass_units, token_tiles) + kProducers + delta_warps(token_tiles);
}

// 16 ranks of a module, over a part of the input features, for a segment.
struct DeltaUnit {
  const char* a;   // of the ranks, in the part's first lane of features
  int lane_bytes;  // to the next
  int first_lane, num_lanes;
  bool two;  // tiles of 8 ranks
  int part, segment, slice, first_rank, rank;
};

// The batch as this launch sees it: segments of up to eight tokens of a slot, and their modules.
struct DeltaShared {
  static constexpr int kPitch = 20;  // floats of a token's sums; spreads them over the banks
  static constexpr int kUnits = 8;   // that are looked up at a time

  int32_t slots[ARIL_FORWARD_TOKENS];
  float scales[ARIL_FORWARD_TOKENS];
  int8_t segment_of[ARIL_FORWARD_TOKENS];              // -1: none
  int8_t tokens[ARIL_FORWARD_TOKENS][kSegmentTokens];  // -1: none
  uint32_t leaders[ARIL_FORWARD_TOKENS / 32];          // tokens that begin a segment
  int32_t num_segments, num_units;                     // of all blocks
  int32_t slice_rank;                                  // the largest of this block's slice
  int32_t missing;                                     // a unit that did not come, or -1
  int32_t polls;                                       // for the next one
  Arrival a[kMaxDeltaWarps][kAPlaces];                // a warp's part of a unit's A
  Arrival b[kMaxDeltaWarps][kChunkPlaces];  // and chunks of B, at the same place
  DeltaUnit units[kUnits];
  alignas(16) float sums[2][kHalves][kSegmentTokens * kPitch];
};

// Where the dynamic shared memory's parts are, in bytes, from a boundary of 1024.
struct ForwardSmem {
  int stage_bytes, handover, inbox, deltas, v, a, batch, modules, total;
  int delta_pitch;  // floats from a row of deltas to the next
  int v_pitch;      // bytes from a token of v to the next
  int v_ranks;      // that fit at once

  ForwardSmem() = default;

  ForwardSmem(int token_tiles, const ForwardGrid& grid, int splits,
                                  int num_slices, int max_rank) {
    stage_bytes = grid.stage_boxes * (grid.pass_units * kUnitBoxBytes + token_tiles * kTokenBoxBytes);
    handover = grid.stages * stage_bytes;
    inbox = handover + kTeams * ceil_div(grid.pass_units, kUnitsPerWarp) * token_tiles * 32 * 16;
    deltas = inbox + (splits > 1 ? grid.units * token_tiles * 32 * 16 : 0);
    // An odd row of eight-token tiles spreads a warp's rows over all banks.
    delta_pitch = kTokenTile * (token_tiles == 1 ? 1 : token_tiles <= 4 ? 5 : 9);
    v_ranks = v_pitch = 0;
    if (max_rank == 0) {
      v = a = batch = modules = total = deltas;
      return;
    }
    const int blocks = ceil_div(grid.pass_units / 2 + 1, splits);
    v = deltas + blocks * kBlockRows * delta_pitch * 4;
    constexpr int kMaxV = 16 << 10;
    const int tokens = token_tiles * kTokenTile;
    const int padded = ceil_div(max_rank, kChunkRanks) * kChunkRanks;
    const int most = kMaxV / (tokens * 2 * 2) / kSpanRanks * kSpanRanks;
    v_ranks = padded < most ? padded : most;
    v_pitch = v_ranks * 2 + 16;
    a = v + 2 * tokens * v_pitch;
    batch = a + delta_warps(token_tiles) * kAPlaces * kPairBytes;
    modules = batch + static_cast<int>(sizeof(DeltaShared));
    total = modules + tokens * num_slices * (static_cast<int>(sizeof(aril_descriptor)) + 4) + 8;
  }
};

struct ForwardParams {
  CUtensorMap w[ARIL_MAX_SLICES];
  CUtensorMap x;
  aril_forward_args args;
  ForwardGrid grid;
  ForwardSmem smem;
  int splits;
  // Of A, in lanes of features.
  int num_lanes, part_lanes, num_parts;
};

// What a block of the grid has of W.
struct Share {
  int split, slice;
  int begin, end;             // units of the slice
  int first_box, num_boxes;   // of the features

  __device__ __forceinline__ void init(const ForwardParams& p) {
    slice = 0;
    split = p.splits == 1 ? 0 : blockIdx.x % 2;
    const int cluster = blockIdx.x / p.splits;
    while (slice + 1 < p.args.num_slices && cluster >= p.grid.first_cluster[slice + 1]) ++slice;
    begin = (cluster - p.grid.first_cluster[slice]) * p.grid.units;
    end = min(begin + p.grid.units, slice_units(p.args.out_features[slice]));
    const int boxes = ceil_div(p.args.in_features, kBoxFeatures);
    const int share = ceil_div(ceil_div(boxes, kStepBoxes), p.splits) * kStepBoxes;
    first_box = split * share;
    num_boxes = max(0, min(boxes - first_box, share));
  }

  // Of whole blocks of 32 rows.
  __host__ __device__ __forceinline__ static int slice_units(int out_features) {
    return ceil_div(out_features, kBlockRows) * (kBlockRows / kUnitRows);
  }
};

// What the roles of a block share beside the dynamic memory.
struct ForwardShared {
  Arrival full[kMaxStages], empty[kMaxStages];  // of the ring's stages
  Arrival handover[kTeams * kMaxUnits];  // the other team's sums of a warp's unit, and
  Arrival taken[kTeams * kMaxUnits];     // that it has read them
  Arrival inbox[kMostGroups * kMaxSplitUnits];  // the other block's sums of a unit and group
  Arrival tagged;                               // `tag` is known
  Arrival deltas_full, deltas_empty;
  uint64_t tag;
  Share share;
};

}  // namespace aril::detail
