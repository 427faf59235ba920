// SPDX-License-Identifier: MIT OR Apache-2.0
//
// A trial: the fused linear of many tokens in bf16 on sm_90a: y = x W^T + bias + B (A x) in one
// launch.
//
// A cluster of two blocks takes jobs of 256 tokens, a pair of tiles of 128: first those of v = A x,
// whose columns are rank tiles of the adapters that the pair's tokens have, then those of y, 128
// outputs of a slice each. Both are products with x, which is in the 128-byte swizzle; A is in
// cores as it is stored, W in the swizzle.
//
// B v is an extension of K: behind the products with W, a job multiplies the terms of v by B of
// each adapter of its tokens, into the same sums. v is zero where a token does not own the adapter,
// and B is finite, so no token's sum depends on another's adapter, and y is rounded once.
//
// Warp 0 of a block fills a ring of stages of 64 features by tensor copies; each
// block loads half of W or A for both. Warp 1 lists the adapters of the next job's tokens. Warps 1
// to 3 fill the stages of the extension, which follow those of K in the ring. Two warpgroups
// multiply 64 tokens each.
//
// W's rows come in the order of B's cores (aril_descriptor), so that B is multiplied as it is
// stored, and a lane has eight adjacent outputs.
//
// Progress: a job of y waits for its pair's jobs of v, so that all clusters must be resident at
// once. (Jobs that clusters claim one after the other need no residency, and cost a wave where
// there are about as many jobs as clusters.)
//
// Bits: features in order, then the ranks of the token's adapter in order. No job changes them.
//
// Bound: products. The extension multiplies 32 elements of K for each 16 ranks of an adapter of a
// tile; a job of v costs as much as one of y.
#pragma once

#include "device/descriptor.cuh"
#include "device/product.cuh"
#include "device/reduction.cuh"
#include "linear/large_m_shrink.cuh"
#include "ptx/async.cuh"
#include "ptx/pdl.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

namespace aril {

// As in csrc/ptx, where this kernel alone would use it.
constexpr uint64_t kEvictNormal = 0x1000000000000000ull;
#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ uint32_t load_acquire(const uint32_t* global) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(global) : "memory");
  return value;
}

// Copies bytes to the same place of both blocks of a cluster, and counts them at the same barrier
// of both. Addresses and `bytes` are multiples of 16.
__device__ __forceinline__ void copy_to_both(void* shared, const void* global, uint32_t bytes,
                                             TransactionBarrier& arrival) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1], %2, [%3], %4;" ::"r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(&arrival.barrier)), "h"(static_cast<uint16_t>(3))
      : "memory");
}

// Copies a box of rows, in the order of B's cores, to the same place of both blocks of a cluster,
// and counts its bytes at the same barrier of both. The map has five dimensions: features, 2 rows,
// 4 rows that are 8 apart, 4 that are 2 apart, and groups of 32.
__device__ __forceinline__ void copy_rows_to_both(void* shared, const CUtensorMap& map, int column,
                                                  int group, TransactionBarrier& arrival) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3, %3, %3, %4}], [%5], %6;" ::"r"(
          shared_address(shared)),
      "l"(&map), "r"(column), "r"(0), "r"(group), "r"(shared_address(&arrival.barrier)),
      "h"(static_cast<uint16_t>(3))
      : "memory");
}

// Counts this thread's arrival at a barrier of the cluster.
__device__ __forceinline__ void arrive_at(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Counts this thread's arrival when its copies by copy_async() have completed.
__device__ __forceinline__ void arrive_with_copies(TransactionBarrier& arrival) {
  asm volatile(
      "cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(&arrival.barrier))
      : "memory");
}

#endif
#if __CUDA_ARCH_FEAT_SM90_ALL
template <int kPending>
__device__ __forceinline__ void wgmma_wait_for() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Gives registers to, or takes them from, the threads of a warpgroup, which then have `kCount`
// each.
template <int kCount, bool kMore>
__device__ __forceinline__ void set_registers() {
  if constexpr (kMore) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
  }
}

// sums[64, 128] = rows[64, 16] * columns[16, 128], or += if `adds`.
#define COLUMN(c) "+f"(sums[c][0]), "+f"(sums[c][1]), "+f"(sums[c][2]), "+f"(sums[c][3])
#define COLUMNS(c) COLUMN(c), COLUMN(c + 1), COLUMN(c + 2), COLUMN(c + 3)
__device__ __forceinline__ void wgmma_k16_n128(float (&sums)[16][4], uint64_t rows,
                                               uint64_t columns, bool adds) {
  asm volatile(
      "{\n.reg .pred adds;\nsetp.ne.b32 adds, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
      "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
      "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
      "}, %64, %65, adds, 1, 1, 0, 0;\n}\n"
      : COLUMNS(0), COLUMNS(4), COLUMNS(8), COLUMNS(12)
      : "l"(rows), "l"(columns), "r"(static_cast<int>(adds)));
}
#undef COLUMNS
#undef COLUMN
#endif

}  // namespace aril

