// Checks and times the trial: ./gemm_trial check | prefill T...; LTLIB=<libcublasLt.so.13>
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#define CK(call)                                                    \
  do {                                                              \
    const auto status = (call);                                     \
    if (status) {                                                   \
      printf("%s:%d: error %d\n", __FILE__, __LINE__, (int)status); \
      exit(1);                                                      \
    }                                                               \
  } while (0)

#include "gemm.cuh"
#include "host/launch.cuh"
#include "lt.h"

namespace aril {
int32_t load_linear();
}
using namespace aril;
using namespace aril::detail;
using bf16 = __nv_bfloat16;

constexpr Kernel<LargeMForwardParams> kForward = {large_m_forward_kernel<bf16>,
                                                  kForwardStages * kForwardStageBytes};

__device__ unsigned mixed(unsigned bits) {
  bits = (bits ^ bits >> 16) * 0x7feb352du;
  bits = (bits ^ bits >> 15) * 0x846ca68bu;
  return bits ^ bits >> 16;
}

// Sums of four uniform numbers.
__global__ void fill_kernel(bf16* to, size_t count, unsigned seed, float scale) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count;
       i += size_t{gridDim.x} * blockDim.x) {
    const unsigned a = mixed(static_cast<unsigned>(i) * 2654435761u ^ seed), b = mixed(a + seed);
    const float sum = ((a & 0xffff) + (a >> 16) + (b & 0xffff) + (b >> 16)) / 65536.0f - 2.0f;
    to[i] = __float2bfloat16(1.7f * scale * sum);
  }
}
static void fill(bf16* to, size_t count, unsigned seed, float scale) {
  fill_kernel<<<1024, 256>>>(to, count, seed, scale);
}

// Some rows of a slice, product by product. `w` has rows of all slices, this one's from `first` on.
__global__ void expect(float* y, aril_linear_args p, const bf16* w, int slice, size_t first,
                       int outs, const int* rows, const int* slots) {
  __shared__ float v[64];
  const int token = rows[blockIdx.y], out = blockIdx.x * 128 + threadIdx.x, in = p.in_features;
  const bf16* const x = static_cast<const bf16*>(p.x) + static_cast<size_t>(token) * in;
  const aril_descriptor module = module_of(p.weights, slots[token], slice);
  const int tiles = ceil_div(module.rank, 8);
  for (int r = threadIdx.x; r < module.rank; r += 128) {
    const bf16* const a = static_cast<const bf16*>(module.a) + r / 8 * 2048 + r % 8 * 8;
    v[r] = 0;
    for (int k = 0; k < in; ++k) {
      v[r] += __bfloat162float(x[k]) *
              __bfloat162float(a[k / 256 * tiles * 2048 + k % 256 / 8 * 64 + k % 8]);
    }
  }
  __syncthreads();
  if (out >= outs) return;
  float sum = 0, delta = 0;
  for (int k = 0; k < in; ++k) {
    sum += __bfloat162float(x[k]) * __bfloat162float(w[(first + out) * in + k]);
  }
  const int row = 2 * (out % 32 / 8) + out % 2, core = out % 64 / 32 * 4 + out % 8 / 2;
  for (int r = 0; r < module.rank; ++r) {
    const bf16* const b = static_cast<const bf16*>(module.b) + (out / 64 * tiles + r / 8) * 512;
    delta += v[r] * __bfloat162float(b[core * 64 + row * 8 + r % 8]);
  }
  y[static_cast<size_t>(blockIdx.y) * outs + out] = sum + module.scaling * delta;
}

struct Layer {
  const char* name;
  int in;
  std::vector<int> outs;
  int all() const { return std::accumulate(outs.begin(), outs.end(), 0); }
};
static const std::vector<Layer> kLayers = {{"qkv", 4096, {4096, 1024, 1024}},
                                           {"o", 4096, {4096}},
                                           {"gate_up", 4096, {12288, 12288}},
                                           {"down", 12288, {4096}}};
