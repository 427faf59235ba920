// SPDX-License-Identifier: MIT OR Apache-2.0
//
// aril_forward_maps and aril_linear_forward: launches a fused linear as the plan
// (src/plan/forward.rs) has divided it, and refuses a plan that does not fit the kernels.
#include <atomic>
#include <type_traits>

#include "host/launch.cuh"
#include "linear/fused/kernel.cuh"

namespace aril {
namespace {

using detail::ceil_div;

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                            const cuuint64_t*, const cuuint32_t*, const cuuint32_t*,
                            CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                            CUtensorMapFloatOOBfill);

// The driver's function, which the runtime does not wrap; null if it has none. A process has one
// driver.
std::atomic<Encode> encoder = nullptr;

int32_t load_encoder() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  ARIL_TRY(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                            cudaEnableDefault, &found));
  if (found == cudaDriverEntryPointSuccess) encoder = reinterpret_cast<Encode>(function);
  return 0;
}

// Encodes a matrix that is read in boxes of `box_rows` rows of 128 bytes.
int32_t encode_map(CUtensorMap& map, int32_t dtype, const void* matrix, int rows, int columns,
                   int64_t stride, int box_rows, CUtensorMapL2promotion promotion) {
  const Encode encode = encoder;
  if (encode == nullptr) return ARIL_ERR_NO_KERNEL;
  const int64_t row_bytes = stride * 2;
  const bool aligned =
      (reinterpret_cast<uintptr_t>(matrix) | row_bytes) % ARIL_FORWARD_ALIGNMENT == 0;
  if (!aligned || matrix == nullptr || rows < 1 || columns < 1) return ARIL_ERR_ARGUMENT;
  if (dtype != ARIL_BF16 && dtype != ARIL_F16) return ARIL_ERR_ARGUMENT;
  const auto type =
      dtype == ARIL_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(row_bytes)};
  const cuuint32_t box[] = {detail::kBoxFeatures, static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[] = {1, 1};
  const CUresult result = encode(&map, type, 2, const_cast<void*>(matrix), sizes, strides, box,
                                 steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? 0 : ARIL_ERR_ARGUMENT;
}

// Dynamic shared memory that a block may have.
int32_t smem_budget(int& bytes) {
  ARIL_TRY(max_smem_bytes(bytes));
  bytes += ARIL_STATIC_BYTES - ARIL_FORWARD_STATIC_BYTES;
  return 0;
}

int32_t smem_bytes_of(const aril_forward_ring& ring) {
  return ring.total + ARIL_FORWARD_ALIGNMENT_BYTES;
}

int32_t share_out(const aril_forward_args& args, detail::FusedParams& params) {
  const aril_forward_plan& plan = args.map->plan;
  detail::FusedGrid& grid = params.grid;
  grid = {};
  int clusters = 0;
  for (int slice = 0; slice < args.num_slices; ++slice) {
    if (args.out_features[slice] < 1) return ARIL_ERR_ARGUMENT;
    grid.first_cluster[slice] = clusters;
    clusters += ceil_div(detail::Share::slice_strips(args.out_features[slice]), plan.strips);
  }
  ARIL_CHECK(clusters == plan.clusters);
  for (int slice = args.num_slices; slice <= ARIL_MAX_SLICES; ++slice) {
    grid.first_cluster[slice] = clusters;
  }
  grid.strips = plan.strips;
  grid.passes = plan.passes;
  grid.pass_strips = ceil_div(grid.strips, grid.passes);
  constexpr int kStep = detail::kStepBoxes;
  grid.boxes = ceil_div(args.in_features, detail::kBoxFeatures);
  grid.split_boxes = ceil_div(ceil_div(grid.boxes, kStep), plan.splits) * kStep;
  params.num_k_tiles = ceil_div(args.in_features, ARIL_K_TILE);
  params.part_k_tiles = ceil_div(params.num_k_tiles, detail::kParts);
  params.num_parts = ceil_div(params.num_k_tiles, params.part_k_tiles);
  return 0;
}

int32_t check(const aril_forward_args& args) {
  const bool fits = args.num_tokens >= 0 && args.num_tokens <= ARIL_FORWARD_TOKENS &&
                    args.in_features >= 8 && args.in_features % 8 == 0 && args.num_slices >= 1 &&
                    args.num_slices <= ARIL_MAX_SLICES && args.map != nullptr && args.polls >= 0 &&
                    args.map->plan.strips >= 1 && args.map->plan.trigger_boxes >= 1 &&
                    are_set(args.y, args.num_slices);
  if (!fits) return ARIL_ERR_ARGUMENT;
  if (args.weights.table != nullptr) {
    const bool has_mailbox = args.mailbox != nullptr &&
                             reinterpret_cast<uintptr_t>(args.mailbox) % 16 == 0 &&
                             args.weights.max_rank >= 1 && args.weights.max_rank <= ARIL_MAX_RANK;
    if (!has_mailbox) return ARIL_ERR_ARGUMENT;
  }
  return 0;
}

// Rejects code without the kernels, whatever the device is: they do nothing there.
int32_t check_code() {
  int32_t version;
  ARIL_TRY(code_version(version));
  return version < 90 ? ARIL_ERR_NO_KERNEL : 0;
}

int32_t fill_params(const aril_forward_args& args, detail::FusedParams& params) {
  params.args = args;
  params.splits = args.map->plan.splits;
  static_assert(sizeof(params.w) == sizeof(args.map->tensor_maps));
  memcpy(params.w, args.map->tensor_maps, sizeof(params.w));
  ARIL_TRY(encode_map(params.x, args.dtype, args.x, args.num_tokens, args.in_features,
                      args.x_stride, args.num_tokens, CU_TENSOR_MAP_L2_PROMOTION_L2_128B));
  return share_out(args, params);
}

template <typename T, int kTokenTiles>
int32_t launch_fused(const detail::FusedParams& params, int smem_bytes, void* stream) {
  const int num_warps = detail::fused_warps(params.grid.pass_strips, kTokenTiles);
  const int idle_warps = params.args.weights.table == nullptr ? detail::kDeltaWarps : 0;
  const Kernel<detail::FusedParams> kernel = {detail::fused_linear_kernel<T, kTokenTiles>,
                                              smem_bytes};
  return launch_clusters(kernel, params.splits,
                         params.grid.first_cluster[ARIL_MAX_SLICES] * params.splits,
                         32 * (num_warps - idle_warps), smem_bytes, stream, params);
}

template <typename T, int kTokenTiles>
int32_t forward(const aril_forward_args& args, void* stream) {
  constexpr int kRing = kTokenTiles / 2;
  const aril_forward_ring& ring = args.map->plan.rings[kRing];
  if (ring.stages == 0) return ARIL_ERR_SHARED_MEMORY;
  // Ranks that do not fit at once are divided where sums are.
  ARIL_CHECK(args.weights.table == nullptr || ring.v_ranks % detail::kSumRanks == 0 ||
             ring.v_ranks >= args.weights.max_rank);
  detail::FusedParams params;
  ARIL_TRY(fill_params(args, params));
  params.smem = ring;
  params.grid.stage_boxes = ring.stage_boxes;
  params.grid.stages = ring.stages;
  params.grid.first_stages = ring.first_stages;
  params.grid.trigger = args.map->plan.trigger_boxes / ring.stage_boxes;
  return launch_fused<T, kTokenTiles>(params, smem_bytes_of(ring), stream);
}

// Whether a ring is one of this kernel's: its stages are those of the grid, and what follows them
// is in order.
bool is_ring(const aril_forward_ring& ring, int token_tiles, int pass_strips) {
  const int box_bytes = pass_strips * detail::kStripBoxBytes + token_tiles * detail::kTokenBoxBytes;
  return ring.stage_boxes >= 1 && ring.stage_boxes <= detail::kStepBoxes && ring.stages >= 1 &&
         ring.stages <= detail::kMaxStages && ring.first_stages >= 1 &&
         ring.first_stages <= ring.stages && ring.stage_bytes == ring.stage_boxes * box_bytes &&
         ring.inbox == ring.stages * ring.stage_bytes && ring.inbox <= ring.deltas &&
         ring.deltas < ring.v && ring.v == ring.sums && ring.v == ring.handover &&
         ring.v < ring.a && ring.a < ring.batch && ring.batch < ring.modules &&
         ring.modules < ring.total && ring.v_ranks >= detail::kPanelRanks &&
         ring.v_ranks % detail::kPanelRanks == 0;
}

// Rejects rings that are none, or larger than the device's shared memory.
int32_t check_rings(const aril_forward_plan& plan) {
  const int pass_strips = ceil_div(plan.strips, plan.passes);
  int budget;
  ARIL_TRY(smem_budget(budget));
  int token_tiles = 1;
  for (const aril_forward_ring& ring : plan.rings) {
    if (ring.stages != 0) {
      if (!is_ring(ring, token_tiles, pass_strips)) return ARIL_ERR_ARGUMENT;
      if (smem_bytes_of(ring) > budget) return ARIL_ERR_SHARED_MEMORY;
    }
    token_tiles *= 2;
  }
  return 0;
}

// Calls `f` with the number of token tiles of the kernel instance for `num_tokens` tokens.
template <typename F>
int32_t with_tiles(int num_tokens, F&& f) {
  const int tiles = ceil_div(num_tokens, detail::kTokenTile);
  if (tiles <= 1) return f(std::integral_constant<int, 1>{});
  if (tiles <= 2) return f(std::integral_constant<int, 2>{});
  return f(std::integral_constant<int, 4>{});
}

template <typename T>
int32_t load_kernels() {
  int bytes;
  ARIL_TRY(smem_budget(bytes));
  using FusedKernel = Kernel<detail::FusedParams>;
  for (const int num_tokens : {8, 16, 32}) {
    ARIL_TRY(with_tiles(num_tokens, [&](auto tiles) {
      const auto kernel = detail::fused_linear_kernel<T, decltype(tiles)::value>;
      return load(FusedKernel{kernel, bytes});
    }));
  }
  return 0;
}

}  // namespace