namespace aril::detail {

constexpr int kForwardTokens = 128;  // of a tile
constexpr int kForwardOuts = 128;
constexpr int kForwardThreads = 3 * kWarpgroupThreads;
constexpr int kMultipliers = 2;  // warpgroups
constexpr int kFillers = 3;      // warps
constexpr int kClusterBlocks = 2;
constexpr int kMapRows = kForwardOuts / kClusterBlocks;  // of W in a tensor copy
constexpr int kForwardStages = 7;
// Registers of a thread: 3 * 168 at the start.
constexpr int kProducerRegisters = 56, kMultiplierRegisters = 224;

// A stage of the ring: x, and W or A; or the extension's steps of 16 ranks, their terms of v
// [kTerms][2 octets of ranks][16 cores], and their B [2][16 cores].
constexpr int kForwardXBytes = kForwardTokens * kStageFeatures * 2;
constexpr int kForwardWBytes = kForwardOuts * kStageFeatures * 2;
constexpr int kForwardStageBytes = 32768;
static_assert(kForwardStageBytes == kForwardXBytes + kForwardWBytes);
constexpr int kOctetBytes = kForwardTokens * 16;  // of a term of v
constexpr int kStepTermsBytes = 2 * kTerms * kOctetBytes;
constexpr int kStepBBytes = 2 * kForwardOuts * 16;
constexpr int kStageSteps = kForwardStageBytes / (kStepTermsBytes + kStepBBytes);
// Rank tiles of a job of v.
constexpr int kJobRankTiles = kForwardOuts / ARIL_RANK_TILE;

// v, scaled, in bf16 terms [tokens][slices][octets of ranks][kTerms][8].
struct VTerms {
  static constexpr int kPieceBytes = 16;
  int num_slices, octets;

  __device__ __forceinline__ explicit VTerms(const aril_linear_args& p)
      : num_slices(p.num_slices), octets(rank_tiles(p.weights)) {}

  __device__ __forceinline__ int64_t at(int token, int slice, int octet) const {
    return ((int64_t{token} * num_slices + slice) * octets + octet) * (kTerms * kPieceBytes);
  }
};

// What the jobs of a pair have counted. Zero between launches.
struct PairCounts {
  uint32_t v;  // warpgroups that have ended a job of v
  uint32_t y;  // fillers that have ended one of y
};

struct ForwardGrid {
  int32_t first_job[ARIL_MAX_SLICES + 1];  // of a slice and pair; the last: all jobs of y of a pair
  int32_t pairs;
  int32_t group;   // pairs that are multiplied by the same W in turn
  int32_t v_jobs;  // of a pair
  int32_t clusters;
};

struct LargeMForwardParams {
  CUtensorMap w[ARIL_MAX_SLICES], x;
  aril_linear_args args;
  const void* bias;
  unsigned char* terms;
  PairCounts* counts;
  ForwardGrid grid;

  __device__ __forceinline__ PairCounts* counts_of(int pair) const { return counts + pair; }
  __device__ __forceinline__ int num_jobs() const {
    return grid.pairs * (grid.v_jobs + grid.first_job[ARIL_MAX_SLICES]);
  }
};

// A rank tile of A, and whose it is.
struct VTile {
  const char* a;
  int32_t k_tile_bytes;
  int16_t slot;
  uint8_t slice, octet;
};

// The adapters of a job's tokens, in the order of their first tokens.
struct AdapterList {
  union {
    struct {
      int32_t steps;       // of 16 ranks, of all of the block's adapters
      int32_t most_steps;  // of this block and the other one
      int32_t adapters;
    };
    struct {
      int32_t v_tiles;  // of the job
      int32_t more;     // whether the job has further ones behind them
    };
  };
  uint16_t slots[kClusterBlocks * kForwardTokens];
  union {
    struct {
      uint16_t first_steps[kForwardTokens];
      uint8_t adapter_of[kForwardTokens];  // of a token; kNone
    };
    VTile tiles[kJobRankTiles];
  };
  static constexpr int kNone = 255;

