// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The fused linear's delta: kDeltaWarps warps of each block, beside the stream of W.
//
// v = A x is shared out in units of 16 ranks, 8 tokens of a slot and a part of the input features,
// evenly over all blocks. A block publishes the sums of its units in the exchange, gathers those of
// all parts for the slices that its rows are of, and leaves scaling * B v of its rows for the
// multipliers. A sum that does not come in time, as its block cannot run, is computed on the spot,
// in the same order: nobody has to wait for another block for ever.
//
// Weights go from L2 to registers, 16 bytes a lane, in the order in which they stand: features, or
// ranks, are permuted within a product alike in both operands.
#pragma once

#include "../common/mma.cuh"
#include "../common/vec.cuh"
#include "forward_exchange.cuh"
#include "forward_layout.cuh"
#include "product.cuh"

namespace aril::detail {

#if __CUDA_ARCH__ >= 900

__device__ __forceinline__ void sync_delta_warps() {
  __syncwarp();
  asm volatile("bar.sync 1, %0;" ::"n"(kDeltaThreads) : "memory");
}

// Weights: read once by this block.
__device__ __forceinline__ uint4 load_weights(const char* from, bool valid) {
  uint4 bits = make_uint4(0, 0, 0, 0);
  if (valid) {
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
                 : "l"(from));
  }
  return bits;
}

// What a predecessor wrote.
__device__ __forceinline__ uint4 load_input(const char* from, bool valid) {
  uint4 bits = make_uint4(0, 0, 0, 0);
  if (valid) {
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
                 : "l"(from)
                 : "memory");
  }
  return bits;
}

// The batch as this launch sees it: segments of up to eight tokens of a slot, and their modules.
struct DeltaShared {
  static constexpr int kPitch = 20;  // floats of a token's sums; spreads them over the banks

  int32_t slots[ARIL_FORWARD_TOKENS];
  float scales[ARIL_FORWARD_TOKENS];
  int8_t segment_of[ARIL_FORWARD_TOKENS];                       // -1: none
  int8_t tokens[ARIL_FORWARD_TOKENS][kSegmentTokens];           // -1: none
  int32_t slice_rank;                                           // the largest of this block's slice
  uint32_t leaders[ARIL_FORWARD_TOKENS / 32];                   // tokens that begin a segment
  int32_t missing;                                              // a unit that did not come, or -1
  alignas(16) float sums[2][kDeltaWarps][kSegmentTokens * kPitch];
};

template <typename T>
struct Delta {
  const ForwardParams& p;
  const aril_forward_args& args;
  ForwardShared& shared;
  DeltaShared& batch;
  const Share& share;
  const ForwardSmem& smem;
  unsigned char* const dynamic;
  aril_descriptor* const modules;  // [segments][slices]
  int32_t* const pairs;            // [segments * slices + 1] pairs of tiles of A before a module's
  const int thread;
  const int warp = thread / 32, lane = thread % 32, g = lane / 4, q = lane % 4;
  const int padded_tokens;
  int num_segments = 0, all_pairs = 0, part_lanes = 0, num_units = 0;
  int first_unit = 0, last_unit = 0;  // of this block
  int buffer = 0;
  int polls = args.polls;
  uint64_t tag = 0;

  __device__ __forceinline__ Delta(const ForwardParams& p, ForwardShared& shared,
                                   DeltaShared& batch, const Share& share,
                                   const ForwardSmem& smem, unsigned char* dynamic, int thread,
                                   int padded_tokens)
      : p(p),
        args(p.args),
        shared(shared),
        batch(batch),
        share(share),
        smem(smem),
        dynamic(dynamic),
        modules(reinterpret_cast<aril_descriptor*>(dynamic + smem.modules)),
        pairs(reinterpret_cast<int32_t*>(modules + padded_tokens * args.num_slices)),
        thread(thread),
        padded_tokens(padded_tokens) {}

