// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The fused linear's delta, computed by some warps of each thread block beside the stream of W.
//
// v = A x is divided into partials (DeltaPartial), which thread blocks take in the order in which
// they start. A block publishes the sums of its partials in the mailbox, gathers the sums of all
// parts for the slice of its own rows, and leaves scaling * B v of these rows in shared memory. It
// polls for a sum a bounded number of times; then it computes the sum itself, in the same order. So
// no block depends on another one running.
//
// Fragments of A, B and x are loaded 16 bytes per lane in memory order: features, or ranks, are
// permuted within a product, alike in both operands.
#pragma once

#include "../../device/product.cuh"
#include "../../device/vec.cuh"
#include "../../ptx/mma.cuh"
#include "layout.cuh"

namespace aril::detail {

#if __CUDA_ARCH__ >= 900

// The place of a part's words in the mailbox. Two words, of neighbouring ranks, are stored and
// loaded together.
struct FusedMailbox {
  char* first;
  int64_t slice_bytes, token_bytes, part_bytes;

  __device__ __forceinline__ explicit FusedMailbox(const aril_forward_args& args)
      : first(reinterpret_cast<char*>(tagged_words(args.mailbox))),
        slice_bytes(int64_t{ceil_div(args.weights.max_rank, kPairRanks)} * kPairRanks *
                    ARIL_WORD_BYTES),
        token_bytes(args.num_slices * slice_bytes),
        part_bytes(args.num_tokens * token_bytes) {}

  __device__ __forceinline__ char* at(int part, int token, int slice, int rank) const {
    return first + part * part_bytes + token * token_bytes + slice * slice_bytes +
           rank * ARIL_WORD_BYTES;
  }
};

// Loads x, which a predecessor wrote.
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

template <typename T, int kTokenTiles>
struct Delta {
  static constexpr int kTokens = kTokenTiles * kTokenTile;
  static constexpr int kWarps = kDeltaWarps, kThreads = 32 * kWarps;
  static constexpr bool kAFirst = requests_a_first(kTokenTiles);

  const FusedParams& p;
  const aril_forward_args& args;
  FusedShared& shared;
  DeltaShared& batch;
  const Share& share;
  unsigned char* const dynamic;
  const int thread;
  const int warp = thread / 32, lane = thread % 32, g = lane / 4, q = lane % 4;
  int buffer = 0;
  int a_issued = 0, a_taken = 0;  // steps of A
  int issued = 0, taken = 0;      // panels of B

  __device__ __forceinline__ Delta(const FusedParams& p, FusedShared& shared, DeltaShared& batch,
                                   unsigned char* dynamic, int thread)
      : p(p),
        args(p.args),
        shared(shared),
        batch(batch),
        share(shared.share),
        dynamic(dynamic),
        thread(thread) {}

  __device__ __forceinline__ static void sync_warps() {
    __syncwarp();
    asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory");
  }

  // A segment's module, [segments][slices].
  __device__ __forceinline__ aril_descriptor& module_at(int entry) const {
    return reinterpret_cast<aril_descriptor*>(dynamic + p.smem.modules)[entry];
  }

  // Pairs of rank tiles before those of a module; at the end, of all modules.
  __device__ __forceinline__ int32_t& pairs_before(int entry) const {
    return reinterpret_cast<int32_t*>(dynamic + p.smem.modules +
                                      kTokens * args.num_slices * sizeof(aril_descriptor))[entry];
  }