  __device__ __forceinline__ int stages() const { return ceil_div(most_steps, kStageSteps); }
};

struct ForwardShared {
  TransactionBarrier full[kForwardStages], empty[kForwardStages];
  // Of the extension: a stage may be filled, its terms are there.
  TransactionBarrier ready[kForwardStages], filled[kForwardStages];
  TransactionBarrier listed[2], unlisted[2];
  AdapterList lists[2];
};
static_assert(sizeof(ForwardShared) <= 3072);

struct ForwardJob {
  int pair;
  int v_job;               // -1: a job of y
  int slice, first, outs;  // of y

  __device__ __forceinline__ ForwardJob(const LargeMForwardParams& p, int number)
      : v_job(-1), slice(0), first(0), outs(0) {
    const ForwardGrid& grid = p.grid;
    if (number < grid.v_jobs * grid.pairs) {
      v_job = number / grid.pairs;
      pair = number - v_job * grid.pairs;
      return;
    }
    number -= grid.v_jobs * grid.pairs;
    const int all = grid.first_job[ARIL_MAX_SLICES];
    const int group = number / (grid.group * all), in_group = number - group * grid.group * all;
    const int pairs = min(grid.group, grid.pairs - group * grid.group);
    int job = in_group / pairs;
    pair = group * grid.group + in_group - job * pairs;
    while (slice + 1 < p.args.num_slices && job >= grid.first_job[slice + 1]) ++slice;
    job -= grid.first_job[slice];
    first = job * kForwardOuts;
    outs = min(kForwardOuts, p.args.out_features[slice] - first);
  }

  __device__ __forceinline__ int first_token(int block) const {
    return (kClusterBlocks * pair + block) * kForwardTokens;
  }
};

// A place in a ring, and the parity of its turn.
struct RingPlace {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance(int stages) {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// The parities of stages that are used for the extension.
struct StageParities {
  uint32_t bits = 0;

  __device__ __forceinline__ void wait(const TransactionBarrier* barriers, int stage) {
    barriers[stage].wait(bits >> stage & 1);
    bits ^= 1u << stage;
  }
};

#if __CUDA_ARCH_FEAT_SM90_ALL

// A role's way through the jobs and lists of its block: all roles take the same.
class ForwardTurns {
 public:
  __device__ __forceinline__ ForwardTurns(const LargeMForwardParams& p, ForwardShared& shared)
      : p_(p), shared_(shared), next_(blockIdx.x / kClusterBlocks) {}

  // The next job; -1 behind the last.
  __device__ __forceinline__ int next() {
    const int number = next_;
    next_ += p_.grid.clusters;
    return number < p_.num_jobs() ? number : -1;
  }

  __device__ __forceinline__ const AdapterList& list() {
    shared_.listed[list_.stage].wait(list_.parity);
    return shared_.lists[list_.stage];
  }
  // The role does not read the list again.
  __device__ __forceinline__ void end_list(bool leads) {
    if (leads) arrive(shared_.unlisted[list_.stage]);
    list_.advance(2);
  }
  __device__ __forceinline__ AdapterList& list_to_make() {
    shared_.unlisted[list_.stage].wait(list_.parity ^ 1);
    return shared_.lists[list_.stage];
  }
  __device__ __forceinline__ void make_list() { arrive(shared_.listed[list_.stage]); }

 private:
  const LargeMForwardParams& p_;
  ForwardShared& shared_;
  int next_;
  RingPlace list_;
};

__device__ __forceinline__ int warp_scan(int value) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int before = __shfl_up_sync(0xffffffffu, value, distance);
    if (lane >= distance) value += before;
  }
  return value;
}

// The distinct slots of kTokens tokens, in the order of their first tokens, and of each of a lane's
// tokens the number of its slot among them. Returns how many there are. A whole warp calls it.
template <int kTokens>
__device__ __forceinline__ int find_adapters(const aril_linear_args& p, int first_token,
                                             uint16_t* slots_of, int (&adapters)[kTokens / 32]) {
  constexpr int kOfLane = kTokens / 32;
  const int lane = threadIdx.x % 32;
  const int num_tokens = min(p.num_tokens, *p.routing.num_tokens);
  int slots[kOfLane];
  uint32_t pending[kOfLane];
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) {
    const int token = first_token + i * 32 + lane;
    slots[i] = token < num_tokens ? p.routing.slots[token] : -1;
    if (slots[i] >= p.weights.num_slots) slots[i] = -1;
    pending[i] = __ballot_sync(0xffffffffu, slots[i] >= 0);
    adapters[i] = AdapterList::kNone;
  }
  int count = 0;
  for (;; ++count) {
    int word = -1;
#pragma unroll
    for (int i = kOfLane - 1; i >= 0; --i) word = pending[i] != 0 ? i : word;
    if (word < 0) break;
    int slot = 0;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      if (word == i) slot = __shfl_sync(0xffffffffu, slots[i], __ffs(pending[i]) - 1);
    }
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      pending[i] &= ~__ballot_sync(0xffffffffu, slots[i] == slot);
      if (slots[i] == slot) adapters[i] = count;
    }
    if (lane == 0) slots_of[count] = static_cast<uint16_t>(slot);
  }
  __syncwarp();
  return count;
}