constexpr int kSlots = 8, kMaxRank = 64, kMaxIn = 12288, kCopies = 2;

template <typename T>
static T* device(size_t count) {
  T* pointer;
  CK(cudaMalloc(&pointer, count * sizeof(T)));
  CK(cudaMemset(pointer, 0, count * sizeof(T)));
  return pointer;
}

static CUtensorMap tensor_map(const void* first, std::vector<cuuint64_t> sizes,
                              std::vector<cuuint64_t> strides, std::vector<cuuint32_t> box) {
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    CK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                        cudaEnableDefault, &found));
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  CUtensorMap map;
  const cuuint32_t steps[] = {1, 1, 1, 1, 1};
  CK(encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, sizes.size(), const_cast<void*>(first),
            sizes.data(), strides.data(), box.data(), steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
            CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
  return map;
}

// Tokens by adapter: in segments, in turn, two of three in some order, or none.
enum Order { kSegments, kInTurn, kSome, kNone };
static const char* const kOrders[] = {"segments", "in turn", "some", "none"};

struct Batch {
  int tokens, rank;  // the rank that the table has room for
  bf16 *x, *y;
  aril_descriptor* table;
  aril_routing routing;
  float* partials;
  unsigned char* terms;
  void* counts;
  int multiprocessors;
};

static aril_linear_args linear_args(const Batch& batch, const Layer& layer) {
  aril_linear_args a = {};
  a.dtype = ARIL_BF16;
  a.num_tokens = batch.tokens;
  a.large_m = 1;
  a.in_features = layer.in;
  a.num_slices = layer.outs.size();
  a.x = batch.x;
  a.x_stride = layer.in;
  int first = 0;
  for (size_t i = 0; i < layer.outs.size(); first += layer.outs[i++]) {
    a.out_features[i] = layer.outs[i];
    a.y[i] = {batch.y + first, layer.all()};
  }
  a.partials = batch.partials;
  a.weights = {batch.table, kSlots, 3, batch.rank};
  a.routing = batch.routing;
  return a;
}

static void forward(const Batch& batch, const Layer& layer, const bf16* w, bool lora,
                    cudaStream_t stream) {
  LargeMForwardParams p = {};
  p.args = linear_args(batch, layer);
  p.args.overwrites = 1;
  p.terms = batch.terms;
  p.counts = static_cast<PairCounts*>(batch.counts);
  const cuuint64_t in = layer.in, row = 2 * in;
  int jobs = 0;
  for (size_t i = 0; i < layer.outs.size(); ++i) {
    p.w[i] = tensor_map(w, {in, 2, 4, 4, static_cast<cuuint64_t>(layer.outs[i]) / 32},
                        {row, 8 * row, 2 * row, 32 * row}, {64, 2, 4, 4, kMapRows / 32});
    w += layer.outs[i] * in;
    p.grid.first_job[i] = jobs;
    jobs += ceil_div(layer.outs[i], kForwardOuts);
  }
  for (size_t i = layer.outs.size(); i <= ARIL_MAX_SLICES; ++i) p.grid.first_job[i] = jobs;
  p.x =
      tensor_map(batch.x, {in, static_cast<cuuint64_t>(batch.tokens)}, {row}, {64, kForwardTokens});
  p.grid.pairs = ceil_div(batch.tokens, kClusterBlocks * kForwardTokens);
  p.grid.group = 8;
  // Enough for two adapters of a pair in one job each.
  const int rank_tiles = 2 * layer.outs.size() * ceil_div(batch.rank, ARIL_RANK_TILE);
  p.grid.v_jobs = lora ? ceil_div(rank_tiles, kJobRankTiles) : 0;
  p.grid.clusters =
      std::min(batch.multiprocessors / kClusterBlocks, p.grid.pairs * (jobs + p.grid.v_jobs));
  CK(launch_clusters(kForward, kClusterBlocks, kClusterBlocks * p.grid.clusters, kForwardThreads,
                     kForward.smem_bytes, stream, p));
}