  // Groups tokens by slot, in their order.
  __device__ __forceinline__ void make_segments() {
    const int token = thread;
    if (token < ARIL_FORWARD_TOKENS) {
      int slot = -1;
      float scale = 0.0f;
      if (token < args.num_tokens && token < *args.routing.num_tokens) {
        slot = args.routing.slots[token];
        scale = args.routing.scales[token];
        if (slot >= args.weights.num_slots) slot = -1;
      }
      batch.slots[token] = slot;
      batch.scales[token] = scale;
      reinterpret_cast<uint64_t*>(batch.tokens)[token] = ~uint64_t{0};
    }
    if (thread == 0) {
      batch.slice_rank = 0;
      batch.missing = -1;
    }
    sync_delta_warps();
    int leader = token, position = 0;
    const bool live = token < args.num_tokens && batch.slots[token] >= 0;
    if (live) {
      int before = 0;
      for (int other = 0; other < token; ++other) {
        if (batch.slots[other] != batch.slots[token]) continue;
        if (before % kSegmentTokens == 0) leader = other;
        ++before;
      }
      position = before % kSegmentTokens;
      if (position == 0) leader = token;
    }
    if (warp < ARIL_FORWARD_TOKENS / 32) {
      const uint32_t leaders = __ballot_sync(0xffffffffu, live && leader == token);
      if (lane == 0) batch.leaders[warp] = leaders;
    }
    sync_delta_warps();
    num_segments = __popc(batch.leaders[0]) + __popc(batch.leaders[1]);
    if (token < ARIL_FORWARD_TOKENS) {
      int segment = -1;
      if (live) {
        segment = __popc(batch.leaders[leader / 32] & ((1u << leader % 32) - 1)) +
                  (leader < 32 ? 0 : __popc(batch.leaders[0]));
        batch.tokens[segment][position] = static_cast<int8_t>(token);
      }
      batch.segment_of[token] = static_cast<int8_t>(segment);
    }
  }