// Lists up to kJobRankTiles rank tiles of A, from number `first` on, of the adapters of a pair.
__device__ __forceinline__ void list_v_tiles(const aril_linear_args& p, int first_token, int first,
                                             int stride, AdapterList& list) {
  const int lane = threadIdx.x % 32;
  int adapters[kClusterBlocks * kForwardTokens / 32];
  const int count =
      find_adapters<kClusterBlocks * kForwardTokens>(p, first_token, list.slots, adapters);
  int all = 0;
  for (int at = 0; at < count; at += 32) {
    const int slot = at + lane < count ? list.slots[at + lane] : -1;
    int own = 0;
    for (int slice = 0; slice < p.num_slices; ++slice) {
      own += ceil_div(module_of(p.weights, slot, slice).rank, ARIL_RANK_TILE);
    }
    const int end = warp_scan(own);
    int tile = all + end - own - first;
    all += __shfl_sync(0xffffffffu, end, 31);
    for (int slice = 0; slot >= 0 && slice < p.num_slices; ++slice) {
      const aril_descriptor module = module_of(p.weights, slot, slice);
      const int octets = ceil_div(module.rank, ARIL_RANK_TILE);
      for (int octet = 0; octet < octets; ++octet, ++tile) {
        if (tile < 0 || tile >= kJobRankTiles) continue;
        list.tiles[tile] = {static_cast<const char*>(module.a) + octet * kATileBytes,
                            octets * kATileBytes, static_cast<int16_t>(slot),
                            static_cast<uint8_t>(slice), static_cast<uint8_t>(octet)};
      }
    }
  }
  if (lane == 0) {
    list.v_tiles = max(0, min(all - first, kJobRankTiles));
    list.more = all > first + stride;
  }
  __syncwarp();
}

// The steps of 16 ranks of the adapters of a tile of tokens. Lists them, if there is a list.
__device__ __forceinline__ int list_steps(const aril_linear_args& p, int slice, int first_token,
                                          uint16_t* slots, AdapterList* list) {
  const int lane = threadIdx.x % 32;
  int adapters[kForwardTokens / 32];
  const int count = find_adapters<kForwardTokens>(p, first_token, slots, adapters);
  int steps = 0;
  for (int first = 0; first < count; first += 32) {
    const int i = first + lane, slot = i < count ? slots[i] : -1;
    const int own = ceil_div(module_of(p.weights, slot, slice).rank, kRanksPerStep);
    const int end = warp_scan(own);
    if (list != nullptr && i < count) {
      list->first_steps[i] = static_cast<uint16_t>(steps + end - own);
    }
    steps += __shfl_sync(0xffffffffu, end, 31);
  }
  __syncwarp();
  if (list == nullptr) return steps;
#pragma unroll
  for (int i = 0; i < kForwardTokens / 32; ++i) {
    list->adapter_of[i * 32 + lane] = static_cast<uint8_t>(adapters[i]);
  }
  if (lane == 0) {
    list->steps = steps;
    list->adapters = count;
  }
  return steps;
}

// Loads A of a job of v, by all warps of the producers: each has some rank tiles, since a warp
// starts its copies one after the other. Warp 0 loads x, too.
__device__ __forceinline__ void load_v_job(const LargeMForwardParams& p, ForwardShared& shared,
                                           unsigned char* ring, const ForwardJob& job, int block,
                                           const AdapterList& list, RingPlace& place,
                                           int stages_of_k) {
  constexpr int kWarps = 1 + kFillers;
  constexpr int kStagesOfKTile = ARIL_K_TILE / kStageFeatures;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int tiles = list.v_tiles, own = (lane * kWarps + warp) * kClusterBlocks + block;
  const bool has = own < tiles;
  const char* a = has ? list.tiles[own].a : nullptr;
  const int k_tile_bytes = has ? list.tiles[own].k_tile_bytes : 0;
  for (int k = 0; k < stages_of_k && tiles > 0; ++k, place.advance(kForwardStages)) {
    unsigned char* const x = ring + place.stage * kForwardStageBytes;
    TransactionBarrier& full = shared.full[place.stage];
    shared.empty[place.stage].wait(place.parity);
    if (threadIdx.x == 0) {
      full.expect(kForwardXBytes + tiles * kStageATileBytes);
      copy_box(x, p.x, k * kStageFeatures, job.first_token(block), full, kEvictNormal);
    }
    if (has) {
      copy_to_both(
          x + kForwardXBytes + own * kStageATileBytes,
          a + int64_t{k / kStagesOfKTile} * k_tile_bytes + k % kStagesOfKTile * kStageATileBytes,
          kStageATileBytes, full);
    }
  }
}

