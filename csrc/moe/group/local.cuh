// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Local grouping: every block of shrink finds the route tiles of up to ARIL_ONE_BLOCK_ROUTES routes
// with a slot by itself, so that it does not wait for the block that sorts for all.
//
// Each expert has a bitmap of tokens, in the order of their slots, so the place of a route among
// its expert's, and among its slot's, is a population count: every block finds the same tiles. A
// token that chose an expert twice has only one bit; then all blocks wait for the sorting block.
// (H100, gate_up of rank 16: 256 routes 19.0 us instead of 21.0, 1024 routes 35.3 instead of 36.6.)
#pragma once

#include <cub/block/block_scan.cuh>

#include "../../device/math.cuh"
#include "../../ptx/pdl.cuh"
#include "../routes.cuh"

namespace aril::detail {

class LocalTiles {
 public:
  // Waits for inputs and returns the number of tiles. Returns -1, possibly before the wait,
  // if it cannot find them. `scratch` is free again afterwards. The whole block calls it.
  __device__ __forceinline__ int find(const aril_experts_args& p, void* scratch,
                                      int scratch_bytes) {
    using Scan = cub::BlockScan<uint32_t, kExpertsThreads, cub::BLOCK_SCAN_WARP_SCANS>;
    __shared__ typename Scan::TempStorage scan;
    const int live_tokens = *p.routing.num_tokens, num_experts = p.top_k.num_experts;
    const int words = ceil_div(p.num_tokens, 32), num_bits = (1 + num_experts) * words;
    // A bit for the first token of each slot [words]; the experts' bitmaps [experts][words]; where
    // an expert's routes begin [experts]; where the tokens of a token's slot begin and end
    // [tokens].
    uint32_t* const firsts = static_cast<uint32_t*>(scratch);
    uint32_t* const bits = firsts + words;
    uint32_t* const begins = bits + num_experts * words;
    uint32_t* const spans = begins + num_experts;
    const int bytes = (num_bits + num_experts + p.num_tokens) * static_cast<int>(sizeof(uint32_t));
    // If the batch has more tokens than the operation, the operation's tokens may be anywhere in
    // the batch's order.
    if (live_tokens > p.num_tokens || bytes > scratch_bytes) return -1;

    // The loads of all rounds are issued before the first use.
    int place[kRounds], choice[kRounds], token[kRounds], slot[kRounds], slot_before[kRounds];
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      const int i = round * kExpertsThreads + static_cast<int>(threadIdx.x);
      place[round] = i / p.top_k.top_k;
      choice[round] = i % p.top_k.top_k;
      token[round] = place[round] < live_tokens ? p.routing.tokens[place[round]] : -1;
      slot_before[round] =
          place[round] < live_tokens && place[round] > 0 ? p.routing.tokens[place[round] - 1] : -1;
    }
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      slot[round] = token[round] < 0 ? -1 : p.routing.slots[token[round]];
      slot_before[round] = slot_before[round] < 0 ? -1 : p.routing.slots[slot_before[round]];
    }
#pragma unroll 1
    for (int i = threadIdx.x; i < num_bits; i += kExpertsThreads) firsts[i] = 0;
    __syncthreads();
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      if (choice[round] > 0 || slot[round] == slot_before[round]) continue;
      atomicOr(&firsts[place[round] / 32], 1u << place[round] % 32);
    }
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < live_tokens; i += kExpertsThreads) {
      spans[i] = span_of(firsts, words, live_tokens, i);
    }
    wait_for_inputs(p);

    int expert[kRounds];
    bool is_twice = false;
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      expert[round] =
          slot[round] < 0 ? -1 : id_of(p.top_k, token[round] * p.top_k.top_k + choice[round]);
    }
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      const bool is_here = static_cast<unsigned>(expert[round]) < num_experts;
      const int route = token[round] * p.top_k.top_k + choice[round];
      if (!is_here || row_of(p.top_k, p.num_tokens, route) == kNowhere) expert[round] = -1;
      if (expert[round] < 0) continue;
      const uint32_t bit = 1u << place[round] % 32;
      const uint32_t others = atomicOr(&bits[expert[round] * words + place[round] / 32], bit);
      is_twice = is_twice || (others & bit) != 0;
    }
    if (__syncthreads_or(is_twice)) return -1;
    // Earlier routes to the same expert; those of the same slot among them; all of that slot.
    int before[kRounds], before_of_slot[kRounds], of_slot[kRounds];
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      before[round] = before_of_slot[round] = of_slot[round] = 0;
      if (expert[round] < 0) continue;
      const uint32_t* const own = bits + expert[round] * words;
      const int begin = spans[place[round]] >> 16, end = spans[place[round]] & 0xffff;