  // Brings the segments' modules, and shares out the units.
  __device__ __forceinline__ void share_out() {
    sync_delta_warps();
    const int entries = num_segments * args.num_slices;
    for (int i = thread; i < entries; i += kDeltaThreads) {
      const int slice = i % args.num_slices;
      const int token = batch.tokens[i / args.num_slices][0];
      const aril_descriptor module = module_of(args.weights, batch.slots[token], slice);
      modules[i] = module;
      if (slice == share.slice && module.rank > 0) atomicMax(&batch.slice_rank, module.rank);
    }
    sync_delta_warps();
    if (warp == 0) {
      int before = 0;
      for (int first = 0; first < entries; first += 32) {
        const int i = first + lane;
        int end = i < entries ? ceil_div(modules[i].rank, kPairRanks) : 0;
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
          const int other = __shfl_up_sync(0xffffffffu, end, distance);
          if (lane >= distance) end += other;
        }
        if (i < entries) pairs[i + 1] = before + end;
        before += __shfl_sync(0xffffffffu, end, 31);
      }
      if (lane == 0) pairs[0] = 0;
    }
    sync_delta_warps();
    all_pairs = pairs[entries];
    const int lanes = ceil_div(args.in_features, ARIL_LANE_FEATURES);
    part_lanes = ceil_div(lanes, kParts);
    num_units = all_pairs * num_parts();
    const int blocks = gridDim.x, block = blockIdx.x;
    first_unit = static_cast<int>(int64_t{num_units} * block / blocks);
    last_unit = static_cast<int>(int64_t{num_units} * (block + 1) / blocks);
  }

  __device__ __forceinline__ int num_parts() const {
    return ceil_div(ceil_div(args.in_features, ARIL_LANE_FEATURES), part_lanes);
  }

  struct Unit {
    const char* a;  // of the pair, in the first lane of features
    int lane_bytes;
    bool two;  // tiles
    int begin, end;  // lanes of the part
    int part, segment, slice, first_rank, rank;
  };

  __device__ __forceinline__ Unit unit_at(int index) const {
    Unit unit;
    unit.part = index / all_pairs;
    const int pair = index - unit.part * all_pairs;
    int low = 0, high = num_segments * args.num_slices;  // pairs[low] <= pair < pairs[high]
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (pairs[middle] <= pair) {
        low = middle;
      } else {
        high = middle;
      }
    }
    const aril_descriptor& module = modules[low];
    const int tiles = ceil_div(module.rank, ARIL_RANK_TILE), tile = 2 * (pair - pairs[low]);
    unit.a = static_cast<const char*>(module.a) + tile * kPieceBytes;
    unit.lane_bytes = tiles * kPieceBytes;
    unit.two = tile + 1 < tiles;
    unit.begin = unit.part * part_lanes;
    unit.end = min(unit.begin + part_lanes, ceil_div(args.in_features, ARIL_LANE_FEATURES));
    unit.segment = low / args.num_slices;
    unit.slice = low % args.num_slices;
    unit.first_rank = tile * ARIL_RANK_TILE;
    unit.rank = module.rank;
    return unit;
  }

  // Brings what this block will need to L2: A of its units, B of its rows.
  __device__ __forceinline__ void prefetch(int first_block, int end_block) {
    constexpr int kUnits = 6;  // at most; the rest is brought by loads
    const int units = min(last_unit - first_unit, kUnits);
    for (int i = thread; i < units * part_lanes; i += kDeltaThreads) {
      const Unit unit = unit_at(first_unit + i / part_lanes);
      const int at = unit.begin + i % part_lanes;
      if (at < unit.end) {
        prefetch_bytes(unit.a + int64_t{at} * unit.lane_bytes, (unit.two ? 2 : 1) * kPieceBytes);
      }
    }
    constexpr int kTiles = 8;  // of ranks; likewise
    const OwnBlocks own(first_block, p.splits, share.split);
    const int count = ceil_div(max(0, end_block - own.first), p.splits);
    for (int i = thread; i < count * num_segments * kTiles; i += kDeltaThreads) {
      const int tile = i % kTiles, segment = i / kTiles % num_segments;
      const int block = own.first + i / kTiles / num_segments * p.splits;
      const aril_descriptor& module = modules[segment * args.num_slices + share.slice];
      if (tile * ARIL_RANK_TILE < module.rank) {
        prefetch_bytes(b_tile(module, block * kBlockRows, tile), 512);
      }
    }
  }

  // Four cores of B: 32 outputs of 8 ranks.
  __device__ __forceinline__ static const char* b_tile(const aril_descriptor& module, int row,
                                                       int tile) {
    const int tiles = ceil_div(module.rank, ARIL_RANK_TILE);
    return static_cast<const char*>(module.b) +
           (int64_t{row / ARIL_OUT_TILE} * tiles + tile) * (ARIL_OUT_TILE * ARIL_RANK_TILE * 2) +
           row % ARIL_OUT_TILE / kBlockRows * 512;
  }

  // A of 128 features of a lane, half a lane for each warp.
  __device__ __forceinline__ void load_a(uint4 (&a)[8], const Unit& unit, int step) const {
    const int at = unit.begin + step * (kDeltaWarps / 2) + warp / 2;
    const char* from = unit.a + int64_t{at} * unit.lane_bytes + warp % 2 * (kPieceBytes / 2) +
                       q * 128 + g * 16;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a[2 * i] = load_weights(from + i * 512, at < unit.end);
      a[2 * i + 1] = load_weights(from + i * 512 + kPieceBytes, at < unit.end && unit.two);
    }
  }

  __device__ __forceinline__ void load_x(uint4 (&x)[4], const Unit& unit, int step) const {
    const int at = unit.begin + step * (kDeltaWarps / 2) + warp / 2;
    const int feature = at * ARIL_LANE_FEATURES + warp % 2 * (ARIL_LANE_FEATURES / 2) + 8 * q;
    const int token = batch.tokens[unit.segment][g];
    const T* from = static_cast<const T*>(args.x) + token * args.x_stride + feature;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[i] = load_input(reinterpret_cast<const char*>(from + i * 32),
                        token >= 0 && at < unit.end && feature + i * 32 < args.in_features);
    }
  }

  __device__ __forceinline__ static void multiply(float (&sums)[2][4], const uint4 (&a)[8],
                                                  const uint4 (&x)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint4 &low = a[2 * i], &high = a[2 * i + 1];
      mma_m16n8k16<T>(sums[i % 2], make_uint4(low.x, high.x, low.y, high.y), x[i].x, x[i].y);
      mma_m16n8k16<T>(sums[i % 2], make_uint4(low.z, high.z, low.w, high.w), x[i].z, x[i].w);
    }
  }

  // Adds up the warps' sums of a unit, and hands them over.
  __device__ __forceinline__ void publish(const Unit& unit, const float (&sums)[2][4]) {
    float* own = batch.sums[buffer][warp];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      own[(2 * q + e % 2) * DeltaShared::kPitch + g + e / 2 * 8] = sums[0][e] + sums[1][e];
    }
    sync_delta_warps();
    if (thread < kSegmentTokens * kPairRanks / 2) {
      const int position = thread / (kPairRanks / 2), rank = thread % (kPairRanks / 2) * 2;
      const int token = batch.tokens[unit.segment][position];
      float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
      for (int w = 0; w < kDeltaWarps; ++w) {
        sum = sum + *reinterpret_cast<const float2*>(
                        &batch.sums[buffer][w][position * DeltaShared::kPitch + rank]);
      }
      const int at = unit.first_rank + rank;
      if (at >= unit.rank) sum.x = 0.0f;
      if (at + 1 >= unit.rank) sum.y = 0.0f;
      if (token >= 0) {
        store_pair(ExchangePlanes(args).at(unit.part, token, unit.slice, at), sum, tag);
      }
    }
    // The next unit has the other buffer, and whoever meets there has read this one.
    buffer ^= 1;
  }

  // Units [first, last), of which A's first step is on its way.
  __device__ __forceinline__ void shrink(int first, int last, uint4 (&a)[8]) {
    for (int index = first; index < last; ++index) {
      const Unit unit = unit_at(index);
      const int steps = ceil_div(part_lanes, kDeltaWarps / 2);
      float sums[2][4] = {};
      for (int step = 0; step < steps; ++step) {
        uint4 x[4];
        load_x(x, unit, step);
        __syncwarp();
        multiply(sums, a, x);
        if (step + 1 < steps) {
          load_a(a, unit, step + 1);
        } else if (index + 1 < last) {
          load_a(a, unit_at(index + 1), 0);
        }
      }
      publish(unit, sums);
    }
  }

  // Brings v of ranks [begin, begin + ranks) to shared memory, scaled, as two terms.
  // Returns a unit that did not come in time, or -1.
  __device__ __forceinline__ int gather(int begin, int ranks) {
    const ExchangePlanes planes(args);
    const int per_token = ranks / 2, parts = num_parts();
    unsigned char* const v = dynamic + smem.v;
    for (int i = thread; i < args.num_tokens * per_token; i += kDeltaThreads) {
      const int token = i / per_token, rank = begin + (i - token * per_token) * 2;
      const int segment = batch.segment_of[token];
      if (segment < 0) continue;
      const int entry = segment * args.num_slices + share.slice;
      const aril_descriptor& module = modules[entry];
      if (rank >= ceil_div(module.rank, kChunkRanks) * kChunkRanks) continue;
      float2 sum = make_float2(0.0f, 0.0f);
      if (rank < ceil_div(module.rank, kPairRanks) * kPairRanks) {
        TaggedPair pair[kParts];
        int missing;
        for (int poll = 0;; ++poll) {
          missing = -1;
#pragma unroll
          for (int part = 0; part < kParts; ++part) {
            if (part < parts) pair[part] = load_pair(planes.at(part, token, share.slice, rank));
          }
#pragma unroll
          for (int part = 0; part < kParts; ++part) {
            if (part < parts && pair[part].tag != tag) missing = part;
          }
          if (missing < 0 || poll >= polls) break;
          __nanosleep(40);
        }
        if (missing >= 0) {
          batch.missing = missing * all_pairs + pairs[entry] + rank / kPairRanks;
          break;
        }
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          if (part < parts) sum = sum + pair[part].sums;
        }
      }
      const float factor = module.scaling * batch.scales[token];
      uint32_t high, low;
      detail::split(sum.x * factor, sum.y * factor, high, low);
      unsigned char* to = v + token * smem.v_pitch + (rank - begin) * 2;
      *reinterpret_cast<uint32_t*>(to) = high;
      *reinterpret_cast<uint32_t*>(to + padded_tokens * smem.v_pitch) = low;
    }
    sync_delta_warps();
    return batch.missing;
  }

  // Gathers until all is there, computing what does not come.
  __device__ __forceinline__ void gather_all(int begin, int ranks) {
    int missing;
    while ((missing = gather(begin, ranks)) >= 0) {
      sync_delta_warps();
      if (thread == 0) batch.missing = -1;
      polls = 0;
      uint4 a[8];
      load_a(a, unit_at(missing), 0);
      shrink(missing, missing + 1, a);
      sync_delta_warps();
    }
  }

  // A block of 32 outputs and a segment.
  struct Item {
    const char* b;  // of this lane's tile of ranks in the first chunk, or null
    int segment, row, tiles;
  };

  __device__ __forceinline__ void load_b(uint4 (&b)[4], const Item& item, int tile) const {
    const char* from =
        item.b + int64_t{tile} * (ARIL_OUT_TILE * ARIL_RANK_TILE * 2) + g * 16;
#pragma unroll
    for (int core = 0; core < 4; ++core) b[core] = load_weights(from + core * 128, tile < item.tiles);
  }

  // sums += B v of a chunk of 32 ranks: of rows (g, q), core 2m and 2m + 1.
  __device__ __forceinline__ static void multiply_chunk(float (&sums)[2][4], const uint4 (&b)[4],
                                                        const uint4& high, const uint4& low) {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const uint4 &even = b[2 * m], &odd = b[2 * m + 1];
      const uint4 first = make_uint4(even.x, odd.x, even.y, odd.y);
      const uint4 second = make_uint4(even.z, odd.z, even.w, odd.w);
      multiply_terms(sums[m], first, high.x, high.y, low.x, low.y);
      multiply_terms(sums[m], second, high.z, high.w, low.z, low.w);
    }
  }

  __device__ __forceinline__ static void multiply_terms(float (&sums)[4], const uint4& b,
                                                        uint32_t high0, uint32_t high1,
                                                        uint32_t low0, uint32_t low1) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      mma_m16n8k16<T>(sums, b, high0, high1);
      mma_m16n8k16<T>(sums, b, low0, low1);
    } else {
      uint4 b_high, b_low;
      const auto split_half2 = [](uint32_t bits, uint32_t& high, uint32_t& low) {
        __half2 values;
        memcpy(&values, &bits, sizeof(bits));
        const float2 wide = __half22float2(values);
        detail::split(wide.x, wide.y, high, low);
      };
      split_half2(b.x, b_high.x, b_low.x);
      split_half2(b.y, b_high.y, b_low.y);
      split_half2(b.z, b_high.z, b_low.z);
      split_half2(b.w, b_high.w, b_low.w);
      mma_m16n8k16<__nv_bfloat16>(sums, b_high, high0, high1);
      mma_m16n8k16<__nv_bfloat16>(sums, b_high, low0, low1);
      mma_m16n8k16<__nv_bfloat16>(sums, b_low, high0, high1);
      mma_m16n8k16<__nv_bfloat16>(sums, b_low, low0, low1);
    }
  }

  // Adds B v of ranks [begin, begin + ranks) to the deltas of `count` of this block's blocks.
  __device__ __forceinline__ void expand(int first, int count, int begin, int ranks) {
    const int items = count * num_segments;
    const auto item_at = [&](int i) {
      Item item = {nullptr, i / count, 0, 0};
      const aril_descriptor& module = modules[item.segment * args.num_slices + share.slice];
      const int block = i % count;
      item.tiles = begin < module.rank ? ceil_div(module.rank, ARIL_RANK_TILE) : 0;
      item.b = b_tile(module, (first + block * p.splits) * kBlockRows, 0);
      item.row = block * kBlockRows;
      return item;
    };
    uint4 b[4];
    Item item = item_at(min(warp, items - 1));
    if (warp < items) load_b(b, item, begin / ARIL_RANK_TILE + q);
    gather_all(begin, ranks);
    for (int i = warp; i < items; i += kDeltaWarps) {
      float sums[2][4] = {};
      const Item next = item_at(min(i + kDeltaWarps, items - 1));
      const int end = min(begin + ranks, item.tiles * ARIL_RANK_TILE);
      const int token = batch.tokens[item.segment][g];
      const unsigned char* v = dynamic + smem.v + max(token, 0) * smem.v_pitch + q * 16;
      int rank = begin;
      do {
        uint4 ahead[4] = {};
        const bool more = rank + kChunkRanks < end;
        if (more) {
          load_b(ahead, item, (rank + kChunkRanks) / ARIL_RANK_TILE + q);
        } else if (i + kDeltaWarps < items) {
          load_b(ahead, next, begin / ARIL_RANK_TILE + q);
        }
        uint4 high = make_uint4(0, 0, 0, 0), low = high;
        if (token >= 0 && rank < end) {
          high = *reinterpret_cast<const uint4*>(v + (rank - begin) * 2);
          low = *reinterpret_cast<const uint4*>(v + (rank - begin) * 2 +
                                                padded_tokens * smem.v_pitch);
        }
        __syncwarp();
        multiply_chunk(sums, b, high, low);
#pragma unroll
        for (int core = 0; core < 4; ++core) b[core] = ahead[core];
        rank += kChunkRanks;
        // However many ranks fit at once, the spans are the same.
        if (begin < end && (rank % kSpanRanks == 0 || rank >= end)) add_deltas(item, sums);
      } while (rank < end);
      item = next;
    }
  }

  __device__ __forceinline__ void add_deltas(const Item& item, float (&sums)[2][4]) const {
    float* deltas = reinterpret_cast<float*>(dynamic + smem.deltas);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = batch.tokens[item.segment][2 * q + i];
      if (token < 0) continue;
#pragma unroll
      for (int core = 0; core < 4; ++core) {
        const int row = item.row + g / 2 * 8 + 2 * core + g % 2;
        deltas[row * smem.delta_pitch + token] += sums[core / 2][core % 2 * 2 + i];
      }
    }