// 16 ranks of an adapter, in a tile.
struct ExtensionStep {
  const char* b;  // of the tile's first output tile
  int adapter, octet, octets, halves;

  ExtensionStep() = default;
  __device__ __forceinline__ ExtensionStep(const aril_linear_args& p, const ForwardJob& job,
                                           const AdapterList& list, int adapter, int step)
      : adapter(adapter) {
    const aril_descriptor module = module_of(p.weights, list.slots[adapter], job.slice);
    octet = 2 * (step - list.first_steps[adapter]);
    octets = ceil_div(module.rank, ARIL_RANK_TILE);
    halves = min(octets - octet, 2);
    b = static_cast<const char*>(module.b) +
        (int64_t{job.first / ARIL_OUT_TILE} * octets + octet) * kBTileBytes;
  }

  // B of half a step and an output tile. Without a second rank tile v is zero there, and the first
  // one stands for it.
  __device__ __forceinline__ const char* b_of(int out_tile, int half) const {
    return b + (int64_t{out_tile} * octets + min(half, halves - 1)) * kBTileBytes;
  }
};

// The warp that loads x, W and A.
__device__ __forceinline__ void load_forward(const LargeMForwardParams& p, ForwardShared& shared,
                                             unsigned char* ring, int block, bool has_lora) {
  const int lane = threadIdx.x % 32;
  const int stages_of_k = ceil_div(p.args.in_features, kStageFeatures);
  ForwardTurns turns(p, shared);
  RingPlace place = {0, 1};
  for (;;) {
    const int number = turns.next();
    if (number < 0) return;
    const ForwardJob job(p, number);
    if (job.v_job >= 0) {
      bool more;
      do {
        const AdapterList& list = turns.list();
        more = list.more != 0;
        load_v_job(p, shared, ring, job, block, list, place, stages_of_k);
        __syncwarp();
        turns.end_list(lane == 0);
      } while (more);
      continue;
    }
    const int group = job.first / ARIL_OUT_UNIT + block * (kMapRows / ARIL_OUT_UNIT);
    for (int k = 0; k < stages_of_k; ++k, place.advance(kForwardStages)) {
      unsigned char* const x = ring + place.stage * kForwardStageBytes;
      unsigned char* const w = x + kForwardXBytes + block * (kForwardWBytes / kClusterBlocks);
      TransactionBarrier& full = shared.full[place.stage];
      shared.empty[place.stage].wait(place.parity);
      if (lane != 0) continue;
      full.expect(kForwardStageBytes);
      copy_box(x, p.x, k * kStageFeatures, job.first_token(block), full, kEvictNormal);
      copy_rows_to_both(w, p.w[job.slice], k * kStageFeatures, group, full);
    }
    if (!has_lora) continue;
    const AdapterList& list = turns.list();
    const int steps = list.steps, stages = list.stages();
    __syncwarp();
    turns.end_list(lane == 0);
    for (int i = 0; i < stages; ++i, place.advance(kForwardStages)) {
      shared.empty[place.stage].wait(place.parity);
      if (lane != 0) continue;
      arrive(i * kStageSteps < steps ? shared.ready[place.stage] : shared.full[place.stage]);
    }
  }
}

// Waits until all jobs of v of a pair have ended.
__device__ __forceinline__ void wait_for_v(const LargeMForwardParams& p, int pair) {
  const uint32_t all = kClusterBlocks * kMultipliers * p.grid.v_jobs;
  while (load_acquire(&p.counts_of(pair)->v) < all) {
  }
}