int32_t load_fused_linear() {
  ARIL_TRY(load_encoder());
  ARIL_TRY(load_kernels<__nv_bfloat16>());
  return load_kernels<__half>();
}

}  // namespace aril

extern "C" int32_t aril_forward_maps(const aril_base_weights* weights, aril_forward_map* map) {
  using namespace aril;
  ARIL_TRY(check_code());
  const aril_forward_plan& plan = weights->plan;
  ARIL_CHECK(weights->num_slices >= 1 && weights->num_slices <= ARIL_MAX_SLICES &&
             (plan.splits == 1 || plan.splits == 2) && plan.strips >= 1 &&
             (plan.splits == 1 || plan.strips <= detail::kMaxSplitStrips) && plan.passes >= 1 &&
             ceil_div(plan.strips, plan.passes) <= detail::kMaxStrips && plan.clusters >= 1 &&
             plan.trigger_boxes >= 1);
  ARIL_TRY(check_rings(plan));
  *map = {};
  map->plan = plan;
  const int box_rows = ceil_div(plan.strips, plan.passes) * detail::kStripRows;
  for (int slice = 0; slice < weights->num_slices; ++slice) {
    CUtensorMap encoded;
    ARIL_TRY(encode_map(encoded, weights->dtype, weights->slices[slice],
                        weights->out_features[slice], weights->in_features, weights->strides[slice],
                        box_rows, CU_TENSOR_MAP_L2_PROMOTION_L2_64B));
    memcpy(map->tensor_maps[slice], &encoded, sizeof(encoded));
  }
  return 0;
}

extern "C" int32_t aril_linear_forward(const aril_forward_args* args, void* stream) {
  ARIL_TRY(aril::check(*args));
  if (args->num_tokens == 0) return 0;
  return aril::dispatch(args->dtype, [&](auto element) -> int32_t {
    using T = decltype(element);
    if constexpr (sizeof(T) == sizeof(float)) {
      return ARIL_ERR_ARGUMENT;
    } else {
      return aril::with_tiles(args->num_tokens, [&](auto tiles) {
        return aril::forward<T, decltype(tiles)::value>(*args, stream);
      });
    }
  });
}
