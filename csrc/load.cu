// SPDX-License-Identifier: MIT OR Apache-2.0
//
// aril_load, which loads every kernel and tests the block order and early reads,
// aril_kernels_start_early, aril_code_version and aril_status_string.
#include "device/block_order.cuh"
#include "device/early_reads.cuh"
#include "host/launch.cuh"

namespace aril {

int32_t load_routing();
int32_t load_linear();
int32_t load_rows();
int32_t load_sharded();
int32_t load_fused_linear();
int32_t load_consumers();
int32_t load_stacked();
int32_t load_moe();
int32_t load_pack();

namespace {

// Cleared for good when a device fails the test of early reads (device/early_reads.cuh), or runs code
// for devices before 9.0, which waits for no predecessor.
bool early_starts = true;

int32_t load_all() {
  ARIL_TRY(load_routing());
  ARIL_TRY(load_linear());
  ARIL_TRY(load_rows());
  ARIL_TRY(load_sharded());
  ARIL_TRY(load_fused_linear());
  ARIL_TRY(load_consumers());
  ARIL_TRY(load_stacked());
  ARIL_TRY(load_moe());
  return load_pack();
}

// ARIL_ERR_BLOCK_ORDER on a device where waits in the mailbox may never end.
int32_t test_block_order(int multiprocessors, cudaStream_t stream) {
  static uint32_t launches = 0;
  const uint32_t launch_number = __atomic_add_fetch(&launches, 1, __ATOMIC_RELAXED);
  const Kernel<uint32_t> kernel = {detail::block_order_kernel, 0};  // this launch loads it
  const int blocks = multiprocessors * detail::kOrderBlocksPerMultiprocessor;
  ARIL_TRY(launch(kernel, blocks < detail::kMostOrderBlocks ? blocks : detail::kMostOrderBlocks,
                  detail::kOrderThreads, 0, stream, launch_number));
  uint32_t out_of_order;
  ARIL_TRY(cudaMemcpyFromSymbolAsync(&out_of_order, detail::out_of_order, sizeof(out_of_order), 0,
                                     cudaMemcpyDeviceToHost, stream));
  ARIL_TRY(cudaStreamSynchronize(stream));
  return out_of_order < launch_number ? 0 : ARIL_ERR_BLOCK_ORDER;
}

// Lets kernels start early no longer on a device where one may then read an earlier routing, or does
// not wait.
int32_t test_early_reads(int multiprocessors, cudaStream_t stream) {
  static uint32_t turns = 0;
  const uint32_t first = __atomic_fetch_add(&turns, detail::kReadTurns, __ATOMIC_RELAXED) + 1;
  const Kernel<uint32_t> write = {detail::write_words_kernel, 0};
  const Kernel<uint32_t> read = {detail::read_words_kernel, 0};
  for (uint32_t turn = first; turn < first + detail::kReadTurns; ++turn) {
    ARIL_TRY(launch(write, 1, detail::kReadThreads, 0, stream, turn));
    for (int reader = 0; reader < detail::kReadersOfTurn; ++reader) {
      ARIL_TRY(launch(read, multiprocessors, detail::kReadThreads, 0, stream, turn));
    }
  }
  uint32_t stale;
  ARIL_TRY(cudaMemcpyFromSymbolAsync(&stale, detail::stale_turn, sizeof(stale), 0,
                                     cudaMemcpyDeviceToHost, stream));
  ARIL_TRY(cudaStreamSynchronize(stream));
  int32_t version;
  ARIL_TRY(code_version(version));
  if (stale >= first || version < 90) __atomic_store_n(&early_starts, false, __ATOMIC_RELAXED);
  return 0;
}

int32_t test_device() {
  int device, multiprocessors;
  ARIL_TRY(cudaGetDevice(&device));
  ARIL_TRY(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
  cudaStream_t stream;
  // Non-blocking: it waits for no other stream, not even the default one.
  ARIL_TRY(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  int32_t status = test_block_order(multiprocessors, stream);
  if (status == 0) status = test_early_reads(multiprocessors, stream);
  const int32_t destroyed = cudaStreamDestroy(stream);
  return status != 0 ? status : destroyed;
}

}  // namespace

int32_t code_version(int32_t& version) {
  cudaFuncAttributes attributes;
  ARIL_TRY(cudaFuncGetAttributes(&attributes, detail::block_order_kernel));
  version = attributes.ptxVersion;
  return 0;
}

bool start_early() { return __atomic_load_n(&early_starts, __ATOMIC_RELAXED); }

}  // namespace aril

extern "C" const char* aril_status_string(int32_t status) {
  switch (status) {
    case ARIL_ERR_NO_KERNEL:
      return "this build has no code for the device";
    case ARIL_ERR_ARGUMENT:
      return "an argument is outside its limits, or the address of an operand is null";
    case ARIL_ERR_SHARED_MEMORY:
      return "the device has too little shared memory for the fused linear of this layer";
    case ARIL_ERR_BLOCK_ORDER:
      return "the device does not begin the blocks of a launch in the order of their index";
    default:
      return cudaGetErrorString(static_cast<cudaError_t>(status));
  }
}

extern "C" int32_t aril_load(void) {
  // Otherwise a capture on another thread would forbid these calls.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  ARIL_TRY(cudaThreadExchangeStreamCaptureMode(&mode));
  int32_t status = aril::load_all();
  if (status == 0) status = aril::test_device();
  ARIL_TRY(cudaThreadExchangeStreamCaptureMode(&mode));
  const bool no_code =
      status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidDeviceFunction;
  return no_code ? ARIL_ERR_NO_KERNEL : status;
}

extern "C" int32_t aril_kernels_start_early(void) { return aril::start_early(); }

extern "C" int32_t aril_code_version(int32_t* version) { return aril::code_version(*version); }