// The warps that fill the extension of K.
__device__ __forceinline__ void fill_forward(const LargeMForwardParams& p, ForwardShared& shared,
                                             unsigned char* ring, int block) {
  const int filler = threadIdx.x / 32 - 1, lane = threadIdx.x % 32;
  const int thread = filler * 32 + lane;
  const int stages_of_k = ceil_div(p.args.in_features, kStageFeatures);
  const VTerms terms(p.args);
  ForwardTurns turns(p, shared);
  StageParities ready;
  RingPlace place = {0, 1};  // of jobs of v, which come first
  int stage = 0;
  const auto pass = [&](int stages) { stage = (stage + stages) % kForwardStages; };
  for (;;) {
    const int number = turns.next();
    if (number < 0) return;
    const ForwardJob job(p, number);
    if (job.v_job >= 0) {
      bool more;
      for (int first = job.v_job * kJobRankTiles;; first += p.grid.v_jobs * kJobRankTiles) {
        if (filler == 0) {
          AdapterList& list = turns.list_to_make();
          list_v_tiles(p.args, job.first_token(0), first, p.grid.v_jobs * kJobRankTiles, list);
          if (lane == 0) turns.make_list();
        }
        const AdapterList& list = turns.list();
        more = list.more != 0;
        load_v_job(p, shared, ring, job, block, list, place, stages_of_k);
        stage = place.stage;
        __syncwarp();
        turns.end_list(lane == 0);
        if (!more) break;
      }
      continue;
    }
    if (filler == 0) {
      AdapterList& list = turns.list_to_make();
      const int others =
          list_steps(p.args, job.slice, job.first_token(block ^ 1), list.slots, nullptr);
      const int own = list_steps(p.args, job.slice, job.first_token(block), list.slots, &list);
      if (lane == 0) {
        list.most_steps = max(own, others);
        turns.make_list();
      }
      __syncwarp();
    }
    const AdapterList& list = turns.list();
    const int steps = list.steps, stages = list.stages();
    const int out_tiles = ceil_div(job.outs, ARIL_OUT_TILE);
    if (steps > 0) wait_for_v(p, job.pair);
    pass(stages_of_k);
    int adapter = 0;
    for (int i = 0; i < stages; ++i, pass(1)) {
      const int first = i * kStageSteps, count = min(steps - first, kStageSteps);
      if (count <= 0) continue;
      ExtensionStep all[kStageSteps];
#pragma unroll
      for (int s = 0; s < kStageSteps; ++s) {
        while (adapter + 1 < list.adapters && list.first_steps[adapter + 1] <= first + s) ++adapter;
        if (s < count) {
          all[s] = ExtensionStep(p.args, job, list, adapter, first + s);
          constexpr int kLines = kBTileBytes / 128;
          for (int j = thread; j < 2 * out_tiles * kLines; j += 32 * kFillers) {
            prefetch_l2(all[s].b_of(j / kLines / 2, j / kLines % 2) + j % kLines * 128);
          }
        }
      }
      ready.wait(shared.ready, stage);
      unsigned char* const to = ring + stage * kForwardStageBytes;
      TransactionBarrier& full = shared.full[stage];
#pragma unroll
      for (int s = 0; s < kStageSteps; ++s) {
        if (s >= count) break;
        const ExtensionStep& step = all[s];
        for (int j = lane * kFillers + filler; j < 2 * out_tiles; j += 32 * kFillers) {
          full.copy(to + kStageSteps * kStepTermsBytes + s * kStepBBytes +
                        j % 2 * (kStepBBytes / 2) + j / 2 * kBTileBytes,
                    step.b_of(j / 2, j % 2), kBTileBytes);
        }
        const int half = lane / 2 % 2, term = lane % 2;
        unsigned char* const to_terms = to + s * kStepTermsBytes + (term * 2 + half) * kOctetBytes;
        const unsigned char* const from =
            p.terms +
            terms.at(job.first_token(block), job.slice, step.octet + min(half, step.halves - 1)) +
            term * VTerms::kPieceBytes;
        const int64_t row_bytes = terms.at(1, 0, 0);
        for (int t = thread / 4; t < kForwardTokens; t += 8 * kFillers) {
          const bool own = list.adapter_of[t] == step.adapter && half < step.halves;
          copy_async(to_terms + t * 16, own ? from + t * row_bytes : from, own ? 16 : 0);
        }
      }
      arrive_with_copies(shared.filled[stage]);
      if (thread == 0) full.expect(count * out_tiles * 2 * kBTileBytes);
    }
    __syncwarp();
    turns.end_list(lane == 0);
    if (lane == 0) {
      // The last one resets the pair's counts, when all jobs of v have counted.
      PairCounts* const counts = p.counts_of(job.pair);
      const uint32_t all = kClusterBlocks * kFillers * p.grid.first_job[ARIL_MAX_SLICES];
      if (atomicAdd(&counts->y, 1u) == all - 1) {
        wait_for_v(p, job.pair);
        *counts = {0, 0};
      }
    }
    __syncwarp();
  }
}

// Waits for the other threads of the warpgroup.
__device__ __forceinline__ void sync_warpgroup(int multiplier) {
  asm volatile("bar.sync %0, %1;" ::"r"(4 + multiplier), "n"(kWarpgroupThreads) : "memory");
}

constexpr int kForwardColumns = kForwardOuts / 8;
// Of a warpgroup: 64 tokens. Lane (g, q) of a warp has outputs 8 q to 8 q + 7 of each 32 of tokens
// g and g + 8, or ranks 2 q and 2 q + 1 of each rank tile.
using ForwardSums = float[kForwardColumns][4];

