// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Layers whose base GEMM computes v = A x with its own outputs: the copy of A into the stack, and
// expand, alone and within SiLU and product.
//
// A warp of expand has a token tile and one or two units, or a unit of gate and one of up. It loads
// tile, rows and modules side by side, requests B before the wait for predecessors, y and v after
// it, and multiplies from registers: v has 16 bits, so it is an operand as it is, and the scaling
// follows the product. No block waits for another one, and none synchronizes.
//
// Bound: the bytes of B and y, behind two round trips.
#pragma once

#include "../device/activation.cuh"
#include "../device/descriptor.cuh"
#include "../device/product.cuh"
#include "../device/token_tile.cuh"
#include "../device/vec.cuh"
#include "../ptx/mma.cuh"
#include "../ptx/pdl.cuh"
#include "../ptx/tma.cuh"

namespace aril::detail {

constexpr int kStackThreads = 256;
constexpr int kStackedWarps = 4;  // of a block
constexpr int kStackedThreads = 32 * kStackedWarps;
// Units of a warp that only expands, by the steps whose operands it requests at once.
template <int kAhead>
constexpr int kStackedUnits = kAhead == 1 ? 2 : 1;
// Outputs of such a block; and of gate and of up, with SiLU.
template <int kAhead>
constexpr int kStackedOuts = kStackedWarps * kStackedUnits<kAhead> * ARIL_OUT_UNIT;
constexpr int kStackedFeatures = kStackedWarps * ARIL_OUT_UNIT;
// Blocks on a multiprocessor.
template <int kAhead>
constexpr int kStackedBlocks = kAhead == 1 ? 8 : 5;
template <int kAhead>
constexpr int kStackedSiluMulBlocks = kAhead == 1 ? 6 : 4;

// A block copies a K tile of A of a module. What earlier steps read is written after the wait. Later
// ones start when all blocks have ended, and read modules before their own wait (ptx/pdl.cuh).
__global__ void __launch_bounds__(kStackThreads)
    stack_kernel(const __grid_constant__ aril_stack_args p) {
  wait_for_predecessors();
  const int block = blockIdx.x;
  int index = 0;
  for (int last = p.num_layers - 1; index < last;) {
    const int middle = (index + last + 1) / 2;
    if (p.layers[middle].first_block <= block) {
      index = middle;
    } else {
      last = middle - 1;
    }
  }
  const aril_stack_layer layer = p.layers[index];
  const int k_tiles = ceil_div(layer.in_features, ARIL_K_TILE);
  const int slice = (block - layer.first_block) / k_tiles;
  const int k_tile = block - layer.first_block - slice * k_tiles;
  const aril_descriptor module = module_of(p.weights, p.slot, layer.first_entry + slice);
  if (k_tile == 0) {
    aril_stacked_module* const modules =
        p.modules + int64_t{layer.first_entry + slice} * p.positions;
    for (int i = threadIdx.x; i < p.positions; i += kStackThreads) {
      if (i == p.position) {
        modules[i] = {module.b, module.scaling, static_cast<int16_t>(p.slot),
                      static_cast<int16_t>(module.rank)};
      } else if (p.slot >= 0 && modules[i].slot == p.slot) {
        modules[i].slot = -1;
      }
    }
    __threadfence();
  }
  if (p.slot < 0) return;
  const int rank_tiles = ceil_div(module.rank, ARIL_RANK_TILE);
  const char* const a =
      static_cast<const char*>(module.a) + int64_t{k_tile} * rank_tiles * kATileBytes;
  auto* const rows = static_cast<uint16_t*>(layer.rows) +
                     (slice * p.positions + p.position) * p.rank * layer.stride;
  constexpr int kPieces = ARIL_K_TILE / ARIL_CORE;  // of 16 bytes, in a row
  for (int i = threadIdx.x; i < p.rank * kPieces; i += kStackThreads) {
    const int rank = i / kPieces, piece = i % kPieces;
    const int feature = k_tile * ARIL_K_TILE + piece * ARIL_CORE;
    if (feature >= layer.in_features) continue;
    uint4 elements = make_uint4(0, 0, 0, 0);
    if (rank < rank_tiles * ARIL_RANK_TILE) {
      elements = *reinterpret_cast<const uint4*>(a + rank / ARIL_RANK_TILE * kATileBytes +
                                                 piece * kCoreElems * 2 +
                                                 rank % ARIL_RANK_TILE * ARIL_CORE * 2);
    }
    *reinterpret_cast<uint4*>(rows + rank * layer.stride + feature) = elements;
  }
}

// Loads what each step reads. L2 keeps it while base weights pass through: a launch takes 0.3 us
// less.
template <typename S>
__device__ __forceinline__ S load_kept(const S* from) {
  uint32_t words[sizeof(S) / 4];
  if constexpr (sizeof(S) == 16) {
    asm volatile("ld.global.L2::cache_hint.v4.b32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "l"(from), "l"(kEvictLast));
  } else {
#pragma unroll
    for (size_t i = 0; i < sizeof(S) / 4; ++i) {
      asm volatile("ld.global.L2::cache_hint.b32 %0, [%1], %2;"
                   : "=r"(words[i])
                   : "l"(reinterpret_cast<const uint32_t*>(from) + i), "l"(kEvictLast));
    }
  }
  S value;
  memcpy(&value, words, sizeof(S));
  return value;
}

// A token tile, as the lanes of a warp have it.
struct StackedTile {
  int slot, count;
  int rows[2];  // g and g + 8; -1: none
  float scales[2];

  // A whole warp calls it.
  __device__ __forceinline__ StackedTile(const aril_stacked_args& p, int index) {
    const int place = index < p.max_tiles ? index : 0, t = threadIdx.x % ARIL_TOKENS_PER_TILE;
    const aril_tile tile = load_kept(p.tiles.all + place);
    const aril_row row = load_kept(p.rows + place * ARIL_TOKENS_PER_TILE + t);
    const bool is_live = index < min(load_kept(p.tiles.count), p.max_tiles);
    slot = is_live ? tile.slot : -1;
    count = is_live ? tile.count : 0;
    const int token = t < count && row.token < p.num_tokens ? row.token : -1;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int lane = threadIdx.x % 32 / 4 + 8 * half;
      rows[half] = __shfl_sync(0xffffffffu, token, lane);
      scales[half] = __shfl_sync(0xffffffffu, row.scale, lane);
    }
  }
};

// The module of a slot at a slice, and where rows have its v. It has no rank tiles if it is not in
// the stack.
struct StackedModule {
  const char* b = nullptr;
  int rank_tiles = 0;
  int column = 0;
  float scaling = 0.0f;
};

// The modules at some adjacent slices, of up to 64 positions at a time: two of each slice a lane.
template <int kSlices>
class StackedModules {
 public:
  __device__ __forceinline__ StackedModules(const aril_stacked_args& p, int slice)
      : p_(p), slice_(slice) {
    load(0);
  }