// The library's, with blocks as its plan has them at rank 16.
static void add_delta(const Batch& batch, const Layer& layer, cudaStream_t stream) {
  aril_linear_launch launch = {};
  aril_linear_args& a = launch.args;
  a = linear_args(batch, layer);
  a.max_tiles = batch.tokens / ARIL_WIDE_TILE + kSlots;
  a.splits_per_block = 1;
  a.outs_per_block = 512;
  const int tiles = a.num_slices * ceil_div(batch.rank, ARIL_RANK_TILE);
  const int of_warpgroup = tiles <= 2 ? 2 : tiles <= 4 ? 4 : ARIL_MAX_RANK_TILES;
  const int spans = ceil_div(layer.in, 4096);
  const int blocks = ceil_div(batch.tokens, 64) * ceil_div(tiles, of_warpgroup) * spans;
  a.k_tiles_per_split = blocks < 500 ? 4 : 16;
  launch.rank_tiles = of_warpgroup;
  launch.warpgroups = 1;
  launch.shrink_smem_bytes = (64 + of_warpgroup * 8) * 512;
  for (const int outs : layer.outs) launch.expand_blocks += a.max_tiles * ceil_div(outs, 512);
  launch.smem_bytes = batch.rank == 16 ? 53248 : 90112;
  CK(aril_linear(&launch, stream));
}