// Stores the terms of a job's v of the tokens that own it.
__device__ __forceinline__ void store_v(const LargeMForwardParams& p, const AdapterList& list,
                                        const ForwardSums& sums, int first_row) {
  const int q = threadIdx.x % 4;
  const int num_tokens = min(p.args.num_tokens, *p.args.routing.num_tokens);
  int slots[2];
  float scales[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int token = first_row + 8 * half;
    slots[half] = token < num_tokens ? p.args.routing.slots[token] : -1;
    scales[half] = token < num_tokens ? p.args.routing.scales[token] : 0.0f;
  }
  const VTerms terms(p.args);
#pragma unroll
  for (int c = 0; c < kForwardColumns; ++c) {
    if (c >= list.v_tiles) break;
    const VTile& v = list.tiles[c];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (slots[half] != v.slot) continue;
      const float factor = module_of(p.args.weights, v.slot, v.slice).scaling * scales[half];
      uint32_t high, low;
      to_bf16_terms(sums[c][2 * half] * factor, sums[c][2 * half + 1] * factor, high, low);
      unsigned char* const to = p.terms + terms.at(first_row + 8 * half, v.slice, v.octet) + q * 4;
      *reinterpret_cast<uint32_t*>(to) = high;
      *reinterpret_cast<uint32_t*>(to + VTerms::kPieceBytes) = low;
    }
  }
}

// Adds eight adjacent elements.
template <typename T>
__device__ __forceinline__ void add_eight(float (&outs)[8], const T* from, bool aligned) {
  if (aligned) {
    const Vec<T> values{*reinterpret_cast<const uint4*>(from)};
#pragma unroll
    for (int e = 0; e < 8; ++e) outs[e] += values[e];
  } else {
#pragma unroll
    for (int e = 0; e < 8; ++e) outs[e] += to_float(from[e]);
  }
}

// Stores a job's outputs, or adds them to y.
template <typename T>
__device__ __forceinline__ void store_y(const LargeMForwardParams& p, const ForwardJob& job,
                                        const ForwardSums& sums, int first_row) {
  const int q = threadIdx.x % 4;
  const aril_outputs outputs = p.args.y[job.slice];
  const bool aligned = is_aligned(static_cast<const T*>(outputs.first), outputs.stride);
  const T* bias = static_cast<const T*>(p.bias);
  if (bias != nullptr) {
    for (int slice = 0; slice < job.slice; ++slice) bias += p.args.out_features[slice];
    bias += job.first;
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int token = first_row + half * 8;
    if (token >= p.args.num_tokens) continue;
    T* const y = static_cast<T*>(outputs.first) + token * outputs.stride + job.first;
#pragma unroll
    for (int c = 0; c < kForwardColumns; c += 4) {
      const int out = c * 8 + q * 8;
      if (out >= job.outs) continue;
      float outs[8];
#pragma unroll
      for (int e = 0; e < 8; ++e) outs[e] = sums[c + e / 2][2 * half + e % 2];
      if (bias != nullptr) {
        add_eight(outs, bias + out, reinterpret_cast<uintptr_t>(bias + out) % 16 == 0);
      }
      if (!p.args.overwrites) add_eight(outs, y + out, aligned);
      T values[8];
#pragma unroll
      for (int e = 0; e < 8; ++e) values[e] = from_float<T>(outs[e]);
      if (aligned) {
        uint4 bits;
        memcpy(&bits, values, sizeof(bits));
        *reinterpret_cast<uint4*>(y + out) = bits;
      } else {
#pragma unroll
        for (int e = 0; e < 8; ++e) y[out + e] = values[e];
      }
    }
  }
}