  // Those of a slot.
  __device__ __forceinline__ void find(int slot, StackedModule (&modules)[kSlices]) {
    if (slot < 0) return;
    for (int first = 0; first < p_.positions; first += 64) {
      if (first > 0) load(first);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int position = first + 32 * i + static_cast<int>(threadIdx.x) % 32;
        const unsigned owner = __ballot_sync(
            0xffffffffu, position < p_.positions && own_[0][i].slot == slot);
        if (owner != 0) take(i, first + 32 * i, __ffs(owner) - 1, modules);
      }
    }
  }

 private:
  __device__ __forceinline__ void load(int first) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int position = first + 32 * i + static_cast<int>(threadIdx.x) % 32;
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) {
        own_[slice][i] = load_kept(p_.modules + (slice_ + slice) * p_.positions +
                                   min(position, p_.positions - 1));
      }
    }
  }

  __device__ __forceinline__ void take(int i, int first, int lane,
                                       StackedModule (&modules)[kSlices]) const {
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      const aril_stacked_module& own = own_[slice][i];
      const auto b = reinterpret_cast<uintptr_t>(own.b);
      const int rank = __shfl_sync(0xffffffffu, own.rank, lane);
      modules[slice].b = reinterpret_cast<const char*>(__shfl_sync(0xffffffffu, b, lane));
      modules[slice].rank_tiles = ceil_div(min(rank, p_.rank), ARIL_RANK_TILE);
      modules[slice].column = ((slice_ + slice) * p_.positions + first + lane) * p_.rank;
      modules[slice].scaling = __shfl_sync(0xffffffffu, own.scaling, lane);
    }
  }

  const aril_stacked_args& p_;
  int slice_;
  aril_stacked_module own_[kSlices][2];
};