  // Copies the batch's segments to shared memory, without the tokens that this launch lacks.
  __device__ __forceinline__ void load_segments() {
    constexpr int kPieces = sizeof(aril_segments) / sizeof(uint4);
    constexpr int kTokenPieces = sizeof(aril_segments::tokens) / sizeof(uint4);
    static_assert(kPieces <= ARIL_FORWARD_TOKENS && 2 * ARIL_FORWARD_TOKENS <= kThreads);
    uint4 piece;
    if (thread < kPieces) piece = reinterpret_cast<const uint4*>(args.routing.segments)[thread];
    clear_deltas();  // While the segments are on their way.
    if (thread < kPieces) {
      if (thread < kTokenPieces) {
        const unsigned end = args.num_tokens * 0x01010101u;
        piece = make_uint4(piece.x | __vcmpges4(piece.x, end), piece.y | __vcmpges4(piece.y, end),
                           piece.z | __vcmpges4(piece.z, end), piece.w | __vcmpges4(piece.w, end));
      }
      reinterpret_cast<uint4*>(&batch.segments)[thread] = piece;
    }
    const int token = thread - (kThreads - ARIL_FORWARD_TOKENS);
    if (token >= 0 && token < args.num_tokens) batch.scales[token] = args.routing.scales[token];
    if (thread == 0) {
      batch.num_segments = args.routing.segments->begun[args.num_tokens - 1];
      batch.slice_rank = 0;
      batch.missing = -1;
      batch.polls = args.polls;
    }
  }

  // Loads the segments' modules, and counts the partials.
  __device__ __forceinline__ void share_out() {
    sync_warps();
    const int entries = batch.num_segments * args.num_slices;
#pragma unroll 1
    for (int i = thread; i < batch.num_segments * ARIL_MAX_SLICES; i += kThreads) {
      const int slice = i % ARIL_MAX_SLICES, segment = i / ARIL_MAX_SLICES;
      if (slice >= args.num_slices) continue;
      const int slot = batch.segments.slots[segment];
      aril_descriptor module = {};
      if (slot < args.weights.num_slots) module = detail::module_of(args.weights, slot, slice);
      module_at(segment * args.num_slices + slice) = module;
      if (slice == share.slice && module.rank > 0) atomicMax(&batch.slice_rank, module.rank);
    }
    sync_warps();
    if (warp == 0) {
      int before = 0;
#pragma unroll 1
      for (int first = 0; first < entries; first += 32) {
        const int i = first + lane;
        int end = i < entries ? ceil_div(module_at(i).rank, kPairRanks) : 0;
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
          const int other = __shfl_up_sync(0xffffffffu, end, distance);
          if (lane >= distance) end += other;
        }
        if (i < entries) pairs_before(i + 1) = before + end;
        before += __shfl_sync(0xffffffffu, end, 31);
      }
      if (lane == 0) pairs_before(0) = 0;
    }
    sync_warps();
    if (thread == 0) {
      batch.num_partials = pairs_before(entries) * p.num_parts;
      static_assert(kMaxPanelPlaces == 8 && kPairBytes == 8 * kUnitBytes);
      const int tiles = ceil_div(batch.slice_rank, ARIL_RANK_TILE);
      batch.place_bits = min((tiles <= 1 ? 3 : tiles == 2 ? 2 : 1) + kAPlaces - 1, 3);
    }
  }

  // B's buffers, in the memory of A's, are as large as the panels of this block's slice.
  __device__ __forceinline__ int index_of(int panel) const {
    return panel & ((1 << batch.place_bits) - 1);
  }
  __device__ __forceinline__ unsigned char* place_of(int panel) const {
    return own_places() + (index_of(panel) * (kAPlaces * kPairBytes) >> batch.place_bits);
  }

  __device__ __forceinline__ int all_pairs() const {
    return pairs_before(batch.num_segments * args.num_slices);
  }
  // Blocks take partials in the order in which they start, the first ones one more than the last:
  // all wait for the sums of the latest. A block has those from first_partial(its ticket) to
  // first_partial(its ticket + 1).
  __device__ __forceinline__ int first_partial(unsigned ticket) const {
    const unsigned partials = batch.num_partials, each = partials / gridDim.x;
    return static_cast<int>(ticket * each + min(ticket, partials - each * gridDim.x));
  }