#pragma unroll
    for (int e = 0; e < 8; ++e) sums[e / 4][e % 4] = 0.0f;
  }

  // Deltas of a pass of blocks [first_block, end_block).
  __device__ __forceinline__ void make_deltas(int first_block, int end_block) {
    const int first = OwnBlocks(first_block, p.splits, share.split).first;
    if (first >= end_block || batch.slice_rank == 0) return;
    const int count = ceil_div(end_block - first, p.splits);
    const int all = ceil_div(batch.slice_rank, kChunkRanks) * kChunkRanks;
    for (int begin = 0; begin < all; begin += smem.v_ranks) {
      expand(first, count, begin, min(smem.v_ranks, all - begin));
      sync_delta_warps();
    }
  }

  // No delta: adding it changes no bit.
  __device__ __forceinline__ void clear_deltas() const {
    float* deltas = reinterpret_cast<float*>(dynamic + smem.deltas);
    const int count = (smem.v - smem.deltas) / 4;
    for (int i = thread; i < count; i += kDeltaThreads) deltas[i] = -0.0f;
  }

  __device__ __forceinline__ void run() {
    const auto first_block = [&](int first) { return (share.begin + first) / 2; };
    const auto end_block = [&](int first) {
      return (min(share.begin + first + p.grid.pass_units, share.end) + 1) / 2;
    };
    make_segments();
    share_out();
    uint4 a[8] = {};
    if (first_unit < last_unit) load_a(a, unit_at(first_unit), 0);
    prefetch(first_block(0), end_block(0));
    clear_deltas();
    shared.tagged.wait(0);
    tag = shared.tag;
    wait_for_predecessors();
    if (!args.withholds) shrink(first_unit, last_unit, a);
    uint32_t parity = 0;
    for (int first = 0; first < p.grid.units; first += p.grid.pass_units) {
      if (first > 0) {
        shared.deltas_empty.wait(parity);
        parity ^= 1;
        clear_deltas();
      }
      sync_delta_warps();
      make_deltas(first_block(first), end_block(first));
      __syncwarp();
      if (lane == 0) arrive(shared.deltas_full);
    }
  }
};

#endif

}  // namespace aril::detail