// The operands of a module's unit for a token tile, kAhead steps of 16 ranks at a time. Lane (g, q)
// has ranks [4 q, 4 q + 4) of a step: of B in row g of each core, of v in the tile's rows g and g + 8.
// Beyond the module's rank tiles they are zero: those columns of v are another slot's.
template <typename T, int kAhead>
class StackedUnit {
 public:
  StackedUnit() = default;

  // Requests B of the first steps. `out` is the unit's first output.
  __device__ __forceinline__ StackedUnit(const StackedModule& module, int out)
      : module_(module), out_(out) {
    request_b(0);
  }

  // Requests v of the first steps. After the wait for predecessors.
  __device__ __forceinline__ void request_v(const aril_stacked_args& p, const StackedTile& tile) {
    request_v(p, tile, 0);
  }

  // deltas = scales * B v
  __device__ __forceinline__ void multiply(float (&deltas)[4][4], const aril_stacked_args& p,
                                           const StackedTile& tile) {
    if (module_.rank_tiles == 0) return fill(deltas, kNoDelta);
    set_zero(deltas);
    for (int first = 0;;) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) mma_m16n8k16<T>(deltas[j], v_[i], b_[i][j].x, b_[i][j].y);
      }
      if constexpr (kAhead == 1) break;
      first += kAhead;
      if (2 * first >= module_.rank_tiles) break;
      request_b(first);
      request_v(p, tile, first);
    }
    const float factors[2] = {module_.scaling * tile.scales[0], module_.scaling * tile.scales[1]};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) deltas[j][e] = __fmul_rn(deltas[j][e], factors[e / 2]);
    }
  }

 private:
  __device__ __forceinline__ bool has(int step) const {
    return 2 * step + static_cast<int>(threadIdx.x) % 4 / 2 < module_.rank_tiles;
  }

  __device__ __forceinline__ void request_b(int first) {
    const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    const char* const b = unit_at(module_.b, out_, module_.rank_tiles, first) +
                          q / 2 * kBTileBytes + g * ARIL_RANK_TILE * 2 + q % 2 * 8;
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        b_[i][j] = has(first + i) ? load_pair_once(b + 2 * i * kBTileBytes + j * kCoreElems * 2)
                                  : make_uint2(0, 0);
      }
    }
  }

  __device__ __forceinline__ void request_v(const aril_stacked_args& p, const StackedTile& tile,
                                            int first) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      uint2 rows[2] = {};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const T* const from = static_cast<const T*>(p.v) + tile.rows[half] * p.v_stride +
                              module_.column + (first + i) * kRanksPerStep + threadIdx.x % 4 * 4;
        if (tile.rows[half] >= 0 && has(first + i)) {
          rows[half] = *reinterpret_cast<const uint2*>(from);
        }
      }
      v_[i] = make_uint4(rows[0].x, rows[1].x, rows[0].y, rows[1].y);
    }
  }

  StackedModule module_;
  int out_;
  uint2 b_[kAhead][4];
  uint4 v_[kAhead];
};