  __device__ __forceinline__ DeltaPartial partial_at(int index) const {
    DeltaPartial partial;
    partial.part = index / all_pairs();
    const int pair = index - partial.part * all_pairs();
    int low = 0, high = batch.num_segments *
                        args.num_slices;  // pairs_before(low) <= pair < pairs_before(high)
#pragma unroll 1
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (pairs_before(middle) <= pair) {
        low = middle;
      } else {
        high = middle;
      }
    }
    const aril_descriptor& module = module_at(low);
    const int tiles = ceil_div(module.rank, ARIL_RANK_TILE), tile = 2 * (pair - pairs_before(low));
    partial.k_tile_bytes = tiles * kATileBytes;
    partial.first_k_tile = partial.part * p.part_k_tiles;
    partial.num_k_tiles = min(p.part_k_tiles, p.num_k_tiles - partial.first_k_tile);
    partial.a = static_cast<const char*>(module.a) +
                int64_t{partial.first_k_tile} * partial.k_tile_bytes + tile * kATileBytes;
    partial.two = tile + 1 < tiles;
    partial.segment = low / args.num_slices;
    partial.slice = low % args.num_slices;
    partial.first_rank = tile * ARIL_RANK_TILE;
    partial.rank = module.rank;
    return partial;
  }

  // Looks up the first DeltaShared::kPartials of the partials [first, last).
  __device__ __forceinline__ void look_up(int first, int last) {
    sync_warps();
    if (thread < min(last - first, DeltaShared::kPartials))
      batch.partials[thread] = partial_at(first + thread);
    sync_warps();
  }

  // A unit of outputs, by its number among the task's, for a segment. A warp takes every kWarps-th
  // item.
  struct Item {
    int segment, unit;
  };

  __device__ __forceinline__ Item first_item(int count) const {
    Item item = {0, warp};
    return settle(item, count);
  }
  __device__ __forceinline__ void step(Item& item, int count) const {
    item.unit += kWarps;
    settle(item, count);
  }
  // Carries units beyond the last one over to the next segments.
  __device__ __forceinline__ Item& settle(Item& item, int count) const {
#pragma unroll 1
    while (item.unit >= count) {
      item.unit -= count;
      ++item.segment;
    }
    return item;
  }
  __device__ __forceinline__ const aril_descriptor& module_of(const Item& item) const {
    return module_at(item.segment * args.num_slices + share.slice);
  }

  // Four cores of B: 32 outputs of 8 ranks.
  __device__ __forceinline__ static const char* b_tile(const aril_descriptor& module, int row,
                                                       int tile) {
    const int tiles = ceil_div(module.rank, ARIL_RANK_TILE);
    return static_cast<const char*>(module.b) +
           (int64_t{row / ARIL_OUT_TILE} * tiles + tile) * (ARIL_OUT_TILE * ARIL_RANK_TILE * 2) +
           row % ARIL_OUT_TILE / ARIL_OUT_UNIT * kUnitBytes;
  }

  // A step of a partial that was looked up: 128 features for each warp.
  struct Step {
    int partial, step;
  };

  __device__ __forceinline__ Step next(const Step& at) const {
    const bool is_last = at.step + 1 == ceil_div(p.part_k_tiles, kHalves / 2);
    return is_last ? Step{at.partial + 1, 0} : Step{at.partial, at.step + 1};
  }

  __device__ __forceinline__ int k_tile_of(const Step& at) const {
    return at.step * (kHalves / 2) + warp / 2;
  }

  // Starts loading a step's A into this warp's next buffer. A step without features takes one, too.
  __device__ __forceinline__ void load_a(const Step& at) {
    const int place = a_issued++ % kAPlaces;
    const DeltaPartial& partial = batch.partials[at.partial];
    const bool live = k_tile_of(at) < partial.num_k_tiles;
    const int tiles = !live ? 0 : partial.two ? 2 : 1;
    constexpr int kHalfBytes = kATileBytes / 2;
    TransactionBarrier& arrival = batch.a[warp][place];
    if (lane == 0) arrival.expect(tiles * kHalfBytes);
    if (lane < tiles) {
      arrival.copy(own_places() + place * kPairBytes + lane * kHalfBytes,
                   partial.a + int64_t{k_tile_of(at)} * partial.k_tile_bytes + lane * kATileBytes +
                       warp % 2 * kHalfBytes,
                   kHalfBytes);
    }
  }

  __device__ __forceinline__ unsigned char* own_places() const {
    return dynamic + p.smem.a + warp * kAPlaces * kPairBytes;
  }

  static constexpr int kLoads = ARIL_K_TILE / 2 / 32;

  __device__ __forceinline__ void load_x(uint4 (&x)[kLoads], const Step& at) const {
    const DeltaPartial& partial = batch.partials[at.partial];
    const int feature =
        (partial.first_k_tile + k_tile_of(at)) * ARIL_K_TILE + warp % 2 * (ARIL_K_TILE / 2) + 8 * q;
    const int token = batch.segments.tokens[partial.segment][g];
    const T* from = static_cast<const T*>(args.x) + token * args.x_stride + feature;
    const int left =
        token >= 0 && k_tile_of(at) < partial.num_k_tiles ? args.in_features - feature : 0;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      x[i] = load_input(reinterpret_cast<const char*>(from + i * 32), i * 32 < left);
    }
  }

  // Adds the products of a step whose A is being loaded.
  __device__ __forceinline__ void multiply_step(float (&sums)[2][4], const uint4 (&x)[kLoads],
                                                const Step& at) {
    const DeltaPartial& partial = batch.partials[at.partial];
    const bool live = k_tile_of(at) < partial.num_k_tiles, two = partial.two;
    const int place = a_taken % kAPlaces;
    batch.a[warp][place].wait(a_taken / kAPlaces % 2);
    ++a_taken;
    __syncwarp();
    if (!live) return;
    const unsigned char* a = own_places() + place * kPairBytes + q * 128 + g * 16;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const uint4 low = *reinterpret_cast<const uint4*>(a + i * 512);
      uint4 high = make_uint4(0, 0, 0, 0);
      if (two) high = *reinterpret_cast<const uint4*>(a + i * 512 + kATileBytes / 2);
      mma_m16n8k16<T>(sums[i % 2], make_uint4(low.x, high.x, low.y, high.y), x[i].x, x[i].y);
      mma_m16n8k16<T>(sums[i % 2], make_uint4(low.z, high.z, low.w, high.w), x[i].z, x[i].w);
    }
  }

  __device__ __forceinline__ float* partial_sums() const {
    return reinterpret_cast<float*>(dynamic + p.smem.sums) + buffer * DeltaShared::kSums;
  }

  // Stores a partial's sums for publish(), and clears them.
  __device__ __forceinline__ void store_sums(float (&sums)[2][4]) {
    float* own = partial_sums() + warp * (DeltaShared::kSums / kHalves);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      own[(2 * q + e % 2) * DeltaShared::kPitch + g + e / 2 * 8] = sums[0][e] + sums[1][e];
      sums[0][e] = sums[1][e] = 0.0f;
    }
  }

  // Adds up the sums of a partial, and stores them in the mailbox.
  __device__ __forceinline__ void publish(const DeltaPartial& partial) {
    sync_warps();
    static_assert(ARIL_SEGMENT_TOKENS * kPairRanks / 2 <= kThreads);
    if (thread < ARIL_SEGMENT_TOKENS * kPairRanks / 2) {
      const int position = thread / (kPairRanks / 2), rank = thread % (kPairRanks / 2) * 2;
      const int token = batch.segments.tokens[partial.segment][position];
      float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        sum = sum + *reinterpret_cast<const float2*>(partial_sums() +
                                                     half * (DeltaShared::kSums / kHalves) +
                                                     position * DeltaShared::kPitch + rank);
      }
      const int at = partial.first_rank + rank;
      if (at >= partial.rank) sum.x = 0.0f;
      if (at + 1 >= partial.rank) sum.y = 0.0f;
      if (token >= 0) {
        store_tagged2(FusedMailbox(args).at(partial.part, token, partial.slice, at), sum.x, sum.y,
                      batch.epoch);
      }
    }
    // The next partial takes the other buffer. Its barrier comes after all reads of this one.
    buffer ^= 1;
  }

  // Starts loading A of the first steps. Returns the first step that was not started.
  __device__ __forceinline__ Step load_first_a(int count) {
    Step at = {0, 0};
#pragma unroll 1
    for (int i = 0; i < kAPlaces && at.partial < count; ++i) {
      load_a(at);
      at = next(at);
    }
    return at;
  }

  // Computes the first `count` partials that were looked up, whose first steps of A are being
  // loaded.
  __device__ __forceinline__ void shrink(int count, Step ahead) {
    Step at = {0, 0};
    uint4 x[kLoads];
    if (count > 0) load_x(x, at);
    float sums[2][4] = {};
#pragma unroll 1
    while (at.partial < count) {
      multiply_step(sums, x, at);
      __syncwarp();
      if (ahead.partial < count) {
        load_a(ahead);
        ahead = next(ahead);
      }
      const Step following = next(at);
      if (following.partial < count) load_x(x, following);
      if (following.partial != at.partial) {
        store_sums(sums);
        publish(batch.partials[at.partial]);
      }
      at = following;
    }
  }

  // Looks up the first partials of [first, last), and starts loading their A.
  __device__ __forceinline__ Step begin_partials(int first, int last) {
    look_up(first, last);
    return load_first_a(min(last - first, DeltaShared::kPartials));
  }

  // Computes partials [first, last), after begin_partials() on them.
  __device__ __forceinline__ void shrink_all(int first, int last, Step ahead) {
#pragma unroll 1
    while (first < last) {
      shrink(min(last - first, DeltaShared::kPartials), ahead);
      first += DeltaShared::kPartials;
      if (first < last) ahead = begin_partials(first, last);
    }
  }

  // Two neighbouring ranks of a token's v: its words in each part.
  struct Pair {
    int token, entry, rank;  // token: -1 if there is nothing to gather
    TaggedPair parts[kParts];

    __device__ __forceinline__ void load(const FusedMailbox& mailbox, int slice, int num_parts) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        if (token >= 0 && part < num_parts) {
          parts[part] = load_tagged(mailbox.at(part, token, slice, rank));
        }
      }
    }

    // A part that has not arrived, or -1.
    __device__ __forceinline__ int missing(uint32_t epoch, int num_parts) const {
      int part = -1;
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        const bool came = parts[i].epoch0 == epoch && parts[i].epoch1 == epoch;
        if (token >= 0 && i < num_parts && !came) part = i;
      }
      return part;
    }
  };

  __device__ __forceinline__ Pair pair_at(int index, int count, int per_token, int begin) const {
    Pair pair;
    pair.token = -1;
    if (index >= count) return pair;
    const int token = index / per_token;
    pair.rank = begin + (index - token * per_token) * 2;
    const int segment = batch.segments.segment_of[token];
    pair.entry = segment * args.num_slices + share.slice;
    // CUDA 12.8 takes `pair.rank <` for the beginning of a template argument list.
    if (segment >= 0 &&
        (pair.rank) < ceil_div(module_at(pair.entry).rank, kPairRanks) * kPairRanks) {
      pair.token = token;
    }
    return pair;
  }

  __device__ __forceinline__ unsigned char* gathered(int token) const {
    return dynamic + p.smem.v + token * p.smem.v_pitch;
  }

  // Expand reads panels of 32 ranks: clears those beyond the last pair of tiles.
  __device__ __forceinline__ void clear_padding(int begin, int ranks) const {
    constexpr int kStores = kPairRanks * 2 / 16;
#pragma unroll 1
    for (int i = thread; i < args.num_tokens * kStores; i += kThreads) {
      const int token = i / kStores, segment = batch.segments.segment_of[token];
      if (segment < 0) continue;
      const int pairs =
          ceil_div(module_at(segment * args.num_slices + share.slice).rank, kPairRanks);
      const int at = pairs * kPairRanks - begin;
      if (pairs % 2 == 0 || at < 0 || at >= ranks) continue;
      unsigned char* const to = gathered(token) + at * 2 + i % kStores * 16;
      *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
      *reinterpret_cast<uint4*>(to + kTokens * p.smem.v_pitch) = make_uint4(0, 0, 0, 0);
    }
  }

  // Gathers v of ranks [begin, begin + ranks) in shared memory, scaled, as two bf16 terms.
  // Returns a partial that did not arrive in time, or -1.
  __device__ __forceinline__ int gather(int begin, int ranks) {
    constexpr int kAtOnce = kTokenTiles > 2 ? 2 : 1;  // loads of all parts in flight
    const FusedMailbox mailbox(args);
    const int padded = ceil_div(batch.slice_rank, kPairRanks) * kPairRanks - begin;
    const int per_token = min(ranks, padded) / 2, count = args.num_tokens * per_token;
    clear_padding(begin, ranks);
#pragma unroll 1
    for (int first = thread; first < count; first += kAtOnce * kThreads) {
      Pair pairs[kAtOnce];
      int missing[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        pairs[i] = pair_at(first + i * kThreads, count, per_token, begin);
      }
      bool came;
#pragma unroll 1
      for (int poll = 0;; ++poll) {
        came = true;
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) pairs[i].load(mailbox, share.slice, p.num_parts);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          missing[i] = pairs[i].missing(batch.epoch, p.num_parts);
          came = came && missing[i] < 0;
        }
        if (came || poll >= batch.polls) break;
        __nanosleep(40);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const Pair& pair = pairs[i];
        if (pair.token < 0) continue;
        if (missing[i] >= 0) {
          const int partial =
              missing[i] * all_pairs() + pairs_before(pair.entry) + pair.rank / kPairRanks;
          atomicMax(&batch.missing, partial ^ missing_key());
          continue;
        }
        float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          if (part < p.num_parts) {
            sum = sum + make_float2(pair.parts[part].value0, pair.parts[part].value1);
          }
        }
        const float factor = module_at(pair.entry).scaling * batch.scales[pair.token];
        uint32_t high, low;
        to_bf16_terms(__fmul_rn(sum.x, factor), __fmul_rn(sum.y, factor), high, low);
        unsigned char* to = gathered(pair.token) + (pair.rank - begin) * 2;
        *reinterpret_cast<uint32_t*>(to) = high;
        *reinterpret_cast<uint32_t*>(to + kTokens * p.smem.v_pitch) = low;
      }
      if (!came) break;
    }
    sync_warps();
    return batch.missing < 0 ? -1 : batch.missing ^ missing_key();
  }

  // Of several partials that are missing, blocks compute different ones, so that each is computed
  // once or so: the order is by partial ^ key, with a key for each block.
  __device__ __forceinline__ int missing_key() const { return batch.ticket & 0xffff; }

  // What a call of expand() computes: `count` units of outputs from `first` on, for ranks
  // [begin, end).
  struct Task {
    int first, count, begin, end;
  };

  // 32 ranks of B of an item.
  struct Panel {
    Item item;
    int rank;
  };

  __device__ __forceinline__ int end_of_item(const Task& task, const Item& item) const {
    const int rank = module_of(item).rank;
    return rank > task.begin ? min(task.end, rank) : 0;
  }

  // The warp's first panel from an item on; items without ranks are skipped.
  __device__ __forceinline__ Panel panel_from(const Task& task, Item item) const {
#pragma unroll 1
    while (item.segment < batch.num_segments && end_of_item(task, item) == 0) {
      step(item, task.count);
    }
    return {item, task.begin};
  }

  __device__ __forceinline__ Panel next(const Task& task, const Panel& panel) const {
    const int rank = panel.rank + kPanelRanks;
    if (rank < end_of_item(task, panel.item)) return {panel.item, rank};
    Item item = panel.item;
    step(item, task.count);
    return panel_from(task, item);
  }

  __device__ __forceinline__ bool has(const Panel& panel) const {
    return panel.item.segment < batch.num_segments;
  }

  // Starts loading a panel into the warp's next buffer, a tile of 8 ranks by each of four lanes.
  __device__ __forceinline__ void load_b(const Task& task, const Panel& panel) {
    const aril_descriptor& module = module_of(panel.item);
    const int tile = panel.rank / ARIL_RANK_TILE;
    const int tiles = min(ceil_div(module.rank, ARIL_RANK_TILE) - tile, 4);
    TransactionBarrier& arrival = batch.b[warp][index_of(issued)];
    if (lane == 0) arrival.expect(tiles * kUnitBytes);
    if (lane < tiles) {
      const int row = (task.first + panel.item.unit * p.splits) * ARIL_OUT_UNIT;
      arrival.copy(place_of(issued) + lane * kUnitBytes, b_tile(module, row, tile + lane),
                   kUnitBytes);
    }
    ++issued;
  }

  __device__ __forceinline__ void wait_for_panel() {
    batch.b[warp][index_of(taken)].wait(taken >> batch.place_bits & 1);
    ++taken;
  }

  // One buffer stays free: the one read last is overwritten a panel later.
  __device__ __forceinline__ void load_first_b(const Task& task) {
    Panel panel = panel_from(task, first_item(task.count));
#pragma unroll 1
    for (int i = 1; i < 1 << batch.place_bits && has(panel); ++i) {
      load_b(task, panel);
      panel = next(task, panel);
    }
  }

  // sums += B v of a panel: this lane's tile of ranks is at `b`, v at `rank` of the gathered ranks.
  __device__ __forceinline__ void multiply_panel(float (&sums)[2][4], const unsigned char* b,
                                                 bool has_ranks, int token, int rank) const {
    const unsigned char* v =
        dynamic + p.smem.v + max(token, 0) * p.smem.v_pitch + rank * 2 + q * 16;
    uint4 high = make_uint4(0, 0, 0, 0), low = high;
    if (token >= 0) {
      high = *reinterpret_cast<const uint4*>(v);
      low = *reinterpret_cast<const uint4*>(v + kTokens * p.smem.v_pitch);
    }
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      uint4 even = make_uint4(0, 0, 0, 0), odd = even;
      if (has_ranks) {
        even = *reinterpret_cast<const uint4*>(b + 2 * m * 128);
        odd = *reinterpret_cast<const uint4*>(b + (2 * m + 1) * 128);
      }
      __syncwarp();
      multiply_terms(sums[m], make_uint4(even.x, odd.x, even.y, odd.y), high.x, high.y, low.x,
                     low.y);
      multiply_terms(sums[m], make_uint4(even.z, odd.z, even.w, odd.w), high.z, high.w, low.z,
                     low.w);
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
      split_half2(b.x, b_high.x, b_low.x);
      split_half2(b.y, b_high.y, b_low.y);
      split_half2(b.z, b_high.z, b_low.z);
      split_half2(b.w, b_high.w, b_low.w);
      mma_m16n8k16<__nv_bfloat16>(sums, b_high, high0, high1);
      mma_m16n8k16<__nv_bfloat16>(sums, b_high, low0, low1);
      // As in product.cuh, zero times infinity would be NaN.
      mma_m16n8k16<__nv_bfloat16>(sums, b_low, high0 & finite_mask(high0),
                                  high1 & finite_mask(high1));
      mma_m16n8k16<__nv_bfloat16>(sums, b_low, low0, low1);
    }
  }

  // Adds B v of a task to its deltas. Its first panels are being loaded.
  __device__ __forceinline__ void expand(const Task& task) {
    Panel panel = panel_from(task, first_item(task.count)), ahead = panel;
    for (int i = taken; i < issued; ++i) ahead = next(task, ahead);
    float sums[2][4] = {};
#pragma unroll 1
    while (has(panel)) {
      const unsigned char* b = place_of(taken) + q * kUnitBytes + g * 16;
      wait_for_panel();
      __syncwarp();
      if (has(ahead)) {
        load_b(task, ahead);
        ahead = next(task, ahead);
      }
      multiply_panel(sums, b, panel.rank + q * ARIL_RANK_TILE < module_of(panel.item).rank,
                     batch.segments.tokens[panel.item.segment][g], panel.rank - task.begin);
      const Panel following = next(task, panel);
      // The sums do not depend on how many ranks fit at once.
      if (following.rank == task.begin || following.rank % kSumRanks == 0) {
        // CUDA 12.8 takes `panel.rank <` for the beginning of a template argument list.
        add_deltas(panel.item, sums, kSumRanks > panel.rank);
      }
      panel = following;
    }
  }

  // Row n of core c is output 8 (n / 2) + 2 c + n % 2. The first sums of an item find -0 there.
  __device__ __forceinline__ void add_deltas(const Item& item, float (&sums)[2][4],
                                             bool first) const {
    float* deltas = reinterpret_cast<float*>(dynamic + p.smem.deltas);
    const int first_row = item.unit * ARIL_OUT_UNIT + g / 2 * 8 + g % 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = batch.segments.tokens[item.segment][2 * q + i];
      if (token < 0) continue;
      float* to[4];
      float before[4];
#pragma unroll
      for (int core = 0; core < 4; ++core) {
        to[core] = deltas + (first_row + 2 * core) * p.smem.delta_pitch + token;
        before[core] = first ? -0.0f : *to[core];
      }
#pragma unroll
      for (int core = 0; core < 4; ++core) {
        *to[core] = before[core] + sums[core / 2][core % 2 * 2 + i];
      }
    }