// The warpgroups that multiply.
template <typename T>
__device__ __forceinline__ void multiply_forward(const LargeMForwardParams& p,
                                                 ForwardShared& shared, unsigned char* ring,
                                                 int block, bool has_lora) {
  const int multiplier = threadIdx.x / kWarpgroupThreads - 1;
  const bool leads = threadIdx.x % kWarpgroupThreads == 0;
  const int row = multiplier * 64 + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
  const int stages_of_k = ceil_div(p.args.in_features, kStageFeatures);
  ForwardTurns turns(p, shared);
  RingPlace place;
  StageParities filled;
  const auto release = [&](int stage) {
    if (!leads) return;
    arrive(shared.empty[stage]);
    arrive_at(cluster_address(&shared.empty[stage], block ^ 1));
  };
  bool more = false;  // of a job of v
  int number = 0;
  for (;;) {
    if (!more) number = turns.next();
    if (number < 0) return;
    const ForwardJob job(p, number);
    const bool is_v = job.v_job >= 0;
    const AdapterList* list = nullptr;
    if (is_v) {
      list = &turns.list();
      more = list->more != 0;
    }
    ForwardSums sums;
    if (!is_v || list->v_tiles > 0) {
      // W is in the swizzle, A in cores.
      const int per_step = is_v ? 16 : 2;
      int last = -1;
#pragma unroll 1
      for (int k = 0; k < stages_of_k; ++k, place.advance(kForwardStages)) {
        const unsigned char* const x = ring + place.stage * kForwardStageBytes;
        const uint64_t rows = swizzled_descriptor(x + multiplier * (kForwardXBytes / kMultipliers));
        const uint64_t columns =
            is_v ? core_descriptor(x + kForwardXBytes, kCoreElems * 2, kStageATileBytes)
                 : swizzled_descriptor(x + kForwardXBytes);
        shared.full[place.stage].wait(place.parity);
        fence_operands(sums);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < kStageFeatures / 16; ++i) {
          wgmma_k16_n128(sums, rows + 2 * i, columns + per_step * i, k > 0 || i > 0);
        }
        wgmma_commit();
        fence_operands(sums);
        wgmma_wait_for<1>();
        if (last >= 0) release(last);
        last = place.stage;
      }
      wgmma_wait();
      fence_operands(sums);
      release(last);
    }
    if (is_v) {
      if (list->v_tiles > 0) {
        store_v(p, *list, sums, job.first_token(block) + row);
        __threadfence();
      }
      sync_warpgroup(multiplier);
      turns.end_list(leads);
      if (leads && !more) atomicAdd(&p.counts_of(job.pair)->v, 1u);
      continue;
    }
    if (has_lora) {
      const int steps = turns.list().steps, stages = turns.list().stages();
      turns.end_list(leads);
#pragma unroll 1
      for (int i = 0; i < stages; ++i, place.advance(kForwardStages)) {
        const int count = min(steps - i * kStageSteps, kStageSteps);
        const unsigned char* const stage = ring + place.stage * kForwardStageBytes;
        const unsigned char* const terms = stage + multiplier * (kOctetBytes / kMultipliers);
        const unsigned char* const b = stage + kStageSteps * kStepTermsBytes;
        shared.full[place.stage].wait(place.parity);
        if (count > 0) filled.wait(shared.filled, place.stage);
        fence_async_proxy();
        fence_operands(sums);
#pragma unroll 1
        for (int s = 0; s < count; ++s) {
          wgmma_fence();
          const uint64_t columns = core_descriptor(b + s * kStepBBytes, kStepBBytes / 2, 128);
#pragma unroll
          for (int term = 0; term < kTerms; ++term) {
            wgmma_k16_n128(sums,
                           core_descriptor(terms + s * kStepTermsBytes + term * 2 * kOctetBytes,
                                           kOctetBytes, 128),
                           columns, true);
          }
          wgmma_commit();
        }
        wgmma_wait();
        fence_operands(sums);
        release(place.stage);
      }
    }
    store_y<T>(p, job, sums, job.first_token(block) + row);
  }
}
#endif

template <typename T>
__global__ void __launch_bounds__(kForwardThreads, 1)
    large_m_forward_kernel(const __grid_constant__ LargeMForwardParams p) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char stages_shared[];
  __shared__ ForwardShared shared;
  const int warp = threadIdx.x / 32, block = blockIdx.x % kClusterBlocks;
  const bool has_lora = p.grid.v_jobs > 0;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kForwardStages; ++i) {
      shared.full[i].init();
      shared.empty[i].init(kClusterBlocks * kMultipliers);
      shared.ready[i].init();
      shared.filled[i].init(32 * kFillers);
    }
    const int roles = 1 + kMultipliers + (has_lora ? kFillers : 0);
    for (int i = 0; i < 2; ++i) {
      shared.listed[i].init();
      shared.unlisted[i].init(roles);
    }
  }
  __syncthreads();
  sync_cluster();
  launch_dependents();
  // Before the first job, so that no operand is read, and no count or output written, too early.
  wait_for_predecessors();
  if (warp < 4) {
    set_registers<kProducerRegisters, false>();
    if (warp == 0) {
      load_forward(p, shared, stages_shared, block, has_lora);
    } else if (has_lora) {
      fill_forward(p, shared, stages_shared, block);
    }
    __syncwarp();
  } else {
    set_registers<kMultiplierRegisters, true>();
    multiply_forward<T>(p, shared, stages_shared, block, has_lora);
  }
  // The other block may still write here.
  sync_cluster();
#endif
}

}  // namespace aril::detail