// Grid: token tiles x blocks of kStackedOuts<kAhead> outputs.
template <typename T, int kAhead>
__global__ void __launch_bounds__(kStackedThreads, kStackedBlocks<kAhead>)
    stacked_expand_kernel(const __grid_constant__ aril_stacked_args p,
                          const __grid_constant__ Divisor out_blocks) {
  constexpr int kUnits = kStackedUnits<kAhead>;
  launch_dependents();
  const int tile_index = out_blocks.quotient(blockIdx.x);
  int slice;
  const BlockOuts<T> outs(p, blockIdx.x - tile_index * out_blocks, kStackedOuts<kAhead>, slice,
                          false);
  StackedModules<1> modules(p, slice);
  const StackedTile tile(p, tile_index);
  StackedModule module[1];
  modules.find(tile.slot, module);
  const int first = threadIdx.x / 32 * kUnits * ARIL_OUT_UNIT;
  if (module[0].rank_tiles == 0 || first >= outs.count) {
    if (is_first_block()) wait_for_predecessors();
    return;
  }
  StackedUnit<T, kAhead> units[kUnits];
#pragma unroll
  for (int i = 0; i < kUnits; ++i) units[i] = {module[0], outs.first + first + i * ARIL_OUT_UNIT};
  wait_for_predecessors();
  const int out = first + threadIdx.x % 4 * 8;
  T* y[2];
  Vec<T> bases[kUnits][2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    y[half] = outs.y + tile.rows[half] * outs.y_stride + outs.first + out;
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      if (tile.rows[half] < 0 || out + i * ARIL_OUT_UNIT >= outs.count) continue;
      bases[i][half] = Vec<T>::load(y[half] + i * ARIL_OUT_UNIT);
    }
  }
#pragma unroll
  for (int i = 0; i < kUnits; ++i) units[i].request_v(p, tile);
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    float deltas[4][4];
    units[i].multiply(deltas, p, tile);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (tile.rows[half] < 0 || out + i * ARIL_OUT_UNIT >= outs.count) continue;
      Vec<T>::store(y[half] + i * ARIL_OUT_UNIT, [&](int e) {
        return bases[i][half][e] + deltas[e / 2][2 * half + e % 2];
      });
    }
  }
}

// Grid: token tiles x blocks of kStackedFeatures features.
template <typename T, int kAhead>
__global__ void __launch_bounds__(kStackedThreads, kStackedSiluMulBlocks<kAhead>)
    stacked_silu_mul_kernel(const __grid_constant__ aril_stacked_silu_mul_args p,
                            const __grid_constant__ Divisor out_blocks) {
  launch_dependents();
  const int tile_index = out_blocks.quotient(blockIdx.x);
  StackedModules<2> all(p.layer, 0);
  const StackedTile tile(p.layer, tile_index);
  const int features = p.layer.out_features[0];
  const int first = (blockIdx.x - tile_index * out_blocks) * kStackedFeatures +
                    threadIdx.x / 32 * ARIL_OUT_UNIT;
  if (tile.count == 0 || first >= features) {
    if (is_first_block()) wait_for_predecessors();
    return;
  }
  StackedModule modules[2];
  all.find(tile.slot, modules);
  StackedUnit<T, kAhead> units[2] = {{modules[0], first}, {modules[1], first}};
  wait_for_predecessors();
  const int feature = first + threadIdx.x % 4 * 8;
  Vec<T> bases[2][2];
  bool has[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    has[half] = tile.rows[half] >= 0 && feature < features;
#pragma unroll
    for (int slice = 0; slice < 2; ++slice) {
      const aril_outputs& y = p.layer.y[slice];
      const T* const from = static_cast<const T*>(y.first) + tile.rows[half] * y.stride + feature;
      if (has[half]) bases[slice][half] = Vec<T>::load(from);
    }
  }
#pragma unroll
  for (int slice = 0; slice < 2; ++slice) units[slice].request_v(p.layer, tile);
  float deltas[2][4][4];
#pragma unroll
  for (int slice = 0; slice < 2; ++slice) units[slice].multiply(deltas[slice], p.layer, tile);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (!has[half]) continue;
    T* const to = static_cast<T*>(p.out) + tile.rows[half] * p.out_stride + feature;
    Vec<T>::store(to, [&](int e) {
      const int r = 2 * half + e % 2;
      return silu_mul<T>(bases[0][half][e] + deltas[0][e / 2][r],
                         bases[1][half][e] + deltas[1][e / 2][r]);
    });
  }
}

}  // namespace aril::detail