#pragma unroll
    for (int e = 0; e < 8; ++e) sums[e / 4][e % 4] = 0.0f;
  }

  // The pass, by its first strip, and the first rank of it that is not in the deltas yet.
  struct Progress {
    int first, begin;
  };

  // Computes the deltas, pass after pass, until a partial does not arrive in time. Returns that
  // partial, or -1.
  __device__ __forceinline__ int make_deltas(Progress& at) {
    sync_warps();
    while (at.first < p.grid.strips) {
      const OwnUnits own(first_unit(at.first), p.splits, share.split);
      const int count = own.count(end_unit(at.first));
      const int all = count == 0 ? 0 : ceil_div(batch.slice_rank, kPanelRanks) * kPanelRanks;
#pragma unroll 1
      while (at.begin < all) {
        const Task task = {own.first, count, at.begin, min(at.begin + p.smem.v_ranks, all)};
        load_first_b(task);
        const int missing = gather(task.begin, task.end - task.begin);
        if (missing >= 0) {
          // A reuses the buffers of B.
          while (taken < issued) wait_for_panel();
          sync_warps();
          if (thread == 0) {
            batch.missing = -1;
            batch.polls = 0;
          }
          return missing;
        }
        expand(task);
        sync_warps();
        at.begin = task.end;
      }
      arrive(shared.deltas_full);
      at = {at.first + p.grid.pass_strips, 0};
      if (at.first < p.grid.strips) {
        shared.deltas_empty.wait((at.first / p.grid.pass_strips - 1) % 2);
        clear_deltas();
      }
    }
    return -1;
  }

  __device__ __forceinline__ int first_unit(int first) const { return (share.begin + first) / 2; }
  __device__ __forceinline__ int end_unit(int first) const {
    return (min(share.begin + first + p.grid.pass_strips, share.end) + 1) / 2;
  }

  // Adding -0 changes no bit.
  __device__ __forceinline__ void clear_deltas() const {
    float* deltas = reinterpret_cast<float*>(dynamic + p.smem.deltas);
    const int count = (p.smem.v - p.smem.deltas) / 4;
    for (int i = thread; i < count; i += kThreads) deltas[i] = -0.0f;
  }

  // A warp's barriers are its own.
  __device__ __forceinline__ void init_barriers() {
    if (lane < kAPlaces) batch.a[warp][lane].init();
    if (lane < kMaxPanelPlaces) batch.b[warp][lane].init();
    fence_async_proxy();
    __syncwarp();
  }

  // What needs no other role of the block.
  __device__ __forceinline__ void prepare() {
    constexpr int kCounter = kThreads - 1;
    unsigned long long count = 0;
    if (thread == kCounter) count = count_block(args.mailbox);
    load_segments();
    init_barriers();
    if (thread == kCounter) {
      batch.ticket = static_cast<uint32_t>(count);
      batch.epoch = epoch_of(args.mailbox, count);
    }
  }

  __device__ __forceinline__ void run() {
    if (!kAFirst && thread == kThreads - 1) arrive(shared.counted);
    share_out();
    sync_warps();
    int first = first_partial(batch.ticket);
    int last = args.withholds ? first : first_partial(batch.ticket + 1);
    Step ahead = {0, 0};
    if (batch.num_partials > 0) {
      ahead = begin_partials(first, last);
    }
    if (kAFirst) {
      sync_warps();
      if (thread == kThreads - 1) arrive(shared.counted);
    }
    if (is_first_block()) {
      clear_stale_words(args.mailbox, args.mailbox_bytes, batch.epoch, thread, kThreads);
    }
    wait_for_predecessors();
    Progress at = {0, 0};
    for (;;) {
      shrink_all(first, last, ahead);
      first = make_deltas(at);
      if (first < 0) break;
      last = first + 1;
      ahead = begin_partials(first, last);
    }
  }
};

#endif

}  // namespace aril::detail