int main(int argc, char** argv) {
  const bool checks = argc < 2 || std::string(argv[1]) == "check";
  std::vector<int> sizes;
  for (int i = 2; i < argc; ++i) sizes.push_back(atoi(argv[i]));
  if (checks) sizes = {1024, 300, 128};
  const int most = *std::max_element(sizes.begin(), sizes.end());
  cudaDeviceProp device_properties;
  CK(cudaGetDeviceProperties(&device_properties, 0));
  printf("%s\n", device_properties.name);
  CK(load(kForward));
  CK(load_linear());

  Batch batch = {};
  batch.rank = kMaxRank;
  batch.multiprocessors = device_properties.multiProcessorCount;
  batch.x = device<bf16>(static_cast<size_t>(most) * kMaxIn);
  batch.y = device<bf16>(static_cast<size_t>(most) * 24576);
  fill(batch.x, static_cast<size_t>(most) * kMaxIn, 77, 1.0f);
  std::vector<bf16*> w;
  for (const Layer& layer : kLayers) {
    for (int copy = 0; copy < (checks ? 1 : kCopies); ++copy) {
      const size_t elements = static_cast<size_t>(layer.in) * layer.all();
      w.push_back(device<bf16>(elements));
      fill(w.back(), elements, 1 + w.size(), 0.02f);
    }
  }
  const auto weight = [&](size_t layer, int copy) {
    return w[checks ? layer : layer * kCopies + copy % kCopies];
  };
  const size_t factor = static_cast<size_t>(kMaxIn) * kMaxRank;
  bf16* const factors = device<bf16>(kSlots * 3 * 2 * factor);
  fill(factors, kSlots * 3 * 2 * factor, 9, 0.02f);
  CK(cudaMallocManaged(&batch.table, kSlots * 3 * sizeof(aril_descriptor)));
  const auto set_ranks = [&](const std::vector<int>& ranks) {
    CK(cudaDeviceSynchronize());
    for (int i = 0; i < kSlots * 3; ++i) {
      const bf16* const a = factors + 2 * i * factor;
      const int rank = ranks[(i / 3 + i % 3) % ranks.size()];
      batch.table[i] = {a, a + factor, rank, 0.5f + 0.1f * (i / 3)};
    }
  };
  aril_routing& r = batch.routing;
  const int tiles = most / 16 + kSlots + 2;
  r = {device<int>(most),
       device<float>(most),
       device<int>(most),
       device<int>(1),
       device<int>(kSlots + 1),
       {device<aril_tile>(tiles), device<int>(1)},
       {device<aril_tile>(tiles), device<int>(1)},
       device<aril_segments>(1),
       device<aril_row>(tiles * 16)};
  batch.partials = device<float>(12ull * most * 3 * kMaxRank);
  batch.terms = device<unsigned char>(4ull * most * 3 * kMaxRank);
  batch.counts = device<PairCounts>(most / 128 + 1);
  int* const token_slots = device<int>(most);
  cudaStream_t stream;
  CK(cudaStreamCreate(&stream));
  const auto set_batch = [&](int tokens, Order order) {
    std::vector<int> slots(tokens, -1);
    for (int t = 0; t < tokens; ++t) {
      if (order == kSegments) slots[t] = t / ((tokens + kSlots - 1) / kSlots);
      if (order == kInTurn || (order == kSome && t % 3 != 0)) slots[t] = t * 7 % kSlots;
    }
    CK(cudaMemcpy(token_slots, slots.data(), tokens * 4, cudaMemcpyHostToDevice));
    aril_route_args args = {token_slots, nullptr, tokens, kSlots, r};
    CK(aril_route(&args, stream));
    CK(cudaStreamSynchronize(stream));
    batch.tokens = tokens;
  };

  if (checks) {
    int failures = 0, runs = 0;
    float* const expected = device<float>(37 * 24576);
    int* rows;
    CK(cudaMallocManaged(&rows, 37 * sizeof(int)));
    for (size_t i = 0; i < kLayers.size(); ++i) {
      for (const int tokens : sizes) {
        for (const Order order : {kSegments, kInTurn, kSome, kNone}) {
          const Layer& layer = kLayers[i];
          const size_t outs = layer.all(), elements = tokens * outs;
          set_ranks(order == kSome ? std::vector<int>{16, 8, 40, 64, 0, 24}
                                   : std::vector<int>{16, order == kInTurn ? 64 : 16});
          set_batch(tokens, order);
          std::vector<bf16> first(elements), y(elements);
          CK(cudaMemset(batch.y, 0xff, elements * 2));
          forward(batch, layer, weight(i, 0), true, stream);
          CK(cudaStreamSynchronize(stream));
          CK(cudaMemcpy(first.data(), batch.y, elements * 2, cudaMemcpyDeviceToHost));
          for (int n = 0; n < 5; ++n) forward(batch, layer, weight(i, 0), true, stream);
          CK(cudaStreamSynchronize(stream));
          CK(cudaMemcpy(y.data(), batch.y, elements * 2, cudaMemcpyDeviceToHost));
          bool same = memcmp(first.data(), y.data(), elements * 2) == 0;
          const int checked = std::min(tokens, 37);
          for (int n = 0; n < checked; ++n) rows[n] = n * 2654435761ll % tokens;
          double worst = 0, largest = 0;
          size_t column = 0;
          for (size_t slice = 0; slice < layer.outs.size(); ++slice) {
            const int of_slice = layer.outs[slice];
            expect<<<dim3((of_slice + 127) / 128, checked), 128, 0, stream>>>(
                expected, linear_args(batch, layer), weight(i, 0), slice, column, of_slice, rows,
                token_slots);
            std::vector<float> want(static_cast<size_t>(checked) * of_slice);
            CK(cudaMemcpyAsync(want.data(), expected, want.size() * 4, cudaMemcpyDeviceToHost,
                               stream));
            CK(cudaStreamSynchronize(stream));
            for (int n = 0; n < checked; ++n) {
              for (int out = 0; out < of_slice; ++out) {
                const double right = want[static_cast<size_t>(n) * of_slice + out];
                const double got = __bfloat162float(y[rows[n] * outs + column + out]);
                const double error = std::fabs(got - right);
                worst = std::max(worst, error <= 1e30 ? error : 1e30);
                largest = std::max(largest, std::fabs(right));
              }
            }
            column += of_slice;
          }
          const bool ok = same && worst <= 0.006 * largest;
          failures += !ok;
          ++runs;
          printf("%s, %d tokens, %s: off by %.3g of %.3g%s\n", layer.name, tokens, kOrders[order],
                 worst, largest,
                 ok     ? ""
                 : same ? ": WRONG"
                        : ": DIFFERS");
        }
      }
    }
    printf("%d of %d failed\n", failures, runs);
    return failures != 0;
  }

  if (!lt_init()) return 1;
  cudaEvent_t begin, end;
  CK(cudaEventCreate(&begin));
  CK(cudaEventCreate(&end));
  const auto captured = [&](auto&& work) {
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    CK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    work();
    CK(cudaStreamEndCapture(stream, &graph));
    CK(cudaGraphInstantiate(&executable, graph, 0));
    return executable;
  };
  // Medians of graphs that run in turn, in us.
  const auto time = [&](const std::vector<cudaGraphExec_t>& graphs) {
    std::vector<std::vector<float>> times(graphs.size());
    for (int round = 0; round < 11; ++round) {
      for (size_t i = 0; i < graphs.size(); ++i) {
        float milliseconds;
        CK(cudaEventRecord(begin, stream));
        CK(cudaGraphLaunch(graphs[i], stream));
        CK(cudaEventRecord(end, stream));
        CK(cudaEventSynchronize(end));
        CK(cudaEventElapsedTime(&milliseconds, begin, end));
        times[i].push_back(1000 * milliseconds);
      }
    }
    std::vector<double> medians;
    for (auto& of : times) {
      std::nth_element(of.begin(), of.begin() + of.size() / 2, of.end());
      medians.push_back(of[of.size() / 2]);
    }
    return medians;
  };
  for (const int tokens : sizes) {
    std::vector<LtOp> gemms;
    for (size_t i = 0; i < kLayers.size(); ++i) {
      LtOp gemm = lt_op(kLayers[i].all(), kLayers[i].in, tokens);
      std::vector<cudaGraphExec_t> graphs;
      for (size_t n = 0; n < gemm.h.size(); ++n) {
        graphs.push_back(captured([&] {
          for (int copy = 0; copy < 4; ++copy) {
            CK(lt_run(gemm, n, weight(i, copy), batch.x, batch.y, stream));
          }
        }));
      }
      const auto times = time(graphs);
      gemm.best = std::min_element(times.begin(), times.end()) - times.begin();
      gemms.push_back(gemm);
    }
    const auto chain = [&](size_t first, size_t last, auto&& layer_of) {
      return captured([&] {
        for (int copy = 0; copy < 4; ++copy) {
          for (size_t i = first; i < last; ++i) layer_of(i, copy);
        }
      });
    };
    const auto base = [&](size_t i, int copy) {
      CK(lt_run(gemms[i], gemms[i].best, weight(i, copy), batch.x, batch.y, stream));
    };
    const auto after = [&](size_t i, int copy) {
      base(i, copy);
      add_delta(batch, kLayers[i], stream);
    };
    const auto alone = [&](size_t i, int copy) {
      forward(batch, kLayers[i], weight(i, copy), false, stream);
    };
    const auto fused = [&](size_t i, int copy) {
      forward(batch, kLayers[i], weight(i, copy), true, stream);
    };
    const auto row = [&](const char* name, size_t first, size_t last) {
      const auto times = time({chain(first, last, base), chain(first, last, alone),
                               chain(first, last, fused), chain(first, last, after)});
      printf("%d tokens, %s, rank %d: cuBLASLt %.1f us; alone %.3f, fused %.3f, after %.3f\n",
             tokens, name, batch.rank, times[0] / 4, times[1] / times[0], times[2] / times[0],
             times[3] / times[0]);
      fflush(stdout);
    };
    for (const auto& [order, rank] : std::vector<std::pair<Order, int>>{
             {kSegments, 16}, {kSegments, 64}, {kInTurn, 16}, {kNone, 16}}) {
      batch.rank = rank;
      set_ranks({rank});
      set_batch(tokens, order);
      printf("-- %s\n", kOrders[order]);
      if (order == kSegments && rank == 16) {
        for (size_t i = 0; i < kLayers.size(); ++i) row(kLayers[i].name, i, i + 1);
      }
      row("all four", 0, kLayers.size());
    }
  }
}