#pragma unroll 1
      for (int i = 0; i * 32 < end; ++i) {
        const uint32_t lower = own[i] & below(i, place[round]), others = below(i, begin);
        before[round] += __popc(lower);
        before_of_slot[round] += __popc(lower & ~others);
        of_slot[round] += __popc(own[i] & below(i, end) & ~others);
      }
    }
    const auto leads = [&](int round) {
      return expert[round] >= 0 && before_of_slot[round] % ARIL_ROUTES_PER_TILE == 0;
    };

    // Low half: routes of the thread's experts. High half: tiles that begin with its routes.
    const int experts_per_thread = ceil_div(num_experts, kExpertsThreads);
    const int first_expert = min(static_cast<int>(threadIdx.x) * experts_per_thread, num_experts);
    const int last_expert = min(first_expert + experts_per_thread, num_experts);
    uint32_t begin = 0, total;
#pragma unroll 1
    for (int i = first_expert; i < last_expert; ++i) {
      begins[i] = 0;
#pragma unroll 1
      for (int j = 0; j < words; ++j) begins[i] += __popc(bits[i * words + j]);
      begin += begins[i];
    }
#pragma unroll
    for (int round = 0; round < kRounds; ++round) begin += leads(round) << 16;
    Scan(scan).ExclusiveSum(begin, begin, total);
#pragma unroll 1
    for (int i = first_expert; i < last_expert; ++i) {
      const uint32_t routes = begins[i];
      begins[i] = begin & 0xffff;
      begin += routes;
    }
    __syncthreads();
    int tile = begin >> 16;
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      if (expert[round] < 0) continue;
      const int at = begins[expert[round]] + before[round];
      routes_[at] = token[round] * p.top_k.top_k + choice[round];
      if (!leads(round)) continue;
      const int count = min(of_slot[round] - before_of_slot[round], ARIL_ROUTES_PER_TILE);
      tiles_[tile++] = make_uint2(slot[round], expert[round] << 16 | at << kCountBits | count);
    }
    __syncthreads();
    return total >> 16;
  }

  // As RouteTiles::tile().
  __device__ __forceinline__ int4 tile(int i) const {
    const uint2 tile = tiles_[i];
    return make_int4(tile.x, tile.y >> 16, (tile.y & 0xffff) >> kCountBits,
                     tile.y & ((1 << kCountBits) - 1));
  }

  __device__ __forceinline__ int route(int i) const { return routes_[i]; }

 private:
  static constexpr int kRounds = ARIL_ONE_BLOCK_ROUTES / kExpertsThreads;  // of the routes
  static constexpr int kCountBits = 4;
  static_assert(ARIL_ONE_BLOCK_ROUTES < 1 << 16 && ARIL_MAX_EXPERTS <= 1 << 16);
  static_assert(ARIL_ONE_BLOCK_ROUTES << kCountBits <= 1 << 16 &&
                ARIL_ROUTES_PER_TILE < 1 << kCountBits);

  // Where the tokens of the slot of the i-th token begin (high half) and end, by the bits of the
  // first ones.
  __device__ __forceinline__ static uint32_t span_of(const uint32_t* firsts, int words,
                                                     int live_tokens, int i) {
    const uint32_t up_to = ~0u >> (31 - i % 32);
    int word = i / 32;
    uint32_t mask = firsts[word] & up_to;
    while (mask == 0 && word > 0) mask = firsts[--word];
    const int begin = word * 32 + (mask == 0 ? 0 : 31 - __clz(mask));
    word = i / 32;
    mask = firsts[word] & ~up_to;
    while (mask == 0 && ++word < words) mask = firsts[word];
    const int end = mask == 0 ? live_tokens : word * 32 + __ffs(mask) - 1;
    return begin << 16 | end;
  }

  // The bits of a word that stand for smaller numbers.
  __device__ __forceinline__ static uint32_t below(int word, int number) {
    const int bits = number - word * 32;
    return bits <= 0 ? 0 : bits >= 32 ? ~0u : (1u << bits) - 1;
  }

  uint16_t routes_[ARIL_ONE_BLOCK_ROUTES];
  uint2 tiles_[ARIL_ONE_BLOCK_ROUTES];  // slot; expert, where its routes begin, how many
};
static_assert(sizeof(LocalTiles) == ARIL_LOCAL_TILES_BYTES);

}  // namespace aril::detail
